"""CIFAR and ciFAIR from generated files, downloads from a local server, and `icmixup data`."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from icmixup.lab.datasets import (
    DATASETS,
    STATISTICS,
    DataSpec,
    cifar,
    deic_rows,
    load_dataset,
    measure_statistics,
)
from icmixup.lab.datasets.cifar import LAYOUTS
from icmixup.lab.datasets.download import Archive, download, fetch_archive
from icmixup.lab.datasets.inspect import check_dataset, get_dataset, list_datasets
from icmixup.lab.datasets.pickles import read_pickle


class FakeImages:
    """Random images, `per_class` of each class."""

    def __init__(self, classes: int, per_class: int) -> None:
        random = np.random.default_rng(classes)
        self.labels = np.tile(np.arange(classes, dtype=np.uint8), per_class)
        self.images = random.integers(0, 256, (len(self.labels), 3072), dtype=np.uint8)


def binary_records(fake: FakeImages, header: int) -> bytes:
    """Records of CIFAR's binary files; CIFAR-100 has a coarse label, here 7, before the fine one."""
    coarse = np.full((len(fake.labels), header - 1), 7, np.uint8)
    return np.concatenate([coarse, fake.labels[:, None], fake.images], axis=1).tobytes()


def write_cifar(name: str, layout: int, fake: FakeImages, data_dir: Path, protocol: int = 2) -> Path:
    chosen = LAYOUTS[name][layout]
    folder = data_dir / chosen.archive.folder
    folder.mkdir(parents=True)
    names = [f"name-{n}" for n in range(int(fake.labels.max()) + 1)]
    content = {"data": fake.images, chosen.labels: fake.labels.tolist()}
    for file in (*chosen.train, chosen.test):
        raw = binary_records(fake, chosen.header) if chosen.header else pickle.dumps(content, protocol)
        (folder / file).write_bytes(raw)
    listed = "\n".join(names).encode() if chosen.header else pickle.dumps({chosen.names_key: names}, protocol)
    (folder / chosen.names).write_bytes(listed)
    return folder


ALL_LAYOUTS = [(name, number) for name, layouts in LAYOUTS.items() for number in range(len(layouts))]


@pytest.mark.parametrize(("name", "layout"), ALL_LAYOUTS)
def test_every_layout_is_read_with_the_bytes_and_labels_that_were_written(
    name: str, layout: int, tmp_path: Path
) -> None:
    fake = FakeImages(100 if name.endswith("100") else 10, per_class=2)
    write_cifar(name, layout, fake, tmp_path)
    dataset = load_dataset(DataSpec(name), tmp_path, download=False)
    files = len(LAYOUTS[name][layout].train)
    assert len(dataset.train) == files * len(fake.labels)
    assert np.array_equal(dataset.test.images.numpy().reshape(-1, 3072), fake.images)
    assert np.array_equal(dataset.test.labels.numpy(), fake.labels)
    assert torch.equal(dataset.train.images[: len(fake.labels)], dataset.test.images)
    assert dataset.class_names[3] == "name-3"
    assert (dataset.mean, dataset.std) == STATISTICS[name]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    fake = FakeImages(10, per_class=1)
    write_cifar("cifair10", 0, fake, tmp_path, protocol)
    dataset = load_dataset(DataSpec("cifair10"), tmp_path)
    assert np.array_equal(dataset.test.images.numpy().reshape(-1, 3072), fake.images)


def test_python_2_pickles_with_byte_strings_are_read(tmp_path: Path) -> None:
    # Python 2 and NumPy 1 wrote byte strings for keys and pixels, and the old name of the module.
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
    dtype = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
    state = b"(I1\n(I1\nI4\nt" + dtype + b"I00\nS'\\x00\\x80\\xff\\x07'\ntb"
    (tmp_path / "old").write_bytes(b"(dS'data'\n" + array + state + b"s.")
    data = read_pickle(tmp_path / "old")["data"]
    assert isinstance(data, np.ndarray)
    assert data.tolist() == [[0, 128, 255, 7]]


class MaliciousObject:
    """Creates a folder when pickle.loads reads it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_a_pickle_that_calls_another_function_is_refused_and_never_executed(tmp_path: Path) -> None:
    folder = write_cifar("cifair10", 0, FakeImages(10, 1), tmp_path)
    target = tmp_path / "created"
    (folder / "data_batch_2").write_bytes(pickle.dumps({"data": MaliciousObject(target)}))
    with pytest.raises(ValueError, match=r"refused to load .*data_batch_2.*posix\.mkdir"):
        load_dataset(DataSpec("cifair10"), tmp_path)
    assert not target.exists()
    pickle.loads((folder / "data_batch_2").read_bytes())
    assert target.exists()  # the pickle is malicious indeed


@pytest.mark.parametrize(
    ("module", "name"), [("numpy", "fromfile"), ("builtins", "eval"), ("numpy.core", "os")]
)
def test_names_other_than_array_constructors_are_refused(module: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(ValueError, match=rf"{module}\.{name}"):
        read_pickle(tmp_path / "file")


def test_codecs_other_than_latin1_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"c_codecs\nencode\n(Va\nVrot13\ntR.")
    with pytest.raises(ValueError, match="rot13"):
        read_pickle(tmp_path / "file")


@pytest.mark.parametrize(("name", "layout"), ALL_LAYOUTS)
def test_the_error_names_a_truncated_file(name: str, layout: int, tmp_path: Path) -> None:
    folder = write_cifar(name, layout, FakeImages(100 if name.endswith("100") else 10, 1), tmp_path)
    path = folder / LAYOUTS[name][layout].train[0]
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"{path.name} .*truncated.* again"):
        load_dataset(DataSpec(name), tmp_path)


def test_the_error_names_a_missing_file_and_labels_out_of_range(tmp_path: Path) -> None:
    folder = write_cifar("cifar10", 0, FakeImages(10, 1), tmp_path)
    (folder / "data_batch_3.bin").write_bytes(binary_records(FakeImages(30, 1), 1))
    with pytest.raises(
        ValueError, match=r"data_batch_3\.bin has labels from 0 to 29, expected labels from 0 to 9"
    ):
        load_dataset(DataSpec("cifar10"), tmp_path)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"has no data_batch_3\.bin"):
        load_dataset(DataSpec("cifar10"), tmp_path)


def test_a_deic_split_has_fifty_images_per_class_and_its_own_statistics(tmp_path: Path) -> None:
    write_cifar("cifair10", 0, FakeImages(10, 20), tmp_path)  # five batches: 100 images per class
    whole = load_dataset(DataSpec("cifair10"), tmp_path)
    subset = load_dataset(DataSpec("cifair10", split=1), tmp_path)
    rows = deic_rows(whole.train.labels, 1)
    assert torch.equal(subset.train.images, whole.train.images[rows])
    assert subset.class_counts.tolist() == [50] * 10
    assert subset.mean == measure_statistics(subset.train.images)[0]
    assert len(subset.test) == len(whole.test)


# Downloads, from a local server


def tar_of(folder: Path) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as archive:
        archive.add(folder, folder.name)
    return memory.getvalue()


def zip_of(folder: Path) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"{folder.name}/{path.name}")
    return memory.getvalue()


class Server:
    """Serves `files` by name and records the requests."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                outer.requests.append(name)
                content = outer.files.get(name)
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    local = Server()
    yield local
    local.close()


def serve(server: Server, name: str, content: bytes, folder: str, md5: str | None = None) -> Archive:
    server.files[name] = content
    return Archive(server.url + name, md5 or hashlib.md5(content).hexdigest(), folder)


@pytest.mark.parametrize(("name", "pack"), [("cifar100", tar_of), ("cifair100", zip_of)])
def test_a_missing_dataset_is_downloaded_once_verified_and_unpacked(
    name: str, pack: Callable[[Path], bytes], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeImages(100, 1)
    content = pack(write_cifar(name, 0, fake, tmp_path / "publisher"))
    layout = LAYOUTS[name][0]
    archive = serve(server, layout.archive.file_name, content, layout.archive.folder)
    monkeypatch.setitem(cifar.LAYOUTS, name, (layout._replace(archive=archive),))
    for _ in range(2):
        dataset = load_dataset(DataSpec(name), tmp_path / "data")
        assert np.array_equal(dataset.train.images.numpy().reshape(-1, 3072), fake.images)
    assert server.requests == [archive.file_name]
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == sorted(
        [archive.folder, archive.file_name]
    )


def test_an_archive_in_data_dir_is_unpacked_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = LAYOUTS["cifar10"]
    content = tar_of(write_cifar("cifar10", 1, FakeImages(10, 1), tmp_path / "publisher"))
    archive = layouts[1].archive._replace(md5=hashlib.md5(content).hexdigest())
    monkeypatch.setitem(cifar.LAYOUTS, "cifar10", (layouts[0], layouts[1]._replace(archive=archive)))
    (tmp_path / archive.file_name).write_bytes(content)
    assert len(load_dataset(DataSpec("cifar10"), tmp_path, download=False).test) == 10


def test_a_wrong_checksum_is_reported_with_both_sums_and_no_file_is_left(
    server: Server, tmp_path: Path
) -> None:
    archive = serve(server, "a.tar.gz", b"not what was published", "a", md5="0" * 32)
    found = hashlib.md5(b"not what was published").hexdigest()
    with pytest.raises(ValueError, match=f"a.tar.gz .*{found}.*{'0' * 32}"):
        fetch_archive(archive, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.tar.gz").write_bytes(b"saved by the user, and wrong too")
    with pytest.raises(ValueError, match=f"{tmp_path}/a.tar.gz has MD5 .* remove it and download"):
        fetch_archive(archive, tmp_path)
    assert (tmp_path / "a.tar.gz").exists()  # the user's own file is not deleted


@pytest.mark.parametrize("failure", ["refused", "missing"])
def test_a_failed_download_names_the_file_and_where_to_save_it(
    failure: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    layout = LAYOUTS["cifar100"][0]
    host = server.url if failure == "missing" else "http://127.0.0.1:9/"  # no server on port 9
    archive = layout.archive._replace(url=host + "cifar-100-binary.tar.gz")
    monkeypatch.setitem(cifar.LAYOUTS, "cifar100", (layout._replace(archive=archive),))
    reason = "Not Found" if failure == "missing" else "refused"
    remedy = f"save it as {tmp_path}/cifar-100-binary.tar.gz"
    with pytest.raises(ValueError, match=f"cifar-100-binary.tar.gz .*{reason}.*{remedy}"):
        load_dataset(DataSpec("cifar100"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_dataset_that_may_not_be_downloaded_names_the_url_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data get cifar100`.*https://www\.cs\.toronto\.edu/.*cifar-100-binary\.tar\.gz"
    ):
        load_dataset(DataSpec("cifar100"), tmp_path, download=False)


def test_a_download_shows_progress_only_on_request(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    archive = serve(server, "large.bin", bytes(3_000_000), "large")
    download(archive, tmp_path / "quiet.bin")
    silent = capfd.readouterr()
    download(archive, tmp_path / "large.bin", show_progress=True)
    shown = capfd.readouterr()
    assert (silent.out, silent.err, shown.out) == ("", "", "")
    assert "large.bin" in shown.err
    assert "3.0" in shown.err
    assert (tmp_path / "large.bin").stat().st_size == 3_000_000


def test_an_archive_with_paths_outside_its_folder_is_refused(server: Server, tmp_path: Path) -> None:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as malicious:
        malicious.addfile(tarfile.TarInfo("../../outside"), io.BytesIO())
    archive = serve(server, "evil.tar.gz", memory.getvalue(), "evil")
    with pytest.raises(ValueError, match=r"could not unpack .*evil\.tar\.gz"):
        fetch_archive(archive, tmp_path / "deep" / "data")
    assert not list(tmp_path.rglob("outside"))


# `icmixup data list` and `icmixup data check`


def test_the_list_shows_which_datasets_are_available_and_how_to_get_the_others(tmp_path: Path) -> None:
    write_cifar("cifar100", 1, FakeImages(100, 1), tmp_path)
    rows = {row.name: row for row in list_datasets(tmp_path)}
    assert tuple(rows) == DATASETS
    assert [name for name, row in rows.items() if not row.where.startswith("not in")] == [
        "digits",
        "cifar100",
    ]
    assert rows["cifar100"].where == str(tmp_path / "cifar-100-python")
    assert "icmixup data get cifair10" in rows["cifair10"].where
    digits = load_dataset(DataSpec("digits"), tmp_path)
    assert (rows["digits"].train, rows["digits"].test) == (len(digits.train), len(digits.test))


def test_checks_pass_on_digits_and_fail_on_a_fake_cifar(tmp_path: Path) -> None:
    assert all(check.holds for check in check_dataset(get_dataset("digits", tmp_path, download=False)))
    write_cifar("cifar10", 0, FakeImages(10, 1), tmp_path)
    wrong = {
        check.claim: check.found
        for check in check_dataset(get_dataset("cifar10", tmp_path, download=False))
        if check.holds is False
    }
    assert wrong["50,000 train and 10,000 test images"] == "50 and 10"
    assert any("means" in claim for claim in wrong)
