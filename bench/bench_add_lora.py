"""LoRA of mixed batches, compared with torch: gathered matrices and two batched products, or a product per adapter."""

from functools import partial

import torch
from harness import Cases, Setting, cold_inputs, compare, main
from torch import Tensor

from fastinfer import ops

# (tokens, adapters, rank, in_features, out_features); adjacent tokens have the same adapter, as in a prompt
SHAPES = [
    (1, 1, 16, 576, 576),
    (1, 1, 16, 4096, 4096),
    (1, 1, 64, 4096, 4096),
    (16, 16, 16, 4096, 4096),
    (16, 2, 16, 4096, 4096),
    (512, 1, 16, 576, 1536),
    (512, 1, 16, 4096, 4096),
]


def gathered(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> None:
    h = torch.bmm(a[ids], x.to(a.dtype)[:, :, None])
    y += torch.bmm(h.mT, b[ids])[:, 0]


def per_adapter(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> None:
    for slot in range(len(a)):
        rows = (ids == slot).nonzero()[:, 0]
        y[rows] += (x[rows].to(a.dtype) @ a[slot].T) @ b[slot]


def make_inputs(setting: Setting, tokens: int, slots: int, rank: int, features: int, out: int) -> tuple[Tensor, ...]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.device)

    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    a, b = random(slots, rank, features).bfloat16(), random(slots, rank, out).bfloat16()
    ids = torch.arange(tokens, device=setting.device).mul(slots).div(tokens, rounding_mode="floor").int()
    return random(tokens, out).to(dtype), random(tokens, features).to(dtype), a, b, ids


def run(setting: Setting) -> Cases:
    cases = setting.cases
    for shape in SHAPES:
        tokens, slots, rank, features, out = shape
        if setting.rehearsal and (tokens > 16 or features > 576):
            continue
        cases[f"{tokens} tokens, {slots} adapters of rank {rank}, {features} to {out}"] = compare(
            {"fastinfer": ops.add_lora, "torch, gathered": gathered, "torch, per adapter": per_adapter},
            cold_inputs(partial(make_inputs, setting, *shape)),
            repeats=setting.repeats,
            bytes_moved=2 * slots * rank * (features + out),
            flops=2 * tokens * rank * (features + out),
        )
    return cases


if __name__ == "__main__":
    main("add_lora", cpu=run, cuda=run)
