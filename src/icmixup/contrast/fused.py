"""The fused form: Triton kernels, forward and backward, that compute both axes without storing S~.

R images, K classifiers, C classes    scores S (R, C)    targets Y~ (K, C)    mixed scores z = S Y~^T (R, K)

A mixed target has two classes, so z_ij = u_j S_i,a_j + v_j S_i,b_j is two reads instead of a product of
length C; under label smoothing the other classes share one floor, which adds the same to every z of an image.
With o_i = z_ii the own entry, t_i the largest score of image i and m the middle of all scores, one
exponential serves both axes, and dominant entries are near e^0, where rounding is small:

    e_ij = exp(z_ij - t_i)            rows       loss_i = log(1 + exp(t_i - o_i) sum_j!=i e_ij)
    w_i  = exp(t_i - m)               columns    loss_j = log(1 + exp(m - o_j) sum_i!=j e_ij w_i)
    W_ij = e_ij (A_i + w_i H_j)       gradient   dS_ic  = sum_j W_ij Y_jc - (g_i + h_i) Y_ic

with coefficients A and H: the gradients g and h divided by the sums. That holds while scores spread over less
than 60; beyond it the largest entries are found first, and each axis has its own exponential. Targets with
more classes go through a tiled float32 product. The device chooses between the three, so the host never
waits, and the loss can be captured in a CUDA graph. There are no atomic additions: equal inputs always give
equal bits. Memory is linear in R + K.

A score that is not finite makes every loss nan, as it does in the plain form.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from icmixup._checks import Duplicates
from icmixup._first_order import first_order_only
from icmixup.contrast.request import Losses, Request

if TYPE_CHECKING:
    from icmixup.contrast.triton_forward import Launch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def fused_available(device: torch.device | str = "cuda") -> bool:
    """Whether the kernels run on `device`: Triton is installed, and it is a CUDA GPU.

    With TRITON_INTERPRET=1 Triton runs them on the CPU, slowly, for tests.
    """
    on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return HAS_TRITON and (on_gpu or os.environ.get("TRITON_INTERPRET") == "1")


def contrast_fused(request: Request, tiles: tuple[int, ...] = ()) -> Losses:
    """What contrast_plain returns, from kernels that never store S~.

    Gradients flow to the scores only. float32, bfloat16 and float16, computed in float32; the gradient has
    the dtype of the scores. Deterministic. Works with autograd, torch.compile and CUDA graphs.

    Args:
        request: what to compute; its reduction is ignored. Equal keys must mean equal targets.
        tiles: triton_forward.Tiles; the default ones if empty.

    Returns:
        (R,) and (num_matched,) float32 losses; None for what was not requested.
    """
    if not torch.compiler.is_compiling():
        _check(request)
    row_keys, column_keys = request.keys()
    args = ForwardArgs(
        scores=request.scores,
        targets=request.targets,
        bias=request.bias,
        row_keys=row_keys,
        column_keys=column_keys,
        offset=request.offset,
        rows=request.rows,
        columns=request.columns,
        num_columns=request.num_matched(),
        duplicates=request.duplicates,
        tiles=list(tiles),
    )
    row_losses, column_losses, *_ = torch.ops.icmixup.contrast_fused(*args)
    return row_losses if request.rows else None, column_losses if request.columns else None


def _check(request: Request) -> None:
    device = request.scores.device
    if not fused_available(device):
        raise ValueError(
            f"fused=True needs Triton and a CUDA GPU, but scores are on {device}"
            f"{'' if HAS_TRITON else ' and Triton is not installed'}; "
            'pip install triton and move the scores to the GPU, or use fused="auto"'
        )
    if request.scores.dtype == torch.float64:
        raise ValueError('the kernels compute in float32, but scores are float64; use fused="auto"')
    R, K, offset = len(request.scores), len(request.targets), request.offset
    assert min(R, K) > 0, "empty batch"
    assert not request.rows or 0 <= offset <= K - R, "an image without its classifier"
    matched = request.num_matched()
    assert not request.columns or (0 <= -offset <= R - matched and matched <= K), "a classifier without image"


# The two operators as torch.library sees them. A schema is flat and has no NamedTuples, so these two mirror
# the schemas below, argument by argument, and every function here unpacks its arguments into them.


class ForwardArgs(NamedTuple):
    """Arguments of icmixup::contrast_fused; shapes as in Request."""

    scores: Tensor
    targets: Tensor
    bias: Tensor | None
    row_keys: Tensor | None
    column_keys: Tensor | None
    offset: int
    rows: bool
    columns: bool
    num_columns: int
    duplicates: Duplicates
    tiles: list[int]

    def launch(self, multiprocessors: int) -> Launch:
        num_images, num_classes = self.scores.shape
        return _launch(num_images, num_classes, self, self.bias is not None, multiprocessors)


class BackwardArgs(NamedTuple):
    """Arguments of icmixup::contrast_fused_backward: gradients of losses, inputs, ForwardState, options."""

    row_grad: Tensor | None
    column_grad: Tensor | None
    targets: Tensor
    row_keys: Tensor | None
    column_keys: Tensor | None
    scores_t: Tensor
    classes_of: Tensor
    row_table: Tensor
    column_table: Tensor
    plan: Tensor
    num_images: int
    offset: int
    rows: bool
    columns: bool
    num_columns: int
    has_bias: bool
    duplicates: Duplicates
    tiles: list[int]
    dtype: torch.dtype

    def launch(self, multiprocessors: int) -> Launch:
        return _launch(self.num_images, self.scores_t.shape[0], self, self.has_bias, multiprocessors)


_FORWARD = (
    "(Tensor scores, Tensor targets, Tensor? bias, Tensor? row_keys, Tensor? column_keys, int offset, "
    "bool rows, bool columns, int num_columns, str duplicates, int[] tiles) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor? row_grad, Tensor? column_grad, Tensor targets, Tensor? row_keys, Tensor? column_keys, "
    "Tensor scores_t, Tensor classes_of, Tensor row_table, Tensor column_table, Tensor plan, int num_images, "
    "int offset, bool rows, bool columns, int num_columns, bool has_bias, str duplicates, int[] tiles, "
    "ScalarType dtype) -> Tensor"
)


def _launch(
    num_images: int,
    num_classes: int,
    args: ForwardArgs | BackwardArgs,
    has_bias: bool,
    multiprocessors: int,
) -> Launch:
    from icmixup.contrast.triton_forward import Launch, Tiles

    return Launch(
        R=num_images,
        K=len(args.targets),
        C=num_classes,
        offset=args.offset,
        rows=args.rows,
        columns=args.columns,
        num_columns=args.num_columns,
        duplicates=args.duplicates,
        has_bias=has_bias,
        tiles=Tiles(*args.tiles),
        multiprocessors=multiprocessors,
    )


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _keys(args: ForwardArgs | BackwardArgs) -> tuple[Tensor, Tensor]:
    # A kernel needs a pointer even where it reads nothing.
    if args.row_keys is None or args.column_keys is None:
        return args.targets, args.targets
    return args.row_keys.contiguous(), args.column_keys.contiguous()


def _forward(*flat: Any) -> tuple[Tensor, ...]:
    from icmixup.contrast.triton_forward import launch_forward

    args = ForwardArgs(*flat)
    bias = None if args.bias is None else args.bias.contiguous()
    inputs = args.scores.contiguous(), args.targets.contiguous(), bias, _keys(args)
    row_losses, column_losses, state = launch_forward(
        *inputs, args.launch(_multiprocessors(args.targets.device))
    )
    return row_losses, column_losses, *state


def _forward_fake(*flat: Any) -> tuple[Tensor, ...]:
    from icmixup.contrast.triton_forward import empty_state

    args = ForwardArgs(*flat)
    launch, new = args.launch(multiprocessors=1), args.scores.new_empty  # shapes do not depend on them
    losses = (
        new(launch.R if launch.rows else 0, dtype=torch.float32),
        new(launch.num_column_losses, dtype=torch.float32),
    )
    return *losses, *empty_state(launch, args.scores.device)


def _backward(*flat: Any) -> Tensor:
    from icmixup.contrast.triton_backward import launch_backward
    from icmixup.contrast.triton_forward import ForwardState

    args = BackwardArgs(*flat)
    state = ForwardState(args.scores_t, args.classes_of, args.row_table, args.column_table, args.plan)
    grads, keys = (args.row_grad, args.column_grad), _keys(args)
    launch = args.launch(_multiprocessors(args.targets.device))
    return launch_backward(grads, args.targets.contiguous(), keys, state, launch, args.dtype)


def _backward_fake(*flat: Any) -> Tensor:
    args = BackwardArgs(*flat)
    return args.scores_t.new_empty(args.num_images, args.scores_t.shape[0], dtype=args.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    args, state = ForwardArgs(*inputs), output[2:]
    ctx.save_for_backward(args.targets, args.row_keys, args.column_keys, *state)
    shape = (args.offset, args.rows, args.columns, args.num_columns)
    has_bias = args.bias is not None
    ctx.options = (len(args.scores), *shape, has_bias, args.duplicates, args.tiles, args.scores.dtype)
    ctx.mark_non_differentiable(*state)
    ctx.set_materialize_grads(False)  # or autograd would pass zeros as large as the state


def _gradient(
    ctx: Any, row_grad: Tensor | None, column_grad: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    args = BackwardArgs(row_grad, column_grad, *ctx.saved_tensors, *ctx.options)
    gradient = first_order_only(torch.ops.icmixup.contrast_fused_backward(*args), "the fused form")
    return gradient, *(None,) * (len(ForwardArgs._fields) - 1)


_forward_op = torch.library.custom_op("icmixup::contrast_fused", _forward, mutates_args=(), schema=_FORWARD)
_forward_op.register_fake(_forward_fake)
_forward_op.register_autograd(_gradient, setup_context=_setup_context)
_backward_op = torch.library.custom_op(
    "icmixup::contrast_fused_backward", _backward, mutates_args=(), schema=_BACKWARD
)
_backward_op.register_fake(_backward_fake)
