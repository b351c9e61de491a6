"""Linear layers over 4-bit look-up tables beside 4-bit and 8-bit ones, on the CPU.

Several copies of the weights take turns, so that they are read from memory.
"""

from collections.abc import Callable

import torch
from harness import Cases, Setting, cold_inputs, compare, main
from torch import Tensor

from fastinfer import ops
from fastinfer.formats.gguf_rows import IQ4_NL_TABLE
from fastinfer.formats.mxfp4 import MXFP4_TABLE
from fastinfer.quantize.rounding import NF4_TABLE

# (out_features, in_features): gate and up of one of gpt-oss's experts, and a layer of an 8B model.
WEIGHTS = [(5760, 2880), (4096, 4096)]
TOKENS = [1, 4, 16, 128]
GROUP = 32


def run(setting: Setting) -> Cases:
    cases = setting.cases
    for n, k in WEIGHTS:
        weights = cold_inputs(lambda n=n, k=k: _weights(n, k))
        for tokens in TOKENS:
            x = torch.randn(tokens, k)

            def lut(table: Tensor, bits: int, x: Tensor = x, n: int = n) -> Callable[..., Tensor]:
                return lambda int4, int8, scales: ops.lut_gemm(x, int4, scales, table, n, activation_bits=bits)

            candidates = {
                "MXFP4, 8-bit activations": lut(MXFP4_TABLE, 8),
                "IQ4_NL, 8-bit activations": lut(IQ4_NL_TABLE, 8),
                "NF4, fp32": lut(NF4_TABLE, 32),
                "int4, 8-bit activations": lambda int4, int8, scales, x=x, n=n: ops.int4_gemm(
                    x, int4, scales, None, n, activation_bits=8
                ),
                "int8, 8-bit activations": lambda int4, int8, scales, x=x, n=n: ops.int8_gemm(
                    x, int8, scales, None, n, activation_bits=8
                ),
            }
            cases[f"M={tokens} N={n} K={k}"] = compare(
                candidates, weights, repeats=setting.repeats, flops=2 * tokens * n * k
            )
    return cases


def _weights(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    int4 = ops.int4_pack(torch.randint(0, 16, (n, k), dtype=torch.uint8))
    int8 = ops.int8_pack(torch.randint(-128, 128, (n, k), dtype=torch.int8))
    return int4, int8, ops.pack_scales(torch.rand(n, k // GROUP).half())


if __name__ == "__main__":
    main("lut_gemm", cpu=run)
