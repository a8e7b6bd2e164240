"""Pickles of arrays, read as data: nothing that a file names is imported or called.

The pickle module is not used at all. A pickle is a program for a small stack machine; `load` runs the part of
it that files with lists, strings and NumPy arrays need, and refuses everything else. The names of NumPy's
constructors in a file are tokens here, and the arrays are built by this module after the sizes agree.
"""

from __future__ import annotations

import codecs
import io
import math
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_BYTES = 1 << 30  # of a file; CIFAR-100's training set has 155 MB
DTYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "b1")
ORDERS = ("|", "<", ">", "=")
QUOTED = re.compile(rb"""(["'])(.*)\1\n""", re.DOTALL)
MARK = object()
OPCODES = {entry.code: entry for entry in pickletools.opcodes}
CORES = ("numpy.core", "numpy._core")  # NumPy 1 and NumPy 2
ALLOWED = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",  # Python 3 writes bytes this way in protocols 0 to 2
    **{(f"{core}.multiarray", name): name for core in CORES for name in ("_reconstruct", "scalar")},
    **{(f"{core}.numeric", "_frombuffer"): "_frombuffer" for core in CORES},
}


class RefusedPickle(ValueError):
    """A pickle refers to something other than plain values and NumPy arrays."""


class Token(NamedTuple):
    """A name in the file that stands for one of NumPy's constructors; it cannot be called."""

    name: str


class DType:
    """A numeric dtype of the file; its byte order follows in a second instruction."""

    def __init__(self, code: str) -> None:
        self.code, self.order = code, "|"

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(("" if self.order == "|" else self.order) + self.code)


class Array:
    """An array of the file; its content follows in a second instruction."""

    def __init__(self, value: npt.NDArray[Any] | None = None) -> None:
        self.value = value


def read_pickle(path: Path) -> dict[str, object]:
    """Read a pickled dictionary of arrays and lists without executing it; keys are converted to str."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, expected at most {MAX_BYTES:,}: download it again")
    try:
        with open(path, "rb") as file:
            content = load(file)
    except RefusedPickle as error:
        raise RefusedPickle(
            f"refused to load the pickle {path}: {error}; download it from its publisher"
        ) from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, Warning) as error:
        raise ValueError(
            f"{path} is truncated or not a pickle ({error}): remove it and download it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must contain a dictionary of arrays, got {type(content).__name__}: download it again"
        )
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): v.value if isinstance(v, Array) else v
        for key, v in content.items()
    }


def load(file: BinaryIO) -> object:
    """The value that a pickle describes; arrays in it are `Array`, other objects are refused."""
    content = io.BytesIO(file.read())  # a reader of an argument can then never wait for more than there is
    machine = Machine()
    while code := content.read(1):
        opcode = OPCODES.get(code.decode("latin1"))
        if opcode is None:
            raise ValueError(f"unknown instruction {code!r}")
        if opcode.name == "STOP":
            return machine.stack[-1]
        argument = read_argument(opcode, content)
        step = OPERATIONS.get(opcode.name)
        if step is None:
            raise RefusedPickle(f"it has the instruction {opcode.name}, which arrays do not need")
        step(machine, argument)
    raise ValueError("it ends too early")


def read_argument(opcode: pickletools.OpcodeInfo, file: BinaryIO) -> Any:
    if opcode.name == "STRING":  # pickletools reads ASCII only, and Python 2 wrote bytes as escapes
        found = QUOTED.fullmatch(file.readline())
        if found is None:
            raise ValueError("a string without quotes")
        return codecs.escape_decode(found[2])[0].decode("latin1")
    return None if opcode.arg is None else opcode.arg.reader(file)


class Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            raise ValueError("a value is missing")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        for position in range(len(self.stack) - 1, -1, -1):
            if self.stack[position] is MARK:
                items = self.stack[position + 1 :]
                del self.stack[position:]
                return items
        raise ValueError("a mark is missing")

    def top(self, kind: type) -> Any:
        value = self.stack[-1] if self.stack else None
        if type(value) is not kind:
            raise ValueError(f"a {kind.__name__.lower()} was expected, not {type(value).__name__}")
        return value


def push_global(machine: Machine, name: str) -> None:
    """GLOBAL: the argument is "module name"."""
    machine.push(find_token(*name.split(" ", 1)))


def stack_global(machine: Machine, _: object) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        raise ValueError("the name of a constructor is not a string")
    machine.push(find_token(module, name))


def find_token(module: str, name: str) -> Token:
    if (module, name) not in ALLOWED:
        raise RefusedPickle(
            f"it refers to {module}.{name}, and only plain values and NumPy arrays are allowed"
        )
    return Token(ALLOWED[module, name])


def call_reduce(machine: Machine, _: object) -> None:
    """REDUCE: what the file means as a call of a constructor; the constructors are those in CALLS."""
    arguments, token = machine.pop(), machine.pop()
    if type(token) is not Token or type(arguments) is not tuple or token.name not in CALLS:
        raise RefusedPickle("it calls something that is not a constructor of arrays")
    machine.push(CALLS[token.name](*arguments))


def reconstruct(kind: object, shape: object, code: object) -> Array:
    """numpy.core.multiarray._reconstruct(ndarray, (0,), b"b"): an array whose content follows."""
    if kind != Token("ndarray") or shape != (0,):
        raise RefusedPickle("it makes an array of another type than numpy.ndarray")
    return Array()


def make_dtype(code: object, align: object = False, copy: object = True) -> DType:
    code = code.decode("latin1") if isinstance(code, bytes) else code
    plain = code[1:] if isinstance(code, str) and code[:1] in ORDERS else code
    if not isinstance(plain, str) or plain not in DTYPES:
        raise RefusedPickle(f"it has an array of {shorten(code)}, and only numbers are allowed")
    dtype = DType(plain)
    if isinstance(code, str) and code[:1] in ORDERS:
        dtype.order = code[0]
    return dtype


def from_buffer(content: object, dtype: object, shape: object, order: object) -> Array:
    return Array(build_array(content, dtype, shape, order == "F"))


def make_scalar(dtype: object, content: object) -> object:
    """The Python number of a NumPy scalar."""
    return build_array(content, dtype, (), False).item()


def encode_latin1(text: object, encoding: object = "latin1") -> bytes:
    """_codecs.encode(text, "latin1"); codecs other than latin1 are refused."""
    if encoding != "latin1":
        raise RefusedPickle(f"it refers to the codec {shorten(encoding)}, and only latin1 is allowed")
    return as_bytes(text)


def build_array(content: object, dtype: object, shape: object, fortran: bool) -> npt.NDArray[Any]:
    """An array over a copy of the file's bytes, once dtype, shape and number of bytes agree."""
    raw = as_bytes(content)
    if type(dtype) is not DType or type(shape) is not tuple or len(shape) > 8:
        raise ValueError("an array has no dtype or no shape")
    if any(type(side) is not int or not 0 <= side <= len(raw) for side in shape):
        raise ValueError(f"an array has the shape {shorten(shape)} and {len(raw):,} bytes")
    numbers = dtype.numpy()
    if math.prod(shape) * numbers.itemsize != len(raw):
        raise ValueError(f"an array of shape {shorten(shape)} and dtype {numbers} has {len(raw):,} bytes")
    return np.frombuffer(raw, numbers).reshape(shape, order="F" if fortran else "C").copy()


def as_bytes(content: object) -> bytes:
    if isinstance(content, str):  # a byte string of Python 2
        return content.encode("latin1")
    if not isinstance(content, bytes | bytearray):
        raise ValueError(f"bytes were expected, not {type(content).__name__}")
    return bytes(content)


def shorten(value: object) -> str:
    """A short text of a value of the file; nested values are not printed, they may refer to themselves."""
    if isinstance(value, tuple):
        return f"({', '.join(str(side) if type(side) is int else '?' for side in value[:8])})"[:60]
    return repr(value)[:60] if isinstance(value, str | bytes) else type(value).__name__


CALLS: dict[str, Callable[..., object]] = {
    "_reconstruct": reconstruct,
    "_frombuffer": from_buffer,
    "dtype": make_dtype,
    "scalar": make_scalar,
    "encode": encode_latin1,
}


def build(machine: Machine, _: object) -> None:
    """BUILD: the byte order of a dtype, or the content of an array."""
    state = machine.pop()
    target = machine.stack[-1] if machine.stack else None
    if type(target) is DType and type(state) is tuple:
        set_dtype(target, state)
    elif type(target) is Array and type(state) is tuple and len(state) == 5:
        _, shape, dtype, fortran, content = state
        target.value = build_array(content, dtype, shape, bool(fortran))
    else:
        raise RefusedPickle("it sets the state of an object that is not an array")


def set_dtype(dtype: DType, state: tuple[object, ...]) -> None:
    """State of a plain dtype: (3, "<", None, None, None, -1, -1, 0); fields and subarrays are refused."""
    order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
    if len(state) != 8 or order not in ORDERS or state[2:5] != (None, None, None) or state[5:] != (-1, -1, 0):
        raise RefusedPickle("it has an array of records, and only numbers are allowed")
    dtype.order = str(order)


def set_items(machine: Machine, _: object) -> None:
    put_items(machine, machine.pop_to_mark())


def set_item(machine: Machine, _: object) -> None:
    value, key = machine.pop(), machine.pop()
    put_items(machine, [key, value])


def put_items(machine: Machine, items: list[Any]) -> None:
    machine.top(dict).update(pair_up(items))


def pair_up(items: list[Any]) -> dict[str | bytes | int, Any]:
    # Tuples as keys could take exponential time to hash, since a pickle can share their parts.
    if len(items) % 2 or not all(isinstance(key, str | bytes | int) for key in items[::2]):
        raise ValueError("a key of a dictionary is not a string")
    return dict(zip(items[::2], items[1::2], strict=True))


def get(machine: Machine, number: int) -> None:
    machine.push(machine.memo[number])


def put(machine: Machine, number: int) -> None:
    if not machine.stack or machine.stack[-1] is MARK:
        raise ValueError("a value is missing")
    machine.memo[number] = machine.stack[-1]


def make_tuple(size: int) -> Callable[[Machine, object], None]:
    def step(machine: Machine, _: object) -> None:
        machine.push(tuple(reversed([machine.pop() for _ in range(size)])))

    return step


def append(machine: Machine, _: object) -> None:
    value = machine.pop()
    machine.top(list).append(value)


def appends(machine: Machine, _: object) -> None:
    items = machine.pop_to_mark()
    machine.top(list).extend(items)


def constant(value: object) -> Callable[[Machine, object], None]:
    return lambda machine, _: machine.push(value)


VALUES = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
)
OPERATIONS: dict[str, Callable[[Machine, Any], None]] = {
    **dict.fromkeys(VALUES.split(), Machine.push),
    **dict.fromkeys(("PROTO", "FRAME", "READONLY_BUFFER"), lambda machine, _: None),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), get),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), put),
    "MEMOIZE": lambda machine, _: put(machine, len(machine.memo)),
    "MARK": constant(MARK),
    "NONE": constant(None),
    "NEWTRUE": constant(True),
    "NEWFALSE": constant(False),
    "EMPTY_TUPLE": constant(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "LIST": lambda machine, _: machine.push(machine.pop_to_mark()),
    "DICT": lambda machine, _: machine.push(pair_up(machine.pop_to_mark())),
    **{f"TUPLE{size}": make_tuple(size) for size in (1, 2, 3)},
    "POP": lambda machine, _: machine.stack.pop() and None,
    "APPEND": append,
    "APPENDS": appends,
    "SETITEM": set_item,
    "SETITEMS": set_items,
    "GLOBAL": push_global,
    "STACK_GLOBAL": stack_global,
    "REDUCE": call_reduce,
    "BUILD": build,
}
