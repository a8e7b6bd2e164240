"""Loss or accuracy: which of the two, on held-out images, chooses values that are good on test images?

    icmixup compare digits --per-class 100 --imbalance 0.05 --tune 10 --out runs/tuned
    python tools/validation_loss.py runs/tuned/digits*tuned* --rows results/validation_loss.csv

Takes a comparison with --tune, whose trials must still have their checkpoints, and tests the networks of all
trials on the test images, which --tune itself never uses. A row per trial: what it has on the held-out images
(mean_class_nll, balanced_accuracy) and on the test images (test_balanced_accuracy, the mean over its
networks, one for each part that was held out). For methods that do not adjust for class sizes also the
strengths of logit adjustment after training that the same held-out images choose by loss and by accuracy, and
what they have on the test images. Prints, for each method, the test accuracy of the trial that either one
chooses.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from candidates import write_candidates
from scipy.stats import spearmanr
from torch import Tensor

from icmixup import adjust_scores, fit_adjustment
from icmixup.adjustment import TAUS
from icmixup.calibration import mean_class_nll
from icmixup.lab.comparison.tuning import TUNING_FILE, held_out_parts
from icmixup.lab.datasets import Dataset
from icmixup.lab.training.data import training_data
from icmixup.lab.training.evaluate import balanced_accuracy, class_accuracies
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.predictions import read_predictions
from icmixup.lab.training.retrain import scores_of
from icmixup.lab.training.run_folder import Run, provenance
from icmixup.lab.training.step import initial_model
from icmixup.lab.training.trained import find_run, load_run_weights

SETTINGS = ("lr", "weight_decay", "alpha", "adjust_tau")
TAU = ("tau_by_loss", "tau_by_accuracy", "adjusted_by_loss", "adjusted_by_accuracy", "adjusted_tau_1")
COLUMNS = (
    *("dataset", "model", "imbalance", "data_seed", "method", "trial", *SETTINGS, "parts"),
    *("mean_class_nll", "balanced_accuracy", "test_balanced_accuracy", *TAU),
    *("device", "torch", "commit", "date"),
)


class Network(NamedTuple):
    """What a trained network has on its held-out and on the test images."""

    held_out: tuple[Tensor, Tensor]  # (N, C) scores and (N,) labels
    test: tuple[Tensor, Tensor]
    class_counts: Tensor  # of its training images


def load_network(run: Run, data: Dataset, part: Dataset) -> Network:
    recipe = run.recipe
    blank = initial_model(dataclasses.replace(recipe, weights=None), data)
    scores = scores_of(load_run_weights(run, blank), data.test, recipe, data)
    held_out = read_predictions(run.folder).tensors()
    if not torch.equal(held_out[1], part.test.labels):
        raise SystemExit(f"{run.folder} held out other images; pass the data that it was tuned on")
    return Network(held_out, (scores, data.test.labels), part.class_counts)


def adjusted_accuracy(network: Network, tau: float, *, test: bool) -> float:
    scores, labels = network.test if test else network.held_out
    return balanced_accuracy(class_accuracies(adjust_scores(scores, network.class_counts, tau), labels))


def tau_columns(networks: Sequence[Network]) -> dict[str, float]:
    """The strengths that each network's held-out images choose, and what they have on the test images."""
    by_loss = [fit_adjustment(*each.held_out, each.class_counts) for each in networks]
    by_accuracy = [
        max(TAUS, key=lambda tau: (adjusted_accuracy(each, tau, test=False), -abs(tau - 1)))
        for each in networks
    ]
    chosen = {"by_loss": by_loss, "by_accuracy": by_accuracy, "tau_1": [1.0] * len(networks)}
    on_test = {
        f"adjusted_{name}": fmean(
            adjusted_accuracy(network, tau, test=True) for network, tau in zip(networks, taus, strict=True)
        )
        for name, taus in chosen.items()
    }
    return {"tau_by_loss": fmean(by_loss), "tau_by_accuracy": fmean(by_accuracy), **on_test}


def trial_row(line: Mapping[str, str], folder: Path, data: Dataset) -> dict[str, Any]:
    """A row of a finished trial, from its line in tuning.csv."""
    runs = [find_run(folder / name) for name in line["folder"].split()]
    recipe = runs[0].recipe
    parts = held_out_parts(data, len(runs)).values()
    networks = [load_network(run, data, part) for part, run in zip(parts, runs, strict=True)]
    row = {name: getattr(recipe, name) for name in ("dataset", "model", "imbalance", "data_seed", "method")}
    row |= {name: line[name] for name in ("trial", *SETTINGS)}
    held_out = [torch.cat(part) for part in zip(*(network.held_out for network in networks), strict=True)]
    row["parts"] = len(runs)
    row["mean_class_nll"] = mean_class_nll(*held_out)
    row["balanced_accuracy"] = balanced_accuracy(class_accuracies(*held_out))
    row["test_balanced_accuracy"] = fmean(
        balanced_accuracy(class_accuracies(*network.test)) for network in networks
    )
    if not recipe.whole_method.adjusts and not recipe.cosine:
        row |= tau_columns(networks)
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    return rounded | provenance(data.test.labels.device)


def read_trials(folder: Path, data_dir: Path) -> list[dict[str, Any]]:
    """The rows of all finished trials of a comparison."""
    with (folder / TUNING_FILE).open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["status"] == "finished"]
    if not lines:
        raise SystemExit(f"{folder / TUNING_FILE} has no finished trials")
    first = find_run(folder.parent / lines[0]["folder"].split()[0])
    data = training_data(first.recipe, Execution(out=folder.parent, data_dir=data_dir, device="cpu"))
    return [trial_row(line, folder.parent, data) for line in lines]


def print_choices(rows: Sequence[Mapping[str, Any]]) -> None:
    """Markdown: for each method, the test accuracy of the trial that is chosen, and how well it is ranked."""
    print("| method | the recipe's | by accuracy | by loss | best | rank correlation, accuracy | loss |")
    print("|---|---|---|---|---|---|---|")
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        test = [row["test_balanced_accuracy"] for row in own]
        losses = [-row["mean_class_nll"] for row in own]
        accuracies = [row["balanced_accuracy"] for row in own]
        chosen = (test[values.index(max(values))] for values in (accuracies, losses))
        cells = [test[0], *chosen, max(test)]
        ranks = [spearmanr(values, test).statistic if len(own) > 1 else 0 for values in (accuracies, losses)]
        print(f"| {method} |", *(f"{cell:.1f} |" for cell in cells), *(f"{rank:.2f} |" for rank in ranks))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparisons", nargs="+", type=Path, help="folders of comparisons with --tune")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--rows", type=Path, help="CSV file to write")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for folder in args.comparisons:
        rows = read_trials(folder, args.data_dir)
        print_choices(rows)
        found += rows
    if args.rows is not None:
        write_candidates(args.rows, COLUMNS, found)


if __name__ == "__main__":
    main()
