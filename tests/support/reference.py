"""What every operator must compute, in plain torch and fp64, as short as it can be said.

A function has its operator's name and arguments. It returns the exact result unrounded (fp64), so that a test sees the
operator's own rounding; what the operator changes in place is returned. Nothing here calls fastinfer.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

TILE_ROWS = 16
ACTIVATION_RUN = 16  # inputs that share a scale
LARGEST_MULTIPLIER = 4095


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, factor: float = 1.0) -> Tensor:
    x = x.double()
    norm = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return factor * (norm if residual is None else residual.double() + norm)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of the sum as it is stored, and that sum in the dtype of ``residual``."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), eps)


def silu_and_mul(x: Tensor, limit: float = torch.inf) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def gelu_and_mul(x: Tensor, approximate: str = "tanh") -> Tensor:
    gate, up = x.double().chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up


def clamped_swiglu(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x.double()).square()


def xielu(x: Tensor, positive: float, negative: float, beta: float = 0.5, eps: float = -1e-6) -> Tensor:
    x = x.double()
    below = negative * (x.clamp(max=eps).expm1() - x)
    return torch.where(x > 0, positive * x.square(), below) + beta * x


def gelu(x: Tensor, approximate: str = "tanh") -> Tensor:
    return F.gelu(x.double(), approximate=approximate)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """``gate`` has as many columns as ``x``, or a divisor of them."""
    gates = gate.double().sigmoid()
    return x.double() * (gates if gate.shape == x.shape else gates.repeat_interleave(x.shape[1] // gate.shape[1], 1))


def softplus_gate(x: Tensor, gate: Tensor) -> Tensor:
    """The same with softplus."""
    gates = gate.double().clamp(min=0) + gate.double().abs().neg().exp().log1p()
    return x.double() * (gates if gate.shape == x.shape else gates.repeat_interleave(x.shape[1] // gate.shape[1], 1))


def softcap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x.double() / cap)


def rotary_embedding(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate ``x`` [tokens, heads, head_dim]: queries and keys alike."""
    x = x.double()
    rotary_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache.double()[positions][:, None, :].chunk(2, -1)
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
    turned = [a * cos - b * sin, b * cos + a * sin]
    rotated = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([rotated, rest], -1)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    query_start: Tensor,
    state_reads: Tensor,
    state_writes: Tensor,
    gates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The result, and the states after the call, which are copies of inputs."""
    if gates is not None:
        before, after = gates.chunk(2, dim=1)
        x = (before.double() * x.double()).to(x.dtype)
    out, states = torch.empty_like(x, dtype=torch.float64), conv_state.clone()
    for seq, slot in enumerate(state_reads.tolist()):
        begin, end = query_start[seq : seq + 2].tolist()
        window = torch.zeros_like(conv_state[0]) if slot < 0 else conv_state[slot]
        for token in range(begin, end):
            inputs = torch.cat([window, x[token : token + 1]])
            total = (weight.double().T * inputs.double()).sum(0)
            total = total if bias is None else total + bias.double()
            out[token] = F.silu(total) if gates is None else after[token].double() * total
            window = inputs[1:]
            if state_writes[token] >= 0:
                states[state_writes[token]] = window
    return out, states


def gated_delta_rule(
    qkv: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    recurrent_state: Tensor,
    query_start: Tensor,
    state_reads: Tensor,
    state_writes: Tensor,
    beta_scale: float = 1.0,
    sigmoid_gate: bool = False,
    decay_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The result, and the states after the call, in fp64."""
    _, heads, key_dim, value_dim = recurrent_state.shape
    keys = (qkv.shape[1] - heads * value_dim) // 2
    q, k, v = (
        x.double().unflatten(1, (-1, dim))
        for x, dim in zip(qkv.split([keys, keys, heads * value_dim], 1), (key_dim, key_dim, value_dim), strict=True)
    )
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q / key_dim**0.5, k))
    rates, steps = a_log.double().exp()[:, None], (a.double() + dt_bias.double()).unflatten(1, (heads, -1))
    decay = (decay_bound * (rates * steps).sigmoid() if decay_bound else -rates * F.softplus(steps)).exp()
    beta = beta_scale * b.double().sigmoid()
    o, states = torch.empty_like(v), recurrent_state.double()
    for seq, slot in enumerate(state_reads.tolist()):
        begin, end = query_start[seq : seq + 2].tolist()
        state = torch.zeros_like(states[0]) if slot < 0 else recurrent_state[slot].double()
        for t in range(begin, end):
            state = decay[t, :, :, None] * state  # of heads, or of all channels of their keys
            d = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t, :, :, None] * d[:, None, :]
            o[t] = torch.einsum("hkv,hk->hv", state, q[t])
            if state_writes[t] >= 0:
                states[state_writes[t]] = state
    gates = z.double().view_as(o)
    return (rms_norm(o, norm_weight, eps) * (gates.sigmoid() if sigmoid_gate else F.silu(gates))).flatten(1), states


def mamba2_scan(
    xbc: Tensor,
    z: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    dt_min: float,
    dt_max: float,
    ssm_state: Tensor,
    query_start: Tensor,
    state_reads: Tensor,
    state_writes: Tensor,
) -> tuple[Tensor, Tensor]:
    """The result, and the states after the call, in fp64."""
    _, heads, state_dim, head_dim = ssm_state.shape
    inner = heads * head_dim
    x, b, c = xbc.double().split([inner, *[(xbc.shape[1] - inner) // 2] * 2], 1)
    x, b, c = (part.unflatten(1, (-1, dim)) for part, dim in ((x, head_dim), (b, state_dim), (c, state_dim)))
    groups = b.shape[1]
    b, c = (part.repeat_interleave(heads // groups, 1) for part in (b, c))
    step = F.softplus(dt.double() + dt_bias.double()).clamp(dt_min, dt_max)
    decay = (-a_log.double().exp() * step).exp()
    y, states = torch.empty_like(x), ssm_state.double()
    for seq, slot in enumerate(state_reads.tolist()):
        begin, end = query_start[seq : seq + 2].tolist()
        state = torch.zeros_like(states[0]) if slot < 0 else ssm_state[slot].double()
        for t in range(begin, end):
            state = decay[t, :, None, None] * state + b[t, :, :, None] * (step[t, :, None] * x[t])[:, None, :]
            y[t] = torch.einsum("hnp,hn->hp", state, c[t]) + d.double()[:, None] * x[t]
            if state_writes[t] >= 0:
                states[state_writes[t]] = state
    y = y.flatten(1) * F.silu(z.double())
    if norm_weight is not None:
        weight = norm_weight.double().unflatten(0, (groups, -1))
        y = rms_norm(y.unflatten(1, (groups, -1)), weight, eps).flatten(1)
    return y, states


def store_kv_cache(x: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
    """The K or V cache after the store."""
    cache = cache.clone()
    slots = cache.view(-1, *cache.shape[2:])
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot != -1:
            slots[slot] = x[token].to(cache.dtype)
    return cache


def quantize_row(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [..., n] in steps of their scale, unrounded, and the scales [...]: amax / 127 for int8, amax / 448 for e4m3.

    For comparison with what was rounded: see helpers.assert_quantized.
    """
    scale = x.double().abs().amax(-1) / (127 if dtype == torch.int8 else 448)
    return torch.where(scale[..., None] > 0, x.double() / scale[..., None], 0.0), scale


INT4_GROUPS = 16, 64  # of keys and of values


def quantize_int4(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Rows [..., n] as [..., n / 2] bytes of two codes, and each group's scale and minimum, [..., groups, 2] fp16.

    In fp32, step by step as store_kv_cache, whose results are the same bits.
    """
    codes, pairs = [], []
    for group in x.float().split(size, -1):
        lowest, largest = group.amin(-1, keepdim=True) + 0.0, group.amax(-1, keepdim=True)
        minimum = lowest.half()
        # On a GPU torch divides by a number as a product with its reciprocal, which rounds twice.
        scale = (((largest - minimum.float()).clamp(min=0) + 0.0) / torch.full_like(largest, 15)).half()
        shown = (lowest >= -65504) & (minimum.float() + 15 * scale.float() <= 65504)
        steps = ((group - minimum.float()) * (1 / scale.float())).round().clamp(0, 15)
        codes.append(torch.where(shown & (scale > 0), steps, 0.0).byte())
        pairs.append(torch.where(shown, torch.cat([scale, minimum], -1), torch.nan))
    q = torch.cat(codes, -1)
    return q[..., ::2] | q[..., 1::2] << 4, torch.stack(pairs, -2)


def dequantize_int4(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    """What codes and scales of :func:`quantize_int4` are worth, in fp64."""
    q = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).double()
    scale, minimum = (part.repeat_interleave(size, -1)[..., : q.shape[-1]] for part in scales.double().unbind(-1))
    return scale * q + minimum


def hadamard(x: Tensor) -> Tensor:
    """Rows [..., n] times the Hadamard matrix of the largest power of two that divides n, run by run, in fp64."""
    matrix, size = torch.ones(1, 1, dtype=torch.float64), x.shape[-1] & -x.shape[-1]
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.double().unflatten(-1, (-1, size)) @ matrix.to(x.device)).flatten(-2)


def key_levels(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The levels of keys, [blocks, block_size, heads, head_dim], and their scales [blocks, block_size, heads]."""
    words, scales = codes[:, :, :-1].transpose(1, 3), codes[:, :, -1].transpose(1, 2)
    bits = words[..., None] >> torch.tensor([0, 8, 16, 24, 4, 12, 20, 28], device=codes.device)
    levels = (bits & 15).transpose(2, 3).flatten(-2).double() - 7.5
    return levels, scales.contiguous().view(torch.float32)


def assert_nearest_levels(levels: Tensor, scales: Tensor, rows: Tensor) -> None:
    """Assert that levels and scales are those of rows [blocks, block_size, heads, head_dim], after the rotation."""
    rotated = hadamard(rows)
    torch.testing.assert_close(scales.double(), rotated.abs().amax(-1) / 7.5, rtol=1e-6, atol=0)
    steps = torch.where(scales[..., None] > 0, rotated / scales[..., None].double(), 0.5)
    assert ((levels - steps).abs() <= 0.5001).all()


def value_levels(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The levels of values, [blocks, block_size, heads, head_dim], and their scales [blocks, block_size, heads]."""
    blocks, heads, words, block_size = codes.shape
    eights, scales = codes.flatten(2).split([(words - 1) * block_size, block_size], 2)
    bits = eights.view(blocks, heads, block_size // 8, 1, -1) >> torch.tensor([0, 8, 16, 24, 4, 12, 20, 28])[:, None]
    levels = (bits & 15).flatten(2, 3).double() - 7.5
    return levels.transpose(1, 2), scales.transpose(1, 2).contiguous().view(torch.float32)


def norm_rotary(
    x: Tensor, weight: Tensor | None, eps: float, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool
) -> Tensor:
    """norm_rotary_store's queries, or its keys on their way to the cache."""
    x = x.double() if weight is None else rms_norm(x, weight, eps)
    return rotary_embedding(x, positions, cos_sin_cache, interleaved)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunked: bool = False,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Output [tokens, q_heads, value_dim] and lse [tokens, q_heads], with every step in ``compute_dtype``.

    With the dtype of ``q`` this is the naive low-precision attention whose error sets the tolerance.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k_cache.shape[2]
    block_size = k_cache.shape[1]
    out = torch.zeros(*q.shape[:2], v_cache.shape[3], dtype=compute_dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=compute_dtype, device=q.device)
    starts = query_start.tolist()
    for sequence, length in enumerate(seq_lens.tolist()):
        queries = slice(starts[sequence], starts[sequence + 1])
        count = queries.stop - queries.start
        blocks = block_table[sequence, : -(-length // block_size)].long()
        k, v = (
            cache[blocks].flatten(0, 1)[:length].to(compute_dtype).repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )
        logits = torch.einsum("qhd,khd->hqk", q[queries].to(compute_dtype), k) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        at = torch.arange(length - count, length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        visible = key <= at
        if window:
            visible &= key >= at - at % window if chunked else key > at - window
        logits = logits.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            sink = sinks.to(compute_dtype)[:, None, None].expand(-1, count, 1)
            logits = torch.cat([logits, sink], -1)
        lse[queries] = logits.logsumexp(-1).T
        weights = logits.softmax(-1).nan_to_num(0.0)[..., :length]  # NaN: a query that sees nothing
        out[queries] = torch.einsum("hqk,khd->qhd", weights, v)
    return out, lse


def merge_attention_states(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.stack([a_lse, b_lse]).double().logsumexp(0)
    weights = (
        (part - lse).exp().nan_to_num(0.0)[..., None] for part in (a_lse.double(), b_lse.double())
    )  # NaN: no part
    parts = (torch.where(weight > 0, weight * part.double(), 0) for part, weight in zip((a, b), weights, strict=True))
    return sum(parts, torch.zeros(())), lse


def gemm(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Tensor | None = None,
    activation_bits: int = 32,
) -> Tensor:
    """Also the reference of int8_gemm and int4_gemm: ``weight`` is then the dequantised one."""
    x = x.double() if norm_weight is None else rms_norm(x, norm_weight, eps)
    if activation_bits == 8:
        x = round_activations(x)
    out = x @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    if activation is not None:
        gate, up = out.unflatten(1, (-1, 2, TILE_ROWS)).unbind(2)
        gated = {
            "silu": lambda: F.silu(gate) * up,
            "gelu_tanh": lambda: F.gelu(gate, approximate="tanh") * up,
            "gelu": lambda: F.gelu(gate) * up,
            "clamped_swiglu": lambda: clamped_swiglu(torch.cat([gate, up], -1)),
        }
        out = gated[activation]().flatten(1)
    if residual is not None:
        out = out + residual.double()
    return out


def route_experts(
    logits: Tensor,
    top_k: int,
    renormalize: bool,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
    jitter: float = 0.01,
    biased_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weights and ids [tokens, top_k]; stable: the smaller id first among equals."""
    tokens, experts = logits.shape
    if scoring == "sparsemixer":
        return _sparse_mixer(logits, top_k, scale, jitter)
    scores = logits.double().sigmoid() if scoring == "sigmoid" else logits.double().softmax(-1)
    order = logits.double()
    if bias is not None or num_groups > 1:
        order = (order if biased_logits else scores) + (0 if bias is None else bias.double())
    if num_groups > 1:
        by_group = order.view(tokens, num_groups, -1)
        sums = by_group.topk(2).values.sum(-1)
        worst = sums.sort(dim=-1, descending=True, stable=True).indices[:, top_groups:]
        order = by_group.scatter(1, worst[..., None].expand(-1, -1, by_group.shape[2]), -torch.inf).view(
            tokens, experts
        )
    ids = order.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, ids)
    weights = (weights / weights.sum(-1, keepdim=True) if renormalize else weights) * scale
    return weights if expert_scale is None else weights * expert_scale.double()[ids], ids


def _sparse_mixer(logits: Tensor, top_k: int, scale: float, jitter: float) -> tuple[Tensor, Tensor]:
    left, weights, ids = logits.double(), [], []
    for _ in range(top_k):
        best, expert = left.max(-1, keepdim=True)  # the first one among equals
        # Compared in fp32, as the operator and transformers do.
        largest, sizes = best.float(), logits.float().abs()
        too_small = (largest - logits.float()) / sizes.clamp(min=largest) > 2 * jitter
        weights.append(left.masked_fill(too_small, -torch.inf).softmax(-1).gather(-1, expert))
        ids.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(weights, -1) * scale, torch.cat(ids, -1)


def grouped_gemm(
    x: Tensor, weight: Tensor, expert_ids: Tensor, *, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Row r of the result is that of expert ``expert_ids.flatten()[r]`` and of the token that this row belongs to."""
    experts = expert_ids.flatten()
    x = x.repeat_interleave(len(experts) // max(len(x), 1), 0)
    biases = [None] * len(weight) if bias is None else list(bias)
    rows = [
        gemm(x[None, row], weight[expert], bias=biases[expert], activation=activation)
        for row, expert in enumerate(experts.tolist())
    ]
    out_features = weight.shape[1] // (2 if activation else 1)
    return torch.cat(rows) if rows else x.new_zeros(0, out_features, dtype=torch.float64)


def combine_experts(x: Tensor, expert_weights: Tensor, residual: Tensor | None = None) -> Tensor:
    rows = x.double().view(*expert_weights.shape, x.shape[1]) * expert_weights.double()[..., None]
    return rows.sum(1) + (0.0 if residual is None else residual.double())


def activation_multipliers(x: Tensor) -> Tensor:
    """The scales that would just hold each run of ``x``, [tokens, runs, 1] between 0 and 4095, in steps of its row."""
    runs = x.double().unflatten(-1, (-1, ACTIVATION_RUN)).abs().amax(-1, keepdim=True)
    return runs / x.double().abs().amax(-1)[:, None, None] * LARGEST_MULTIPLIER


def activation_steps(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [tokens, in_features] in steps of its run's scale, as [tokens, runs, 16], and those scales: an integer,
    1..4095, times the row's amax / 127 / 4095, the smallest that keeps the steps within 127."""
    multiplier = activation_multipliers(x).ceil().clamp(min=1)
    scale = multiplier * x.double().abs().amax(-1)[:, None, None] / 127 / LARGEST_MULTIPLIER
    runs = x.double().unflatten(-1, (-1, ACTIVATION_RUN))
    return torch.where(scale > 0, runs / scale, 0.0), torch.where(scale > 0, scale, 0.0)


def round_activations(x: Tensor) -> Tensor:
    """``x`` rounded to 8 bits per run, half to even."""
    steps, scale = activation_steps(x)
    return (steps.round() * scale).flatten(-2)


def near_ties(x: Tensor) -> Tensor:
    """Rows [tokens] of ``x`` that fp32 may round otherwise: an element is close to half a step, or a multiplier to the
    next integer."""
    steps, multiplier = activation_steps(x)[0], activation_multipliers(x)
    tie = (steps.abs() % 1 - 0.5).abs() < 5e-5  # 127 steps times 3 ulp of fp32
    edge = ((multiplier - multiplier.round()).abs() < 1e-3) & (multiplier < LARGEST_MULTIPLIER)
    return tie.flatten(1).any(1) | edge.flatten(1).any(1)


def int8_pack(q: Tensor) -> Tensor:
    """[tile, block of 32 inputs, run of four inputs, row, input]."""
    rows, columns = q.shape
    padded = F.pad(q, (0, 0, 0, -rows % TILE_ROWS))
    return padded.view(-1, TILE_ROWS, columns // 32, 8, 4).permute(0, 2, 3, 1, 4).contiguous()


def int4_pack(q: Tensor) -> Tensor:
    """As int8_pack, with runs 2s and 2s + 1 in the low and high nibbles of step s."""
    runs = int8_pack(q)
    return runs[:, :, 0::2] | runs[:, :, 1::2] << 4


def int5_pack(q: Tensor) -> Tensor:
    """The low four bits as int4_pack, then the high bits of all eight runs."""
    runs = int8_pack(q)
    low, high = runs & 15, (runs >> 4) << torch.arange(8, dtype=torch.uint8)[:, None, None]
    return torch.cat([low[:, :, 0::2] | low[:, :, 1::2] << 4, high.sum(2, keepdim=True, dtype=torch.uint8)], 2)


def int6_pack(q: Tensor) -> Tensor:
    """q + 32: the low four bits as int4_pack, then for each run of 16 inputs the high bits of its runs of four."""
    words = int8_pack(q + 32).view(torch.uint8)
    words[:, :, :, q.shape[0] % TILE_ROWS :] *= torch.arange(len(words))[:, None, None, None, None] < q.shape[0] // 16
    high = (words >> 4).unflatten(2, (2, 4)) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None, None]
    return torch.cat([(words[:, :, 0::2] & 15) | (words[:, :, 1::2] & 15) << 4, high.sum(3, dtype=torch.uint8)], 2)


def int8_pack_fragments(q: Tensor) -> Tensor:
    """A GPU's order: lane 4g + t of a block has rows g, g + 8 of inputs 4t .. 4t + 3, then of those 16 further on."""
    rows, columns = q.shape
    padded = F.pad(q, (0, 0, 0, -rows % TILE_ROWS))
    values = padded.view(-1, 2, 8, columns // 32, 2, 4, 4)  # tile, upper rows, g, block, half, t, input
    return values.permute(0, 3, 2, 5, 4, 1, 6).reshape(-1, columns // 32, 8, TILE_ROWS, 4)


def int4_pack_fragments(q: Tensor) -> Tensor:
    """The same lanes; a half's word has in nibble u + 2 p + 4 i row g + 8u, input 2p + i."""
    lanes = int8_pack_fragments(q).view(-1, q.shape[1] // 32, 32, 2, 2, 2, 2)  # tile, block, lane, half, u, p, i
    nibbles = lanes.permute(0, 1, 2, 3, 6, 5, 4)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(-1, q.shape[1] // 32, 4, TILE_ROWS, 4)


def dequantize(q: Tensor, scales: Tensor, mins: Tensor | None, offset: int = 0) -> Tensor:
    """``scale * (q - offset) + min`` in fp32 from unpacked values [out_features, in_features]."""
    group = q.shape[1] // scales.shape[1]
    weight = scales.float().repeat_interleave(group, 1) * (q.float() - offset)
    return weight if mins is None else weight + mins.float().repeat_interleave(group, 1)


def sample_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probability [vocab] with which ``sample`` must draw each token of one row of logits [vocab]."""
    if temperature == 0:
        return F.one_hot(logits.argmax(), logits.shape[0]).double()
    logits, ids = logits.double().sort(descending=True, stable=True)  # stable: the smaller id first among equals
    p = ((logits - logits[0]) / temperature).softmax(0)
    p[p < min_p * p[0]] = 0
    p[top_k or len(p) :] = 0
    p /= p.sum()
    p[p.cumsum(0) - p >= top_p] = 0  # the token that crosses top_p stays
    return torch.zeros_like(p).scatter_(0, ids, p / p.sum())


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """Bools [rows, count] of a bit mask [rows, ceil(count / 32)] int32."""
    bits = words[:, :, None] >> torch.arange(32, device=words.device) & 1
    return bits.flatten(1)[:, :count].bool()


def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    adapter_ids: Tensor,
    ranks: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    expert_ids: Tensor | None = None,
) -> Tensor:
    """fp64; ``y`` and ``b`` are [rows, out] and [slots, max_rank, out], or [slots, experts, max_rank, out]."""
    x, out = x.double(), y.double().clone()
    if norm_weight is not None:
        x = rms_norm(x, norm_weight.double(), eps)
    if expert_ids is None:
        expert_ids = torch.zeros(len(adapter_ids), 1, dtype=torch.int32)
        a, b, ranks = a[:, None], b[:, None], ranks[:, None]
    top_k = expert_ids.shape[1]
    for row, expert in enumerate(expert_ids.flatten().tolist()):
        slot = int(adapter_ids[row // top_k])
        if slot >= 0:
            rank, own = int(ranks[slot, expert]), x[row * len(x) // len(y)]
            out[row] += (a[slot, expert, :rank].double() @ own) @ b[slot, expert, :rank].double()
    return out


def sample_logits(
    logits: Tensor,
    penalties: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    mask: Tensor,
    bias_start: Tensor,
    bias_tokens: Tensor,
    bias_values: Tensor,
) -> Tensor:
    """The logits [rows, vocab] that ``sample`` draws from, after penalties, bias and mask."""
    z, vocab = logits.double(), logits.shape[1]
    repetition, presence, frequency = penalties.double()[:, :, None].unbind(1)
    seen = unpack_bits(prompt_mask, vocab) | (output_counts > 0)
    z = torch.where(seen, torch.where(z > 0, z / repetition, z * repetition), z)
    z = z - (output_counts > 0) * presence - output_counts * frequency
    rows = torch.arange(len(z), device=z.device).repeat_interleave(bias_start.diff())
    z = z.index_put((rows, bias_tokens.long()), bias_values.double(), accumulate=True)
    return z.masked_fill(~unpack_bits(mask, vocab), -torch.inf)


def philox(seed: int, position: int, index: Tensor, stream: int) -> Tensor:
    """Philox-4x32-10's words [n, 4] int64 for n indices, as numbers below 2^32."""
    low = 2**32 - 1

    def multiplied(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
        """Upper and lower half of a product of 64 bits, by halves of the word, as int64 has a sign."""
        upper, lower = factor * (word >> 16), factor * (word & 0xFFFF)
        total = ((upper & 0xFFFF) << 16) + (lower & low)
        return (upper >> 16) + (lower >> 32) + (total >> 32), total & low

    words = [torch.full_like(index, word) for word in (position & low, position >> 32 & low, 0, stream)]
    words[2] = index
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(10):
        (a_high, a_low), (b_high, b_low) = multiplied(0xD2511F53, words[0]), multiplied(0xCD9E8D57, words[2])
        words = [b_high ^ words[1] ^ k0, b_low, a_high ^ words[3] ^ k1, a_low]
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return torch.stack(words, 1)


def sample_noise(seed: int, position: int, vocab: int) -> Tensor:
    """Exponential noise [vocab] fp64 of a draw, which takes the token whose noise over its probability is least."""
    blocks, quads = torch.arange(-(-vocab // 256)), torch.arange(-(-vocab // 4))
    words = philox(seed, position, blocks, 0).flatten()
    least = -torch.log1p(-((words >> 6).double() + 0.5) / 2**26) / 64
    excess = -torch.log1p(-(philox(seed, position, quads, 1).flatten()[:vocab].double() + 0.5) / 2**32)
    places = 64 * torch.arange(len(words)) + words % 64
    excess[places[places < vocab]] = 0
    return least.repeat_interleave(64)[:vocab] + excess
