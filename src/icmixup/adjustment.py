"""Logit adjustment after training: the scores of a network that was trained without class sizes, for a test
set whose classes are equally frequent (Menon et al., 2021, Sec. 4.1).

N images    C classes    n_c training images in class c
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from torch import Tensor

from icmixup._checks import (
    check_counts,
    check_no_empty_class,
    check_number,
    check_scored,
    check_tensor,
)
from icmixup.calibration import mean_class_nll

TAUS = tuple(step / 20 for step in range(41))  # 0 to 2, candidates of fit_adjustment
NO_BETTER = 1e-3  # nats below the loss of guessing


def adjust_scores(scores: Tensor, class_counts: Tensor, tau: float = 1.0) -> Tensor:
    """S - tau log(n / sum n), which moves predictions from frequent classes to rare ones.

    >>> scores = adjust_scores(model(images), class_counts)

    For models that were trained without class sizes, such as those of "erm" or "regmixup"; "balanced" and the
    other methods that adjust in training need no adjustment after it.

    Args:
        scores: (N, C) logits.
        class_counts: (C,) training images of each class, all above 0.
        tau: strength; 1 is right if the scores are calibrated, see fit_adjustment.

    Returns:
        (N, C) adjusted scores.
    """
    check_tensor("scores", scores)
    check_number("tau", tau, 0, float("inf"), "a number of at least 0")
    shift = log_prior(class_counts).to(scores.device)
    if scores.dim() != 2 or scores.shape[1] != len(shift):
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} and there are {len(shift)} class_counts; expected "
            f"(N, {len(shift)}) scores"
        )
    return scores - tau * shift


def fit_adjustment(scores: Tensor, labels: Tensor, class_counts: Tensor) -> float:
    """The tau of adjust_scores, from 0 to 2 in steps of 0.05, with the lowest loss on held-out images.

    >>> tau = fit_adjustment(model(held_out_images), held_out_labels, class_counts)
    >>> scores = adjust_scores(model(images), class_counts, tau)

    The loss is the negative log-likelihood after temperature scaling, averaged over classes: on few images
    it finds a better tau than their accuracy does. Fit it on images that the model was neither trained nor
    tested on. They may have the long tail of the training images, since every class counts the same.

    Args:
        scores: (N, C) logits of held-out images.
        labels: (N,) integers, their classes.
        class_counts: (C,) training images of each class, all above 0.
    """
    check_scored(scores, labels)
    check_tensor("class_counts", class_counts)
    scores, labels, class_counts = scores.detach().cpu().float(), labels.cpu(), class_counts.cpu()
    return search_tau(
        lambda tau: mean_class_nll(adjust_scores(scores, class_counts, tau), labels),
        math.log(scores.shape[1]),
    )


def search_tau(loss_of: Callable[[float], float], guessing: float) -> float:
    """As pick_tau, for a loss that falls up to some tau and rises behind it, with about a dozen evaluations.

    That of fit_adjustment does. It is the lowest of L(b, b tau) over b > 0, where L(b, c) is the loss of
    scores b S - c log(n / sum n). L is convex, so the points where it is at most some value are a convex set,
    and their slopes c / b are an interval. But where scores are no better than guessing, b would be 0, and
    the smallest b that fit_temperature allows decides on the loss: there, all taus are evaluated.

    Args:
        guessing: the loss at b = 0, log C.
    """
    loss = functools.cache(lambda step: round(loss_of(TAUS[step]), 9))
    low, high = 0, len(TAUS) - 1
    while low < high:
        middle = (low + high) // 2
        if loss(middle) == loss(middle + 1) or max(loss(middle), loss(middle + 1)) > guessing - NO_BETTER:
            return pick_tau(lambda tau: loss(TAUS.index(tau)))
        low, high = (middle + 1, high) if loss(middle) > loss(middle + 1) else (low, middle)
    return TAUS[low]


def pick_tau(loss_of: Callable[[float], float]) -> float:
    """The tau with the lowest loss, to nine decimals; of several, the one nearest to 1."""
    return min(TAUS, key=lambda tau: (round(loss_of(tau), 9), abs(tau - 1)))


def log_prior(class_counts: Tensor) -> Tensor:
    """log(n_c / sum n) in float32: (C,) in and out."""
    check_tensor("class_counts", class_counts)
    counts = check_counts(class_counts, class_counts.device)
    check_no_empty_class(counts)
    return (counts / counts.sum()).log()
