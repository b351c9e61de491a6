"""4-bit linear layers. Several copies of the weights take turns, so that they are read from memory.

They are compared with torch's fp32 and bf16 layers on the CPU, and on a GPU with torch's int4 kernel, cuBLAS, and the
kernels of other projects that are installed (``pip install gemlite humming-kernels[cu13]``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Cases, Setting, Timing, cold_inputs, compare, main
from peers.gpu_gemm import Make, int4_peers
from torch.nn import functional as F

from fastinfer import ops

# (out_features, in_features): SmolLM2-135M's gate and up, and a layer of an 8B model.
CPU_WEIGHTS = [(3072, 576), (4096, 4096)]
CPU_TOKENS = [1, 16, 128]
CPU_GROUP = 32

# A common square size, an 8B model's gate and up, and a weight of 117 MB.
CUDA_WEIGHTS = [(8192, 8192), (28672, 4096), (28672, 8192)]
CUDA_TOKENS = [1, 16, 32, 64, 1024, 4096]
CUDA_GROUP = 128


def run_cpu(setting: Setting) -> Cases:
    cases = setting.cases
    for out_features, in_features in CPU_WEIGHTS:
        for tokens in CPU_TOKENS:
            x = torch.randn(tokens, in_features)

            def make(n: int = out_features, k: int = in_features) -> tuple[torch.Tensor, ...]:
                q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
                scales = torch.rand(n, k // CPU_GROUP).half()
                dense = torch.randn(n, k)
                return ops.int4_pack(q), ops.pack_scales(scales), dense, dense.bfloat16()

            def int4(bits: int, x: torch.Tensor = x, n: int = out_features):  # type: ignore[no-untyped-def]
                return lambda qweight, scales, *_: ops.int4_gemm(x, qweight, scales, None, n, activation_bits=bits)

            half = x.bfloat16()
            candidates = {
                "fastinfer, 8-bit activations": int4(8),
                "fastinfer, 16-bit activations": int4(16),
                "fastinfer, fp32": int4(32),
                "torch fp32": lambda q, s, dense, dense16, x=x: F.linear(x, dense),
                "torch bf16": lambda q, s, dense, dense16, x=half: F.linear(x, dense16),
            }
            cases[f"M={tokens} N={out_features} K={in_features}"] = compare(
                candidates,
                cold_inputs(make),
                repeats=setting.repeats,
                bytes_moved=out_features * in_features * 9 // 16,  # packed weight: 4 bits each, 2 bytes per group
                flops=2 * tokens * out_features * in_features,
            )
    return cases


def run_cuda(setting: Setting) -> Cases:
    cases = setting.cases
    for out_features, in_features in CUDA_WEIGHTS:
        n, k = setting.size(out_features, 64), setting.size(in_features, 256)
        peers = {name: partial(_peer, make) for name, make in int4_peers().items()}
        weights = {name: _try_cold_inputs(partial(make, n, k, setting)) for name, make in {**FORMS, **peers}.items()}
        for tokens in CUDA_TOKENS:
            m = setting.size(tokens, 2)
            x = torch.randn(m, k, device=setting.device).bfloat16()
            timings: list[Timing] = []
            for name, form in weights.items():
                if isinstance(form, str):
                    timings.append(Timing(name, [], None, None, error=form))
                    continue
                # Each form has its own weights, so the forms are timed one after the other.
                product = PRODUCTS.get(name, _peer_product)
                run = {name: lambda *weight, x=x, n=n, product=product: product(x, n, *weight)}
                moved = sum(part.nbytes for part in form[0] if isinstance(part, torch.Tensor)) + 2 * m * (n + k)
                timings += compare(run, form, repeats=setting.repeats, bytes_moved=moved, flops=2 * m * n * k)
            cases[f"M={tokens} N={out_features} K={in_features} g{CUDA_GROUP}"] = timings
    return cases


def fastinfer_weight(n: int, k: int, setting: Setting) -> tuple[torch.Tensor, ...]:
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=setting.device)
    return ops.int4_pack(q), ops.pack_scales(torch.rand(n, k // CUDA_GROUP, device=setting.device).half())


def _torch_int4(n: int, k: int, setting: Setting) -> tuple[torch.Tensor, ...]:
    """Create a random weight in tinygemm's layout; its values do not matter here."""
    shape = (n // 8, k // 128, 32, 4)
    packed = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=setting.device)
    return packed, torch.rand(k // CUDA_GROUP, n, 2, device=setting.device).bfloat16()


def _peer(make: Make, n: int, k: int, setting: Setting) -> tuple[Any, ...]:
    """Create a random weight as another project's layer, after the tensors of the layer."""
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=setting.device)
    layer = make(q, torch.rand(n, k // CUDA_GROUP, device=setting.device))
    return *layer.state_dict().values(), layer


def _peer_product(x: torch.Tensor, n: int, *weight: Any) -> torch.Tensor:
    return weight[-1](x)  # type: ignore[no-any-return]


def _try_cold_inputs(make: Callable[[], tuple[Any, ...]]) -> list[tuple[Any, ...]] | str:
    """Return the error's text if a form cannot be made: the other ones are still compared."""
    try:
        return cold_inputs(make)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _dense(n: int, k: int, setting: Setting) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, k, device=setting.device).bfloat16(),)


FORMS = {"fastinfer": fastinfer_weight, "torch int4": _torch_int4, "torch bf16 (cuBLAS)": _dense}
PRODUCTS = {
    "fastinfer": lambda x, n, qweight, scales: ops.int4_gemm(x, qweight, scales, None, n),
    "torch int4": lambda x, n, packed, scales: torch.ops.aten._weight_int4pack_mm(x, packed, CUDA_GROUP, scales),
    "torch bf16 (cuBLAS)": lambda x, n, weight: F.linear(x, weight),
}


if __name__ == "__main__":
    main("int4_gemm", run_cpu, run_cuda)
