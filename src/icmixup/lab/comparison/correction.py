"""P-values for every pair of methods, corrected for how many pairs there are and how often one looks.

Of two methods alone, the seed variance has S - 1 degrees of freedom: with three seeds and eight methods no
difference would ever survive a correction. Other pairs of the same comparison say how large such a variance
is, so it is averaged with theirs, with the weight of at most PRIOR_FREEDOM degrees of freedom (as moderated
t-tests do in genomics, Smyth 2004). A pair must pass without this help as well, at 5 % and before any
correction: no pair is called different whose own interval includes 0.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from icmixup.lab.comparison.variance import Floats, Sample, p_value

ERROR = 0.05  # chance of any wrong claim in a comparison
PRIOR_FREEDOM = 4.0
FIRST_LOOK = 3  # seeds; with two seeds hardly any difference is significant


def pair_p_values(samples: Sample, methods: int) -> tuple[Floats, Floats]:
    """P-values of all pairs of methods: of each on its own, and corrected for the number of pairs.

    Args:
        samples: the pairs on the last axis, (..., P), with at least two seeds each.
        methods: number of methods that the pairs are taken from.

    Returns:
        (..., P) both. A corrected p-value below 0.05 is a claim; at most 5 % of comparisons make a wrong one.
    """
    freedom = samples.seeds - 1
    own = p_value(samples.mean, samples.seed_variance, samples.image_variance, freedom, samples.least)
    variance, shared_freedom = share_variance(samples, methods)
    shared = p_value(samples.mean, variance, samples.image_variance, shared_freedom, samples.least)
    return own, np.maximum(own, shaffer(shared, methods))


def share_variance(samples: Sample, methods: int) -> tuple[Floats, Floats | float]:
    """The seed variance of every pair, averaged with that of all pairs, and its degrees of freedom."""
    freedom = samples.seeds - 1
    # Half of what the other methods contribute: they may vary less from seed to seed than this pair does.
    prior = np.minimum(PRIOR_FREEDOM, freedom * (methods - 2) / 2)
    single = samples.seed_variance * samples.seeds
    typical = np.average(single, axis=-1, weights=np.broadcast_to(freedom, single.shape), keepdims=True)
    shared = (prior * typical + freedom * single) / (prior + freedom)
    return shared / samples.seeds, freedom + prior


def shaffer(p_values: Floats, methods: int) -> Floats:
    """Shaffer's step-down correction (1986) of p-values of pairs, (..., P) in and out.

    Holm multiplies the k-th smallest p-value by the number of pairs not yet rejected. But if two of three
    methods differ, at most one of the other two pairs can be equal: only that many pairs count.
    """
    factors = possible_ties(methods, p_values.shape[-1])
    order = np.argsort(p_values, axis=-1)
    stepped = np.take_along_axis(p_values, order, axis=-1) * factors
    stepped = np.minimum(np.maximum.accumulate(stepped, axis=-1), 1.0)
    corrected = np.empty_like(stepped)
    np.put_along_axis(corrected, order, stepped, axis=-1)
    return corrected


def possible_ties(methods: int, pairs: int) -> Floats:
    """How many pairs can be equal if k pairs differ, for k = 0 ... pairs - 1."""
    all_pairs = math.comb(methods, 2)
    counts = tie_counts(methods)
    most = [max(count for count in counts if count <= all_pairs - k) for k in range(pairs)]
    return np.array([max(1, min(pairs - k, count)) for k, count in enumerate(most)], dtype=float)


@cache
def tie_counts(methods: int) -> frozenset[int]:
    """All numbers of equal pairs that are possible: methods fall into groups, and ties are within groups."""
    if methods < 1:
        return frozenset({0})
    return frozenset(
        math.comb(size, 2) + rest for size in range(1, methods + 1) for rest in tie_counts(methods - size)
    )


def error_at_looks(max_seeds: int) -> dict[int, float]:
    """The error that each look may spend, by number of seeds: a share for every seed since the last look."""
    if max_seeds < FIRST_LOOK:
        raise ValueError(f"--max-seeds must be at least {FIRST_LOOK} with --seeds auto, got {max_seeds}")
    share = ERROR / max_seeds
    return {
        seeds: share * (FIRST_LOOK if seeds == FIRST_LOOK else 1)
        for seeds in range(FIRST_LOOK, max_seeds + 1)
    }
