"""Dense bf16 linear layers compared with cuBLAS, and fused norm and activation compared with separate operators."""

from collections.abc import Callable

import torch
from harness import Cases, Setting, Timing, cold_inputs, compare, main
from torch import Tensor
from torch.nn import functional as F

from fastinfer import ops

# (out_features, in_features) of an 8B model: QKV, gate and up, down.
WEIGHTS = [(6144, 4096), (28672, 4096), (4096, 14336)]
TOKENS = [1, 16, 64, 1024, 8192]


def run(setting: Setting) -> Cases:
    cases = setting.cases
    for out_features, in_features in WEIGHTS:
        n, k = setting.size(out_features, 64), setting.size(in_features, 64)
        for tokens in TOKENS:
            m = setting.size(tokens, 2)

            def make(m: int = m, n: int = n, k: int = k) -> tuple[Tensor, ...]:
                x = torch.randn(m, k, device=setting.device).bfloat16()
                return x, (torch.randn(n, k, device=setting.device) / k**0.5).bfloat16()

            size = {"bytes_moved": 2 * (n * k + m * k + m * n), "flops": 2 * m * n * k}
            cases[f"M={tokens} N={out_features} K={in_features}"] = compare(
                {"fastinfer": ops.gemm, "torch (cuBLAS)": F.linear},
                cold_inputs(make),
                repeats=setting.repeats,
                **size,
            )
            if out_features == 28672:
                half = {**size, "bytes_moved": 2 * (n * k + m * k + m * n // 2)}  # gate and up become one output
                cases[f"M={tokens} RMSNorm + SwiGLU"] = swiglu(setting, make, half)
    return cases


def swiglu(setting: Setting, make: Callable[[], tuple[Tensor, ...]], size: dict[str, int]) -> list[Timing]:
    """Compare a product with fused norm and gated activation with separate operators (three or more kernels)."""
    inputs = cold_inputs(make)
    norm_weight = torch.ones(inputs[0][0].shape[1], device=setting.device, dtype=torch.bfloat16)

    def separate(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(F.rms_norm(x, norm_weight.shape, norm_weight, 1e-6), weight).chunk(2, dim=-1)
        return F.silu(gate) * up

    candidates = {
        "fastinfer": lambda x, weight: ops.gemm(x, weight, norm_weight=norm_weight, activation="silu"),
        "fastinfer, separate": lambda x, weight: ops.silu_and_mul(ops.gemm(ops.rms_norm(x, norm_weight), weight)),
        "torch (cuBLAS)": separate,
    }
    return compare(candidates, inputs, repeats=setting.repeats, **size)


if __name__ == "__main__":
    main("gemm", cuda=run)
