"""Trained networks: load one from a run or from an exported file, and use it on new images.

from icmixup.lab.training.trained import load_trained
network = load_trained("model.safetensors")  # or the folder of a run
print(network.predict(["photo.jpg"]))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from icmixup.lab.augment import normalise
from icmixup.lab.datasets import Dataset, is_named
from icmixup.lab.datasets.folder import find_images
from icmixup.lab.datasets.hub import PREFIX
from icmixup.lab.models import build_model, portable_name
from icmixup.lab.training.data import LoadData
from icmixup.lab.training.evaluate import inference
from icmixup.lab.training.identity import autocast_dtype
from icmixup.lab.training.inputs import InputFormat, read_inputs
from icmixup.lab.training.output import write_output
from icmixup.lab.training.run_folder import Run, read_identity
from icmixup.lab.training.step import to_device
from icmixup.lab.training.stored import FOLDS_FILE, read_recipe_file, read_run_names

BATCH = 256
EXPORT_SUFFIX = ".safetensors"


class Prediction(NamedTuple):
    """The most probable class of an image."""

    file: str
    class_name: str
    probability: float  # after temperature scaling


@dataclass(frozen=True, eq=False)
class Trained:
    """A network with everything that is needed to use it."""

    model: nn.Module  # maps (B, channels, image_size, image_size) normalised images to (B, C) scores
    inputs: InputFormat
    temperature: float  # divides the scores
    model_name: str
    autocast_dtype: torch.dtype | None
    about: Mapping[str, Any]  # where it comes from

    def probabilities(self, images: Tensor) -> Tensor:
        """(B, C) probabilities, after temperature scaling, of (B, channels, H, W) uint8 images."""
        device = next(self.model.parameters()).device
        with inference(self.model, device, self.autocast_dtype):
            scores: Tensor = self.model(normalise(images.to(device), self.inputs.mean, self.inputs.std))
        return (scores.float() / self.temperature).softmax(dim=1).cpu()

    def predict(
        self, paths: Sequence[Path | str], on_error: Callable[[ValueError], None] | None = None
    ) -> list[Prediction]:
        """The class of each image file.

        Args:
            on_error: called for a file that cannot be read, which is then left out; by default the error is
                raised.
        """
        found: list[Prediction] = []
        for start in range(0, len(paths), BATCH):
            files: list[str] = []
            images: list[Tensor] = []
            for path in paths[start : start + BATCH]:
                try:
                    images.append(self.inputs.read(path))
                    files.append(str(path))
                except ValueError as error:
                    if on_error is None:
                        raise
                    on_error(error)
            if images:
                tops = self.probabilities(torch.stack(images)).max(dim=1)
                for file, probability, label in zip(files, *(top.tolist() for top in tops), strict=True):
                    found.append(Prediction(file, self.inputs.class_names[label], probability))
        return found


def list_images(paths: Sequence[Path]) -> Iterator[Path]:
    """Image files: those named, and all inside of folders that are named, in a fixed order."""
    for path in paths:
        if path.is_dir():
            if (path / "recipe.json").exists():
                raise ValueError(
                    f"{path} is the folder of a run, not of images; pass one run, and images after it (a "
                    "pattern such as runs/photos.* can match several runs)"
                )
            inside = find_images(path)
            if not inside:
                raise ValueError(f"{path} contains no image files")
            yield from inside
        elif path.exists():
            yield path
        else:
            raise ValueError(f"{path} does not exist; pass image files or folders of them")


def load_trained(path: Path | str, device: torch.device | str = "cpu") -> Trained:
    """The network of a finished run's folder, or of a file that `export_run` wrote."""
    path, device = Path(path), torch.device(device)
    return load_exported(path, device) if path.suffix == EXPORT_SUFFIX else load_run(find_run(path), device)


def load_run(run: Run, device: torch.device) -> Trained:
    """The network of a finished run."""
    if run.recipe.train == "head":
        raise ValueError(
            f"{run.folder} trained only a linear head on features, which cannot be used on images; "
            "train on images, with --train all"
        )
    inputs, row = read_inputs(run.folder), run.result() or {}
    model = build_for(run.recipe.model, inputs, cosine=run.recipe.cosine)
    about = {name: row.get(name) for name in ("method", "seed", "accuracy", "fingerprint", "version")}
    return Trained(
        load_run_weights(run, to_device(model, device)),
        inputs,
        float(row["fitted_temperature"]),
        run.recipe.model,
        autocast_dtype(run.recipe, device),
        {"run": run.folder.name, "cosine": run.recipe.cosine, **about},
    )


def build_for(name: str, inputs: InputFormat, *, cosine: bool = False) -> nn.Module:
    """A network with random weights for such inputs."""
    size, channels, classes = inputs.image_size, inputs.channels, len(inputs.class_names)
    return build_model(name, classes, channels=channels, seed=0, image_size=size, cosine=cosine)


def load_run_weights(run: Run, model: nn.Module) -> nn.Module:
    """The model with the weights that the run was tested with: averaged weights if the recipe sets ema."""
    state, refused = run.load(next(model.parameters()).device)
    if state is None:
        reason = "; ".join(refused.values()) or f"there is no {run.checkpoints()[0].name}"
        raise ValueError(f"{run.folder} has no weights: {reason}")
    model.load_state_dict(state["model" if run.recipe.ema is None else "average"])
    return model


def find_run(folder: Path) -> Run:
    """The finished run in a folder; a ValueError describes the folder if it has none."""
    path = folder / "recipe.json"
    if not path.exists():
        raise ValueError(f"{folder} {describe_folder(folder)}; pass the folder of a finished run")
    run = Run(folder, read_recipe_file(path), read_identity(folder))
    if run.result() is None:
        done = max((row.get("epoch", 0) for row in run.read_log()), default=0)
        raise ValueError(
            f"{folder} is unfinished after {done} of {run.recipe.epochs} epochs; run the command that "
            "started it again to resume"
        )
    return run


def load_run_data(run: Run, load: LoadData) -> Dataset:
    """The dataset that the run was trained and tested on; a ValueError says what to do if it is not there."""
    name = run.recipe.dataset
    stored = is_named(name) or name.startswith(PREFIX)  # in --data-dir
    try:
        data = load(run.recipe)
    except (ValueError, OSError) as error:
        remedy = (
            "pass the folder that has it with --data-dir"
            if stored
            else "run the command where that path exists, or make it a link to the images; data that was "
            "given in Python cannot be loaded by a command"
        )
        raise ValueError(
            f"{run.folder} was trained on {name}, which cannot be loaded: {error}; {remedy}"
        ) from error
    if run.identity is not None and run.identity.data != data.fingerprint:
        raise ValueError(
            f"{run.folder} was trained on other images of {name} (fingerprint {run.identity.data}, now "
            f"{data.fingerprint}); restore them{', or pass --data-dir' if stored else ''}"
        )
    return data


def describe_folder(folder: Path) -> str:
    """What a folder without a recipe is."""
    if not folder.is_dir():
        return "is a file" if folder.exists() else "does not exist"
    if (folder / "comparison.json").exists():
        inside = [str(folder.parent / name) for name in read_run_names(folder / "comparison.json")]
        return f"is a comparison of {len(inside)} runs" + (f" such as {inside[0]}" if inside else "")
    if (folder / FOLDS_FILE).exists():
        inside = [str(folder.parent / name) for name in read_run_names(folder / FOLDS_FILE)]
        return f"has the results of {len(inside)} folds, each a run of its own, such as {inside[0]}"
    inside = sorted(path.parent.name for path in folder.glob("*/recipe.json"))
    return f"contains {len(inside)} runs such as {inside[0]}" if inside else "is not the folder of a run"


def export_run(folder: Path, to: Path) -> tuple[Path, Path]:
    """Write the weights of a run as safetensors, and what is needed to use them as JSON beside them.

    The JSON is also stored in the file itself, under "icmixup" in its metadata.
    """
    from safetensors.torch import save

    if to.suffix != EXPORT_SUFFIX:
        raise ValueError(f"--to must end in {EXPORT_SUFFIX}, got {to}")
    trained = load_trained(folder)
    about = {
        "model": portable_name(trained.model_name),
        **trained.inputs._asdict(),
        "temperature": trained.temperature,
        **trained.about,
    }
    weights = {name: weight.contiguous().clone() for name, weight in trained.model.state_dict().items()}
    write_output(to, save(weights, metadata={"format": "pt", "icmixup": json.dumps(about)}))
    beside = to.with_suffix(".json")
    write_output(beside, json.dumps(about, indent=1).encode())
    return to, beside


def load_exported(path: Path, device: torch.device) -> Trained:
    """The network in a file that `export_run` wrote."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise ValueError(f"{path} does not exist; icmixup export writes such a file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            about = json.loads((file.metadata() or {})["icmixup"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path} was not written by icmixup export ({error})") from error
    lists: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in about.items()}
    inputs = InputFormat(**{name: lists.pop(name) for name in InputFormat._fields if name in lists})
    name, temperature = lists.pop("model"), float(lists.pop("temperature"))
    model = build_for(name, inputs, cosine=bool(lists.get("cosine", False)))
    restore_weights(model, weights, path)
    return Trained(to_device(model, device).eval(), inputs, temperature, name, None, lists)


@torch.no_grad()
def restore_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy weights by name.

    load_state_dict expects counters of BatchNorm, which our networks do not have, in a file without torch's
    version numbers.
    """
    own = model.state_dict()
    if {name: tensor.shape for name, tensor in own.items()} != {k: v.shape for k, v in weights.items()}:
        raise ValueError(f"the weights in {path} are not those of the network that it names")
    for name, tensor in own.items():
        tensor.copy_(weights[name])
