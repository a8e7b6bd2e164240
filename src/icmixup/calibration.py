"""Temperature scaling: one number, fitted on held-out data, that calibrates the scores.

Infinite Class scores rank classes well but are not calibrated: they are trained as scores of mixed
classifiers within a batch, not as log-probabilities of classes. Dividing them by a fitted temperature
calibrates the probabilities and changes no prediction (Guo et al., 2017).

N images    C classes
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from icmixup._checks import check_scored

FARTHEST = 100.0  # the temperature stays within this factor of the scores' mean range, on either side
HALVINGS = 10  # of four decades, to within 1 %: close enough for Newton
NEWTON_STEPS = 4
BLOCK_ELEMENTS = 2**22  # scores taken to float64 at a time


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """The temperature T that minimises the negative log-likelihood of softmax(scores / T).

    >>> temperature = fit_temperature(model(held_out_images), held_out_labels)
    >>> probabilities = (model(images) / temperature).softmax(dim=1)

    Fit it on images that the model was neither trained nor tested on. Predictions do not change.

    In b = 1 / T the loss is convex, with slope mean_i (E_p[s_i] - s_iy) and curvature mean_i Var_p[s_i], so
    there is one minimum. It is at no finite T when every label has its row's highest score (T would go to
    0), or when the scores are independent of the labels (T would go to infinity). So T is kept between 1/100
    and 100 times the mean range of the scores, highest - lowest averaged over rows. Scores that are k times
    as large always give k times the T.

    Args:
        scores: (N, C) logits of held-out images, on any device, in any floating-point dtype; C >= 2.
        labels: (N,) integers, their classes.

    Returns:
        T > 0; 1.0 if all scores of each row are equal, where T has no effect.
    """
    check_scored(scores, labels)
    # float64 does not exist on Apple's GPUs.
    device = "cpu" if scores.device.type == "mps" else scores.device
    scores, labels = scores.detach().to(device), labels.to(device)
    return 1 / best_inverse(scores, labels, torch.ones(len(labels), dtype=torch.float64, device=device))


def mean_class_nll(scores: Tensor, labels: Tensor) -> float:
    """Negative log-likelihood, averaged over classes, at the temperature where it is lowest.

    It compares models, or settings of one, on held-out images: every class counts the same, the scale of the
    scores does not matter, and on few images it tells settings apart better than their accuracies do.

    Args:
        scores: (N, C) logits of held-out images.
        labels: (N,) integers, their classes; a class without images is left out.

    Returns:
        nats, at least 0; log C for scores that say nothing.
    """
    check_scored(scores, labels)
    scores, labels = scores.detach().cpu(), labels.cpu().long()
    sizes = torch.bincount(labels, minlength=scores.shape[1])
    weights = len(labels) / (int((sizes > 0).sum()) * sizes[labels].double())  # (N,), 1 on average
    inverse = best_inverse(scores, labels, weights)
    return float((weights * F.cross_entropy(scores.double() * inverse, labels, reduction="none")).mean())


def best_inverse(scores: Tensor, labels: Tensor, weights: Tensor) -> float:
    """The b = 1 / T where the slope of the weighted loss is zero, or the end of its range nearest to that."""
    # In float64: the range of float16 scores may exceed the largest float16.
    scale = (scores.amax(dim=1).double() - scores.amin(dim=1).double()).mean().item()
    if scale == 0:
        return 1.0
    low, high = 1 / (FARTHEST * scale), FARTHEST / scale
    if derivatives(scores, labels, weights, low)[0] >= 0:
        return low
    if derivatives(scores, labels, weights, high)[0] <= 0:
        return high
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        rising = derivatives(scores, labels, weights, middle)[0] > 0
        low, high = (low, middle) if rising else (middle, high)
    best = math.sqrt(low * high)
    for _ in range(NEWTON_STEPS):
        slope, curvature = derivatives(scores, labels, weights, best)
        # Without curvature there is no Newton step, and best is already as good as float64 can tell.
        best = min(max(best - slope / curvature, low), high) if curvature > 0 else best
    return best


def derivatives(scores: Tensor, labels: Tensor, weights: Tensor, inverse: float) -> tuple[float, float]:
    """Slope and curvature of the weighted mean negative log-likelihood in b = 1 / T, at b = inverse."""
    totals = torch.zeros(2, dtype=torch.float64, device=scores.device)
    rows = max(1, BLOCK_ELEMENTS // scores.shape[1])
    blocks = (torch.split(part, rows) for part in (scores, labels, weights))
    for block, own, weight in zip(*blocks, strict=True):
        # Relative to the own class, so that the slope is a mean of small numbers and loses no digits.
        gaps = block.double() - block.double().gather(1, own[:, None].long())
        shares = (gaps * inverse).softmax(dim=1)
        mean = (shares * gaps).sum(dim=1, keepdim=True)
        variance = (shares * (gaps - mean).square()).sum(dim=1)
        totals += torch.stack([weight @ mean.squeeze(1), weight @ variance])
    slope, curvature = (totals / len(scores)).tolist()
    return slope, curvature


def negative_log_likelihood(scores: Tensor, labels: Tensor) -> float:
    """Mean of -log softmax(scores)[label], in nats and float64; (N, C) scores, (N,) labels."""
    return F.cross_entropy(scores.double(), labels.long()).item()
