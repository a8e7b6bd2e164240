"""Simulations of the statistics of icmixup compare: data with known differences in, error rates out.

    python tools/simulate_statistics.py                   all simulations, written to results/statistics.csv
    python tools/simulate_statistics.py --only coverage   one of coverage, best, auto; its rows are replaced

A test image i is classified correctly by method m with seed s if

    ability[m] + seed[m, s] + difficulty[i] + affinity[m, i] + chance[m, s, i] > 0,

all but the ability normal. So the expected accuracy of a method over new seeds and new images is known
exactly, and every interval and verdict can be checked. A seed effect of 1 means that accuracies of one method
have a standard deviation of 1 point over seeds, beside that of the test images.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import norm
from scipy.stats import t as student

from icmixup.lab.comparison.adaptive import methods_to_continue
from icmixup.lab.comparison.correction import ERROR, error_at_looks, pair_p_values
from icmixup.lab.comparison.statistics import Decision, Look, decide_next
from icmixup.lab.comparison.variance import Sample, crossed_sample, p_value

OUTPUT = Path(__file__).parents[1] / "results" / "statistics.csv"
DIFFICULTY, AFFINITY, CHANCE = 2.0, 0.3, 1.0  # variances
CELLS = 8_000_000  # of one chunk of trials: methods x seeds x images
SEEDS, EFFECTS = (2, 3, 5, 10), (0.3, 1.0, 3.0)
IMAGES = ((100, 4000), (1000, 2000), (10_000, 1000))  # test images, and trials
COVERED = ("covered", "covered by Satterthwaite", "covered by seeds only")
Bools = npt.NDArray[np.bool_]
Names = tuple[str, ...]


class Setting(NamedTuple):
    """Data to simulate: expected accuracies in percent, and the size of the comparison."""

    accuracies: tuple[float, ...]
    seeds: int
    images: int
    seed_effect: float  # points
    unstable: float = 1.0  # seed effect of the last method, relative to the others


def draw_correct(setting: Setting, trials: int, rng: np.random.Generator) -> Iterator[Bools]:
    """Chunks of trials, (T, M, S, N): whether a method is right with seed s about image i."""
    methods, (_, seeds, images) = len(setting.accuracies), setting[:3]
    each = max(1, min(trials, CELLS // (methods * seeds * images)))
    for start in range(0, trials, each):
        yield draw_chunk(setting, min(each, trials - start), rng)


def draw_chunk(setting: Setting, trials: int, rng: np.random.Generator) -> Bools:
    seeds, images = setting.seeds, setting.images

    def normal(shape: tuple[int, ...], deviation: float) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(deviation)

    others = DIFFICULTY + AFFINITY + CHANCE
    difficulty = normal((trials, 1, images), DIFFICULTY**0.5)
    correct = []
    for number, accuracy in enumerate(setting.accuracies):
        quantile = float(norm.ppf(accuracy / 100))
        effect = setting.seed_effect * (setting.unstable if number == len(setting.accuracies) - 1 else 1)
        seed_deviation = effect / 100 / float(norm.pdf(quantile)) * others**0.5
        latent = normal((trials, seeds, images), CHANCE**0.5)
        latent += difficulty + normal((trials, 1, images), AFFINITY**0.5)
        latent += normal((trials, seeds, 1), seed_deviation)
        correct.append(latent > -quantile * (others + seed_deviation**2) ** 0.5)
    return np.stack(correct, axis=1)


def simulate_coverage(setting: Setting, trials: int, rng: np.random.Generator) -> dict[str, float]:
    """How often, in percent, 95 % intervals of two methods contain the true difference."""
    truth = setting.accuracies[0] - setting.accuracies[1]
    hits: dict[str, list[npt.NDArray[np.bool_]]] = {name: [] for name in COVERED}
    for correct in draw_correct(setting, trials, rng):
        sample = crossed_sample(correct[:, 0], correct[:, 1])
        error = sample.mean - truth
        freedom = setting.seeds - 1
        p = p_value(error, sample.seed_variance, sample.image_variance, freedom, sample.least)
        hits[COVERED[0]].append(p >= ERROR)
        hits[COVERED[1]].append(satterthwaite_p(error, sample, setting) >= ERROR)
        by_seed = 100 * (correct[:, 0].mean(axis=-1) - correct[:, 1].mean(axis=-1))
        bound = student.ppf(1 - ERROR / 2, freedom) * by_seed.std(axis=-1, ddof=1) / setting.seeds**0.5
        hits[COVERED[2]].append(np.abs(error) <= bound)
    return {kind: 100 * float(np.concatenate(each).mean()) for kind, each in hits.items()}


def satterthwaite_p(error: npt.NDArray[np.float64], sample: Sample, setting: Setting) -> Bools:
    """The p-value from one Student t with Satterthwaite's degrees of freedom, for comparison."""
    seeds, images = setting.seeds, setting.images
    residual = sample.residual / (seeds * images)
    mean_squares = (
        (sample.seed_variance, seeds - 1),
        (sample.image_variance + residual, images - 1),
        (residual, (seeds - 1) * (images - 1)),
    )
    variance = np.maximum(sample.seed_variance + sample.image_variance, 1e-12)
    freedom = variance**2 / np.maximum(sum(square**2 / df for square, df in mean_squares), 1e-24)
    return 2 * student.sf(np.abs(error) / np.sqrt(variance), np.maximum(freedom, 1e-3))


def simulate_best(setting: Setting, trials: int, rng: np.random.Generator) -> dict[str, float]:
    """How often, in percent, a sole winner is declared, the true one is found, and any claim is wrong."""
    truth = np.array(setting.accuracies)
    pairs = list(combinations(range(len(truth)), 2))
    found: dict[str, list[npt.NDArray[np.bool_]]] = {"sole winner": [], "found": [], "wrong claim": []}
    for correct in draw_correct(setting, trials, rng):
        samples = stack_pairs(correct, pairs)
        claimed = pair_p_values(samples, len(truth))[1] < ERROR
        leader = correct.mean(axis=(-2, -1)).argmax(axis=1)
        sole = sole_winner(claimed & agrees(samples, leader, pairs), len(truth))
        true_signs = np.sign([truth[first] - truth[second] for first, second in pairs])
        found["sole winner"].append(sole)
        found["found"].append(sole & (leader == truth.argmax()))
        found["wrong claim"].append((claimed & (np.sign(samples.mean) != true_signs)).any(axis=1))
    return {kind: 100 * float(np.concatenate(each).mean()) for kind, each in found.items()}


def stack_pairs(correct: Bools, pairs: Sequence[tuple[int, int]]) -> Sample:
    """Samples of all pairs on the last axis, (T, P)."""
    samples = [crossed_sample(correct[:, first], correct[:, second]) for first, second in pairs]
    columns = list(zip(*samples, strict=True))
    seeds, images = int(columns[1][0]), int(columns[-1][0])
    mean, seed_variance, image_variance, residual = (np.stack(columns[k], axis=-1) for k in (0, 2, 3, 4))
    return Sample(mean, seeds, seed_variance, image_variance, residual, images)


def agrees(samples: Sample, leader: npt.NDArray[np.int64], pairs: Sequence[tuple[int, int]]) -> Bools:
    """(T, P) whether a pair says that the leader is better than another method."""
    first, second = (np.array(column) for column in zip(*pairs, strict=True))
    ahead = (leader[:, None] == first) & (samples.mean > 0)
    behind = (leader[:, None] == second) & (samples.mean < 0)
    return ahead | behind


def sole_winner(better: Bools, methods: int) -> Bools:
    """(T,) whether the leader is better than all other methods."""
    return better.sum(axis=1) == methods - 1


def simulate_auto(setting: Setting, trials: int, rng: np.random.Generator) -> dict[str, float]:
    """--seeds auto: percentage of trials with a wrong claim or the true winner found, and of runs saved."""
    names = tuple(f"method {number}" for number in range(len(setting.accuracies)))
    truth = dict(zip(names, setting.accuracies, strict=True))
    best = max(names, key=truth.__getitem__)
    wrong = right = runs = 0
    for correct in draw_correct(setting, trials, rng):
        stages = stage_samples(correct, names)
        for trial in range(len(correct)):
            looks, decision = run_looks(correct, stages, names, trial)
            claims = [pair for pair, p in decision.p_corrected.items() if p < ERROR]
            wrong += any(is_wrong(pair, looks, truth) for pair in claims)
            right += decision.group == (best,)
            runs += sum(decision.stopped.get(name, looks[-1].seeds) for name in names)
    most = trials * len(names) * setting.seeds
    return {
        "wrong claim": 100 * wrong / trials,
        "found": 100 * right / trials,
        "runs saved": 100 * (1 - runs / most),
    }


def stage_samples(correct: Bools, names: Names) -> dict[int, dict[tuple[str, str], Sample]]:
    """Samples of all pairs after 3, 4, ... seeds, each of (T,) trials."""
    pairs = list(combinations(range(len(names)), 2))
    return {
        seeds: {
            (names[first], names[second]): crossed_sample(
                correct[:, first, :seeds], correct[:, second, :seeds]
            )
            for first, second in pairs
        }
        for seeds in error_at_looks(correct.shape[2])
    }


def run_looks(
    correct: Bools, stages: dict[int, dict[tuple[str, str], Sample]], names: Names, trial: int
) -> tuple[list[Look], Decision]:
    """The looks of one trial, until no method continues, and the decision."""
    looks: list[Look] = []
    decision = Decision(names, {}, {}, False)
    for seeds, error in error_at_looks(correct.shape[2]).items():
        means = 100 * correct[trial, :, :seeds].mean(axis=(-2, -1))
        samples = {
            pair: Sample(*(value[trial] if isinstance(value, np.ndarray) else value for value in sample))
            for pair, sample in stages[seeds].items()
        }
        looks.append(Look(seeds, error, dict(zip(names, means.tolist(), strict=True)), samples))
        decision = decide_next(decision, looks[-1])
        if not methods_to_continue(decision, seeds, correct.shape[2]):
            break
    return looks, decision


def is_wrong(pair: tuple[str, str], looks: Sequence[Look], truth: dict[str, float]) -> bool:
    """Whether a claim about a pair has the wrong sign, or the two methods are equal."""
    first, second = pair
    return (truth[first] - truth[second]) * float(looks[-1].samples[pair].mean) <= 0


EQUAL, ONE_BETTER = (80.0,) * 8, (83.0, *(80.0,) * 7)
SPREAD = (83.0, 82.0, 81.0, 80.0, 79.0, 78.0, 77.0, 76.0)
SCENARIOS = {"equal": EQUAL, "one better": ONE_BETTER, "one point apart": SPREAD}


def coverage_settings() -> Iterator[tuple[str, Setting, int]]:
    for accuracy, (images, trials), seeds, effect in product((80.0, 95.0), IMAGES, SEEDS, EFFECTS):
        yield f"{accuracy:g} %", Setting((accuracy, accuracy - 1), seeds, images, effect), trials


def best_settings() -> Iterator[tuple[str, Setting, int]]:
    for (name, accuracies), (images, trials), seeds, effect in product(
        SCENARIOS.items(), ((1000, 2000), (10_000, 300)), (3, 5, 10), (0.3, 1.0)
    ):
        yield name, Setting(accuracies, seeds, images, effect), trials
    for seeds, factor in product((3, 5), (3.0, 10.0)):
        yield f"equal, one {factor:g} times as unstable", Setting(EQUAL, seeds, 1000, 1.0, factor), 2000


def auto_settings() -> Iterator[tuple[str, Setting, int]]:
    for (name, accuracies), (images, trials), effect in product(
        SCENARIOS.items(), ((1000, 400), (10_000, 100)), (0.3, 1.0)
    ):
        # A rate of a few percent takes more trials than the others.
        yield name, Setting(accuracies, 10, images, effect), trials * 4 if accuracies == EQUAL else trials


SIMULATIONS = {
    "coverage": (coverage_settings, simulate_coverage),
    "best": (best_settings, simulate_best),
    "auto": (auto_settings, simulate_auto),
}


def run_simulation(kind: str, scale: float) -> Iterator[dict[str, object]]:
    """One row per setting and measure."""
    settings, simulate = SIMULATIONS[kind]
    for number, (name, setting, trials) in enumerate(settings()):
        started, count = time.monotonic(), max(10, round(trials * scale))
        measured = simulate(setting, count, np.random.default_rng(number))
        row = {
            "simulation": kind,
            "scenario": name,
            "methods": len(setting.accuracies),
            "seeds": setting.seeds,
            "images": setting.images,
            "seed_effect": setting.seed_effect,
            "trials": count,
        }
        print(row | measured, f"{time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        for measure, percent in measured.items():
            yield {**row, "measure": measure, "percent": f"{percent:.2f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=SIMULATIONS, help="run one simulation")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="fraction of the trials; below 1 writes nothing"
    )
    flags = parser.parse_args()
    kinds = [flags.only] if flags.only else list(SIMULATIONS)
    rows = [row for kind in kinds for row in run_simulation(kind, flags.scale)]
    if flags.scale == 1:
        write_rows(rows, kinds)


def write_rows(rows: Sequence[dict[str, object]], kinds: Sequence[str]) -> None:
    """Replace the rows of these simulations."""
    kept: list[dict[str, object]] = []
    if OUTPUT.exists():
        with OUTPUT.open(newline="") as file:
            kept = [dict(row) for row in csv.DictReader(file) if row["simulation"] not in kinds]
    ordered = sorted([*kept, *rows], key=lambda row: list(SIMULATIONS).index(str(row["simulation"])))
    with OUTPUT.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(ordered)


if __name__ == "__main__":
    main()
