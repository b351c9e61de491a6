"""Linear attention, state-space models and short convolutions: layers with a state of fixed size for each sequence.

The states of all sequences lie in *slots*. A step names, for each sequence, the slot with the state before its first
token, and for each token the slot that the state after it is stored in, if any. Stored states are what a later step, a
fork or a rejected draft continues from.
"""

from torch import Tensor

from fastinfer.ops._library import inference_only, into, ops


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    query_start: Tensor,
    state_reads: Tensor,
    state_writes: Tensor,
    *,
    gates: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve the tokens of each sequence channel by channel, and apply SiLU, or gates before and after.

    ``out[t, c] = silu(bias[c] + sum_j weight[c, j] * x[t - kernel + 1 + j, c])``; the inputs before a sequence's first
    token come from its state. With ``gates``, the inputs are ``u[t, c] = gates[t, c] * x[t, c]`` in the dtype of ``x``,
    and ``out[t, c] = gates[t, dim + c] * (bias[c] + sum_j weight[c, j] * u[t - kernel + 1 + j, c])``. A token's result
    is the same to the last bit however its sequence was divided into steps, and whatever else is in the batch.

    Args:
        x: [tokens, dim]; fp32, bf16 or fp16; rows may be strided (a slice of a fused projection).
        weight: [dim, kernel], kernel 2 to 4, or 7; fp32 or the dtype of ``x``.
        bias: [dim], dtype of ``weight``; or ``None``.
        conv_state: [slots, kernel - 1, dim], dtype of ``x``: the inputs before a token, the oldest first; changed in
            place. Slots may be strided. With ``gates`` these inputs are ``u``.
        query_start: [seqs + 1] int32; cumulative numbers of tokens. Sequences may be empty.
        state_reads: [seqs] int32; the slot of the state before the sequence's first token; -1 for zeros.
        state_writes: [tokens] int32; the slot that the state after the token is stored in; -1 for none. No slot may
            occur twice. A sequence may write the slot that it reads, but not one that another sequence reads.
        gates: [tokens, 2 * dim], dtype of ``x``: the gates of the inputs, then of the results; rows may be strided; or
            ``None``.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, dim], dtype of ``x``; computed in fp32.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; on the CPU also a slot or ``query_start`` out of
            range. A GPU treats a slot out of range like -1.

    Devices: CPU, CUDA.

    Source: Mamba, Gu and Dao, 2023, https://arxiv.org/abs/2312.00752, section 3.4; with gates ``Lfm2ShortConv`` of
    transformers.

    >>> import torch, fastinfer.ops as ops
    >>> int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> x, weight, state = torch.randn(5, 8), torch.randn(8, 4), torch.zeros(2, 3, 8)
    >>> out = ops.causal_conv1d(x, weight, None, state, int32(0, 5), int32(-1), int32(-1, -1, -1, -1, 1))
    >>> padded = torch.cat([torch.zeros(3, 8), x]).T[None]
    >>> expected = torch.nn.functional.conv1d(padded, weight[:, None], groups=8)[0].T
    >>> torch.allclose(out, torch.nn.functional.silu(expected), atol=1e-5), state[1].equal(x[2:])
    (True, True)
    """
    inference_only("causal_conv1d", "x gates", x, gates)
    inference_only("causal_conv1d", "conv_state", conv_state)
    args = x, weight, bias, conv_state, query_start, state_reads, state_writes, gates
    if out is not None:
        return into(out, ops.causal_conv1d, *args)
    return ops.causal_conv1d.default(*args)


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
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Apply the gated delta rule token by token, and the gated RMSNorm of its output.

    For each value head, with the q and k of its key head divided by their lengths, ``sqrt(sum(x^2) + 1e-6)``, the
    state S [key_dim, value_dim] before the token, and the head's own v, z, a and b::

        decay = exp(-exp(a_log) * softplus(a + dt_bias));  beta = beta_scale * sigmoid(b)
        d = beta * (v - decay * S^T k)
        S = decay * S + k d^T
        o = S^T q / sqrt(key_dim)
        out = o / sqrt(mean(o^2) + eps) * norm_weight * silu(z)

    With an ``a`` for each channel of a key, as in Kimi Delta Attention, decay is a vector of key_dim elements, by which
    the rows of S are multiplied. With ``decay_bound``, ``decay = exp(decay_bound * sigmoid(exp(a_log) * (a +
    dt_bias)))``.

    Everything is computed in fp32. A token's result is the same to the last bit however its sequence was divided into
    steps, and whatever else is in the batch; so is every stored state.

    Args:
        qkv: [tokens, 2 * key_heads * key_dim + value_heads * value_dim]: the q of all heads, then k, then v, as
            :func:`causal_conv1d` returns them; fp32, bf16 or fp16; rows may be strided. The number of key heads follows
            from the width, and must divide value_heads: value head h has key head ``h // (value_heads / key_heads)``.
        z: [tokens, value_heads * value_dim], dtype of ``qkv``: the gates of the output; rows may be strided.
        a: [tokens, value_heads], or [tokens, value_heads * key_dim] for a decay of each channel: the decay before
            softplus; fp32 or the dtype of ``qkv``; rows may be strided.
        b: [tokens, value_heads]: the write strength before the sigmoid; likewise.
        a_log: [value_heads] fp32: the logarithm of each head's rate of decay.
        dt_bias: [value_heads] fp32, or [value_heads * key_dim], as many as ``a`` has columns.
        norm_weight: [value_dim]; fp32 or the dtype of ``qkv``.
        eps: ``eps`` of the norm.
        recurrent_state: [slots, value_heads, key_dim, value_dim] fp32, key_dim and value_dim multiples of 16 up to 256;
            changed in place. Slots may be strided; on CUDA each is aligned to 16 bytes.
        query_start: [seqs + 1] int32; cumulative numbers of tokens. Sequences may be empty.
        state_reads: [seqs] int32; the slot of the state before the sequence's first token; -1 for zeros.
        state_writes: [tokens] int32; the slot that the state after the token is stored in; -1 for none. No slot may
            occur twice. A sequence may write the slot that it reads, but not one that another sequence reads.
        beta_scale: 1, or 2 for a state that may have negative eigenvalues.
        sigmoid_gate: whether ``sigmoid(z)`` takes the place of ``silu(z)``.
        decay_bound: least logarithm of a decay, see above; 0 for the softplus, which has none.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, value_heads * value_dim], dtype of ``qkv``.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; on the CPU also a slot or ``query_start`` out of
            range. A GPU treats a slot out of range like -1.

    Devices: CPU, CUDA.

    Source: Gated Delta Networks, Yang et al., 2024, https://arxiv.org/abs/2412.06464; with a decay for each
    channel Kimi Linear, 2025, https://arxiv.org/abs/2510.26692.

    >>> import torch, fastinfer.ops as ops
    >>> int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> qkv, z, gates, ones = torch.randn(5, 4 * 16), torch.randn(5, 2 * 16), torch.randn(5, 4), torch.ones(16)
    >>> model = gates[:, :2], gates[:, 2:], torch.zeros(2), torch.zeros(2), ones, 1e-6
    >>> states = torch.zeros(3, 2, 16, 16)
    >>> whole = ops.gated_delta_rule(qkv, z, *model, states, int32(0, 5), int32(-1), int32(-1, -1, 1, -1, 2))
    >>> model = gates[3:, :2], gates[3:, 2:], *model[2:]
    >>> rest = ops.gated_delta_rule(qkv[3:], z[3:], *model, states, int32(0, 2), int32(1), int32(-1, 0))
    >>> rest.equal(whole[3:]), states[0].equal(states[2])
    (True, True)
    """
    inference_only("gated_delta_rule", "qkv z", qkv, z)
    inference_only("gated_delta_rule", "a b", a, b)
    inference_only("gated_delta_rule", "recurrent_state", recurrent_state)
    model, slots = (a_log, dt_bias, norm_weight, eps), (query_start, state_reads, state_writes)
    args = (qkv, z, a, b, *model, recurrent_state, *slots, beta_scale, sigmoid_gate, decay_bound)
    if out is not None:
        return into(out, ops.gated_delta_rule, *args)
    return ops.gated_delta_rule.default(*args)


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
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Apply Mamba-2's selective state space model token by token, its gate, and the RMSNorm of each group of heads.

    For each head, with the b and c of its group, the state S [state_dim, head_dim] before the token, and the head's own
    x, z, dt, a_log, dt_bias and d::

        dt = clamp(softplus(dt + dt_bias), dt_min, dt_max);  decay = exp(-exp(a_log) * dt)
        S = decay * S + b (dt * x)^T
        y = (S^T c + d * x) * silu(z)
        out = y, or with a norm y / sqrt(mean of y^2 over all heads of the group + eps) * norm_weight

    Everything is computed in fp32. A token's result is the same to the last bit however its sequence was divided into
    steps, and whatever else is in the batch; so is every stored state.

    Args:
        xbc: [tokens, heads * head_dim + 2 * groups * state_dim]: the x of all heads, the b of all groups, then c, as
            :func:`causal_conv1d` returns them; fp32, bf16 or fp16; rows may be strided. The number of groups follows
            from the width, and must divide heads: head h is in group ``h // (heads / groups)``.
        z: [tokens, heads * head_dim], dtype of ``xbc``: the gates of the output; rows may be strided.
        dt: [tokens, heads]: the time steps before softplus; fp32 or the dtype of ``xbc``; rows may be strided.
        a_log: [heads] fp32: the logarithm of each head's rate of decay.
        dt_bias, d: [heads] fp32.
        norm_weight: [heads * head_dim]; fp32 or the dtype of ``xbc``; ``None`` for no norm.
        eps: ``eps`` of the norm.
        dt_min, dt_max: least and largest time step, 0 and infinity for no limits.
        ssm_state: [slots, heads, state_dim, head_dim] fp32, state_dim and head_dim multiples of 16 up to 256; changed
            in place. Slots may be strided; on CUDA each is aligned to 16 bytes.
        query_start: [seqs + 1] int32; cumulative numbers of tokens. Sequences may be empty.
        state_reads: [seqs] int32; the slot of the state before the sequence's first token; -1 for zeros.
        state_writes: [tokens] int32; the slot that the state after the token is stored in; -1 for none. No slot may
            occur twice. A sequence may write the slot that it reads, but not one that another sequence reads.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, heads * head_dim], dtype of ``xbc``.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; on the CPU also a slot or ``query_start`` out of
            range. A GPU treats a slot out of range like -1.

    Devices: CPU, CUDA.

    Source: Transformers are SSMs, Dao and Gu, 2024, https://arxiv.org/abs/2405.21060; ``GraniteMoeHybridMambaLayer`` of
    transformers.

    >>> import torch, fastinfer.ops as ops
    >>> int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> xbc, z, dt, zeros = torch.randn(5, 2 * 16 + 2 * 32), torch.randn(5, 2 * 16), torch.randn(5, 2), torch.zeros(2)
    >>> model, states = (zeros, zeros, zeros, torch.ones(2 * 16), 1e-6), torch.zeros(3, 2, 32, 16)
    >>> model += 0.0, float("inf")
    >>> whole = ops.mamba2_scan(xbc, z, dt, *model, states, int32(0, 5), int32(-1), int32(-1, -1, 1, -1, 2))
    >>> rest = ops.mamba2_scan(xbc[3:], z[3:], dt[3:], *model, states, int32(0, 2), int32(1), int32(-1, 0))
    >>> rest.equal(whole[3:]), states[0].equal(states[2])
    (True, True)
    """
    inference_only("mamba2_scan", "xbc z", xbc, z)
    inference_only("mamba2_scan", "dt ssm_state", dt, ssm_state)
    model = a_log, dt_bias, d, norm_weight, eps, dt_min, dt_max
    args = (xbc, z, dt, *model, ssm_state, query_start, state_reads, state_writes)
    if out is not None:
        return into(out, ops.mamba2_scan, *args)
    return ops.mamba2_scan.default(*args)
