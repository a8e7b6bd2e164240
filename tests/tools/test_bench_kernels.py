"""bench/kernels.py: which group a kernel is counted in."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("reduce_kernel", "fused norm"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "other"),
        ("pool_forward_kernel", "fused pool"),
        ("forward_kernel", "fused depthwise"),
        ("triton_red_fused_native_batch_norm_backward_3", "compiled"),
        ("sm90_xmma_wgrad_implicit_gemm_bf16", "convolution, weights"),
    ],
)
def test_kernels_of_torch_are_not_counted_as_ours(name, group, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from kernels import group_of

    assert group_of(name) == group
