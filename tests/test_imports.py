"""The library needs torch only, and importing icmixup loads nothing it does not need.

Which module may import which is checked by import-linter (`make check`, contracts in pyproject.toml).
"""

from __future__ import annotations

import subprocess
import sys

import icmixup

# Public names of version 0.1.0: users have these in their code. New names are added here, none disappears.
PUBLIC = [
    "AXES",
    "METHODS",
    "InfiniteClassLoss",
    "Method",
    "Pairs",
    "cached_backward",
    "draw_cutmix",
    "draw_either",
    "draw_mixup",
    "draw_remix",
    "draw_virtual",
    "fit_temperature",
    "infinite_class_loss",
    "mix_hidden",
    "mix_inputs",
    "mix_targets",
    "mixed_accuracy",
    "training_loss",
]
HEAVY = ("icmixup.lab", "triton", "matplotlib", "plotly", "sklearn", "scipy", "tyro", "rich", "datasets")


def test_public_names_of_the_first_version_are_still_there() -> None:
    assert set(PUBLIC) <= set(icmixup.__all__)
    for name in icmixup.__all__:
        assert getattr(icmixup, name) is not None
        assert name in dir(icmixup)


def test_importing_the_package_does_not_import_torch() -> None:
    loaded = run_python("import sys, icmixup; print(*sys.modules)").split()
    assert "torch" not in loaded


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_whole_library_loads_neither_the_lab_nor_plots() -> None:
    code = "import sys; from icmixup import *; import icmixup.loss; print(*sys.modules)"
    loaded = run_python(code).split()
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
for method in (row.at(1) for row in icm.METHODS.values()):
    icm.training_loss(model, images, labels, method, counts).backward()
print(icm.fit_temperature(model(images).detach(), labels) > 0)
"""


def test_the_library_runs_with_torch_alone() -> None:
    """With torch's own dependencies, that is, which are loaded before the guard stands."""
    assert run_python(FOUR_LINES).strip() == "True"
