"""Whom to mix and how much: the draws beside their distributions, the mixing beside loops."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from icmixup import (
    Pairs,
    draw_cutmix,
    draw_either,
    draw_mixup,
    draw_remix,
    draw_virtual,
    infinite_class_loss,
    mix_inputs,
    mix_targets,
    mixed_accuracy,
)
from icmixup.pairs import leave_unmixed

C = 5
SIZE = (6, 8)
COUNTS = torch.tensor([100, 40, 20, 5, 1])
MODES = ["batch", "elem", "pair"]
EVERY_MODE = pytest.mark.parametrize("mode", MODES)
any_batch = settings(max_examples=30, deadline=None, derandomize=True, database=None)
UNLIKELY = 1e-4  # draws are seeded, so a test that passes once passes always

DRAWS: dict[str, Callable[..., Pairs]] = {
    "mixup": lambda labels, **choice: draw_mixup(labels, 1.0, **choice),
    "remix": lambda labels, **choice: draw_remix(labels, 1.0, COUNTS, **choice),
    "cutmix": lambda labels, **choice: draw_cutmix(labels, 1.0, SIZE, **choice),
    "either": lambda labels, **choice: draw_either(labels, 1.0, SIZE, **choice),
}
EVERY_DRAW = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_labels(number: int, seed: int = 0) -> Tensor:
    return torch.randint(C, (number,), generator=seeded(seed))


def numbered(number: int, *shape: int) -> Tensor:
    """Images that show their own number, so that a mixed pixel tells where it came from."""
    return torch.arange(number, dtype=torch.float32).reshape(-1, *(1 for _ in shape)).expand(number, *shape)


def same_pairs(a: Pairs, b: Pairs) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Mixing


@EVERY_MODE
@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize(
    "shape",
    [(), (9,), (1, 16, 10), (3, 4, 4), (2, 3, 4, 5)],
    ids=["numbers", "rows", "sound", "image", "volume"],
)
def test_inputs_and_targets_are_the_loop(shape: tuple[int, ...], number: int, mode: Any) -> None:
    images, labels = torch.randn(number, *shape), some_labels(number)
    pairs = draw_mixup(labels, 1.0, mode=mode, generator=seeded())
    inputs, targets = mix_inputs(images, pairs), mix_targets(labels, pairs, C)
    assert inputs.shape == images.shape
    assert targets.shape == (number, C)
    for i in range(number):
        lam, other = pairs.lam[i], pairs.partner[i]
        torch.testing.assert_close(inputs[i], lam * images[i] + (1 - lam) * images[other])
        expected = torch.zeros(C)
        expected[labels[i]] += lam
        expected[labels[other]] += 1 - lam
        torch.testing.assert_close(targets[i], expected)


@EVERY_DRAW
@EVERY_MODE
def test_pixels_and_labels_are_mixed_by_the_same_rule(draw: Callable[..., Pairs], mode: Any) -> None:
    labels = some_labels(64)
    pairs = draw(labels, mode=mode, generator=seeded())
    images = F.one_hot(labels, C).float()[:, :, None, None].expand(-1, -1, *SIZE)  # each shows its own label
    shown = mix_inputs(images, pairs).mean(dim=(2, 3))
    targets = mix_targets(labels, pairs, C)
    kept = (targets - shown).abs().amax(dim=1) < 1e-5
    # Remix moves some labels away from what the pixels show: all of the label, or none.
    assert kept.all() or (draw is DRAWS["remix"] and (targets[~kept].amax(dim=1) == 1).all())
    assert kept.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_inputs_keep_their_precision(dtype: torch.dtype) -> None:
    images = torch.randn(6, 3, *SIZE, dtype=dtype)
    for draw in DRAWS.values():
        assert mix_inputs(images, draw(some_labels(6))).dtype == dtype


def test_integer_one_hot_and_share_labels_agree() -> None:
    labels = some_labels(9)
    pairs = draw_mixup(labels, 1.0, mode="elem", generator=seeded())
    expected = mix_targets(labels, pairs, C)
    for dtype in (torch.uint8, torch.uint16, torch.int32, torch.int64):
        assert mix_targets(labels.to(dtype), pairs, C).equal(expected)
    for dtype in (torch.uint16, torch.int64, torch.float32, torch.bool):
        one_hot = F.one_hot(labels, C).to(dtype)
        assert mix_targets(one_hot, pairs).equal(expected)
        assert mix_targets(one_hot, pairs, C).equal(expected)


def test_shares_are_mixed_by_the_loop() -> None:
    shares = torch.rand(6, C, generator=seeded()).softmax(dim=1)
    pairs = draw_mixup(shares, 1.0, mode="elem", generator=seeded())
    for i, target in enumerate(mix_targets(shares, pairs)):
        lam = pairs.lam[i]
        torch.testing.assert_close(target, lam * shares[i] + (1 - lam) * shares[pairs.partner[i]])


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_label_smoothing_spreads_its_share_over_all_classes(smoothing: float) -> None:
    labels = some_labels(7)
    pairs = draw_mixup(labels, 1.0, mode="elem", generator=seeded())
    smoothed = mix_targets(labels, pairs, C, label_smoothing=smoothing)
    sharp = mix_targets(labels, pairs, C)
    for i, c in itertools.product(range(7), range(C)):
        expected = (1 - smoothing) * sharp[i, c].item() + smoothing / C
        assert smoothed[i, c].item() == pytest.approx(expected, abs=1e-6)


def test_mixed_accuracy_is_the_loop() -> None:
    labels = some_labels(40)
    pairs = draw_mixup(labels, 1.0, mode="elem", generator=seeded())
    scores = torch.randn(40, C, generator=seeded(1))
    total = 0.0
    for i in range(40):
        top = max(range(C), key=lambda c: scores[i, c].item())
        lam = pairs.lam[i].item()
        total += lam * (top == labels[i]).item() + (1 - lam) * (top == labels[pairs.partner[i]]).item()
    actual = mixed_accuracy(scores, mix_targets(labels, pairs, C)).item()
    assert actual == pytest.approx(total / 40, abs=1e-6)


def test_mixed_accuracy_of_one_hot_integers_is_accuracy() -> None:
    labels, scores = some_labels(40), torch.randn(40, C, generator=seeded(1))
    expected = (scores.argmax(dim=1) == labels).float().mean()
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        assert mixed_accuracy(scores, F.one_hot(labels, C).to(dtype)).equal(expected)


def test_labels_that_are_not_a_tensor_are_named() -> None:
    with pytest.raises(TypeError, match=r"labels must be a torch.Tensor, got list"):
        mix_targets([0, 1, 2, 3], PAIRS, C)  # type: ignore[arg-type]


# Partners


@any_batch
@given(st.integers(1, 40), st.sampled_from(MODES), st.sampled_from(list(DRAWS)), st.integers(0, 10**6))
def test_everyone_has_one_partner_and_is_one_partner(number: int, mode: Any, name: str, seed: int) -> None:
    pairs = DRAWS[name](some_labels(number), mode=mode, generator=seeded(seed))
    assert pairs.partner.sort().values.equal(torch.arange(number))
    assert pairs.lam.shape == (number,)
    assert len(pairs.weight) == number
    assert ((pairs.lam >= 0) & (pairs.lam <= 1)).all()
    if mode == "pair":
        assert pairs.partner[pairs.partner].equal(torch.arange(number))
        alone = (pairs.partner == torch.arange(number)).sum()
        assert alone == number % 2


@EVERY_MODE
def test_partners_are_uniform(mode: Any) -> None:
    generator, labels = seeded(), some_labels(4)
    drawn = Counter(
        tuple(draw_mixup(labels, mode=mode, generator=generator).partner.tolist()) for _ in range(2400)
    )
    assert len(drawn) == (3 if mode == "pair" else 24)  # matchings, or permutations, of four
    assert stats.chisquare(list(drawn.values())).pvalue > UNLIKELY


# How much


def test_batch_mode_shares_one_lam_and_elem_mode_none() -> None:
    labels = some_labels(50)
    assert len(draw_mixup(labels, 1.0, generator=seeded()).lam.unique()) == 1  # the default
    assert len(draw_mixup(labels, 1.0, mode="batch", generator=seeded()).lam.unique()) == 1
    assert len(draw_mixup(labels, 1.0, mode="elem", generator=seeded()).lam.unique()) == 50


@pytest.mark.parametrize("name", ["mixup", "cutmix", "either"])
def test_pair_mode_shares_lam_and_box_within_a_pair_alone(name: str) -> None:
    for number in (1, 2, 41):
        pairs = DRAWS[name](some_labels(number), mode="pair", generator=seeded(3))
        assert pairs.lam[pairs.partner].equal(pairs.lam)
        assert pairs.weight[pairs.partner].equal(pairs.weight)
        if name == "mixup":
            assert len(pairs.lam.unique()) == (number + 1) // 2


@pytest.mark.parametrize("alpha", [0.2, 1.0, 20.0])
def test_lam_is_beta_distributed(alpha: float) -> None:
    lam = draw_mixup(torch.zeros(5000), alpha, mode="elem", generator=seeded()).lam
    assert stats.kstest(lam.double().numpy(), stats.beta(alpha, alpha).cdf).pvalue > UNLIKELY


@pytest.mark.parametrize("alpha", [0.2, 1.0, 20.0])
def test_the_one_lam_of_a_batch_is_beta_distributed_too(alpha: float) -> None:
    generator, labels = seeded(), torch.zeros(2)
    lam = [draw_mixup(labels, alpha, generator=generator).lam[0].item() for _ in range(1000)]
    assert stats.kstest(lam, stats.beta(alpha, alpha).cdf).pvalue > UNLIKELY


@pytest.mark.parametrize("alpha", [0.001, 1e-6])
def test_a_tiny_alpha_keeps_one_image_of_the_two_whole(alpha: float) -> None:
    lam = draw_mixup(torch.zeros(2000), alpha, mode="elem", generator=seeded()).lam
    assert lam.isfinite().all()
    assert ((lam < 0.01) | (lam > 0.99)).float().mean() > 0.98
    assert stats.binomtest(int((lam > 0.5).sum()), 2000).pvalue > UNLIKELY


def test_the_default_alpha_is_the_papers() -> None:
    labels = some_labels(9)
    drawn = draw_mixup(labels, mode="elem", generator=seeded())
    assert same_pairs(drawn, draw_mixup(labels, 0.2, mode="elem", generator=seeded()))


@EVERY_DRAW
@EVERY_MODE
def test_generator_alone_decides_a_draw(draw: Callable[..., Pairs], mode: Any) -> None:
    labels = some_labels(16)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw(labels, mode=mode, generator=seeded(5))
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(2)
    assert same_pairs(draw(labels, mode=mode, generator=seeded(5)), first)
    assert not same_pairs(draw(labels, mode=mode, generator=seeded(6)), first)


@EVERY_DRAW
def test_without_a_generator_the_global_seed_decides(draw: Callable[..., Pairs]) -> None:
    labels = some_labels(16)
    torch.manual_seed(1)
    first = draw(labels)
    torch.manual_seed(1)
    assert same_pairs(draw(labels), first)


@EVERY_DRAW
def test_partner_and_lam_can_be_handed_in(draw: Callable[..., Pairs]) -> None:
    labels, partner = torch.full((5,), 3), torch.tensor([1, 2, 3, 4, 0])
    pairs = draw(labels, partner=partner.int(), lam=1.0, generator=seeded())
    assert pairs.partner.equal(partner)
    assert pairs.lam.equal(torch.ones(5))
    inputs = mix_inputs(numbered(5, 1, *SIZE), pairs)
    assert inputs.equal(numbered(5, 1, *SIZE))


@EVERY_DRAW
def test_the_default_device_need_not_be_that_of_the_labels(draw: Callable[..., Pairs]) -> None:
    labels, partner = some_labels(4), torch.tensor([1, 0, 3, 2])
    expected = draw(labels, mode="pair", partner=partner, generator=seeded())
    with torch.device("meta"):
        actual = draw(labels, mode="pair", partner=partner, generator=seeded())
    assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("lam", [0.25, torch.tensor(0.25), torch.tensor([0.25])])
def test_one_lam_stands_for_all(lam: Any) -> None:
    pairs = draw_mixup(some_labels(3), lam=lam)
    assert pairs.lam.equal(torch.full((3,), 0.25))
    assert pairs.weight.equal(pairs.lam)


def test_a_float64_lam_gives_float64_targets() -> None:
    lam = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    pairs = draw_mixup(some_labels(3), lam=lam)
    assert pairs.lam.equal(lam)
    assert mix_targets(some_labels(3), pairs, C).dtype == torch.float64


# CutMix


@EVERY_MODE
@pytest.mark.parametrize("size", [(50,), (12, 20), (1, 7), (5, 6, 7)], ids=str)
def test_cutmix_lam_is_the_share_of_pixels_really_kept(size: tuple[int, ...], mode: Any) -> None:
    number = 33
    pairs = draw_cutmix(some_labels(number), 1.0, size, mode=mode, generator=seeded())
    images = numbered(number, 2, *size)
    inputs = mix_inputs(images, pairs)
    for i in range(number):
        came_from = {i, int(pairs.partner[i])}
        assert {int(pixel) for pixel in inputs[i].unique()} <= came_from
        if len(came_from) == 2:
            kept = (inputs[i] == i).float().mean().item()
            assert pairs.lam[i].item() == pytest.approx(kept, abs=1e-6)


@pytest.mark.parametrize("size", [(200,), (100, 160), (30, 40, 50)], ids=str)
def test_cutmix_cuts_one_box_of_the_drawn_share(size: tuple[int, ...]) -> None:
    lam = 0.4
    pairs = draw_cutmix(torch.zeros(300), 1.0, size, mode="elem", lam=lam, generator=seeded())
    gone = pairs.weight[:, 0] == 0
    longest = []
    for dim in range(len(size)):
        others = tuple(d + 1 for d in range(len(size)) if d != dim)
        along = gone.any(dim=others) if others else gone
        # One run of pixels along each dim, and the box is all of their product.
        assert ((along[:, 1:] != along[:, :-1]).sum(dim=1) <= 2).all()
        longest.append(along.sum(dim=1))
        side = (1 - lam) ** (1 / len(size)) * size[dim]
        assert along.sum(dim=1).max().item() == pytest.approx(side, abs=1.01)
    assert torch.stack(longest).prod(dim=0).equal(gone.flatten(1).sum(dim=1))
    # Whole boxes take the drawn share, those over the edge less.
    assert pairs.lam.min().item() == pytest.approx(lam, abs=0.06)
    assert pairs.lam.max() > lam + 0.1


def test_cutmix_centres_are_uniform() -> None:
    """Boxes of just one pixel are in each place as often."""
    pairs = draw_cutmix(torch.zeros(8000), 1.0, (4, 4), mode="elem", lam=1 - 1 / 16, generator=seeded())
    gone = (pairs.weight[:, 0] == 0).flatten(1)
    single = gone.sum(dim=1) == 1
    assert single.float().mean() > 0.99
    assert stats.chisquare(gone[single].sum(dim=0).numpy()).pvalue > UNLIKELY


def test_cutmix_box_is_shared_as_lam_is() -> None:
    labels = some_labels(20)
    boxes = {mode: draw_cutmix(labels, 1.0, SIZE, mode=mode, generator=seeded(1)).weight for mode in MODES}
    assert len(boxes["batch"].unique(dim=0)) == 1
    assert len(boxes["elem"].unique(dim=0)) > 12
    assert 5 < len(boxes["pair"].unique(dim=0)) <= 10


# Remix


def remix_by_hand(lam: float, ratio: Fraction, kappa: int, tau: float) -> float:
    if ratio >= kappa and lam < tau:
        return 0.0
    if ratio <= Fraction(1, kappa) and 1 - lam < tau:
        return 1.0
    return lam


@pytest.mark.parametrize(("kappa", "tau"), [(3, 0.5), (2, 0.25), (6, 0.75)])
@pytest.mark.parametrize("dense", [False, True])
def test_remix_is_the_rule_with_tau(kappa: int, tau: float, dense: bool) -> None:
    counts = [60, 30, 20, 10, 5]  # with ratios of 2, 3 and 6 to the point
    cases = list(itertools.product(range(C), range(C), [0.0, 0.125, 0.25, 0.5, 0.625, 0.75, 0.875, 1.0]))
    labels = torch.tensor([i for i, _, _ in cases] + [j for _, j, _ in cases])
    partner = torch.arange(2 * len(cases)).roll(len(cases))
    lam = torch.tensor([share for *_, share in cases] * 2)
    pairs = draw_remix(
        F.one_hot(labels, C).float() if dense else labels,
        1.0,
        torch.tensor(counts),
        kappa=kappa,
        tau=tau,
        partner=partner,
        lam=lam,
    )
    assert pairs.weight.equal(lam)  # pixels are mixed as in Mixup
    for n, (i, j, share) in enumerate(cases):
        expected = remix_by_hand(share, Fraction(counts[i], counts[j]), kappa, tau)
        assert pairs.lam[n].item() == expected, (counts[i], counts[j], share)


def test_remix_has_the_papers_kappa_and_tau() -> None:
    labels, partner = torch.tensor([0, 1, 2]), torch.tensor([1, 0, 1])
    pairs = draw_remix(
        labels, 1.0, torch.tensor([30, 10, 29]), partner=partner, lam=torch.tensor([0.49, 0.51, 0.1])
    )
    torch.testing.assert_close(pairs.lam, torch.tensor([0.0, 1.0, 0.1]))


def test_remix_takes_the_expected_size_of_share_labels() -> None:
    shares, partner = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), torch.tensor([1, 0])
    # 30 images expected of the first, against 10 or 12 of the second: three times as many, or not quite.
    for other, lam in ((10, 0.0), (12, 0.4)):
        pairs = draw_remix(shares, 1.0, torch.tensor([50, 10, other]), partner=partner, lam=0.4)
        torch.testing.assert_close(pairs.lam, torch.tensor([lam, 0.4]))  # 1 - 0.4 is not under tau


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_remix_of_shares_is_the_same_under_autocast(dtype: torch.dtype) -> None:
    counts = torch.tensor([90_000, 29_999, 10_000, 3_334, 1_111])  # 90,000 is too large for float16
    shares = F.one_hot(some_labels(200), C).float()
    expected = draw_remix(shares, 1.0, counts, mode="elem", generator=seeded())
    with torch.autocast("cpu", dtype=dtype):
        assert same_pairs(draw_remix(shares, 1.0, counts, mode="elem", generator=seeded()), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64])
def test_remix_takes_integer_labels_and_counts_of_any_width(dtype: torch.dtype) -> None:
    labels = some_labels(30)
    expected = draw_remix(labels, 1.0, COUNTS, generator=seeded())
    assert same_pairs(draw_remix(labels.to(dtype), 1.0, COUNTS, generator=seeded()), expected)
    assert same_pairs(draw_remix(labels, 1.0, COUNTS.to(dtype), generator=seeded()), expected)


# Mixup or CutMix, virtual pairs, no mixing


@EVERY_MODE
def test_either_is_one_kind_or_the_other_and_right_in_both(mode: Any) -> None:
    generator, kinds = seeded(), Counter[bool]()
    number = 3000 if mode == "elem" else 5
    for _ in range(1 if mode == "elem" else 600):
        pairs = draw_either(torch.zeros(number), 1.0, (8, 8), switch_prob=0.3, mode=mode, generator=generator)
        assert pairs.weight.shape == (number, 1, 8, 8)
        torch.testing.assert_close(pairs.lam, pairs.weight.flatten(1).mean(dim=1))
        is_box = ((pairs.weight == 0) | (pairs.weight == 1)).flatten(1).all(dim=1)
        is_blend = (pairs.weight == pairs.weight[:, :, :1, :1]).flatten(1).all(dim=1)
        assert (is_box | is_blend).all()
        assert mode != "batch" or len(is_box.unique()) == 1
        assert is_box[pairs.partner].equal(is_box) or mode != "pair"
        kinds.update(is_box.tolist() if mode == "elem" else is_box[:1].tolist())
    assert stats.binomtest(kinds[True], kinds.total(), 0.3).pvalue > UNLIKELY


def test_either_coin_is_fair_by_default() -> None:
    pairs = draw_either(torch.zeros(2000), 1.0, (4, 4), mode="elem", generator=seeded())
    boxes = ((pairs.weight == 0) | (pairs.weight == 1)).flatten(1).all(dim=1)
    assert stats.binomtest(int(boxes.sum()), 2000).pvalue > UNLIKELY


def test_either_has_an_alpha_for_each_kind() -> None:
    choice: dict[str, Any] = {"mode": "elem", "generator": seeded(), "cutmix_alpha": 1e-3}
    blend = draw_either(torch.zeros(200), 500.0, (8, 8), switch_prob=0.0, **choice)
    assert (blend.lam - 0.5).abs().max() < 0.1
    boxes = draw_either(torch.zeros(200), 500.0, (8, 8), switch_prob=1.0, **choice)
    assert stats.binomtest(int((boxes.lam == 1).sum()), 200).pvalue > UNLIKELY  # half of them lose nothing


def test_virtual_pairs_are_drawn_by_class_size() -> None:
    counts, number = torch.tensor([0, 60, 30, 0, 10, 0]), 6000
    virtual = draw_virtual(counts, number, 1.0, seeded())
    assert virtual.shape == (number, 6)
    torch.testing.assert_close(virtual.sum(dim=1), torch.ones(number))
    drawn = Counter(tuple(row.nonzero().flatten().tolist()) for row in virtual)
    share = {1: 0.6, 2: 0.3, 4: 0.1}
    expected = {(c,): p * p for c, p in share.items()} | {
        (a, b): 2 * share[a] * share[b] for a, b in itertools.combinations(share, 2)
    }
    assert set(drawn) == set(expected)
    observed = [drawn[classes] for classes in expected]
    assert stats.chisquare(observed, [p * number for p in expected.values()]).pvalue > UNLIKELY


@pytest.mark.parametrize("alpha", [0.2, 20.0])
def test_virtual_shares_are_beta_distributed(alpha: float) -> None:
    virtual = draw_virtual(torch.tensor([1, 1]), 6000, alpha, seeded())
    shares = virtual[(virtual > 0).all(dim=1), 0]
    assert stats.kstest(shares.double().numpy(), stats.beta(alpha, alpha).cdf).pvalue > UNLIKELY


def test_no_empty_class_is_drawn_at_the_very_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that a generator gives once in 2^53 draws."""
    edges = torch.tensor([[0.0, 0.5, 1 - 2**-53], [0.0, 0.5, 1 - 2**-53]], dtype=torch.float64)
    answers = iter([edges, torch.full((2, 3), 0.5)])  # for the classes, then for lam
    monkeypatch.setattr("icmixup.pairs.draw_uniform", lambda *_: next(answers))
    virtual = draw_virtual(torch.tensor([0, 3, 0, 3, 0]), 3, 1.0)
    assert virtual.nonzero().tolist() == [[0, 1], [1, 3], [2, 3]]


class CumulativeSums(TorchDispatchMode):
    """Notes the dtypes of all cumulative sums within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.cumsum:
            self.dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


def test_virtual_pairs_need_no_sum_that_deterministic_algorithms_refuse_on_a_gpu() -> None:
    """As with Lightning's Trainer(deterministic=True): only cumulative sums of integers are deterministic."""
    with CumulativeSums() as sums:
        draw_virtual(COUNTS, 50, 1.0, seeded())
    assert sums.dtypes == [torch.int64]


def test_virtual_pairs_may_be_drawn_by_any_multiple_of_the_class_sizes() -> None:
    for factor in (1 / 3, 1e-9, 1e9):
        assert draw_virtual(COUNTS * factor, 500, 1.0, seeded()).equal(
            draw_virtual(COUNTS, 500, 1.0, seeded())
        )


def test_virtual_pairs_come_from_the_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw_virtual(COUNTS, 50, 1.0, seeded())
    assert torch.get_rng_state().equal(before)
    assert draw_virtual(COUNTS, 50, 1.0, seeded()).equal(first)
    assert not draw_virtual(COUNTS, 50, 1.0, seeded(1)).equal(first)


@EVERY_DRAW
def test_prob_is_how_often_a_batch_is_mixed(draw: Callable[..., Pairs]) -> None:
    labels, images = some_labels(6), torch.randn(6, 1, *SIZE)
    pairs = draw(labels, mode="elem", generator=seeded())
    assert same_pairs(leave_unmixed(pairs, 1.0), pairs)
    pure = leave_unmixed(pairs, 0.0)
    assert mix_inputs(images, pure).equal(images)
    assert mix_targets(labels, pure, C).equal(F.one_hot(labels, C).float())
    generator, mixed = seeded(), 0
    for _ in range(500):
        left = leave_unmixed(pairs, 0.3, generator)
        assert same_pairs(left, pairs) or same_pairs(left, pure)
        mixed += same_pairs(left, pairs)
    assert stats.binomtest(mixed, 500, 0.3).pvalue > UNLIKELY


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_whole_step_compiles_into_one_graph_and_takes_a_short_last_batch(dynamic: bool | None) -> None:
    torch.compiler.reset()

    def step(images: Tensor, labels: Tensor) -> Tensor:
        pairs = leave_unmixed(draw_either(labels, 1.0, SIZE, mode="pair"), 0.5)
        targets = mix_targets(labels, pairs, C, label_smoothing=0.1)
        virtual = draw_virtual(COUNTS, 4)
        loss = infinite_class_loss(mix_inputs(images, pairs).mean(dim=(2, 3)), targets, virtual=virtual)
        remix = draw_remix(labels, 1.0, COUNTS)
        return loss + mixed_accuracy(images.mean(dim=(2, 3)), mix_targets(labels, remix, C))

    if torch.__version__ < "2.7" and dynamic:
        pytest.skip("torch 2.6 cannot compile draws of a Beta distribution of symbolic size")
    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=dynamic)
    for number in (6, 5, 3) if torch.__version__ >= "2.7" else (6,):
        assert compiled(torch.randn(number, C, *SIZE), some_labels(number)).isfinite()


# Bad input

LABELS = torch.tensor([0, 1, 2, 3])
PAIRS = draw_mixup(LABELS, lam=0.5)
BAD_CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "alpha zero": (
        r"alpha must be a positive number, got 0; to disable mixing pass lam=1.0",
        lambda: draw_mixup(LABELS, 0),
    ),
    "alpha negative": (r"alpha must be a positive number, got -1", lambda: draw_remix(LABELS, -1, COUNTS)),
    "alpha nan": (r"got nan", lambda: draw_cutmix(LABELS, math.nan, SIZE)),
    "alpha infinite": (r"got inf", lambda: draw_mixup(LABELS, math.inf)),
    "cutmix alpha": (r"alpha .* got -2", lambda: draw_either(LABELS, 1.0, SIZE, cutmix_alpha=-2)),
    "virtual alpha": (r"alpha must be a positive number, got 0", lambda: draw_virtual(COUNTS, 5, 0)),
    "mode": (
        r"mode must be one of 'batch', 'elem', 'pair', got 'sample'",
        lambda: draw_mixup(LABELS, mode="sample"),  # type: ignore[arg-type]
    ),
    "empty batch": (
        r"labels have shape \(0,\); expected at least one image, as \(B,\) integers or \(B, C\) class shares",
        lambda: draw_mixup(LABELS[:0]),
    ),
    "label alone": (r"labels have shape \(\); expected at least one", lambda: draw_mixup(LABELS[0])),
    "lam above": (
        r"lam must be between 0 and 1, got values from 1.5 to 1.5",
        lambda: draw_mixup(LABELS, lam=1.5),
    ),
    "lam below": (
        r"got values from -0.1 to 1",
        lambda: draw_mixup(LABELS, lam=torch.tensor([-0.1, 0.0, 0.5, 1.0])),
    ),
    "lam nan": (r"lam must be between 0 and 1", lambda: draw_mixup(LABELS, lam=math.nan)),
    "lam shape": (
        r"lam has shape \(3,\); expected a number or shape \(4,\)",
        lambda: draw_mixup(LABELS, lam=torch.ones(3)),
    ),
    "partner shape": (
        r"partner has dtype torch.int64 and shape \(3,\); expected \(4,\) integers",
        lambda: draw_mixup(LABELS, partner=torch.arange(3)),
    ),
    "partner dtype": (
        r"partner has dtype torch.float32 and shape \(4,\); expected \(4,\) integers",
        lambda: draw_mixup(LABELS, partner=torch.ones(4)),
    ),
    "partner too high": (
        r"partner ranges from 0 to 4; expected indices of the batch, 0 to 3",
        lambda: draw_mixup(LABELS, partner=torch.tensor([0, 1, 2, 4])),
    ),
    "partner negative": (
        r"partner ranges from -1 to 2",
        lambda: draw_mixup(LABELS, partner=torch.tensor([0, 1, 2, -1])),
    ),
    "shares of two": (
        r"labels must be class shares, .* row 0 has the sum 2",
        lambda: mix_targets(torch.eye(4) * 2, PAIRS),
    ),
    "remix multi-hot": (
        r"labels must be class shares, .* row 0 has the sum 5",
        lambda: draw_remix(torch.ones(4, 5), 1.0, COUNTS),
    ),
    "partner in pairs": (
        r'mode "pair" needs mutual partners: partner\[partner\[i\]\] == i',
        lambda: draw_mixup(LABELS, mode="pair", partner=torch.tensor([1, 2, 3, 0])),
    ),
    "remix too few counts": (
        r"labels range from 0 to 3, but the classes are 0 to 2; num_classes and class_counts must be",
        lambda: draw_remix(LABELS, 1.0, COUNTS[:3]),
    ),
    "remix negative label": (
        r"labels range from -1 to 2, but the classes are 0 to 4",
        lambda: draw_remix(LABELS - 1, 1.0, COUNTS),
    ),
    "remix shares": (
        r"labels have shape \(4, 4\); expected \(B, 5\), one column per class",
        lambda: draw_remix(torch.eye(4), 1.0, COUNTS),
    ),
    "remix empty class": (
        r"class_counts of classes \[1, 3\] are not positive and finite, but.* divides.*count them as 1",
        lambda: draw_remix(LABELS, 1.0, torch.tensor([5, 0, 2, 0, 1])),
    ),
    "counts shape": (
        r"class_counts have shape \(5, 1\); expected \(C,\), one size per class",
        lambda: draw_virtual(COUNTS[:, None], 5),
    ),
    "no counts": (r"class_counts have shape \(0,\)", lambda: draw_virtual(COUNTS[:0], 5)),
    "all counts zero": (
        r"class_counts are \[0.0, 0.0, 0.0, 0.0, 0.0\]; expected .* at least one positive",
        lambda: draw_virtual(COUNTS * 0, 5),
    ),
    "no virtual": (
        r"number must be an integer of at least 1, got 0",
        lambda: draw_virtual(COUNTS, 0),
    ),
    "no size": (
        r"size must be the last dimensions of the images, for example \(32, 32\), got \(\)",
        lambda: draw_cutmix(LABELS, 1.0, ()),
    ),
    "size zero": (r"got \(4, 0\)", lambda: draw_cutmix(LABELS, 1.0, (4, 0))),
    "switch_prob": (
        r"switch_prob must be the probability of CutMix, from 0 to 1, got 1.2",
        lambda: draw_either(LABELS, 1.0, SIZE, switch_prob=1.2),
    ),
    "prob": (
        r"prob must be the probability of mixing a batch, from 0 to 1, got -0.5",
        lambda: leave_unmixed(PAIRS, -0.5),
    ),
    "uint8 images": (
        r"images have dtype torch.uint8; mixing needs floating point, for example images.float\(\) / 255",
        lambda: mix_inputs(torch.zeros(4, 3, dtype=torch.uint8), PAIRS),
    ),
    "partner mask": (
        r"partner has dtype torch.bool and shape \(4,\); expected \(4,\) integers",
        lambda: draw_mixup(LABELS, partner=torch.tensor([True, False, True, False])),
    ),
    "other images": (
        r"5 images but 4 pairs; draw the pairs of this batch",
        lambda: mix_inputs(torch.zeros(5, 3), PAIRS),
    ),
    "flat images under boxes": (
        r"images have shape \(4, 6\).*\(4, 6, 8\)",
        lambda: mix_inputs(torch.zeros(4, 6), draw_cutmix(LABELS, 1.0, SIZE)),
    ),
    "other labels": (
        r"3 labels but 4 pairs; draw the pairs of this batch",
        lambda: mix_targets(LABELS[:3], PAIRS, C),
    ),
    "no num_classes": (
        r"num_classes is required for integer labels: a batch may not contain the last classes",
        lambda: mix_targets(LABELS, PAIRS),
    ),
    "label too high": (
        r"labels range from 0 to 3, but the classes are 0 to 2",
        lambda: mix_targets(LABELS, PAIRS, 3),
    ),
    "label negative": (r"labels range from -1 to 2", lambda: mix_targets(LABELS - 1, PAIRS, C)),
    "other classes": (
        r"labels have shape \(4, 4\); expected \(B, 5\), one column per class",
        lambda: mix_targets(torch.eye(4), PAIRS, 5),
    ),
    "float labels": (
        r"labels have dtype torch.float32 and shape \(4,\); expected \(B,\) integers",
        lambda: mix_targets(LABELS.float(), PAIRS, C),
    ),
    "kappa below 1": (
        r"kappa must be at least 1, the ratio of two class sizes, got 0.5",
        lambda: draw_remix(LABELS, 1.0, COUNTS, kappa=0.5),
    ),
    "kappa infinite": (r"kappa must be .* got inf", lambda: draw_remix(LABELS, 1.0, COUNTS, kappa=math.inf)),
    "tau": (r"tau must be a share .* got 1.5", lambda: draw_remix(LABELS, 1.0, COUNTS, tau=1.5)),
    "alpha as text": (r"alpha must be .* got '1'", lambda: draw_mixup(LABELS, "1")),  # type: ignore[arg-type]
    "remix float labels": (
        r"labels have dtype torch.float32 and shape \(4,\); expected \(B,\) integers",
        lambda: draw_remix(LABELS + 0.5, 1.0, COUNTS),
    ),
    "smoothing": (
        r"label_smoothing must be at least 0 and below 1, got 1",
        lambda: mix_targets(LABELS, PAIRS, C, label_smoothing=1),
    ),
    "accuracy": (
        r"scores have shape \(4, 5\) but targets have shape \(4,\)",
        lambda: mixed_accuracy(torch.randn(4, 5), LABELS),
    ),
}


@pytest.mark.parametrize(("words", "call"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_input_is_named_in_the_error(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=words):
        call()
