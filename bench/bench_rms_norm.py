"""RMSNorm beside torch's: one decode step, a small batch, a prompt; caches warm, and cold for the largest."""

import torch
from harness import Timing, cold_inputs, compare, main

from fastinfer import ops

SHAPES = [(1, 576), (1, 4096), (16, 4096), (512, 576), (512, 4096)]


def run(repeats: int) -> dict[str, list[Timing]]:
    cases = {}
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, hidden in SHAPES:

            def make(
                tokens: int = tokens, hidden: int = hidden, dtype: torch.dtype = dtype
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return torch.randn(tokens, hidden).to(dtype), torch.randn(hidden).to(dtype)

            candidates = {
                "fastinfer": ops.rms_norm,
                "torch": lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6),
            }
            x, weight = make()
            bytes_moved = 2 * x.nbytes + weight.nbytes
            label = f"[{tokens}, {hidden}] {str(dtype).removeprefix('torch.')}"
            cases[label] = compare(candidates, [(x, weight)], repeats=repeats, bytes_moved=bytes_moved)
            if (tokens, hidden) == SHAPES[-1]:
                cases[f"{label} cold"] = compare(
                    candidates, cold_inputs(make), repeats=repeats, bytes_moved=bytes_moved
                )
    return cases


if __name__ == "__main__":
    main("rms_norm", run)
