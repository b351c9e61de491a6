"""SiLU and GELU with a gate, and GELU without one, on a GPU, compared with torch's separate operations."""

import torch
from harness import Cases, Setting, cold_inputs, compare, main
from torch.nn import functional as F

from fastinfer import ops

SHAPES = [(1, 14336), (128, 14336), (8192, 14336)]


def run(setting: Setting) -> Cases:
    def torch_silu(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def torch_gelu(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    cases = setting.cases
    for tokens, width in SHAPES:
        shape = setting.size(tokens, 2), 2 * width
        inputs = cold_inputs(lambda shape=shape: (torch.randn(shape, device=setting.device).bfloat16(),))
        elements = shape[0] * shape[1]  # two bytes each; a gated result is half as wide
        for name, (ours, theirs, bytes_moved) in {
            "silu_and_mul": (ops.silu_and_mul, torch_silu, 3 * elements),
            "gelu_and_mul": (ops.gelu_and_mul, torch_gelu, 3 * elements),
            "gelu": (ops.gelu, lambda x: F.gelu(x, approximate="tanh"), 4 * elements),
        }.items():
            cases[f"{name} [{tokens}, {width}]"] = compare(
                {"fastinfer": ours, "torch": theirs},
                inputs,
                repeats=setting.repeats,
                bytes_moved=bytes_moved,
            )
    return cases


if __name__ == "__main__":
    main("activation", cuda=run)
