"""compare() for data, networks, transforms and methods that are given in Python."""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import nn

from icmixup._checks import check_choice
from icmixup.lab.comparison.classes import write_class_files
from icmixup.lab.comparison.compare import (
    INTERVALS,
    Comparison,
    Tuned,
    check_methods,
    comparison_folder,
    comparison_name,
    comparison_recipes,
    pick_baseline,
    write_comparison,
)
from icmixup.lab.comparison.compare import compare as compare_recipes
from icmixup.lab.comparison.overview import IN_PYTHON, Overview, augments, describe_comparison
from icmixup.lab.comparison.result import ComparisonResult
from icmixup.lab.comparison.statistics import COMPARED
from icmixup.lab.comparison.tuning import Batch, check_trials, held_out_parts, tune_methods, write_tuning
from icmixup.lab.datasets import Dataset
from icmixup.lab.datasets.arrays import Data, Transform, make_dataset
from icmixup.lab.datasets.examples import is_channels_last
from icmixup.lab.models import MODELS, build_model, find_builder, is_own
from icmixup.lab.models.own import ModelFactory, OwnModel, check_factory, check_separate, factory_name
from icmixup.lab.sweep import check_execution, describe_reuse, find_finished
from icmixup.lab.sweep.cost import work
from icmixup.lab.sweep.progress import Display
from icmixup.lab.training.classifier import check_linear_classifier
from icmixup.lab.training.definitions import Definitions, pack_definitions
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.identity import identify, probe_scores
from icmixup.lab.training.loop import check_sizes
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import (
    CHOICES,
    QUICK,
    Augmentation,
    Mixing,
    Numerics,
    Optimisation,
    Recipe,
    lengthen,
)
from icmixup.methods import METHODS, Method, find_method

Methods = Sequence[str | Method] | Mapping[str, str | Method]
BASE = dataclasses.replace(QUICK, padding=0, rotation=0.0)  # the user's data comes with its own transforms
ADAMW: dict[str, object] = {"lr": 1e-3, "weight_decay": 0.05, "decay_norms": False}
OTHER_PRECISIONS = (torch.float16, torch.bfloat16, torch.float64)  # than that of the inputs
# A flag of the command in a message, with its value if that is a number or one of a few words.
FLAG = re.compile(
    r"(?<![\w-])--(no-)?([a-z]+(?:-[a-z]+)*)"
    r"(?: (\d[\d.]*(?:e[+-]?\d+)?(?<!\.)|cpu|float32|uniform|cosine|step|sgd|adamw|balanced-accuracy)\b)?"
)


def compare(
    train: Data,
    test: Data,
    *,
    model: str | ModelFactory = "small-cnn",
    methods: Methods = ("erm", "mixup", "ic-mixup"),
    seeds: int | Sequence[int] = 3,
    optimizer: str = "sgd",
    baseline: str | None = None,
    tune: int | None = None,
    tune_parts: int | None = None,
    transform: Transform | None = None,
    test_transform: Transform | None = None,
    class_names: Sequence[str] | None = None,
    name: str = "data",
    out: str | Path = "runs",
    device: str | None = None,
    workers: int = 1,
    intervals: str = "both",
    measure: str = "accuracy",
    progress: bool = True,
    **settings: object,
) -> ComparisonResult:
    """Train several methods with several seeds on your data, and compare their accuracies seed by seed.

    A second call with the same arguments trains nothing again: runs are found by the content of the data, the
    network, the method and the settings, not by their names.

    >>> result = compare((x_train, y_train), (x_test, y_test), model=Net, methods=["erm", "mixup"])
    >>> print(result.verdict)

    Args:
        train, test: (inputs, labels) as arrays or tensors, or torch Datasets with items (input, label). uint8
            images, (N, H, W), (N, channels, H, W) or (N, H, W, channels), are normalised; other inputs, for
            example (N, D) rows of a table, reach the network as float32 without a change. Items of a torch
            Dataset are read again in every epoch, so random transforms stay random.
        model: a function or class that builds a network, called without arguments, or with the number of
            classes if it takes it; or the name of a network for images, as `icmixup compare --model`.
        methods: names of METHODS, Method objects, or a mapping from your own names to either.
        seeds: a number of seeds, or the seeds.
        optimizer: "sgd" or "adamw". Without `lr`, SGD starts at 0.05 and AdamW at 0.001.
        baseline: method that differences refer to; "mixup" if it is compared, otherwise the first.
        tune: trials per method to choose learning rate, weight decay, alpha, and strength of logit adjustment
            on held-out training data, before all seeds are trained on all of it.
        tune_parts: quarters of the training data that each trial is validated on in turn, from 1 to 4, one
            run for each; by default all 4 if a quarter has fewer than 1,000 examples, otherwise 1.
        transform: applied to every training input whenever it is read, before it is mixed; may be random. It
            gets a tensor, (channels, H, W) uint8 for images.
        test_transform: the same for test inputs; must not be random.
        class_names: names of labels 0, 1, ...
        name: of the data, in the names of folders.
        out: folder of all runs and comparisons.
        device: cpu, cuda or cuda:1; a GPU if there is one by default.
        workers: concurrent runs. With more than one, on CPUs or several GPUs, processes are started with
            spawn: data, model, transforms and methods must be picklable and importable, so defined at the top
            level of a .py file, and a script must call compare under `if __name__ == "__main__":`.
        intervals: "both" covers new seeds and new test examples, "seeds" covers new seeds.
        measure: "accuracy", over test examples, or "balanced-accuracy", its average over classes: what
            differences, intervals and the best group are of. They differ if test classes differ in size.
        progress: show the progress on stderr.
        settings: epochs, batch_size, lr, weight_decay and other settings of optimisation, augmentation,
            mixing and numerics, as the flags of `icmixup compare`: 60 epochs with batches of 64 and a cosine
            schedule by default.
    """
    check_starting(workers)
    check_choice("intervals", intervals, INTERVALS)
    check_choice("measure", measure, COMPARED)
    with errors_about_arguments():
        check_trials(tune, tune_parts)
    data = make_dataset(
        name,
        train,
        test,
        class_names=class_names,
        transform=transform,
        test_transform=test_transform,
    )
    definitions, network = define(model, methods), model_name(model)
    with definitions.registered(), errors_about_arguments():
        names = check_methods(method_names(methods))
        check_inputs(names, data)
        recipe = make_recipe(name, network, optimizer, data, settings)
        check_network(recipe, data)
        check_classifier(names, recipe, data)
        execution = Execution(
            out=Path(out),
            data_dir=Path("data"),
            device=device,
            workers=workers,
            dataset=data,
            definitions=definitions,
        )
        check_execution(execution)
        plan = Plan(
            *(recipe, names, seed_list(seeds), pick_baseline(names, baseline)),
            *(execution, tune, tune_parts, measure),
        )
        return ComparisonResult(plan.run(intervals, progress), plan.folder, definitions)


@contextmanager
def errors_about_arguments() -> Iterator[None]:
    """Errors name arguments of compare() instead of flags of the command."""
    try:
        yield
    except ValueError as error:
        if len(error.args) == 1:
            error.args = (as_arguments(str(error)),)
        raise


def as_arguments(text: str) -> str:
    """A message of the command in the words of Python: "use --batch-size 12" is "use batch_size=12"."""

    def argument(flag: re.Match[str]) -> str:
        negated, name, value = flag.groups()
        name = name.replace("-", "_")
        if value is not None:
            return f"{name}={value if value[0].isdigit() else repr(value)}"
        return f"{name}=False" if negated else name

    return FLAG.sub(argument, text.replace("; --reuse takes them", ""))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compared, after all arguments have been checked."""

    recipe: Recipe
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str
    execution: Execution
    tune: int | None
    tune_parts: int | None
    measure: str

    @property
    def folder(self) -> Path:
        """Where the files of the comparison are: depends on what names mean, as runs do."""
        data = self.execution.loaded
        recipes = [dataclasses.replace(self.recipe, method=method) for method in self.methods]
        identities = [identify(recipe, data, "cpu") for recipe in recipes]
        meaning = " ".join(f"{identity.data} {identity.model} {identity.method}" for identity in identities)
        parts = 1 if self.tune is None else len(held_out_parts(data, self.tune_parts))
        name = comparison_name(
            *(self.recipe, IN_PYTHON, self.methods, self.seeds, self.baseline, meaning),
            *(self.tune, parts, self.measure),
        )
        return comparison_folder(self.execution.out, name)

    def run(self, intervals: str, progress: bool) -> Comparison:
        """Tune if asked, train everything, write the files."""
        if self.execution.workers != 1 and pick_device(self.execution.device).type == "cpu":
            pack_definitions(self.execution)  # what cannot be pickled is reported before anything is trained
        console = Console(stderr=True, quiet=not progress)
        tuned = None if self.tune is None else self.tuned(self.tune, console)
        recipes = comparison_recipes(self.recipe, self.methods, self.seeds, tuned)
        overview = self.overview()
        overview = dataclasses.replace(overview, warnings=tuple(map(as_arguments, overview.warnings)))
        warned = [f"warning: {warning}" for warning in overview.warnings]
        for note in (*warned, *describe_reuse(recipes, self.execution)):
            console.print(as_arguments(note), markup=False, highlight=False, soft_wrap=True)
        with self.display(recipes, console) as display:
            comparison = compare_recipes(
                self.recipe,
                self.methods,
                self.seeds,
                self.baseline,
                execution=self.execution,
                display=display,
                intervals=intervals,
                measure=self.measure,
                tuned=tuned,
            )
        for failure in comparison.failures:
            reason = as_arguments(failure.reason)
            warnings.warn(f"{failure.method} seed {failure.seed} has no result: {reason}", stacklevel=3)
        comparison = dataclasses.replace(
            comparison,
            overview=overview.as_json(),
            verdict=as_arguments(comparison.verdict),
            footnote=as_arguments(comparison.footnote),
        )
        write_comparison(comparison, self.folder)
        if comparison.rows:
            counts = self.execution.loaded.class_counts.tolist()
            write_class_files(self.folder, self.execution.out, comparison.rows, self.methods, counts)
        return comparison

    def display(self, recipes: Sequence[Recipe], console: Console) -> Display:
        return Display(recipes, console, work=work, finished=find_finished(recipes, self.execution))

    def tuned(self, number: int, console: Console) -> Tuned:
        def show(batch: Batch) -> Display:
            return Display(
                [trial.recipe for trial in batch.trials],
                console,
                finished=batch.finished,
                title=batch.title_of(number),
                later=batch.later + len(self.methods) * len(self.seeds),
            )

        tuning = tune_methods(
            self.recipe,
            self.methods,
            number,
            execution=self.execution,
            parts=self.tune_parts,
            show=show,
            on_round=lambda done: write_tuning(done, self.folder),
        )
        return tuning.best

    def overview(self) -> Overview:
        return describe_comparison(
            self.recipe,
            self.execution.loaded,
            self.methods,
            self.seeds,
            recipe_name=IN_PYTHON,
            where=pick_device(self.execution.device).type,
            seconds=None,
            measure=self.measure,
        )


def check_starting(workers: int) -> None:
    """Raise an error in a worker that imports a script without `if __name__ == "__main__":`."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"compare(workers={workers}) starts processes that import {sys.argv[0] or 'the script'} again, "
            'and this one reached compare while importing; put the call under if __name__ == "__main__":'
        )


def define(model: str | ModelFactory, methods: Methods) -> Definitions:
    """What the user gave besides names: a network and methods."""
    models = {}
    if not isinstance(model, str):
        check_factory(model)
        models[model_name(model)] = OwnModel(model)
    return Definitions(models, own_methods(methods))


def model_name(model: str | ModelFactory) -> str:
    """A name that is not one of the package's: torchvision has a resnet18, too."""
    if isinstance(model, str):
        return model
    name = factory_name(model)
    return f"own-{name}" if name in MODELS else name


def own_methods(methods: Methods) -> dict[str, Method]:
    """Methods that the table of methods does not have, by name."""
    if isinstance(methods, str) or not isinstance(methods, Mapping | Sequence):
        raise ValueError(f"methods must be a list of names or Method objects, or a mapping, got {methods!r}")
    named = zip(method_names(methods), values_of(methods), strict=True)
    own: dict[str, Method] = {}
    for name, value in named:
        method = find_method(value) if isinstance(value, str) else value
        if own.get(name, METHODS.get(name, method)) != method:
            raise ValueError(
                f"the name {name!r} belongs to another method of this package; use another name for yours"
            )
        if name not in METHODS:
            own[name] = method
    return own


def values_of(methods: Methods) -> list[str | Method]:
    values = list(methods.values() if isinstance(methods, Mapping) else methods)
    for value in values:
        if not isinstance(value, str | Method):
            raise ValueError(f"a method must be a name or a Method, got {type(value).__name__}")
    return values


def method_names(methods: Methods) -> list[str]:
    """Names of the methods: as given, or made from the settings of a Method."""
    if isinstance(methods, Mapping):
        return [check_name(name) for name in methods]
    return [value if isinstance(value, str) else describe_method(value) for value in values_of(methods)]


def check_name(name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise ValueError(
            f"the name of a method must consist of letters, digits, '.', '_', '+' and '-', because folders "
            f"are named after it, got {name!r}"
        )
    return name


def describe_method(method: Method) -> str:
    """The name of a row of the table, or the draw and all settings that differ from their defaults."""
    for name, known in METHODS.items():
        if known == method:
            return name
    parts: list[str] = [method.draw]
    for entry in dataclasses.fields(method):
        value = getattr(method, entry.name)
        if entry.name != "draw" and value != entry.default:
            written = "+".join(value) if isinstance(value, tuple) else f"{value}"
            parts.append(f"{entry.name}={written}")
    return "-".join(parts)


def seed_list(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, Integral):  # of NumPy as well
        if seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {seeds}")
        return tuple(range(int(seeds)))
    found = tuple(dict.fromkeys(seeds)) if isinstance(seeds, Iterable) else ()
    if not found or not all(isinstance(seed, Integral) for seed in found):
        raise ValueError(f"seeds must be a number, or whole numbers, got {seeds!r}")
    return tuple(map(int, found))


def make_recipe(
    name: str, model: str, optimizer: str, data: Dataset, settings: Mapping[str, object]
) -> Recipe:
    """The settings of all runs, checked."""
    if optimizer not in CHOICES["optimizer"]:
        allowed = " or ".join(repr(choice) for choice in CHOICES["optimizer"])
        raise ValueError(f"optimizer must be {allowed}, got {optimizer!r}")
    check_settings(settings, data)
    chosen = {**(ADAMW if optimizer == "adamw" else {}), **settings}
    chosen = {key: plain_value(value) for key, value in chosen.items()}
    if is_own(model):  # a CUDA graph would repeat what Python code of the network decided once
        chosen = {"graph": False, **chosen}
    task = {"dataset": name, "model": model, "method": "erm", "optimizer": optimizer}
    recipe = dataclasses.replace(BASE, **task, **chosen)  # type: ignore[arg-type]
    check_sizes(recipe, data)
    return lengthen(recipe, len(data.train))


def plain_value(value: object) -> object:
    """A setting as a recipe stores it: numbers of NumPy as Python's, lists as tuples."""
    if isinstance(value, np.generic):
        return value.item()
    return tuple(value) if isinstance(value, list) else value


def check_settings(settings: Mapping[str, object], data: Dataset) -> None:
    """Raise an error for settings that do not exist, or have no effect on this data."""
    kinds = (Optimisation, Augmentation, Mixing, Numerics)
    known = {entry.name for kind in kinds for entry in dataclasses.fields(kind)}
    for setting in settings:
        if setting not in known:
            near = get_close_matches(setting, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"use {', '.join(sorted(known))}"
            raise ValueError(f"compare has no setting {setting!r}; {hint}")
    augmenting = [entry.name for entry in dataclasses.fields(Augmentation) if entry.name in settings]
    if augmenting and not augments(data):
        raise ValueError(
            f"{', '.join(augmenting)} would have no effect: only arrays of uint8 images are augmented by "
            "settings; use transform= or the transforms of your dataset"
        )


def check_inputs(methods: Sequence[str], data: Dataset) -> None:
    """Raise an error for methods that need images where there are none."""
    images = data.train.images
    allowed = ("none", "mixup", "remix") if images.dim() == 2 else ("none", "mixup", "remix", "manifold")
    wrong = [name for name in methods if find_method(name).draw not in allowed]
    if wrong and images.dim() != 4:
        raise ValueError(
            f"{', '.join(wrong)} cannot mix inputs of shape {tuple(images.shape[1:])}: cutting needs images, "
            "(channels, height, width), and mixing hidden layers needs more than rows; leave them out"
        )


def check_classifier(methods: Sequence[str], recipe: Recipe, data: Dataset) -> None:
    """Raise an error if a classifier is to be changed that is not linear, or is of a network of the user."""
    if not is_own(recipe.model):
        for method in methods:
            check_linear_classifier(dataclasses.replace(recipe, method=method), data)
        return
    cosine = [name for name in methods if find_method(name).margin > 0]
    cosine += ["cosine_classifier"] if recipe.cosine_classifier else []
    adjusted = [name for name in methods if find_method(name).class_sizes == "adjust-after"]
    for wrong, what in ((cosine, "classifies by cosines"), (adjusted, "adjusts biases after training")):
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} {what}, and cannot find the classifier of your own network; "
                'leave it out, or use a network by name, for example model="resnet18"'
            )


def check_network(recipe: Recipe, data: Dataset) -> None:
    """Raise an error if the network does not give one score per class, or is not new in every run."""
    images = data.train.images
    if not is_own(recipe.model):
        find_builder(recipe.model)
        if images.dim() != 4:
            raise ValueError(
                f"{recipe.model} takes images, but inputs are {tuple(images.shape[1:])}; pass a function "
                "that builds your network as model"
            )
        if is_channels_last(images.shape[1:]):  # it would be built for as many channels as there are rows
            raise ValueError(
                f"{recipe.model} takes images of (channels, height, width), but inputs are "
                f"{tuple(images.shape[1:])}; move the channels to the front"
            )
    channels, size = images.shape[1], images.shape[-1]

    def build() -> nn.Module:
        name, classes, seed = recipe.model, data.num_classes, recipe.seed
        return build_model(name, classes, channels=channels, seed=seed, image_size=size)

    model = build()
    if is_own(recipe.model):
        check_separate(model, build())
        check_weights(model)
    scores = probe_scores(model, data)
    wanted = (min(2, len(data.train)), data.num_classes)
    if not isinstance(scores, torch.Tensor) or tuple(scores.shape) != wanted:
        got = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise ValueError(
            f"the network must return {wanted} scores for {wanted[0]} examples of {data.num_classes} "
            f"classes, got {got}"
        )
    check_scores(scores)


def check_weights(model: nn.Module) -> None:
    """Raise an error for a network that cannot be trained, or not on float32 inputs."""
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ValueError("the network has no weights that require a gradient, so there is nothing to train")
    if all(weight.dtype in OTHER_PRECISIONS for weight in model.parameters()):
        kind = next(model.parameters()).dtype
        raise ValueError(
            f"the weights of the network are {kind}, but inputs are float32; build it in float32 (check "
            'torch.set_default_dtype), and set precision="bfloat16" for autocast'
        )


def check_scores(scores: torch.Tensor) -> None:
    """Raise an error for probabilities and their logarithms.

    Every loss applies a softmax of its own, and the pair axis compares scores of different images, which a
    log_softmax shifts.
    """
    rows = scores.double()
    for kind, softmax, shares in (("", "softmax", rows), ("log-", "log_softmax", rows.exp())):
        sums = shares.sum(dim=1)
        if bool((shares >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            raise ValueError(
                f"the network returns {kind}probabilities; it must return the scores (logits) before them: "
                f"remove its {softmax}"
            )
