"""Which images are mixed and how much of each: drawn at random, then applied.

B images, and as many pairs    C classes

Everything is drawn where the labels are, without a loop over samples and without waiting for the device, so a
step that mixes can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from icmixup._checks import (
    MODES,
    Mode,
    check_batch,
    check_choice,
    check_classes,
    check_counts,
    check_fits,
    check_generator,
    check_label_types,
    check_labels,
    check_lam,
    check_no_empty_class,
    check_partner,
    check_positive,
    check_remix,
    check_share,
    check_shares,
    check_size,
    check_smoothing,
    check_some_size,
    check_tensor,
    check_whole,
)


class Pairs(NamedTuple):
    """The B pairs of a batch: image i is mixed with image partner[i]."""

    partner: Tensor  # (B,) int64
    weight: Tensor  # (B,) or (B, 1, *size)   share of each pixel that image i keeps
    lam: Tensor  # (B,)                    share of the label that image i keeps


def draw_mixup(
    labels: Tensor,
    alpha: float = 0.2,
    *,
    mode: Mode = "batch",
    generator: torch.Generator | None = None,
    partner: Tensor | None = None,
    lam: Tensor | float | None = None,
) -> Pairs:
    """Pairs for Mixup: lam ~ Beta(alpha, alpha).

    Args:
        labels: (B,) or (B, C), used for its length and device only.
        alpha: 0.2 leaves most images nearly pure; 20 mixes nearly half and half.
        mode: one lam for the "batch" (as for the paper's numbers), one for each "elem", or one for each
            "pair" of images that are each other's partner.
        generator: source of all randomness; the draws happen on its device.
        partner: (B,) int64 to use instead of a random one.
        lam: () or (B,) in [0, 1] to use instead of drawing from alpha.

    Values of partner and lam are checked on the CPU only: on a GPU the host would have to wait.
    """
    check_batch(labels)
    check_choice("mode", mode, MODES)
    partner = (
        draw_partner(labels, mode, generator) if partner is None else check_partner(partner, labels, mode)
    )
    if lam is not None:
        lam = check_lam(lam, labels)
    else:
        check_positive("alpha", alpha, "; to disable mixing pass lam=1.0")
        lam = spread(draw_beta(alpha, draws(labels, mode), labels.device, generator), partner, mode)
    return Pairs(partner, lam, lam)


def draw_remix(
    labels: Tensor,
    alpha: float,
    class_counts: Tensor,
    *,
    kappa: float = 3.0,
    tau: float = 0.5,
    mode: Mode = "batch",
    generator: torch.Generator | None = None,
    partner: Tensor | None = None,
    lam: Tensor | float | None = None,
) -> Pairs:
    """Pairs for Remix: pixels as in Mixup, but the rarer class may take the whole label (Sec. 4.2).

    lam_y = 0 if n_i / n_j >= kappa and lam < tau;  1 if n_i / n_j <= 1 / kappa and 1 - lam < tau;  else lam.
    The paper prints lam < kappa, which with kappa = 3 is always true; the rule is Remix's own, with tau.

    Args:
        labels: (B,) integers, or (B, C) shares, whose size is then the expected class size.
        class_counts: (C,) training images of each class, on any device.
        kappa: how many times more common a class must be to lose its label; at least 1.
        tau: the label moves only if the rarer image keeps more than 1 - tau of the pixels; in [0, 1].
    """
    check_remix(kappa, tau)
    check_label_types(labels)
    check_no_empty_class(class_counts)
    counts = check_counts(class_counts, labels.device)
    pairs = draw_mixup(labels, alpha, mode=mode, generator=generator, partner=partner, lam=lam)
    if labels.dim() == 1:
        check_labels(labels, len(counts))
        size = counts[labels.long()]
    else:
        check_classes("labels", labels, len(counts))
        check_shares("labels", labels)
        size = (labels.float() * counts).sum(dim=1)  # a product would run in the half precision of autocast
    times_commoner = size / size[pairs.partner]
    to_partner = (times_commoner >= kappa) & (pairs.lam < tau)
    to_image = (times_commoner <= 1 / kappa) & (1 - pairs.lam < tau)
    lam_y = pairs.lam.masked_fill(to_partner, 0.0).masked_fill(to_image, 1.0)
    return Pairs(pairs.partner, pairs.weight, lam_y)


def draw_cutmix(
    labels: Tensor,
    alpha: float,
    size: tuple[int, ...],
    *,
    mode: Mode = "batch",
    generator: torch.Generator | None = None,
    partner: Tensor | None = None,
    lam: Tensor | float | None = None,
) -> Pairs:
    """Pairs for CutMix: a box of the partner is pasted over each image.

    Args:
        size: last dimensions of the images, which the box spans: (H, W), or (T,) for a signal, or (D, H, W)
            for a volume.
        mode: as for Mixup; in "batch" mode all images lose the same box.
    """
    check_size(size)
    pairs = draw_mixup(labels, alpha, mode=mode, generator=generator, partner=partner, lam=lam)
    half = (1 - pairs.lam[:, None]) ** (1 / len(size)) / 2
    centre = draw_uniform((draws(labels, mode), len(size)), labels.device, generator)
    centre = spread(centre, pairs.partner, mode)
    inside = torch.ones((), dtype=torch.bool, device=labels.device)
    for dim, pixels in enumerate(size):
        position = (torch.arange(pixels, device=labels.device) + 0.5) / pixels
        along = (position - centre[:, dim, None]).abs() < half  # (B, pixels)
        inside = inside & along.reshape(-1, 1, *(pixels if d == dim else 1 for d in range(len(size))))
    weight = 1.0 - inside.to(pairs.lam.dtype)
    # A box that leaves the image covers less than was drawn, so lam is read off the mask.
    return Pairs(pairs.partner, weight, weight.flatten(1).mean(dim=1))


def draw_either(
    labels: Tensor,
    alpha: float,
    size: tuple[int, ...],
    *,
    cutmix_alpha: float = 1.0,
    switch_prob: float = 0.5,
    mode: Mode = "batch",
    generator: torch.Generator | None = None,
    partner: Tensor | None = None,
    lam: Tensor | float | None = None,
) -> Pairs:
    """Pairs for Mixup or CutMix, chosen at random for the batch, or for each pair.

    Args:
        alpha: of Mixup; `cutmix_alpha` is that of CutMix.
        switch_prob: probability of CutMix, as in timm.
    """
    check_share("switch_prob", switch_prob, "the probability of CutMix")
    blend = draw_mixup(labels, alpha, mode=mode, generator=generator, partner=partner, lam=lam)
    boxes = draw_cutmix(
        labels, cutmix_alpha, size, mode=mode, generator=generator, partner=blend.partner, lam=lam
    )
    cut = draw_uniform((draws(labels, mode),), labels.device, generator) < switch_prob
    cut = spread(cut, blend.partner, mode)
    weight = torch.where(
        like_inputs(cut, boxes.weight), boxes.weight, like_inputs(blend.weight, boxes.weight)
    )
    return Pairs(blend.partner, weight, torch.where(cut, boxes.lam, blend.lam))


def draw_virtual(
    class_counts: Tensor, number: int, alpha: float = 0.2, generator: torch.Generator | None = None
) -> Tensor:
    """Targets of pairs that are not in the batch: two classes, drawn by size, and lam ~ Beta(alpha, alpha).

    A classifier needs no image, only a row of Y~, so the class axis can contrast each image with these too.

    Args:
        class_counts: (C,) training images of each class.

    Returns:
        (number, C) class shares, on the device of class_counts.
    """
    check_positive("alpha", alpha)
    check_whole("number", number, 1)
    check_tensor("class_counts", class_counts)
    counts = check_counts(class_counts, class_counts.device)
    check_some_size(counts)
    # By the inverse of the cumulative sizes: torch.multinomial would wait for the device.
    # In whole numbers: of others most versions of torch have no deterministic cumulative sum on a GPU.
    ends = (counts.double() / counts.double().sum() * 2**52).long().cumsum(0).double()
    where = draw_uniform((2, number), counts.device, generator, torch.float64) * ends[-1]
    first, second = torch.searchsorted(ends, where, right=True).clamp_max(len(counts) - 1)
    lam = draw_beta(alpha, number, counts.device, generator)[:, None]
    return torch.lerp(F.one_hot(second, len(counts)).float(), F.one_hot(first, len(counts)).float(), lam)


def unmixed(labels: Tensor) -> Pairs:
    """Pairs that change nothing: every image keeps all of its pixels and of its label."""
    whole = torch.ones(len(labels), device=labels.device)
    return Pairs(torch.arange(len(labels), device=labels.device), whole, whole)


def leave_unmixed(pairs: Pairs, prob: float, generator: torch.Generator | None = None) -> Pairs:
    """The pairs with probability `prob`; otherwise no image of the batch is mixed (lam = 1)."""
    check_share("prob", prob, "the probability of mixing a batch")
    pure = draw_uniform((1,), pairs.lam.device, generator) >= prob
    weight = torch.where(like_inputs(pure, pairs.weight), 1.0, pairs.weight)
    return Pairs(pairs.partner, weight, torch.where(pure, 1.0, pairs.lam))


def mix_inputs(images: Tensor, pairs: Pairs) -> Tensor:
    """x~ = lam x_a + (1 - lam) x_b  (Eq. 1, left), (B, ...) in and out, of any shape behind B."""
    check_tensor("images", images)
    if not images.is_floating_point():
        raise ValueError(
            f"images have dtype {images.dtype}; mixing needs floating point, for example images.float() / 255"
        )
    if len(images) != len(pairs.partner):
        raise ValueError(f"{len(images)} images but {len(pairs.partner)} pairs; draw the pairs of this batch")
    weight = like_inputs(pairs.weight, images).to(images.dtype)
    check_fits(weight, images)
    return torch.lerp(images[pairs.partner], images, weight)


def mix_targets(
    labels: Tensor, pairs: Pairs, num_classes: int | None = None, *, label_smoothing: float = 0.0
) -> Tensor:
    """y~ = lam y_a + (1 - lam) y_b  (Eq. 1, right).

    Args:
        labels: (B,) integers, or (B, C) one-hot rows or shares.
        num_classes: C; not needed for (B, C) labels.
        label_smoothing: share of every label that is spread over all classes.

    Returns:
        (B, C) class shares.
    """
    check_tensor("labels", labels)
    if len(labels) != len(pairs.partner):
        raise ValueError(f"{len(labels)} labels but {len(pairs.partner)} pairs; draw the pairs of this batch")
    check_smoothing(label_smoothing)
    shares = smooth(class_shares(labels, num_classes, pairs.lam.dtype), label_smoothing)
    return torch.lerp(shares[pairs.partner], shares, pairs.lam[:, None])


def mixed_accuracy(scores: Tensor, targets: Tensor) -> Tensor:
    """Training accuracy under mixing: the share of the label that the class with the highest score has.

    For integer labels it is the mean of lam [top = y_a] + (1 - lam) [top = y_b]. The best possible value is
    the mean of each target's largest share, which is max(lam, 1 - lam) for two classes, not 1.

    Args:
        scores: (B, C).
        targets: (B, C) class shares, as from mix_targets.
    """
    check_tensor("scores", scores)
    check_tensor("targets", targets)
    if scores.dim() != 2 or scores.shape != targets.shape:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} but targets have shape {tuple(targets.shape)}; "
            "expected (B, C) for both"
        )
    shares = targets.gather(1, scores.argmax(dim=1, keepdim=True))
    return shares.to(torch.promote_types(shares.dtype, torch.float32)).mean()


def class_shares(labels: Tensor, num_classes: int | None, dtype: torch.dtype) -> Tensor:
    """(B,) integers or (B, C) shares to (B, C) shares."""
    if labels.dim() == 2:
        if num_classes is not None:
            check_classes("labels", labels, num_classes)
        check_shares("labels", labels)
        return labels.to(dtype)
    check_label_types(labels)
    if num_classes is None:
        raise ValueError(
            "num_classes is required for integer labels: a batch may not contain the last classes"
        )
    check_labels(labels, num_classes)
    return F.one_hot(labels.long(), num_classes).to(dtype)


def smooth(shares: Tensor, label_smoothing: float) -> Tensor:
    """Spread this part of (B, C) shares over all classes."""
    if not label_smoothing:
        return shares
    return shares * (1 - label_smoothing) + label_smoothing / shares.shape[1]


def like_inputs(weight: Tensor, inputs: Tensor) -> Tensor:
    """(B,) or (B, 1, *size) weight with as many dims as the inputs have: boxes span their last dims."""
    size = weight.shape[2:]
    ones = (1,) * (inputs.dim() - 1 - len(size))
    return weight.reshape(*weight.shape[:1], *ones, *size)


def draws(labels: Tensor, mode: Mode) -> int:
    """Number of independent draws that a mode makes for a batch."""
    return 1 if mode == "batch" else len(labels)


def spread(drawn: Tensor, partner: Tensor, mode: Mode) -> Tensor:
    """(draws, ...) to (B, ...): the batch shares one draw, or each pair shares that of its first image."""
    if mode == "batch":
        return drawn.expand(len(partner), *drawn.shape[1:])
    if mode == "pair":
        return drawn[torch.minimum(partner, torch.arange(len(partner), device=partner.device))]
    return drawn


def draw_beta(alpha: float, number: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """(number,) float32 samples of Beta(alpha, alpha), for any positive alpha.

    Gamma(a) is Gamma(a + 1) U^(1 / a). Logarithms do not underflow for small alpha, and lam = g / (g + g') is
    the sigmoid of their difference.
    """
    check_generator(generator)
    place = generator.device if generator is not None else device
    shape = torch.full((2, number), alpha + 1.0, device=place, dtype=torch.float64)
    log_gamma = torch._standard_gamma(shape, generator=generator).log()
    log_gamma = log_gamma + draw_uniform((2, number), place, generator, torch.float64).log() / alpha
    return torch.sigmoid(log_gamma[0] - log_gamma[1]).float().to(device)


def draw_uniform(
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Uniform numbers in [0, 1), drawn on the generator's device."""
    check_generator(generator)
    if generator is None:
        # Without the argument: compiled code with it cannot take a batch of another size.
        return torch.rand(shape, device=device, dtype=dtype)
    return torch.rand(shape, generator=generator, device=generator.device, dtype=dtype).to(device)


def draw_partner(labels: Tensor, mode: Mode, generator: torch.Generator | None) -> Tensor:
    """A random partner for each image; in "pair" mode partners are mutual, and an odd one has itself."""
    # Sorting noise is a random permutation that never waits for the device, as randperm may.
    order = draw_uniform((len(labels),), labels.device, generator, torch.float64).argsort()
    if mode != "pair":
        return order
    position = torch.arange(len(labels), device=labels.device)
    # 0 1 2 3 4 -> 1 0 3 2 4
    neighbour = torch.where(position % 2 == 0, position + 1, position - 1)
    neighbour = torch.where(neighbour == len(labels), position, neighbour)
    return torch.empty_like(order).scatter(0, order, order[neighbour])
