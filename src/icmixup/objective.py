"""training_loss: the loss of one batch under any method."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from icmixup._checks import (
    check_counts,
    check_label_types,
    check_labels,
    check_no_empty_class,
    check_one_label_per_row,
    check_rows,
)
from icmixup.distributed import mean_over_ranks
from icmixup.hidden import check_hidden, check_none_compiled, hidden_modules, mix_somewhere
from icmixup.inputs import Inputs, call_model, first_tensor, join_batches, map_tensors, mix_batch
from icmixup.loss import infinite_class_loss
from icmixup.methods import Method, as_method
from icmixup.pairs import (
    Pairs,
    class_shares,
    draw_cutmix,
    draw_either,
    draw_mixup,
    draw_remix,
    draw_virtual,
    leave_unmixed,
    mix_targets,
    smooth,
)

EFFECTIVE_BETA = 0.9999  # of Cui et al. (2019), as in the code of LDAM


def training_loss(
    model: nn.Module,
    images: Inputs,
    labels: Tensor,
    method: Method | str,
    class_counts: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    hidden: tuple[nn.Module, ...] | None = None,
    size: tuple[int, ...] | None = None,
) -> Tensor:
    """The loss of one batch under any method.

    >>> loss = icm.training_loss(model, images, labels, "ic-remix", class_counts)

    Args:
        model: from images to (B, C) scores, or to an output with `logits`.
        images: (B, ...) floating point; or a tuple, passed as model(*images), or a dict, passed as
            model(**images). Every tensor in them is mixed. Integers, such as token ids, can only be mixed at
            a hidden layer (draw="manifold").
        labels: (B,) integers, or (B, C) class shares.
        method: a Method, or a name of METHODS.
        class_counts: (C,) training images of each class; required if the method depends on class sizes.
        generator: source of all randomness.
        hidden: the modules at which Manifold Mixup may mix; found in the model by default.
        size: last dimensions of the images that a box of CutMix spans; by default all behind the channels.
            For example (T,) for signals (B, T), (F, T) for spectrograms (B, F, T) without channels, and
            (H, W) for videos (B, T, C, H, W).

    Returns:
        Scalar.
    """
    method = as_method(method)
    check_label_types(labels)
    needs_class_counts(method, class_counts)
    if class_counts is not None:
        class_counts = check_counts(class_counts, first_tensor(images).device)
    if method.draw == "none":
        return clean_loss(call_model(model, images), labels, method, class_counts) * method.clean_weight
    pairs = draw_pairs(images, labels, method, class_counts, generator, size)
    clean, mixed = forward(model, images, pairs, method, generator, hidden)
    targets = mix_targets(labels, pairs, mixed.shape[1], label_smoothing=method.label_smoothing)
    loss = mixed_loss(mixed, targets, method, class_counts, generator)
    if clean is not None:
        loss = loss + method.clean_weight * clean_loss(clean, labels, method, class_counts)
    return loss


def needs_class_counts(method: Method, class_counts: Tensor | None) -> None:
    if method.defer:
        raise ValueError(
            f"this method weighs classes only after {method.defer:g} of training; pass "
            "method.at(epoch / epochs), which is the method in that epoch"
        )
    if method.class_sizes == "adjust-after":
        raise ValueError(
            "this method adjusts scores after training: pass method.at(0), which is what it trains with, and "
            f"use adjust_scores(scores, class_counts, {method.adjust_tau:g}) at test time"
        )
    if not (method.draw == "remix" or method.class_sizes != "none" or method.margin):
        return
    if class_counts is None:
        raise ValueError(
            "this method depends on class sizes; pass class_counts, (C,) training images of each class"
        )
    # Before they are moved to the device of the images, where their values may not be looked at.
    check_no_empty_class(class_counts)


def draw_pairs(
    images: Inputs,
    labels: Tensor,
    method: Method,
    class_counts: Tensor | None,
    generator: torch.Generator | None = None,
    size: tuple[int, ...] | None = None,
) -> Pairs:
    """Partners and mixing weights, as the method draws them."""
    if size is None:
        size = tuple(first_tensor(images).shape[2:])
    if method.draw == "remix":
        assert class_counts is not None
        pairs = draw_remix(
            labels,
            method.alpha,
            class_counts,
            kappa=method.kappa,
            tau=method.tau,
            mode=method.mode,
            generator=generator,
        )
    elif method.draw == "cutmix":
        pairs = draw_cutmix(labels, method.alpha, size, mode=method.mode, generator=generator)
    elif method.draw == "either":
        pairs = draw_either(
            labels,
            method.alpha,
            size,
            cutmix_alpha=method.cutmix_alpha,
            switch_prob=method.switch_prob,
            mode=method.mode,
            generator=generator,
        )
    else:
        pairs = draw_mixup(labels, method.alpha, mode=method.mode, generator=generator)
    return pairs if method.prob == 1.0 else leave_unmixed(pairs, method.prob, generator)


def forward(
    model: nn.Module,
    images: Inputs,
    pairs: Pairs,
    method: Method,
    generator: torch.Generator | None,
    hidden: tuple[nn.Module, ...] | None,
) -> tuple[Tensor | None, Tensor]:
    """(B, C) scores of the clean images, if they count, and of the mixed ones."""
    if method.draw == "manifold":
        modules = hidden_modules(model, images) if hidden is None else hidden
        check_hidden(modules)
        check_none_compiled(model, modules)
        # A copy, since a model may change its inputs in place, and they are needed again.
        inputs = map_tensors(torch.clone, images) if method.clean_weight else images
        with mix_somewhere(modules, pairs, generator):
            mixed = call_model(model, inputs)
        return (call_model(model, images) if method.clean_weight else None), mixed
    inputs = mix_batch(images, pairs)
    if not method.clean_weight:
        return None, call_model(model, inputs)
    if method.joint:
        clean, mixed = call_model(model, join_batches(images, inputs)).chunk(2)
        return clean, mixed
    return call_model(model, images), call_model(model, inputs)


def clean_loss(
    scores: Tensor, labels: Tensor, method: Method, class_counts: Tensor | None, smoothed: bool = False
) -> Tensor:
    """Cross-entropy of (B, C) scores of unmixed images, whose (B,) labels or (B, C) shares are smoothed as
    the method says, unless they are already `smoothed`."""
    if labels.dim() == 2:
        labels = class_shares(labels, scores.shape[1], torch.promote_types(scores.dtype, torch.float32))
    else:
        # Torch would silently skip labels of -100.
        check_labels(labels, scores.shape[1])
        labels = labels.long()
    smoothing = 0.0 if smoothed else method.label_smoothing
    scores = adjust(scores, method.class_sizes in ("adjust", "adjust-clean"), class_counts, method.adjust_tau)
    return cross_entropy(scores, labels, method, class_counts, smoothing)


def cross_entropy(
    scores: Tensor, labels: Tensor, method: Method, class_counts: Tensor | None, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy, in float32 or float64, with the method's margin, focal factor and class weights, if any:

        - sum_ic w_c y_ic (1 - p_ic)^gamma log p_ic / sum_ic w_c y_ic      p = softmax(S - m Y)

    Args:
        scores: (B, C), adjusted already.
        labels: (B,) integers or (B, C) class shares Y.
        class_counts: (C,), for margins m and weights w.
    """
    # One label would silently stand for all rows where shares are multiplied.
    check_one_label_per_row(scores, labels)
    weighed = method.class_sizes == "effective"
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if not (method.margin or method.focal_gamma or weighed):
        return F.cross_entropy(scores, labels, label_smoothing=label_smoothing)
    shares = labels if labels.dim() == 2 else F.one_hot(labels, scores.shape[1])
    shares = shares.to(scores.dtype)
    shares = (1 - label_smoothing) * shares + label_smoothing / scores.shape[1]
    if method.margin:
        assert class_counts is not None
        scores = scores - ldam_margins(class_counts, method.margin) * shares
    if weighed:
        assert class_counts is not None
        shares = shares * effective_weights(class_counts)
    log_p = scores.log_softmax(dim=1)
    terms = shares * log_p
    if method.focal_gamma:
        # 1 - p from log p is exact also where p is near 1; a power below 1 has an infinite slope at 0.
        terms = terms * (-log_p.expm1()).clamp(min=1e-12) ** method.focal_gamma
    # Over all ranks, so that the mean of their losses is that of one process with all images.
    return -terms.sum() / (mean_over_ranks(shares.sum()) if weighed else shares.sum())


def ldam_margins(class_counts: Tensor, largest: float) -> Tensor:
    """Margins of LDAM, in proportion to n_c^(-1/4); the smallest class has the largest: (C,) in and out."""
    margin: Tensor = largest * (class_counts.min() / class_counts) ** 0.25
    return margin


def effective_weights(class_counts: Tensor) -> Tensor:
    """(1 - beta) / (1 - beta^n_c), the inverse of the effective number of images, with a mean of 1: (C,) in
    and out."""
    weights = 1 / -torch.expm1(class_counts * math.log(EFFECTIVE_BETA))
    return weights / weights.mean()


def mixed_loss(
    scores: Tensor,
    targets: Tensor,
    method: Method,
    class_counts: Tensor | None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Cross-entropy of (B, C) scores and targets, or the Infinite Class loss if the method names axes."""
    if not method.axes:
        check_rows(scores, targets)
        targets = targets.to(torch.promote_types(targets.dtype, torch.float32))
        scores = adjust(scores, method.class_sizes == "adjust", class_counts, method.adjust_tau)
        return cross_entropy(scores, targets, method, class_counts)
    virtual = class_weights = None
    if method.class_sizes == "weigh":
        assert class_counts is not None
        class_weights = 1 / class_counts
    if method.num_virtual:
        counts = torch.ones(scores.shape[1], device=scores.device) if class_counts is None else class_counts
        virtual = draw_virtual(counts, method.num_virtual, method.alpha, generator)
        virtual = smooth(virtual, method.label_smoothing)
    return infinite_class_loss(
        adjust(scores, method.class_sizes == "adjust", class_counts, method.adjust_tau),
        targets,
        method.axes,
        negatives=method.negatives,
        temperature=method.temperature,
        class_weights=class_weights,
        virtual=virtual,
        duplicates=method.duplicates,
        centred=method.centred,
    )


def adjust(scores: Tensor, adjusted: bool, class_counts: Tensor | None, tau: float = 1.0) -> Tensor:
    """(B, C) scores + tau log class size in training, plain scores at test: Balanced Softmax, or logit
    adjustment."""
    if class_counts is not None and len(class_counts) != scores.shape[1]:
        raise ValueError(f"{len(class_counts)} class_counts but scores of {scores.shape[1]} classes")
    if not adjusted:
        return scores
    assert class_counts is not None
    return scores + class_counts.log() * tau
