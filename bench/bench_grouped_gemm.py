"""MLP of a mixture of experts, compared with a loop over experts in torch.

For a single token it is also compared with a dense MLP that reads as many weights; the difference is the cost of
routing and of scattered experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Cases, Setting, compare, main
from torch import Tensor
from torch.nn import functional as F

from fastinfer import ops

# (hidden, intermediate, experts, top_k): Qwen3-30B-A3B with a quarter of its experts, Mixtral 8x7B with a quarter of
# its width.
SHAPES = [(2048, 768, 32, 8), (4096, 3584, 8, 2)]
TOKENS = [1, 16, 256]
GROUP = 128


@dataclass(frozen=True)
class Layer:
    """Weights [experts, ...] in three forms: bf16, packed in 4 bits, and the dtype with which torch is fastest.

    Packed weights are tuples of the operators' arguments. torch is fastest with fp32 on a CPU and bf16 on a GPU.
    """

    gate_up: Tensor
    down: Tensor
    gate_up4: tuple[Tensor, Tensor, None, int]
    down4: tuple[Tensor, Tensor, None, int]
    router: Tensor
    top_k: int
    for_torch: tuple[Tensor, Tensor, Tensor]  # gate_up, down, router


def make_layer(setting: Setting, hidden: int, intermediate: int, experts: int, top_k: int) -> Layer:
    def dense(rows: int, columns: int) -> Tensor:
        return torch.empty(experts, rows, columns, dtype=torch.bfloat16, device=setting.device).normal_(
            0, columns**-0.5
        )

    def packed(rows: int, columns: int) -> tuple[Tensor, Tensor, None, int]:
        q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=setting.device)
        one = ops.int4_pack(q), ops.pack_scales(torch.rand(rows, columns // GROUP, device=setting.device).half() / 64)
        qweight, scales = (t[None].repeat(experts, *[1] * t.dim()) for t in one)
        return qweight, scales, None, rows

    gate_up, down = dense(2 * intermediate, hidden), dense(hidden, intermediate)
    router = torch.randn(experts, hidden, device=setting.device).bfloat16()
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    return Layer(
        gate_up,
        down,
        packed(2 * intermediate, hidden),
        packed(hidden, intermediate),
        router,
        top_k,
        (gate_up.to(dtype), down.to(dtype), router.to(dtype)),
    )


def run(setting: Setting) -> Cases:
    cases = setting.cases
    bits = 8 if setting.device == "cpu" and not setting.rehearsal else 32
    for hidden, intermediate, experts, top_k in SHAPES[: setting.size(len(SHAPES), 1)]:
        sizes = (hidden, intermediate) if not setting.rehearsal else (128, 128)
        weights = make_layer(setting, *sizes, setting.size(experts, 8), setting.size(top_k, 2))
        for tokens in TOKENS[: setting.size(len(TOKENS), 2)]:
            # Successive calls choose different experts, because those of a real model are not in the cache either.
            m = setting.size(tokens, 3)
            xs = [(torch.randn(m, sizes[0], device=setting.device).bfloat16(), i) for i in range(16)]
            candidates: dict[str, Callable[[Tensor, int], Tensor]] = {
                "fastinfer int4": lambda x, i, w=weights: _int4(x, w, bits),
                "fastinfer bf16": lambda x, i, w=weights: _dense(x, w),
                "torch, a loop over experts": lambda x, i, w=weights: _loop(x, w),
            }
            if tokens == 1:
                candidates["fastinfer int4, one dense MLP"] = lambda x, i, w=weights: _one_mlp(x, w, i, bits)
            macs = 3 * sizes[0] * sizes[1] * weights.top_k
            cases[f"{tokens} tokens, {experts} experts, top {top_k}, {hidden} x {intermediate}"] = compare(
                candidates, xs, repeats=setting.repeats, flops=2 * macs * m
            )
    return cases


def _route(x: Tensor, weights: Layer) -> ops.Routing:
    return ops.route_experts(ops.gemm(x, weights.router), weights.top_k, True)


def _dense(x: Tensor, weights: Layer) -> Tensor:
    routing = _route(x, weights)
    hidden = ops.grouped_gemm(x, weights.gate_up, routing.row_ids, routing.expert_start, activation="silu")
    rows = ops.grouped_gemm(hidden, weights.down, routing.row_ids, routing.expert_start)
    return ops.combine_experts(rows, routing.expert_weights, x)


def _int4(x: Tensor, weights: Layer, bits: int) -> Tensor:
    routing = _route(x, weights)
    work = routing.row_ids, routing.expert_start
    hidden = ops.grouped_int4_gemm(x, *weights.gate_up4, *work, activation="silu", activation_bits=bits)
    rows = ops.grouped_int4_gemm(hidden, *weights.down4, *work, activation_bits=bits)
    return ops.combine_experts(rows, routing.expert_weights, x)


def _loop(x: Tensor, weights: Layer) -> Tensor:
    gate_up, down, router = weights.for_torch
    x = x.to(router.dtype)
    probabilities, chosen = F.linear(x, router).float().softmax(-1).topk(weights.top_k)
    probabilities = (probabilities / probabilities.sum(-1, keepdim=True)).to(x.dtype)
    out = x.clone()
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        out.index_add_(0, token, F.linear(F.silu(gate) * up, down[expert]) * probabilities[token, place, None])
    return out


def _one_mlp(x: Tensor, weights: Layer, index: int, bits: int) -> Tensor:
    """Compute a dense MLP of the size of ``top_k`` experts, whose weights it views as one."""
    start = index % (len(weights.router) // weights.top_k) * weights.top_k
    experts = slice(start, start + weights.top_k)
    qweight, scales, _, rows = weights.gate_up4
    hidden = ops.int4_gemm(
        x,
        qweight[experts].flatten(0, 1),
        scales[experts].flatten(0, 1),
        None,
        rows * weights.top_k,
        activation="silu",
        activation_bits=bits,
    )
    qweight, scales, _, rows = weights.down4
    # View the experts' weights as [hidden, top_k * intermediate]. The values are in another order, the size is equal.
    shape = [qweight.shape[1], weights.top_k * qweight.shape[2], *qweight.shape[3:]]
    groups = scales.shape[1], weights.top_k * scales.shape[2], scales.shape[3]
    return ops.int4_gemm(
        hidden, qweight[experts].view(shape), scales[experts].view(groups), None, rows, residual=x, activation_bits=bits
    )


if __name__ == "__main__":
    main("grouped_gemm", cpu=run, cuda=run)
