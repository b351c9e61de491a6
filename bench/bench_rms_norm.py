"""RMSNorm and LayerNorm compared with torch's, for a decode step, a small batch and a prompt.

On the CPU the caches are warm, and for the largest size also cold. On a GPU the cases include addition of a residual
before or after the norm, and int8 results.
"""

import torch
from harness import Cases, Setting, cold_inputs, compare, main
from torch.nn import functional as F

from fastinfer import ops

CPU_SHAPES = [(1, 576), (1, 4096), (16, 4096), (512, 576), (512, 4096)]
CUDA_SHAPES = [(1, 4096), (128, 4096), (8192, 4096), (8192, 8192), (32768, 8192)]


def torch_norm(x: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def torch_layer_norm(x: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, weight)


def run_cpu(setting: Setting) -> Cases:
    cases = setting.cases
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, hidden in CPU_SHAPES:

            def make(
                tokens: int = tokens, hidden: int = hidden, dtype: torch.dtype = dtype
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return torch.randn(tokens, hidden).to(dtype), torch.randn(hidden).to(dtype)

            candidates = {"fastinfer": ops.rms_norm, "torch": torch_norm}
            x, weight = make()
            bytes_moved = 2 * x.nbytes + weight.nbytes
            label = f"[{tokens}, {hidden}] {str(dtype).removeprefix('torch.')}"
            cases[label] = compare(candidates, [(x, weight)], repeats=setting.repeats, bytes_moved=bytes_moved)
            if (tokens, hidden) == CPU_SHAPES[-1]:
                cases[f"{label} cold"] = compare(
                    candidates, cold_inputs(make), repeats=setting.repeats, bytes_moved=bytes_moved
                )
            candidates = {"fastinfer": lambda x, w: ops.layer_norm(x, w, w), "torch": torch_layer_norm}
            cases[f"layer_norm {label}"] = compare(
                candidates, [(x, weight)], repeats=setting.repeats, bytes_moved=bytes_moved
            )
    return cases


def run_cuda(setting: Setting) -> Cases:
    def torch_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch_norm(residual.add_(x), weight)

    cases = setting.cases
    for tokens, hidden in CUDA_SHAPES:
        rows = setting.size(tokens, 2)

        def make(rows: int = rows, hidden: int = hidden) -> tuple[torch.Tensor, ...]:
            x, residual = torch.randn(2, rows, hidden, device=setting.device).bfloat16().unbind()
            return x.clone(), torch.randn(hidden, device=setting.device).bfloat16(), residual.clone()

        inputs = cold_inputs(make)
        elements = rows * hidden
        groups = {
            "rms_norm": (4, {"fastinfer": lambda x, w, r: ops.rms_norm(x, w), "torch": torch_norm}),
            "rms_norm, residual after": (
                6,
                {
                    "fastinfer": lambda x, w, r: ops.rms_norm(x, w, residual=r),
                    "torch": lambda x, w, r: r + torch_norm(x, w),
                },
            ),
            "layer_norm": (4, {"fastinfer": lambda x, w, r: ops.layer_norm(x, w, w), "torch": torch_layer_norm}),
            "add_rms_norm": (8, {"fastinfer": lambda x, w, r: ops.add_rms_norm(x, r, w), "torch": torch_add}),
            "rms_norm_quantize": (7, {"fastinfer": lambda x, w, r: ops.rms_norm_quantize(x, r, w)}),
        }
        for name, (bytes_each, candidates) in groups.items():
            cases[f"{name} [{tokens}, {hidden}]"] = compare(
                candidates, inputs, repeats=setting.repeats, bytes_moved=bytes_each * elements
            )
    return cases


if __name__ == "__main__":
    main("rms_norm", run_cpu, run_cuda)
