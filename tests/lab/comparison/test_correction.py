"""Corrections for many pairs of methods and for several looks, and the shared seed variance."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icmixup.lab.comparison.correction import (
    error_at_looks,
    pair_p_values,
    possible_ties,
    shaffer,
    share_variance,
    tie_counts,
)
from icmixup.lab.comparison.variance import Floats, Sample, seed_sample


def holm(p_values: Floats) -> Floats:
    """The k-th smallest of m p-values times m - k + 1, kept monotone."""
    order = np.argsort(p_values)
    steps = np.minimum(1, np.maximum.accumulate(p_values[order] * np.arange(len(p_values), 0, -1)))
    return steps[np.argsort(order)]


@pytest.mark.parametrize("methods", [1, 2, 3, 4, 5])
def test_possible_numbers_of_equal_pairs_match_an_enumeration(methods: int):
    found = set()
    for labels in np.ndindex(*(methods,) * methods):  # every way to put methods into groups of equal ones
        found.add(sum(a == b for a, b in combinations(labels, 2)))
    assert tie_counts(methods) == found


def test_shaffer_by_hand():
    # Three methods: once a pair differs, at most one of the other two pairs is equal.
    np.testing.assert_allclose(shaffer(np.array([0.04, 0.01, 0.03]), 3), [0.04, 0.03, 0.03])
    assert possible_ties(4, 6).tolist() == [6, 3, 3, 3, 2, 1]  # Shaffer 1986
    assert possible_ties(4, 2).tolist() == [2, 1]  # where only some pairs are tested


@given(st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_shaffer_lies_between_no_correction_and_holm(p_values: list[float]):
    raw = np.array(p_values)
    corrected = shaffer(raw, 4)
    assert (raw <= corrected).all()
    assert (corrected <= holm(raw) + 1e-12).all()
    assert corrected.max() <= 1


def make_samples(gaps: Floats) -> Sample:
    """Samples of pairs from (P, S) differences by seed."""
    return seed_sample(gaps)


def test_two_methods_have_nothing_to_share_and_nothing_to_correct():
    samples = make_samples(np.array([[1.0, 2.0, 3.0]]))
    variance, freedom = share_variance(samples, methods=2)
    assert variance == pytest.approx(samples.seed_variance)
    assert freedom == 2
    own, corrected = pair_p_values(samples, methods=2)
    assert own == pytest.approx(corrected)


def test_the_shared_variance_is_the_average_weighted_by_degrees_of_freedom():
    samples = make_samples(np.array([[0.0, 2.0, 4.0], [0.0, 1.0, 2.0], [1.0, 1.0, 4.0]]))
    variance, freedom = share_variance(samples, methods=3)
    # Variances 4, 1 and 3 over seeds, 8/3 on average. Two degrees of freedom of its own, half of two shared.
    np.testing.assert_allclose(variance * 3, (1 * 8 / 3 + 2 * np.array([4, 1, 3])) / 3)
    assert np.asarray(freedom) == pytest.approx(3)


@given(st.lists(st.lists(st.integers(-20, 20), min_size=3, max_size=3), min_size=3, max_size=3))
def test_a_corrected_p_value_is_never_below_that_of_the_pair_alone(gaps: list[list[int]]):
    own, corrected = pair_p_values(make_samples(np.array(gaps, dtype=float)), methods=3)
    assert (corrected >= own).all()


@pytest.mark.parametrize("max_seeds", [3, 4, 10, 50])
def test_looks_spend_five_percent_in_all(max_seeds: int):
    errors = error_at_looks(max_seeds)
    assert list(errors) == list(range(3, max_seeds + 1))
    assert sum(errors.values()) == pytest.approx(0.05)


def test_fewer_than_three_seeds_leave_no_look():
    with pytest.raises(ValueError, match="--max-seeds must be at least 3 with --seeds auto, got 2"):
        error_at_looks(2)
