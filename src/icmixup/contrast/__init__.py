"""Both axes of S~ = S Y~^T: plain, chunked, or fused into Triton kernels."""
