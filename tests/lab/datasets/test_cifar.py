"""CIFAR and ciFAIR from files made here, and downloads from a server of our own."""

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

from icmixup.lab.datasets import cifar as sources
from icmixup.lab.datasets import DATASETS, STATISTICS, deic_rows, load_dataset, measure_statistics
from icmixup.lab.datasets.download import Archive, download, fetch_archive, read_pickle
from icmixup.lab.datasets.inspect import check_dataset, list_datasets
from icmixup.lab.datasets.cifar import LAYOUTS


class Made:
    """Random images in a publisher's layout: each class so many times."""

    def __init__(self, classes: int, per_class: int) -> None:
        random = np.random.default_rng(classes)
        self.labels = np.tile(np.arange(classes, dtype=np.uint8), per_class)
        self.images = random.integers(0, 256, (len(self.labels), 3072), dtype=np.uint8)


def binary_records(made: Made, header: int) -> bytes:
    """CIFAR-100 has a coarse label, here always 7, before the fine one."""
    coarse = np.full((len(made.labels), header - 1), 7, np.uint8)
    return np.concatenate([coarse, made.labels[:, None], made.images], axis=1).tobytes()


def write_cifar(name: str, layout: int, made: Made, data_dir: Path, protocol: int = 2) -> Path:
    kind = LAYOUTS[name][layout]
    folder = data_dir / kind.archive.folder
    folder.mkdir(parents=True)
    names = [f"name-{n}" for n in range(int(made.labels.max()) + 1)]
    content = {"data": made.images, kind.labels: made.labels.tolist()}
    for file in (*kind.train, kind.test):
        raw = binary_records(made, kind.header) if kind.header else pickle.dumps(content, protocol)
        (folder / file).write_bytes(raw)
    listed = "\n".join(names).encode() if kind.header else pickle.dumps({kind.names_key: names}, protocol)
    (folder / kind.names).write_bytes(listed)
    return folder


ALL_LAYOUTS = [(name, number) for name, layouts in LAYOUTS.items() for number in range(len(layouts))]


@pytest.mark.parametrize(("name", "layout"), ALL_LAYOUTS)
def test_every_layout_gives_back_the_bytes_and_labels_that_were_written(
    name: str, layout: int, tmp_path: Path
) -> None:
    made = Made(100 if name.endswith("100") else 10, per_class=2)
    write_cifar(name, layout, made, tmp_path)
    dataset = load_dataset(name, data_dir=tmp_path, download=False)
    files = len(LAYOUTS[name][layout].train)
    assert len(dataset.train) == files * len(made.labels)
    assert np.array_equal(dataset.test.images.numpy().reshape(-1, 3072), made.images)
    assert np.array_equal(dataset.test.labels.numpy(), made.labels)
    assert torch.equal(dataset.train.images[: len(made.labels)], dataset.test.images)
    assert dataset.class_names[3] == "name-3"
    assert (dataset.mean, dataset.std) == STATISTICS[name]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    made = Made(10, per_class=1)
    write_cifar("cifair10", 0, made, tmp_path, protocol)
    dataset = load_dataset("cifair10", data_dir=tmp_path)
    assert np.array_equal(dataset.test.images.numpy().reshape(-1, 3072), made.images)


def test_python_2_pickles_with_text_as_bytes_are_read(tmp_path: Path) -> None:
    # What Python 2 and NumPy 1 wrote: byte strings for keys and pixels, and the module's old name.
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
    dtype = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
    state = b"(I1\n(I1\nI4\nt" + dtype + b"I00\nS'\\x00\\x80\\xff\\x07'\ntb"
    (tmp_path / "old").write_bytes(b"(dS'data'\n" + array + state + b"s.")
    data = read_pickle(tmp_path / "old")["data"]
    assert isinstance(data, np.ndarray)
    assert data.tolist() == [[0, 128, 255, 7]]


class Evil:
    """Unpickled the plain way, this writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_that_calls_anything_else_is_refused_by_name_and_never_runs(tmp_path: Path) -> None:
    folder = write_cifar("cifair10", 0, Made(10, 1), tmp_path)
    mark = tmp_path / "mark"
    (folder / "data_batch_2").write_bytes(pickle.dumps({"data": Evil(mark)}))
    with pytest.raises(ValueError, match=r"data_batch_2 was refused.*posix\.mkdir"):
        load_dataset("cifair10", data_dir=tmp_path)
    assert not mark.exists()
    pickle.loads((folder / "data_batch_2").read_bytes())
    assert mark.exists()  # the trap was a real one


@pytest.mark.parametrize(
    ("module", "name"), [("numpy", "fromfile"), ("builtins", "eval"), ("numpy.core", "os")]
)
def test_names_beside_the_constructors_are_refused(module: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(ValueError, match=rf"{module}\.{name}"):
        read_pickle(tmp_path / "file")


def test_codecs_other_than_latin1_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"c_codecs\nencode\n(Va\nVrot13\ntR.")
    with pytest.raises(ValueError, match="rot13"):
        read_pickle(tmp_path / "file")


@pytest.mark.parametrize(("name", "layout"), ALL_LAYOUTS)
def test_a_truncated_file_is_named(name: str, layout: int, tmp_path: Path) -> None:
    folder = write_cifar(name, layout, Made(100 if name.endswith("100") else 10, 1), tmp_path)
    path = folder / LAYOUTS[name][layout].train[0]
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"{path.name} .*(truncated|torn).* again"):
        load_dataset(name, data_dir=tmp_path)


def test_a_missing_file_and_a_strange_label_are_named(tmp_path: Path) -> None:
    folder = write_cifar("cifar10", 0, Made(10, 1), tmp_path)
    (folder / "data_batch_3.bin").write_bytes(binary_records(Made(30, 1), 1))
    with pytest.raises(ValueError, match=r"data_batch_3\.bin has labels from 0 to 29 where 0 to 9 belong"):
        load_dataset("cifar10", data_dir=tmp_path)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"lacks data_batch_3\.bin"):
        load_dataset("cifar10", data_dir=tmp_path)


def test_the_deic_split_trains_on_fifty_a_class_with_their_own_statistics(tmp_path: Path) -> None:
    write_cifar("cifair10", 0, Made(10, 20), tmp_path)  # five batches make 100 a class
    whole = load_dataset("cifair10", data_dir=tmp_path)
    part = load_dataset("cifair10", data_dir=tmp_path, deic_split=1)
    rows = torch.cat(deic_rows(whole.train.labels, 1)).sort().values
    assert torch.equal(part.train.images, whole.train.images[rows])
    assert part.class_counts.tolist() == [50] * 10
    assert part.mean == measure_statistics(part.train.images)[0]
    assert len(part.test) == len(whole.test)


# Downloads, from a server of our own


def tar_of(folder: Path) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as tape:
        tape.add(folder, folder.name)
    return memory.getvalue()


def zip_of(folder: Path) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as pages:
        for path in folder.iterdir():
            pages.write(path, f"{folder.name}/{path.name}")
    return memory.getvalue()


class Server:
    """Serves `files` by name and counts what it was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                outer.asked.append(name)
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
    made = Server()
    yield made
    made.close()


def serve(server: Server, name: str, content: bytes, folder: str, md5: str | None = None) -> Archive:
    server.files[name] = content
    return Archive(server.url + name, md5 or hashlib.md5(content).hexdigest(), folder)


@pytest.mark.parametrize(("name", "pack"), [("cifar100", tar_of), ("cifair100", zip_of)])
def test_a_dataset_that_is_not_there_is_downloaded_once_checked_and_unpacked(
    name: str, pack: Callable[[Path], bytes], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(100, 1)
    content = pack(write_cifar(name, 0, made, tmp_path / "publisher"))
    layout = LAYOUTS[name][0]
    archive = serve(server, layout.archive.file_name, content, layout.archive.folder)
    monkeypatch.setitem(sources.LAYOUTS, name, (layout._replace(archive=archive),))
    for _ in range(2):
        dataset = load_dataset(name, data_dir=tmp_path / "data")
        assert np.array_equal(dataset.train.images.numpy().reshape(-1, 3072), made.images)
    assert server.asked == [archive.file_name]
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == sorted(
        [archive.folder, archive.file_name]
    )


def test_an_archive_brought_by_hand_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = LAYOUTS["cifar10"]
    content = tar_of(write_cifar("cifar10", 1, Made(10, 1), tmp_path / "publisher"))
    archive = layouts[1].archive._replace(md5=hashlib.md5(content).hexdigest())
    monkeypatch.setitem(sources.LAYOUTS, "cifar10", (layouts[0], layouts[1]._replace(archive=archive)))
    (tmp_path / archive.file_name).write_bytes(content)
    assert len(load_dataset("cifar10", data_dir=tmp_path, download=False).test) == 10


def test_a_wrong_checksum_names_both_sums_and_the_file_and_leaves_nothing(
    server: Server, tmp_path: Path
) -> None:
    archive = serve(server, "a.tar.gz", b"not what was published", "a", md5="0" * 32)
    found = hashlib.md5(b"not what was published").hexdigest()
    with pytest.raises(ValueError, match=f"a.tar.gz .*{found}.*{'0' * 32}"):
        fetch_archive(archive, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.tar.gz").write_bytes(b"brought by hand, and wrong too")
    with pytest.raises(ValueError, match=f"{tmp_path}/a.tar.gz has MD5 .* remove it and fetch"):
        fetch_archive(archive, tmp_path)
    assert (tmp_path / "a.tar.gz").exists()  # a user's own file is the user's to remove


@pytest.mark.parametrize("what", ["refused", "missing"])
def test_without_the_network_the_user_is_told_which_file_to_put_where(
    what: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    layout = LAYOUTS["cifar100"][0]
    host = server.url if what == "missing" else "http://127.0.0.1:9/"  # nobody listens on port 9
    archive = layout.archive._replace(url=host + "cifar-100-binary.tar.gz")
    monkeypatch.setitem(sources.LAYOUTS, "cifar100", (layout._replace(archive=archive),))
    reason = "Not Found" if what == "missing" else "refused"
    by_hand = f"bring that file by hand to {tmp_path}/cifar-100-binary.tar.gz"
    with pytest.raises(ValueError, match=f"cifar-100-binary.tar.gz .*{reason}.*{by_hand}"):
        load_dataset("cifar100", data_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_leave_to_download_the_user_is_told_which_file_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cifar-100-binary\.tar\.gz from https://www\.cs\.toronto\.edu"):
        load_dataset("cifar100", data_dir=tmp_path, download=False)


def test_a_download_shows_its_progress_only_when_asked(
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


def test_an_archive_that_writes_outside_its_folder_is_refused(server: Server, tmp_path: Path) -> None:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as tape:
        tape.addfile(tarfile.TarInfo("../../outside"), io.BytesIO())
    archive = serve(server, "evil.tar.gz", memory.getvalue(), "evil")
    with pytest.raises(ValueError, match=r"evil\.tar\.gz could not be unpacked"):
        fetch_archive(archive, tmp_path / "deep" / "data")
    assert not list(tmp_path.rglob("outside"))


# What `icmixup data` says of them


def test_the_list_says_what_is_here_and_how_to_get_the_rest(tmp_path: Path) -> None:
    write_cifar("cifar100", 1, Made(100, 1), tmp_path)
    rows = {row.name: row for row in list_datasets(tmp_path)}
    assert tuple(rows) == DATASETS
    assert [name for name, row in rows.items() if row.here] == ["digits", "cifar100"]
    assert rows["cifar100"].where == str(tmp_path / "cifar-100-python")
    assert "icmixup data get cifair10" in rows["cifair10"].where
    digits = load_dataset("digits", data_dir=tmp_path)
    assert (rows["digits"].train, rows["digits"].test) == (len(digits.train), len(digits.test))


def test_a_check_passes_on_digits_and_says_what_is_wrong_with_a_false_cifar(tmp_path: Path) -> None:
    assert all(check.holds for check in check_dataset("digits", tmp_path))
    write_cifar("cifar10", 0, Made(10, 1), tmp_path)
    wrong = {check.claim: check.found for check in check_dataset("cifar10", tmp_path) if check.holds is False}
    assert wrong["50,000 train and 10,000 test images"] == "50 and 10"
    assert any("means" in claim for claim in wrong)
