"""6-bit linear layers beside 8-bit ones, and 4-bit ones with scales of one and of two levels, on the CPU.

Several copies of the weights take turns, so that they are read from memory.
"""

import torch
from harness import Cases, Setting, cold_inputs, compare, main

from fastinfer import ops

# (out_features, in_features): the down projection and a part of the output layer of a 1.5B model.
WEIGHTS = [(1536, 8960), (16384, 1536)]
TOKENS = [1, 4, 16, 512]


def run(setting: Setting) -> Cases:
    cases = setting.cases
    for n, k in WEIGHTS:
        weights = cold_inputs(lambda n=n, k=k: (*_int8(n, k), *_int6(n, k), *_int4(n, k), *_int4_two_level(n, k)))
        for tokens in TOKENS:
            x = torch.randn(tokens, k)
            for bits in (8, 16):
                options = {"out_features": n, "activation_bits": bits}
                candidates = {
                    "int8": lambda *w, x=x, options=options: ops.int8_gemm(x, *w[:2], None, **options),
                    "int6": lambda *w, x=x, options=options: ops.int6_gemm(x, *w[2:4], **options),
                    "int4": lambda *w, x=x, options=options: ops.int4_gemm(x, *w[4:7], **options),
                    "int4, two levels": lambda *w, x=x, options=options: ops.int4_gemm(x, *w[7:], **options),
                }
                cases[f"M={tokens} N={n} K={k}, {bits}-bit activations"] = compare(
                    candidates, weights, repeats=setting.repeats, flops=2 * tokens * n * k
                )
    return cases


def _int8(n: int, k: int) -> tuple[torch.Tensor, ...]:
    return ops.int8_pack(torch.randint(-128, 128, (n, k), dtype=torch.int8)), _scales(n, k)


def _int6(n: int, k: int) -> tuple[torch.Tensor, ...]:
    return ops.int6_pack(torch.randint(-32, 32, (n, k), dtype=torch.int8)), _two_level(n, k, 16)


def _int4(n: int, k: int) -> tuple[torch.Tensor, ...]:
    return ops.int4_pack(torch.randint(0, 16, (n, k), dtype=torch.uint8)), _scales(n, k), _scales(n, k)


def _int4_two_level(n: int, k: int) -> tuple[torch.Tensor, ...]:
    return _int4(n, k)[0], _two_level(n, k, 32), _two_level(n, k, 32)


def _scales(n: int, k: int) -> torch.Tensor:
    return ops.pack_scales(torch.rand(n, k // 32).half())


def _two_level(n: int, k: int, group: int) -> torch.Tensor:
    integers = torch.randint(0, 64, (n, k // group), dtype=torch.int8)
    return ops.pack_two_level_scales(integers, torch.rand(n, k // 256).half())


if __name__ == "__main__":
    main("int6_gemm", cpu=run)
