"""Operators of a linear attention layer in the sizes of Qwen3-Next, compared with transformers' torch code.

The delta rule also with a decay for each channel, in the sizes of Kimi Linear, whose keys have as many heads as values.

Decode steps read and write the states of their sequences, 2 MiB each; bytes are those of states alone.
"""

from collections.abc import Callable
from functools import partial

import torch
from harness import Cases, Setting, cold_inputs, compare, main
from torch import Tensor
from torch.nn import functional as F
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from fastinfer import ops

KEY_HEADS, HEADS, DIM, KERNEL, EPS = 16, 32, 128, 4, 1e-6
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
STEPS = [(1, 1), (8, 1), (1, 512)]  # sequences, and tokens of each


def step(setting: Setting, seqs: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """query_start, state_reads and state_writes: each sequence has a slot, in place."""
    slots, count = torch.arange(seqs, dtype=torch.int32), seqs * tokens
    writes = torch.full((seqs, tokens), -1, dtype=torch.int32)
    writes[:, -1] = slots
    starts = torch.arange(0, count + 1, tokens, dtype=torch.int32)
    return starts.to(setting.device), slots.to(setting.device), writes.flatten().to(setting.device)


def activations(setting: Setting, tokens: int, width: int) -> Tensor:
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    return torch.randn(tokens, width, device=setting.device).to(dtype)


def rule_inputs(setting: Setting, seqs: int, tokens: int, channels: bool) -> tuple[Tensor | float, ...]:
    """The inputs of the delta rule; with ``channels`` each channel of a key has a decay, and each head a key."""
    state = torch.randn(seqs, HEADS, DIM, DIM, device=setting.device)
    widths = (3 * HEADS * DIM, HEADS * DIM, HEADS * DIM, HEADS) if channels else (CHANNELS, HEADS * DIM, HEADS, HEADS)
    per_token = (activations(setting, seqs * tokens, width) for width in widths)
    rates, bias, weight = torch.rand(HEADS), torch.randn(widths[2]) - 3, torch.ones(DIM)
    model = (t.to(setting.device) for t in (rates, bias, weight))
    return (*per_token, *model, EPS, state, *step(setting, seqs, tokens))


def torch_rule(
    seqs: int, qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, rates: Tensor, bias: Tensor, weight: Tensor, *rest: Tensor
) -> Tensor:
    q, k, v = (
        part.view(seqs, -1, part.shape[1] // DIM, DIM)
        for part in qkv.split([KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM], 1)
    )
    decay = (-rates.exp() * F.softplus(a.float() + bias)).view(seqs, -1, HEADS)
    q, k = (part.repeat_interleave(HEADS // KEY_HEADS, 2) for part in (q, k))  # as releases before 5.24 need
    rule = torch_recurrent_gated_delta_rule if len(qkv) == seqs else torch_chunk_gated_delta_rule
    return normed_rule(rule, (q, k, v), decay, b, rest[1], weight, F.silu(z.view(-1, DIM).float()))


def torch_channel_rule(
    seqs: int, qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, rates: Tensor, bias: Tensor, weight: Tensor, *rest: Tensor
) -> Tensor:
    q, k, v = (part.reshape(seqs, -1, HEADS, DIM) for part in qkv.chunk(3, 1))
    decay = (-rates.exp()[:, None] * F.softplus(a.float() + bias).view(-1, HEADS, DIM)).view(seqs, -1, HEADS, DIM)
    rule = recurrent_kimi_delta_attention if len(qkv) == seqs else chunk_kimi_delta_attention
    return normed_rule(rule, (q, k, v), decay, b, rest[1], weight, z.view(-1, DIM).float().sigmoid())


def normed_rule(
    rule: Callable[..., tuple[Tensor, Tensor]],
    heads: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    b: Tensor,
    state: Tensor,
    weight: Tensor,
    gate: Tensor,
) -> Tensor:
    """The output of a rule of transformers for queries, keys and values, normalised and times the gate."""
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    beta = b.sigmoid().view(len(state), -1, HEADS)
    o, last = rule(*heads, g=decay, beta=beta, initial_state=state, **options)
    state.copy_(last)
    o = o.reshape(-1, DIM).float()
    norm = weight * o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS)
    return (norm * gate).to(b.dtype).view(len(b), -1)


def conv_inputs(setting: Setting, seqs: int, tokens: int) -> tuple[Tensor | None, ...]:
    x = activations(setting, seqs * tokens, CHANNELS)
    weight, state = torch.randn(CHANNELS, KERNEL, device=setting.device), x.new_zeros(seqs, KERNEL - 1, CHANNELS)
    return x, weight.to(x.dtype), None, state, *step(setting, seqs, tokens)


def torch_conv(seqs: int, x: Tensor, weight: Tensor, _: None, state: Tensor, *slots: Tensor) -> Tensor:
    inputs = torch.cat([state, x.view(seqs, -1, CHANNELS)], 1)
    state.copy_(inputs[:, -(KERNEL - 1) :])
    return F.silu(F.conv1d(inputs.mT, weight[:, None], groups=CHANNELS)).mT.reshape(x.shape)


def run(setting: Setting) -> Cases:
    cases = setting.cases
    for seqs, length in STEPS:
        tokens = setting.size(length, min(length, 3))
        label = f"sequences: {seqs}, tokens of each: {tokens}"
        cases[f"gated_delta_rule, {label}"] = compare(
            {"fastinfer": ops.gated_delta_rule, "transformers": partial(torch_rule, seqs)},
            cold_inputs(partial(rule_inputs, setting, seqs, tokens, channels=False)),
            repeats=setting.repeats,
            bytes_moved=2 * seqs * HEADS * DIM * DIM * 4,
            flops=7 * seqs * tokens * HEADS * DIM * DIM,
        )
        cases[f"gated_delta_rule with decays of channels, {label}"] = compare(
            {
                "fastinfer": partial(ops.gated_delta_rule, sigmoid_gate=True),
                "transformers": partial(torch_channel_rule, seqs),
            },
            cold_inputs(partial(rule_inputs, setting, seqs, tokens, channels=True)),
            repeats=setting.repeats,
            bytes_moved=2 * seqs * HEADS * DIM * DIM * 4,
            flops=7 * seqs * tokens * HEADS * DIM * DIM,
        )
        cases[f"causal_conv1d, {label}"] = compare(
            {"fastinfer": ops.causal_conv1d, "torch": partial(torch_conv, seqs)},
            cold_inputs(partial(conv_inputs, setting, seqs, tokens)),
            repeats=setting.repeats,
        )
    return cases


if __name__ == "__main__":
    main("linear_attention", cpu=run, cuda=run)
