"""Evaluations of runs on shifted data, summarised: one summary per line of the table, over its seeds.

Corrupted accuracy and other means weigh all corruptions and strengths equally. The mean corruption error is
that of Hendrycks and Dietterich (2019): for each corruption the error, summed over strengths, divided by that
of the baseline; then the mean over corruptions, in percent. 100 is as good as the baseline, and less is
better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from icmixup.lab.analysis.runs import describe_run, line_names
from icmixup.lab.analysis.shifted import Evaluated, Plan
from icmixup.lab.analysis.stored_evaluation import Stored
from icmixup.lab.comparison.statistics import Difference, known_mean, paired_difference, spread
from icmixup.lab.training.output import rows_as_csv
from icmixup.lab.training.run_folder import Run

LEFT_OUT = ("class_accuracies",)  # of the columns of a CSV file


@dataclass(frozen=True)
class Summary:
    """Means over the runs of one line; all but errors relative to a baseline are in percent."""

    line: str
    seeds: tuple[int, ...]
    clean: dict[str, float | None]  # each metric, of the test images as they are
    clean_std: float | None  # of the accuracy, over seeds
    corrupted: dict[str, float | None]  # each metric, over all corruptions and strengths
    corrupted_std: float | None  # of the accuracy, over seeds
    by_strength: dict[int, float]  # accuracy
    by_corruption: dict[str, float]  # accuracy
    ood: dict[str, dict[str, float]]  # folder to auroc, fpr95 and images
    corruption_error: float | None = None  # mean, relative to the baseline; None for the baseline itself
    difference: Difference | None = None  # of the corrupted accuracy, to the baseline


def summarise(evaluated: Sequence[Evaluated], plan: Plan, baseline: str | None) -> list[Summary]:
    """One summary per line, highest corrupted accuracy first.

    Args:
        plan: what of the evaluations is summarised; they may have more.
        baseline: a line, see `pick_baseline_line`; None for no comparison.
    """
    tables = {
        line: Table([entry for entry in evaluated if entry.line == line], plan.corruptions, plan.strengths)
        for line in dict.fromkeys(entry.line for entry in evaluated)
    }
    reference = None if baseline is None else tables[baseline]
    ood = [other.name for other in plan.others]
    found = [table.summary(line, ood, reference) for line, table in tables.items()]
    return sorted(found, key=lambda summary: summary.corrupted["accuracy"] or 0.0, reverse=True)


class Table:
    """The runs of one line, with the corruptions and strengths that are summarised."""

    def __init__(
        self, entries: Sequence[Evaluated], corruptions: Sequence[str], strengths: Sequence[int]
    ) -> None:
        self.entries, self.corruptions, self.strengths = entries, corruptions, strengths

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(entry.run.recipe.seed for entry in self.entries)

    def values(self, stored: Stored, metric: str) -> list[float | None]:
        """A metric under every corruption and strength, of one run."""
        return [
            stored["corruptions"][name][strength - 1][metric]
            for name in self.corruptions
            for strength in self.strengths
        ]

    def accuracies(self) -> list[float]:
        """The corrupted accuracy of each run."""
        return [fmean(v for v in self.values(e.stored, "accuracy") if v is not None) for e in self.entries]

    def accuracy(self, corruptions: Sequence[str], strengths: Sequence[int]) -> float:
        """Mean over runs, and some of the corruptions and strengths."""
        part = Table(self.entries, corruptions, strengths)
        return fmean(part.accuracies())

    def corrupted(self) -> dict[str, float | None]:
        first = self.entries[0].stored["corruptions"][self.corruptions[0]][self.strengths[0] - 1]
        return {
            metric: known_mean([v for entry in self.entries for v in self.values(entry.stored, metric)])
            for metric in first
        }

    def sharing(self, other: Table) -> Table:
        """The runs with a seed that a run of the other line has."""
        entries = [entry for entry in self.entries if entry.run.recipe.seed in other.seeds]
        return Table(entries, self.corruptions, self.strengths)

    def corruption_error(self, reference: Table) -> float | None:
        """The mean corruption error, over the seeds of both; None if there are none, or if the baseline makes
        no error under some corruption."""
        tables = (self.sharing(reference), reference.sharing(self))
        if not tables[0].entries:
            return None
        ratios = []
        for name in self.corruptions:
            own, other = (100 - table.accuracy([name], self.strengths) for table in tables)
            if other == 0:
                return None
            ratios.append(own / other)
        return 100 * fmean(ratios)

    def difference(self, reference: Table) -> Difference | None:
        """Corrupted accuracy minus that of the baseline, paired by seed."""
        ours = dict(zip(self.seeds, self.accuracies(), strict=True))
        theirs = dict(zip(reference.seeds, reference.accuracies(), strict=True))
        return paired_difference(list(ours.values()), [theirs.get(seed) for seed in ours])

    def summary(self, line: str, ood: Sequence[str], reference: Table | None) -> Summary:
        other = None if reference is self else reference  # the baseline is not compared with itself
        clean = [entry.stored["clean"] for entry in self.entries]
        metrics = [name for name in clean[0] if name not in LEFT_OUT]
        accuracies = self.accuracies()
        return Summary(
            line=line,
            seeds=self.seeds,
            clean={name: known_mean([of_run[name] for of_run in clean]) for name in metrics},
            clean_std=spread([of_run["accuracy"] for of_run in clean]),
            corrupted=self.corrupted(),
            corrupted_std=spread(accuracies),
            by_strength={s: self.accuracy(self.corruptions, [s]) for s in self.strengths},
            by_corruption={name: self.accuracy([name], self.strengths) for name in self.corruptions},
            ood={
                name: mean_separation([entry.stored["ood"][name] for entry in self.entries]) for name in ood
            },
            corruption_error=None if other is None else self.corruption_error(other),
            difference=None if other is None else self.difference(other),
        )


def mean_separation(entries: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(entry[name] for entry in entries) for name in ("auroc", "fpr95", "images")}


def pick_baseline_line(runs: Sequence[Run], baseline: str | None) -> str | None:
    """The line that others are compared with: the given line or method, or mixup, or the first line.

    None if there is only one line, and nothing to compare.
    """
    names = line_names([run.recipe for run in runs])
    lines = dict(zip(names, (run.recipe.method for run in runs), strict=True))
    if baseline is None:
        mixup = [line for line, method in lines.items() if method == "mixup"]
        return None if len(lines) == 1 else (mixup or names)[0]
    found = [baseline] if baseline in lines else [line for line in lines if lines[line] == baseline]
    if len(found) != 1:
        problem = "is not among the methods" if not found else f"means {len(found)} of the lines"
        raise ValueError(f"baseline {baseline!r} {problem} of these runs: {', '.join(lines)}")
    return found[0] if len(lines) > 1 else None


def evaluations_as_json(
    evaluated: Sequence[Evaluated], summaries: Sequence[Summary], baseline: str | None
) -> dict[str, Any]:
    """Summaries, and the evaluation of every run."""
    return {
        "format": 1,
        "dataset": evaluated[0].run.recipe.dataset,
        "baseline": baseline,
        "methods": {summary.line: asdict(summary) for summary in summaries},
        "runs": [{**describe_run(entry.run, entry.line), "evaluation": entry.stored} for entry in evaluated],
    }


def evaluations_as_csv(evaluated: Sequence[Evaluated]) -> str:
    """One row per run and set of images: clean, each corruption and strength, each folder of other images."""
    return rows_as_csv([row for entry in evaluated for row in long_rows(entry)])


def long_rows(entry: Evaluated) -> list[dict[str, Any]]:
    stored, about = entry.stored, describe_run(entry.run, entry.line)

    def row(images: str, strength: int | str, metrics: dict[str, Any]) -> dict[str, Any]:
        shown = {name: value for name, value in metrics.items() if name not in LEFT_OUT}
        return {**about, "images": images, "strength": strength, **shown}

    corrupted = [
        row(name, strength, metrics)
        for name, entries in stored["corruptions"].items()
        for strength, metrics in enumerate(entries, start=1)
        if metrics
    ]
    others = [
        row(f"ood:{name}", "", {"auroc": of_folder["auroc"], "fpr95": of_folder["fpr95"]})
        for name, of_folder in stored["ood"].items()
    ]
    return [row("clean", 0, stored["clean"]), *corrupted, *others]
