"""4-bit linear layers beside torch's fp32 and bf16 ones; weights rotate, so that they come from memory."""

import torch
from harness import Timing, cold_inputs, compare, main

from fastinfer import ops

# [out_features, in_features]: SmolLM2-135M's gate and up, and a layer of an 8B model.
WEIGHTS = [(3072, 576), (4096, 4096)]
TOKENS = [1, 16, 128]
GROUP = 32


def run(repeats: int) -> dict[str, list[Timing]]:
    cases = {}
    for out_features, in_features in WEIGHTS:
        for tokens in TOKENS:
            x = torch.randn(tokens, in_features)

            def make(n: int = out_features, k: int = in_features) -> tuple[torch.Tensor, ...]:
                q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
                scales = torch.rand(n, k // GROUP).half()
                dense = torch.randn(n, k)
                return ops.int4_pack(q), ops.pack_scales(scales), dense, dense.bfloat16()

            def int4(bits: int, x: torch.Tensor = x, n: int = out_features):  # type: ignore[no-untyped-def]
                return lambda qweight, scales, *_: ops.int4_gemm(x, qweight, scales, None, n, activation_bits=bits)

            half = x.bfloat16()
            candidates = {
                "fastinfer, 8-bit activations": int4(8),
                "fastinfer, 16-bit activations": int4(16),
                "fastinfer, fp32": int4(32),
                "torch fp32": lambda q, s, dense, dense16, x=x: torch.nn.functional.linear(x, dense),
                "torch bf16": lambda q, s, dense, dense16, x=half: torch.nn.functional.linear(x, dense16),
            }
            cases[f"M={tokens} N={out_features} K={in_features}"] = compare(
                candidates,
                cold_inputs(make),
                repeats=repeats,
                bytes_moved=out_features * in_features * 9 // 16,  # of the packed weight: 4 bits and 2 bytes per group
                flops=2 * tokens * out_features * in_features,
            )
    return cases


if __name__ == "__main__":
    main("int4_gemm", run)
