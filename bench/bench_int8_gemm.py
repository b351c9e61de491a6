"""8-bit linear layers on a GPU, with 8-bit weights only or also activations, compared with torch._int_mm and cuBLAS."""

import torch
from harness import Cases, Setting, cold_inputs, compare, main
from torch.nn import functional as F

from fastinfer import ops

WEIGHTS = [(8192, 8192), (28672, 4096)]
TOKENS = [1, 16, 64, 1024, 8192]


def run(setting: Setting) -> Cases:
    cases = setting.cases
    for out_features, in_features in WEIGHTS:
        n, k = setting.size(out_features, 64), setting.size(in_features, 64)
        weights = cold_inputs(lambda n=n, k=k: _weight(n, k, setting))
        dense = cold_inputs(lambda n=n, k=k: (torch.randn(n, k, device=setting.device).bfloat16(),))
        for tokens in TOKENS:
            m = setting.size(tokens, 2)
            x = torch.randn(m, k, device=setting.device).bfloat16()
            x8 = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=setting.device)
            x_scales = torch.rand(m, device=setting.device)

            candidates = {
                "int8_gemm": lambda qweight, scales, plain, x=x, n=n: ops.int8_gemm(x, qweight, scales, None, n),
                "w8a8_gemm": lambda qweight, scales, plain, x8=x8, x_scales=x_scales, n=n: ops.w8a8_gemm(
                    x8, x_scales, qweight, scales, n, dtype=torch.bfloat16
                ),
                "torch._int_mm": lambda qweight, scales, plain, x8=x8: torch._int_mm(x8, plain.T),
            }
            size = {"bytes_moved": n * k + 2 * m * (n + k), "flops": 2 * m * n * k}
            timings = compare(candidates, weights, repeats=setting.repeats, **size)
            size["bytes_moved"] += n * k
            cublas = {"torch bf16 (cuBLAS)": lambda weight, x=x: F.linear(x, weight)}
            timings += compare(cublas, dense, repeats=setting.repeats, **size)
            cases[f"M={tokens} N={out_features} K={in_features}"] = timings
    return cases


def _weight(n: int, k: int, setting: Setting) -> tuple[torch.Tensor, ...]:
    q = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=setting.device)
    return ops.int8_pack(q), ops.pack_scales(torch.rand(n, 1, device=setting.device)), q


if __name__ == "__main__":
    main("int8_gemm", cuda=run)
