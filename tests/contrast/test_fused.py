"""The fused and the chunked form against float64: kernels compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import csv
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from triton_on_cpu import DEVICE, import_kernels

from icmixup.contrast import Request, prefer_chunked, prefer_fused
from icmixup.contrast.chunked import contrast_chunked
from icmixup.contrast.fused import ForwardArgs, contrast_fused, fused_available
from icmixup.loss import infinite_class_loss
from icmixup.pairs import draw_virtual

import_kernels("icmixup.contrast.triton_backward")  # before anything else imports Triton
from icmixup.contrast.triton_backward import launch_backward  # noqa: E402  (it imports Triton)
from icmixup.contrast.triton_forward import (  # noqa: E402
    PLAN_MODE,
    Launch,
    Tiles,
    _log_sum,
    launch_forward,
    tl,
    triton,
)

SMALL = tuple(
    Tiles(
        sum_classifiers=16,
        sum_images=16,
        grad_chunks=2,
        grad_entries=4,
        grad_images=16,
        dense_classifiers=16,
        dense_images=16,
        heavy_chunks=8,
    )
)
# The interpreter takes as long for a large tile as for a small one: for tests of many launches, which need
# sums over several tiles but not many of them.
MEDIUM = tuple(
    Tiles(*SMALL)._replace(
        sum_classifiers=32,
        sum_images=32,
        grad_chunks=8,
        grad_images=32,
        dense_classifiers=32,
        dense_images=32,
    )
)
FAST, SAFE, DENSE = 0, 1, 2
ROOT = Path(__file__).parents[2]
Form = Callable[..., tuple[Tensor | None, Tensor | None]]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(0)
    # NumPy replaces the GPU here, which overflows to inf without a warning; an inf is then not selected.
    with np.errstate(over="ignore", invalid="ignore"):
        yield


def fused(scores: Tensor, targets: Tensor, **fields: Any) -> tuple[Tensor | None, Tensor | None]:
    return contrast_fused(Request(scores, targets, **fields), tiles=SMALL)


def chunked(scores: Tensor, targets: Tensor, **fields: Any) -> tuple[Tensor | None, Tensor | None]:
    return contrast_chunked(Request(scores, targets, **fields), chunk=4)


def reference(scores: Tensor, targets: Tensor, **fields: Any) -> tuple[Tensor | None, Tensor | None]:
    """log sum over D less log sum over P, of the whole matrix in float64."""
    z = scores.double() @ targets.double().T
    rows, columns = torch.arange(z.shape[0])[:, None], torch.arange(z.shape[1])
    own = (columns == rows + fields.get("offset", 0)).to(z.device)
    left_out, right = torch.zeros_like(own), own
    if fields.get("duplicates", "negative") != "negative":
        same = fields["row_keys"][:, None] == fields["column_keys"]
        left_out = same & ~own if fields["duplicates"] == "ignore" else left_out
        right = same | own if fields["duplicates"] == "positive" else own
    z = z.masked_fill(left_out, -torch.inf)
    biased = z if fields.get("bias") is None else z + fields["bias"].double()
    z, right_columns = z[:, : fields.get("num_columns")], right[:, : fields.get("num_columns")]
    by_row = biased.logsumexp(1) - biased.masked_fill(~right, -torch.inf).logsumexp(1)
    by_column = z.logsumexp(0) - z.masked_fill(~right_columns, -torch.inf).logsumexp(0)
    return by_row if fields.get("rows", True) else None, by_column if fields.get("columns", True) else None


def weighted(losses: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """A scalar in which every loss has another weight."""
    parts = [
        loss.double() * torch.linspace(0.5, 2, len(loss)).to(loss) for loss in losses if loss is not None
    ]
    return torch.cat(parts).sum()


def mixed_targets(number: int, classes: int, smoothing: float = 0.0, share: float | None = None) -> Tensor:
    shares = torch.rand(number, 1) if share is None else torch.full((number, 1), share)
    clean = torch.eye(classes) * (1 - smoothing) + smoothing / classes
    first, second = torch.randint(classes, (2, number))
    return shares * clean[first] + (1 - shares) * clean[second]


def three_way_targets(number: int, classes: int) -> Tensor:
    return torch.randn(number, classes).softmax(dim=1)


def with_keys(targets: Tensor, number: int, images: int) -> tuple[Tensor, dict[str, Any]]:
    """Few different targets, each many times."""
    keys = torch.randint(len(targets), (number,))
    return targets[keys], {"row_keys": keys[:images], "column_keys": keys, "num_columns": images}


def virtual_bias(images: int, number: int) -> Tensor:
    return torch.cat([torch.zeros(images), torch.linspace(-2.0, 1.0, number - images)])


def one_class_targets() -> Tensor:
    targets = mixed_targets(37, 5)
    targets[4:] = torch.eye(5)[2]
    return targets


def case(name: str) -> tuple[Tensor, Tensor, dict[str, Any], int]:
    """Scores, targets, other fields of the request, and the mode that the device should choose."""
    sharp, far = torch.randn(13, 7) * 3, torch.randn(13, 7) * 100
    virtual = {"bias": virtual_bias(13, 29), "num_columns": 13}
    few, few_keys = with_keys(mixed_targets(4, 7), 29, 13)
    soft, soft_keys = with_keys(mixed_targets(4, 7, smoothing=0.1), 29, 13)
    dense, dense_keys = with_keys(three_way_targets(4, 7), 29, 13)
    cases: dict[str, tuple[Tensor, Tensor, dict[str, Any], int]] = {
        "primes": (sharp, mixed_targets(13, 7), {}, FAST),
        "whole tiles": (torch.randn(32, 8), mixed_targets(32, 8), {}, FAST),
        "shifted": (sharp + 1000, mixed_targets(13, 7), {}, FAST),
        "one lam": (sharp, mixed_targets(13, 7, share=0.3), {}, FAST),
        "one-hot": (sharp, mixed_targets(13, 7, share=1.0), {}, FAST),
        "two classes": (sharp[:, :2], mixed_targets(13, 2), {}, FAST),
        "one class": (sharp[:, :1], mixed_targets(13, 1), {}, FAST),
        "one class has all": (torch.randn(37, 5), one_class_targets(), {}, FAST),
        "more classes than pairs": (torch.randn(3, 41), mixed_targets(3, 41), {}, FAST),
        "rows": (sharp, mixed_targets(13, 7), {"columns": False}, FAST),
        "columns": (sharp, mixed_targets(13, 7), {"rows": False}, FAST),
        "a rank's images": (sharp, mixed_targets(29, 7), {"columns": False, "offset": 5}, FAST),
        "a rank's pairs": (torch.randn(29, 7), mixed_targets(13, 7), {"rows": False, "offset": -9}, FAST),
        "virtual": (sharp, mixed_targets(29, 7), virtual, FAST),
        "smoothed": (sharp, mixed_targets(13, 7, 0.1), {}, FAST),
        "smoothed, one axis": (sharp, mixed_targets(13, 7, 0.1), {"rows": False}, FAST),
        "far": (far, mixed_targets(13, 7), {}, SAFE),
        "far, virtual": (far, mixed_targets(29, 7), virtual, SAFE),
        "far, smoothed": (far, mixed_targets(13, 7, 0.1), {}, DENSE),
        "not shares": (sharp, mixed_targets(13, 7) * 1.7 - 0.2 * torch.eye(7)[:1], {}, DENSE),
        "dense": (sharp, three_way_targets(13, 7), {}, DENSE),
        "dense, virtual": (sharp, three_way_targets(29, 7), virtual, DENSE),
        "ignore": (sharp, few, {**few_keys, "duplicates": "ignore"}, FAST),
        "ignore, virtual": (sharp, few, {**few_keys, **virtual, "duplicates": "ignore"}, FAST),
        "ignore, far": (far, few, {**few_keys, **virtual, "duplicates": "ignore"}, SAFE),
        "ignore, smoothed": (sharp, soft, {**soft_keys, "duplicates": "ignore"}, FAST),
        "ignore, dense": (sharp, dense, {**dense_keys, **virtual, "duplicates": "ignore"}, DENSE),
        "positive": (sharp, few, {**few_keys, "duplicates": "positive"}, FAST),
        "positive, virtual": (sharp, few, {**few_keys, **virtual, "duplicates": "positive"}, FAST),
        "positive, far": (far, few, {**few_keys, **virtual, "duplicates": "positive"}, SAFE),
        "positive, smoothed": (sharp, soft, {**soft_keys, "duplicates": "positive"}, DENSE),
        "positive, dense": (sharp, dense, {**dense_keys, **virtual, "duplicates": "positive"}, DENSE),
    }
    scores, targets, fields, mode = cases[name]
    on_device = {
        key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in fields.items()
    }
    return scores.to(DEVICE), targets.to(DEVICE), on_device, mode


CASES = (
    *("primes", "whole tiles", "shifted", "one lam", "one-hot", "two classes", "one class"),
    *("one class has all", "more classes than pairs", "rows", "columns", "a rank's images", "a rank's pairs"),
    *("virtual", "smoothed", "smoothed, one axis", "far", "far, virtual", "far, smoothed"),
    *("not shares", "dense", "dense, virtual", "ignore", "ignore, virtual", "ignore, far"),
    *("ignore, smoothed", "ignore, dense", "positive", "positive, virtual", "positive, far"),
    *("positive, smoothed", "positive, dense"),
)


@pytest.mark.parametrize("form", [fused, chunked])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_whole_matrix_in_float64(name: str, form: Form) -> None:
    scores, targets, fields, _ = case(name)
    scores.requires_grad_()
    losses, expected = form(scores, targets, **fields), reference(scores, targets, **fields)
    rounding = 2e-6 * max(1.0, scores.detach().abs().max().item())
    for loss, right in zip(losses, expected, strict=True):
        assert (loss is None) == (right is None)
        if loss is not None and right is not None:
            torch.testing.assert_close(loss.double(), right, atol=rounding, rtol=0)
    gradient, right = (torch.autograd.grad(weighted(each), scores)[0] for each in (losses, expected))
    torch.testing.assert_close(gradient, right, atol=2 * rounding, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_device_chooses_the_cheapest_kernel_that_is_right(name: str) -> None:
    scores, targets, fields, mode = case(name)
    *_, plan = torch.ops.icmixup.contrast_fused(*operator_args(Request(scores, targets, **fields)))
    assert int(plan[PLAN_MODE.value]) == mode


def operator_args(request: Request) -> ForwardArgs:
    return ForwardArgs(
        *(request.scores, request.targets, request.bias, *request.keys()),
        *(request.offset, request.rows, request.columns, request.num_matched()),
        duplicates=request.duplicates,
        tiles=list(SMALL),
    )


@pytest.mark.parametrize("form", [fused, chunked])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_single_pair_costs_exactly_nothing(form: Form, scale: float) -> None:
    scores = (torch.randn(1, 5, device=DEVICE) * scale).requires_grad_()
    rows, columns = form(scores, mixed_targets(1, 5).to(DEVICE))
    assert rows is not None
    assert columns is not None
    (rows + columns).sum().backward()
    assert rows.item() == columns.item() == 0.0
    torch.testing.assert_close(scores.grad, torch.zeros_like(scores), atol=1e-6, rtol=0)


def gradient_error(losses: tuple[Tensor, ...], scores: Tensor, right: Tensor) -> float:
    (gradient,) = torch.autograd.grad(sum(part.sum() for part in losses), scores)
    return ((gradient.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("make", [mixed_targets, three_way_targets], ids=["pairs", "dense"])
@pytest.mark.parametrize("scale", [3.0, 20.0, 100.0, 1e3, 1e4])
def test_gradients_stay_as_near_to_float64_as_those_of_the_plain_product(
    make: Callable[[int, int], Tensor], scale: float
) -> None:
    """However far the scores spread, up to a rounding more.

    The median over draws: a mean would depend on the one draw with a near tie, where rounding counts most.
    """
    errors, own = [], torch.arange(37, device=DEVICE)
    for _ in range(9):
        scores = (torch.randn(37, 11, device=DEVICE) * scale).requires_grad_()
        targets = make(37, 11).to(DEVICE)
        exact = scores.detach().double().requires_grad_()
        mixed = exact @ targets.double().T
        (right,) = torch.autograd.grad(F.cross_entropy(mixed, own) + F.cross_entropy(mixed.T, own), exact)
        mixed = scores @ targets.T
        plain = (F.cross_entropy(mixed, own), F.cross_entropy(mixed.T, own))
        found = contrast_fused(Request(scores, targets), tiles=MEDIUM)
        ours = tuple(part.mean() for part in found if part is not None)
        errors.append([gradient_error(losses, scores, right) for losses in (ours, plain)])
    assert np.median([ours / plain for ours, plain in errors]) <= 1.5


@pytest.mark.parametrize("form", [fused, chunked])
def test_pairs_that_are_all_equal_cost_the_log_of_their_number(form: Form) -> None:
    scores, targets = torch.randn(1, 5).expand(11, 5), mixed_targets(1, 5).expand(11, 5)
    for losses in form(scores.to(DEVICE), targets.to(DEVICE)):
        torch.testing.assert_close(losses, torch.full((11,), np.log(11.0), device=DEVICE), check_dtype=False)


@pytest.mark.parametrize("form", [fused, chunked])
@pytest.mark.parametrize("targets", [mixed_targets(6, 5), three_way_targets(6, 5)], ids=["pairs", "dense"])
def test_scores_of_ten_thousand_give_finite_losses_and_gradients(form: Form, targets: Tensor) -> None:
    scores = (torch.randint(0, 2, (6, 5), device=DEVICE) * 2e4 - 1e4).requires_grad_()
    losses = form(scores, targets.to(DEVICE))
    (gradient,) = torch.autograd.grad(weighted(losses), scores)
    assert all(loss is not None and loss.isfinite().all() for loss in losses)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("form", [fused, chunked])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_not_hidden(form: Form, bad: float) -> None:
    scores = torch.randn(6, 5, device=DEVICE)
    scores[2, 3] = bad
    losses = form(scores, mixed_targets(6, 5).to(DEVICE))
    assert all(loss is not None and loss.mean().isnan() for loss in losses)


@pytest.mark.parametrize("form", [fused, chunked])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_contrasted_in_float32(form: Form, dtype: torch.dtype) -> None:
    scores, targets, *_ = case("primes")
    scores = scores.to(dtype).requires_grad_()
    losses, expected = form(scores, targets), reference(scores, targets)
    for loss, right in zip(losses, expected, strict=True):
        assert loss is not None
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), right, atol=5e-6, rtol=0)
    gradient, right = (torch.autograd.grad(weighted(each), scores)[0] for each in (losses, expected))
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, right)


@pytest.mark.parametrize("form", [fused, chunked])
def test_the_error_is_not_larger_than_that_of_the_plain_product_in_float32(form: Form) -> None:
    plain = (lambda scores, targets: reference_in_float32(scores, targets)), form
    errors = []
    for each in plain:
        torch.manual_seed(1)
        error = torch.zeros(2, dtype=torch.float64)
        for _ in range(4):
            scores, targets = (
                (torch.randn(31, 11) * 5).to(DEVICE).requires_grad_(),
                mixed_targets(31, 11).to(DEVICE),
            )
            losses, expected = each(scores, targets), reference(scores, targets)
            found, right = (
                torch.autograd.grad(weighted(part), scores)[0].double() for part in (losses, expected)
            )
            loss_error = sum((a.double() - b).pow(2).sum() for a, b in zip(losses, expected, strict=True))
            error += torch.stack([loss_error, (found - right).pow(2).sum()]).detach().cpu()
        errors.append(error.sqrt())
    assert (errors[1] <= 1.1 * errors[0]).all(), errors


def reference_in_float32(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    z, own = scores @ targets.T, torch.arange(len(scores), device=scores.device)
    cross_entropy = torch.nn.functional.cross_entropy
    return cross_entropy(z, own, reduction="none"), cross_entropy(z.T, own, reduction="none")


@pytest.mark.parametrize("programs", [1, 7, 50])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_tiles_change_no_more_than_rounding(scale: float, programs: int) -> None:
    scores, targets, fields, _ = case("one class has all")
    others = Tiles(*SMALL)._replace(sum_groups=programs, dense_images=32, grad_chunks=4, grad_entries=8)
    for one, other in zip(
        fused(scale * scores, targets, **fields),
        contrast_fused(Request(scale * scores, targets, **fields), tiles=tuple(others)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=3e-6 * scale, rtol=0)


class RecordOperators(TorchDispatchMode):
    """Records the names of torch operators, except for those that Triton's interpreter calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        if not any("triton" in frame.filename for frame in traceback.extract_stack()):
            self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


def test_torch_only_allocates_memory_and_sorts() -> None:
    # A small operation costs the host as much as a kernel, and a large batch would wait for the host.
    scores, targets, *_ = case("primes")
    launch = Launch(
        *(13, 13, 7),
        offset=0,
        rows=True,
        columns=True,
        num_columns=13,
        duplicates="negative",
        has_bias=False,
        tiles=Tiles(*SMALL),
        multiprocessors=2,
    )
    with RecordOperators() as recorded:
        rows, columns, state = launch_forward(scores, targets, None, (targets, targets), launch)
        launch_backward((rows, columns), targets, (targets, targets), state, launch, torch.float32)
    assert set(recorded.names) <= {"empty", "new_empty", "sort", "select"}
    assert len(recorded.names) < 30


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["primes", "far", "smoothed", "dense", "positive, far"])
def test_a_cuda_graph_chooses_anew_at_each_replay(name: str) -> None:
    scores, targets, fields, _ = case(name)
    held, held_targets = torch.zeros_like(scores).requires_grad_(), targets.roll(1, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(weighted(fused(held, held_targets, **fields)), held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = fused(held, held_targets, **fields)
        (gradient,) = torch.autograd.grad(sum(loss.sum() for loss in losses if loss is not None), held)
    with torch.no_grad():
        held.copy_(scores)
        held_targets.copy_(targets)
    graph.replay()
    fresh = scores.clone().requires_grad_()
    eager = fused(fresh, targets, **fields)
    (expected,) = torch.autograd.grad(sum(loss.sum() for loss in eager if loss is not None), fresh)
    assert torch.equal(gradient, expected)
    assert all(torch.equal(a, b) for a, b in zip(losses, eager, strict=True) if a is not None)


def test_equal_inputs_give_equal_bits() -> None:
    scores, targets, fields, _ = case("one class has all")
    scores.requires_grad_()
    first, second = fused(scores, targets, **fields), fused(scores, targets, **fields)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None)
    gradients = [torch.autograd.grad(weighted(losses), scores)[0] for losses in (first, second)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("axis", [0, 1])
def test_an_axis_without_a_gradient_adds_nothing(axis: int) -> None:
    scores, targets, *_ = case("primes")
    scores.requires_grad_()
    gradients = [
        torch.autograd.grad(form(scores, targets)[axis].sum(), scores)[0] for form in (fused, reference)
    ]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_a_compiled_graph_holds_the_kernels_whole() -> None:
    scores, targets, *_ = case("primes")
    scores.requires_grad_()
    compiled = torch.compile(lambda s, t: weighted(fused(s * 1.0, t)), fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(scores, targets), scores)
    torch.testing.assert_close(gradient, torch.autograd.grad(weighted(fused(scores, targets)), scores)[0])


def test_the_custom_operators_pass_the_checks_of_torch() -> None:
    scores, targets, *_ = case("primes")
    args = tuple(operator_args(Request(scores.requires_grad_(), targets)))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.icmixup.contrast_fused.default, args, test_utils=checks)


@pytest.mark.parametrize("duplicates", ["negative", "ignore", "positive"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_chunked_form_is_differentiated_exactly_whatever_the_chunk(duplicates: str, chunk: int) -> None:
    targets, keys = with_keys(mixed_targets(3, 4).double(), 9, 5)
    scores = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    fields = {**keys, "bias": virtual_bias(5, 9).double(), "duplicates": duplicates}
    for loss, right in zip(
        contrast_chunked(Request(scores, targets, **fields), chunk),
        reference(scores, targets, **fields),
        strict=True,
    ):
        assert loss is not None
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss, right, atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(
        lambda s: contrast_chunked(Request(s, targets, **fields), chunk), (scores,)
    )


def test_a_million_virtual_classifiers_are_those_of_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icmixup.contrast.CHUNKED_ENTRIES", 2**20)
    assert prefer_chunked(6, 10**6)
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(6, 4, generator=generator, dtype=torch.float64).requires_grad_()
    targets = draw_virtual(torch.ones(4), 6, 0.2, generator).double()
    virtual = draw_virtual(torch.tensor([5.0, 3.0, 2.0, 1.0]), 10**6, 0.2, generator).double()
    whole, parts = (
        infinite_class_loss(scores, targets, virtual=virtual, fused=how) for how in (False, "auto")
    )
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    (expected,), (found,) = (torch.autograd.grad(loss, scores) for loss in (whole, parts))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_auto_takes_the_kernels_where_the_benchmark_shows_that_they_are_not_slower() -> None:
    with (ROOT / "results" / "bench_loss.csv").open(newline="") as file:
        ms = {
            (row["form"], int(row["batch"]), int(row["classes"])): float(row["ms"])
            for row in csv.DictReader(file)
        }
    sizes = [(B, C) for form, B, C in ms if form == "fused" and ("plain", B, C) in ms]
    chosen = [prefer_fused(B, B, C, torch.device("cuda")) for B, C in sizes]
    assert any(chosen)
    assert not all(chosen)
    for (B, C), fused in zip(sizes, chosen, strict=True):
        taken, left = ("fused", "plain") if fused else ("plain", "fused")
        assert ms[taken, B, C] <= 1.05 * ms[left, B, C], (B, C)


def test_without_a_gpu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not fused_available("cpu")
    assert not prefer_fused(2**20, 2**20, 100, torch.device("cpu"))
    with pytest.raises(ValueError, match="pip install triton"):
        contrast_fused(Request(torch.randn(3, 2), mixed_targets(3, 2)))


def test_the_logarithm_of_a_sum_is_exact_where_others_hardly_add_to_it() -> None:
    @triton.jit
    def kernel(others, losses, N: tl.constexpr):
        n = tl.arange(0, N)
        zero = tl.zeros([N], tl.float64)
        loss, _ = _log_sum(tl.load(others + n), zero, zero)
        tl.store(losses + n, loss)

    others = torch.tensor([0, 1e-12, 3e-7, 9e-7, 2e-6, 1e-3, 1, 50], dtype=torch.float64, device=DEVICE)
    losses = torch.empty_like(others)
    kernel[(1,)](others, losses, N=8)
    torch.testing.assert_close(losses, others.log1p(), rtol=1e-9, atol=0)


def test_tiles_are_powers_of_two_as_triton_requires() -> None:
    sizes = Tiles()._asdict()
    del sizes["sum_groups"]  # a number of programs
    assert [name for name, size in sizes.items() if size < 1 or size.bit_count() != 1] == []


@pytest.mark.parametrize(("classes", "wide"), [(2**24 - 2, False), (2**24 - 1, True)])
def test_indices_into_the_scores_have_64_bits_from_two_to_the_31(classes: int, wide: bool) -> None:
    # Rows of S^T have 128 entries here, and the kernels address up to one row behind the last.
    launch = Launch(
        R=100,
        K=100,
        C=classes,
        offset=0,
        rows=True,
        columns=True,
        num_columns=100,
        duplicates="negative",
        has_bias=False,
        tiles=Tiles(),
        multiprocessors=1,
    )
    assert launch.wide == wide


def test_float64_scores_are_an_error() -> None:
    with pytest.raises(ValueError, match="float64"):
        fused(torch.randn(3, 2, dtype=torch.float64, device=DEVICE), mixed_targets(3, 2).to(DEVICE))


def test_second_derivatives_of_the_kernels_are_an_error() -> None:
    scores = torch.randn(6, 5, device=DEVICE, requires_grad=True)
    targets = torch.rand(6, 5, device=DEVICE).softmax(dim=1)
    rows, columns = fused(scores, targets)
    assert rows is not None
    assert columns is not None
    (gradient,) = torch.autograd.grad(rows.sum() + columns.sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of the fused form are not implemented"):
        (gradient.square().sum() + scores.sum()).backward()
