"""Files of CIFAR's python layout from an attacker: refused with a message, and nothing in them is called."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from icmixup.lab.datasets import cifar
from icmixup.lab.datasets.pickles import Array, load, read_pickle

ROOT = Path(__file__).parents[2]
PIXELS = np.zeros((1, cifar.PIXELS), np.uint8)
RAW = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
U1 = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR"
POINTERS = b"cnumpy\nndarray\n((I1\nt" + U1 + b"S'AAAAAAAA'\ntR"


def state(dtype: bytes, shape: bytes = b"(I4\nt", content: bytes = b"S'abcd'\n") -> bytes:
    return b"(I1\n" + shape + dtype + b"I00\n" + content + b"tb"


# what is tried: its bytes after (dS'data'\n, and the message
HOSTILE = {
    "ndarray called with pointers": (POINTERS, "constructor of arrays"),
    "dtype of objects": (RAW + state(b"cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR"), "array of 'O8'"),
    "dtype of records": (RAW + state(b"cnumpy\ndtype\n(S'V8'\nI0\nI1\ntR"), "array of 'V8'"),
    "dtype of strings": (RAW + state(b"cnumpy\ndtype\n(S'S4'\nI0\nI1\ntR"), "array of 'S4'"),
    "dtype with fields": (
        RAW + state(U1 + b"(I3\nS'|'\n(S'a'\nt(dS'a'\nI1\nsNI-1\nI-1\nI0\ntb"),
        "array of records",
    ),
    "dtype with a subarray": (RAW + state(U1 + b"(I3\nS'|'\n(I1\nI2\ntNNI-1\nI-1\nI0\ntb"), "of records"),
    "dtype with flags": (RAW + state(U1 + b"(I3\nS'|'\nNNNI-1\nI-1\nI63\ntb"), "array of records"),
    "dtype with another itemsize": (RAW + state(U1 + b"(I3\nS'|'\nNNNI99\nI-1\nI0\ntb"), "of records"),
    "shape larger than the bytes": (RAW + state(U1, b"(I400000000\nt"), "shape .400000000"),
    "negative shape": (RAW + state(U1, b"(I-4\nt"), "shape"),
    "shape whose product overflows": (RAW + state(U1, b"(" + b"I4\n" * 40 + b"t"), "no shape"),
    "shape of floats": (RAW + state(U1, b"(F4.0\nt"), "shape"),
    "content that is a list": (RAW + state(U1, content=b"(I1\nl"), "bytes were expected"),
    "array without a dtype": (RAW + state(b"N"), "no dtype"),
    "subclass of ndarray": (RAW.replace(b"ndarray", b"recarray"), "numpy.recarray"),
    "os.system": (b"cos\nsystem\n(S'touch executed'\ntR", "os.system"),
    "posix.system": (b"cposix\nsystem\n(S'touch executed'\ntR", "posix.system"),
    "builtins.eval": (b"cbuiltins\neval\n(S'1'\ntR", "builtins.eval"),
    "numpy.fromfile": (b"cnumpy\nfromfile\n(S'/etc/passwd'\ntR", "numpy.fromfile"),
    "INST": (b"(S'touch executed'\nios\nsystem\n", "INST"),
    "OBJ": (b"(cnumpy\ndtype\nS'u1'\no", "OBJ"),
    "NEWOBJ": (b"cnumpy\ndtype\n(S'u1'\nt\x81", "NEWOBJ"),
    "EXT1": (b"\x82\x01", "EXT1"),
    "PERSID": (b"Pabc\n", "PERSID"),
    "state of a list": (b"(lN}b", "state of an object"),
    "call of a string": (b"S'os.system'\n(S'ls'\ntR", "constructor of arrays"),
    "missing mark": (b"0" * 9, "not a pickle"),
    "string without quotes": (b"Sabc\n", "quotes"),
    "unknown instruction": (b"\xff", "unknown instruction"),
    "memo that was never set": (b"h\x77", "pickle"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_with_a_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, message = HOSTILE[name]
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"(dS'data'\n" + content + b"s.")
    with pytest.raises(ValueError, match=message):
        read_pickle(path)
    assert os.listdir(tmp_path) == ["data_batch_1"]


LABELS: dict[str, object] = {
    "floats": [3.7],
    "booleans": [True],
    "huge": [2**80],
    "beyond int64": [-(2**63) - 1],
    "a scalar": 3,
    "a string": "3",
    "strings": ["3"],
    "None": None,
    "a list in a list": [[3]],
    "an array of floats": np.array([3.0]),
    "a matrix": np.array([[3]]),
    "an array without dimensions": np.array(3),
    "a dictionary": {"0": 3},
    "bytes": b"\x03",
    "NaN": [float("nan")],
    "out of range": [10],
    "negative": [-1],
    "too many": [1, 2],
    "none at all": [],
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_that_are_not_integers_in_range_are_refused_not_truncated(name: str, tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": PIXELS, "labels": LABELS[name]}))
    with pytest.raises(ValueError, match="data_batch_1"):
        cifar._read_file(path, cifar.LAYOUTS["cifar10"][1], 10)


@pytest.mark.parametrize(
    "pixels",
    [PIXELS.astype(np.int64), PIXELS[:, :-1], PIXELS.tolist(), None, PIXELS.astype(bool), "x" * 3072],
)
def test_pixels_of_another_type_or_number_are_refused(pixels: object, tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": pixels, "labels": [3]}))
    with pytest.raises(ValueError, match="data_batch_1"):
        cifar._read_file(path, cifar.LAYOUTS["cifar10"][1], 10)


@pytest.mark.parametrize("names", [[["a"]] * 10, [None] * 10, list(range(10)), ["a"] * 9, "abcdefghij", None])
def test_class_names_that_are_not_ten_strings_are_refused(names: object, tmp_path: Path) -> None:
    layout = cifar.LAYOUTS["cifar10"][1]
    (tmp_path / layout.names).write_bytes(pickle.dumps({"label_names": names}))
    with pytest.raises(ValueError, match="does not list 10 class names"):
        cifar._read_class_names(tmp_path, layout, 10)


def test_nested_values_that_share_their_parts_take_no_exponential_time(tmp_path: Path) -> None:
    # 200 levels of (x, x): hashing or printing the last one would take 2^200 steps.
    content = b"N" + b"".join(b"p%d\n0(g%d\ng%d\nt" % (n, n, n) for n in range(200))
    path = tmp_path / "data_batch_1"
    started = time.monotonic()
    for program in (b"(" + content + b"I1\nd.", b"(dS'data'\n" + content + b"s.", content + b"."):
        path.write_bytes(program)
        with pytest.raises(ValueError, match="data_batch_1"):
            cifar._read_file(path, cifar.LAYOUTS["cifar10"][1], 10)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", ">u2", "<i4", ">i8", "<f4", ">f8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_numbers_are_read_as_numpy_reads_them(dtype: str, order: str, tmp_path: Path) -> None:
    array = np.array(np.arange(24).reshape(2, 3, 4) % 120, dtype=dtype, order=order)  # type: ignore[call-overload]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path = tmp_path / str(protocol)
        path.write_bytes(pickle.dumps(array, protocol))
        with path.open("rb") as file:
            found = load(file)
        assert isinstance(found, Array)
        assert found.value is not None
        assert found.value.dtype == array.dtype
        assert np.array_equal(found.value, array)


def test_2000_mutated_files_neither_crash_the_interpreter_nor_call_anything(tmp_path: Path) -> None:
    tool = [sys.executable, str(ROOT / "tools" / "fuzz_cifar.py"), "--files", "2000", "--seed", "7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(tool, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["read"] + result["refused"] == 2000
    assert result["read"] > 50  # otherwise the mutations would only test the first bytes
    assert (result["unexpected"], result["crashes"], result["forbidden_events"]) == ({}, [], {})
