"""--seeds auto: which methods continue, when it stops, what it reports, and a real comparison on digits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from icmixup.lab.comparison.adaptive import Clock, compare_adaptively, methods_to_continue, take_looks
from icmixup.lab.comparison.compare import Comparison, read_comparison, summarise, write_comparison
from icmixup.lab.comparison.statistics import MEASURES, Answers, Look, decide
from icmixup.lab.comparison.table import accuracy_cell
from icmixup.lab.comparison.verdict import describe_stop
from icmixup.lab.training.data import load_recipe_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import QUICK
from icmixup.lab.training.run_folder import Row

TINY = dataclasses.replace(QUICK, dataset="digits", per_class=20, epochs=1)
METHODS = ("mixup", "ic-mixup", "erm")


def make_rows(accuracies: dict[str, list[float]]) -> list[Row]:
    return [
        {"method": method, "seed": seed, "accuracy": value, **dict.fromkeys(MEASURES, 1.0)}
        for method, values in accuracies.items()
        for seed, value in enumerate(values)
    ]


def looks_at(accuracies: dict[str, list[float]], done: int, max_seeds: int = 8) -> list[Look]:
    return take_looks(make_rows(accuracies), list(accuracies), range(max_seeds), done, None)


def continue_after(accuracies: dict[str, list[float]], done: int, max_seeds: int = 8) -> tuple[str, ...]:
    return methods_to_continue(decide(looks_at(accuracies, done, max_seeds)), done, max_seeds)


CLOSE = {"mixup": [80.0, 80.4, 79.9, 80.2], "ic-mixup": [80.1, 80.2, 80.3, 79.8]}
FAR = {"erm": [60.0, 60.3, 60.1]}


def test_a_method_clearly_behind_gets_no_more_seeds_and_the_others_continue():
    assert continue_after(CLOSE | FAR, 3) == ("mixup", "ic-mixup")
    decision = decide(looks_at(CLOSE | FAR, 4))
    assert decision.stopped == {"erm": 3}
    assert decision.group == ("mixup", "ic-mixup")


def test_no_method_continues_once_one_is_left_or_seeds_run_out():
    assert continue_after({"mixup": [80.0, 80.4, 79.9]} | FAR, 3) == ()
    assert continue_after(CLOSE, 4, max_seeds=4) == ()
    assert continue_after(CLOSE, 4, max_seeds=5) == ("mixup", "ic-mixup")


def test_a_difference_that_a_fixed_comparison_calls_clear_may_have_to_wait():
    # p = 0.030: enough at 5 %, not at the 1.5 % that the first of eight looks may spend.
    accuracies = {"mixup": [80.0, 80.4, 79.9], "ic-mixup": [82.3, 83.0, 81.2]}
    fixed = summarise(QUICK, list(accuracies), range(3), "mixup", make_rows(accuracies))
    assert fixed.verdict.startswith("ic-mixup is best")
    assert continue_after(accuracies, 3) == ("mixup", "ic-mixup")


def test_the_p_value_at_a_look_is_scaled_by_the_share_of_the_error():
    looks = looks_at({"mixup": [80.0, 80.4, 79.9], "ic-mixup": [82.3, 83.0, 81.2]}, 3)
    fixed = decide([looks[0]._replace(error=0.05)]).p_corrected["mixup", "ic-mixup"]
    assert decide(looks).p_corrected["mixup", "ic-mixup"] == pytest.approx(fixed * 8 / 3)


def test_it_stops_when_only_test_images_are_uncertain():
    # The same predictions with every seed: more seeds change nothing.
    rng = np.random.default_rng(0)
    right = {method: rng.random(200) < 0.8 for method in METHODS}
    correct = {(method, seed): right[method] for method in METHODS for seed in range(3)}
    rows = make_rows({method: [100 * float(hits.mean())] * 3 for method, hits in right.items()})
    looks = take_looks(rows, METHODS, range(8), 3, Answers(correct, np.zeros(200, dtype=np.int64)))
    assert decide(looks).limited_by_images
    assert methods_to_continue(decide(looks), 3, 8) == ()
    assert "that of the test images" in describe_stop(looks, 8)
    assert (
        "test images instead of 200" in summarise(TINY, METHODS, range(3), "mixup", rows, looks=looks).verdict
    )


def adaptive_summary() -> Comparison:
    accuracies = CLOSE | FAR
    return summarise(
        TINY,
        list(accuracies),
        range(4),
        "mixup",
        make_rows(accuracies),
        looks=looks_at(accuracies, 4),
        stop="why",
    )


def test_a_method_without_more_seeds_is_not_reported_as_failed():
    erm = adaptive_summary().standings[-1]
    assert (erm.method, erm.stopped_after, erm.failed) == ("erm", 3, 0)
    assert accuracy_cell(erm) == "60.1 ± 0.2 (3 seeds)"
    assert "erm is clearly behind" in adaptive_summary().verdict
    assert "all 3 pairs of methods and 2 looks at the results" in adaptive_summary().footnote


def test_an_adaptive_comparison_comes_back_from_its_json(tmp_path: Path):
    path, _ = write_comparison(adaptive_summary(), tmp_path)
    assert read_comparison(path) == adaptive_summary()


def test_a_round_starts_only_if_the_longest_so_far_still_fits(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(100.0)

    def after(seconds: float) -> bool:
        now[0] += seconds
        return clock.has_time()

    assert [after(40.0), after(15.0), after(10.0)] == [True, True, False]
    assert Clock(None).has_time()


def test_on_digits_seeds_are_added_until_the_most_and_are_not_trained_twice(tmp_path: Path):
    execution = Execution(
        out=tmp_path, data_dir=tmp_path, dataset=load_recipe_data(TINY, tmp_path), workers=1
    )

    def compare_again(seeds: Sequence[int], seconds: float | None = None) -> Comparison:
        return compare_adaptively(TINY, ("mixup", "erm"), seeds, execution=execution, seconds=seconds)

    first = compare_again(range(4))
    assert len(first.rows) == sum(s.stopped_after or len(first.seeds) for s in first.standings)
    assert first.stop
    assert int(next(iter(first.looks[-1].samples.values())).images) > 0  # from predictions
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    assert compare_again(range(4)) == first
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    short = compare_again(range(4), seconds=1e-6)
    assert (short.seeds, short.stop) == ((0,), "the budget is used up")
