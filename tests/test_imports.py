"""Imports go one way, the library needs torch alone, and `import icmixup` loads nothing it does not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "icmixup"
KERNELS = (
    "kernels",
    "kernels_sums",
    "kernels_backward",
    "launch",
    "launch_backward",
)  # imported only where they are used
LIBRARY = [  # a new room gets a place here: behind all it imports
    *("checks", "contrast", "gather", "temperature", *KERNELS, "chunked", "fused"),
    *("pairs", "hidden", "loss", "cached", "methods", "adapters"),
]
LABORATORY = [  # DESIGN.md's order; smaller rooms stand where they fit, as long as there is no circle
    *("data", "augment", "models", "evaluate", "recipe", "runs", "train", "engine", "compare", "paper"),
    *("analysis", "figures", "report", "cli"),
]
DOORS = ("__init__", "__main__")
HEAVY = ("icmixup.lab", "triton", "matplotlib", "plotly", "sklearn", "scipy", "tyro", "rich", "datasets")


def library_rooms() -> list[str]:
    rooms = [path.stem for path in SRC.glob("*.py") if path.stem not in DOORS]
    return sorted(rooms) + ["adapters"] * (SRC / "adapters").is_dir()


def laboratory_rooms() -> list[str]:
    return sorted(path.stem for path in (SRC / "lab").glob("*.py") if path.stem not in DOORS)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a file imports, at its head or within a function, but not for its types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield from imported_modules(node)


def imports_of(room: str, folder: Path = SRC) -> set[str]:
    files = [folder / f"{room}.py"] if (folder / f"{room}.py").exists() else (folder / room).glob("*.py")
    return {name for file in files for name in imported_modules(ast.parse(file.read_text()))}


def rooms_named(imports: set[str], prefix: str, rooms: list[str]) -> set[str]:
    """Of names as icmixup.pairs.draw_mixup, those that lie in one of the rooms: pairs."""
    below = {name.removeprefix(prefix).split(".")[0] for name in imports if name.startswith(prefix)}
    return below & set(rooms)


def test_every_library_room_has_its_place_in_the_order() -> None:
    assert set(library_rooms()) - set(LIBRARY) == set()


@pytest.mark.parametrize("room", [room for room in LIBRARY if room in library_rooms()])
def test_each_library_room_imports_only_rooms_before_it(room: str) -> None:
    before = LIBRARY[: LIBRARY.index(room)]
    assert rooms_named(imports_of(room), "icmixup.", LIBRARY) - {room} <= set(before)


@pytest.mark.parametrize("room", [*library_rooms(), "__init__"])
def test_no_library_room_knows_the_laboratory(room: str) -> None:
    assert not any(name.startswith("icmixup.lab") for name in imports_of(room))


@pytest.mark.parametrize("room", [room for room in library_rooms() if room != "adapters"])
def test_library_rooms_import_torch_alone(room: str) -> None:
    allowed = {"torch", "icmixup", *sys.stdlib_module_names} | ({"triton"} if room in KERNELS else set())
    assert {name.split(".")[0] for name in imports_of(room)} <= allowed


@pytest.mark.parametrize("room", [room for room in LABORATORY if room in laboratory_rooms()])
def test_each_laboratory_room_imports_only_rooms_before_it(room: str) -> None:
    before = LABORATORY[: LABORATORY.index(room)]
    assert rooms_named(imports_of(room, SRC / "lab"), "icmixup.lab.", LABORATORY) <= set(before)


def test_no_circle_of_rooms_in_the_laboratory() -> None:
    rooms = laboratory_rooms()
    graph = {room: rooms_named(imports_of(room, SRC / "lab"), "icmixup.lab.", rooms) for room in rooms}
    assert set(TopologicalSorter(graph).static_order()) == set(rooms)  # a circle is a CycleError


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_library_loads_neither_laboratory_nor_plots() -> None:
    loaded = run_python("import sys, icmixup; print(*sys.modules)").split()
    assert "icmixup.loss" in loaded
    assert [
        name for name in loaded if any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)
    ] == []


FOUR_LINES = """
import sys, torch

finders = list(sys.meta_path)
there = {name.split(".")[0] for name in sys.modules} | set(sys.stdlib_module_names) | {"icmixup"}

class TorchAlone:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] not in there or name.startswith("icmixup.lab"):
            return None
        return next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)

sys.meta_path[:] = [TorchAlone]
for absent in ("rich", "icmixup.lab"):
    try:
        __import__(absent)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{absent} should not be found")

import icmixup as icm

images, labels, counts = torch.randn(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([5, 3, 2])
nn = torch.nn
model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
pairs = icm.draw_mixup(labels, alpha=0.2)
inputs = icm.mix_inputs(images, pairs)
targets = icm.mix_targets(labels, pairs, num_classes=3)
icm.infinite_class_loss(model(inputs), targets).backward()
for method in icm.METHODS:
    icm.training_loss(model, images, labels, method, counts).backward()
print(icm.fit_temperature(model(images).detach(), labels) > 0)
"""


def test_the_library_runs_with_torch_alone() -> None:
    """With torch's own dependencies, that is, which are loaded before the guard stands."""
    assert run_python(FOUR_LINES).strip() == "True"
