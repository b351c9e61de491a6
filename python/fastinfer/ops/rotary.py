"""Rotary position embedding, with the scaling methods for long contexts.

Scaling only changes the cos/sin table; the kernel only rotates.
"""

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.ops._library import check_tensors, inference_only, ops
from fastinfer.utils.checks import INT32_MAX, show

TABLE_SLICE = 512  # positions computed at once


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of a model's rotary frequencies beyond the context length that it was trained on.

    Attributes:
        kind: ``"none"``, ``"linear"`` (position interpolation, https://arxiv.org/abs/2306.15595), ``"ntk"`` (NTK-aware
            base), ``"yarn"`` (https://arxiv.org/abs/2309.00071), ``"llama3"`` (piecewise scaling of Llama 3.1),
            ``"longrope"`` (https://arxiv.org/abs/2402.13753) or ``"proportional"`` (of Gemma 4: a part of the
            frequencies is 0, and the others are those of the whole head).
        factor: ratio of the extended context length to the trained one.
        original_max_position: trained context length (yarn, llama3, longrope).
        num_rotated: number of elements of a head that are rotated (proportional).
        low_freq_factor, high_freq_factor: limits of llama3's blend, in rotations over the trained context.
        beta_fast, beta_slow: limits of yarn's blend, in rotations over the trained context.
        truncate: whether the blend's limits are rounded outwards to whole dimensions (yarn).
        attention_factor: factor on cos and sin (yarn, longrope); ``None`` for the papers' ``0.1 ln(factor) + 1`` and
            ``sqrt(1 + ln(factor) / ln(original_max_position))``.
        short_factors, long_factors: divisors of each frequency (longrope), for tables up to the trained length and for
            longer tables. A table for a long context uses the long factors at all positions.

    >>> import torch, fastinfer.ops as ops
    >>> stretched = ops.cos_sin_cache(64, 100, scaling=ops.RopeScaling("linear", factor=2.0))
    >>> torch.allclose(stretched[::2], ops.cos_sin_cache(64, 50))  # position 2 p rotates like p before
    True
    """

    kind: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    num_rotated: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def factors(self, max_position: int) -> tuple[float, ...]:
        """Return the divisors of each frequency in a table of this length (longrope)."""
        return self.long_factors if max_position > self.original_max_position else self.short_factors


def cos_sin_cache(
    rotary_dim: int,
    max_position: int,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    frequency_factors: Tensor | None = None,
) -> Tensor:
    """Compute the table that :func:`rotary_embedding` reads, in plain torch.

    Args:
        rotary_dim: number of rotated elements per head, even.
        max_position: number of rows of the table.
        base: base of the frequencies ``base ** (-2i / rotary_dim)``.
        scaling: scaling of the frequencies, or ``None``.
        frequency_factors: [rotary_dim / 2], divisors of the frequencies; GGUF files of Llama 3 store their scaling in
            this form.

    Returns:
        [max_position, rotary_dim] fp32 on the CPU; each row has the cosines of a position, then its sines.

    Raises:
        ValueError: ``rotary_dim`` is odd, ``base`` is at most 1 or infinite, the kind of scaling is unknown, its
            ``factor`` is not positive and finite, ``original_max_position`` is missing (or below 2 for longrope),
            ``frequency_factors`` has another shape, or longrope does not have one factor per frequency.

    Devices: CPU; move the table to the device that uses it.

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864; for the scalings see :class:`RopeScaling`.

    >>> import torch, fastinfer.ops as ops
    >>> ops.cos_sin_cache(2, 3)
    tensor([[ 1.0000,  0.0000],
            [ 0.5403,  0.8415],
            [-0.4161,  0.9093]])
    """
    if not isinstance(rotary_dim, int) or not 0 < rotary_dim <= INT32_MAX or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be a positive even number, got {show(rotary_dim)}")
    scaling = scaling or RopeScaling()
    if not isinstance(base, int | float) or not 1 < base <= sys.float_info.max:
        raise ValueError(f"base must be a finite number above 1, got {show(base)}")
    if frequency_factors is not None:
        check_tensors("cos_sin_cache", frequency_factors=frequency_factors)
        if frequency_factors.shape != (rotary_dim // 2,):
            got = list(frequency_factors.shape)
            raise ValueError(f"frequency_factors must have the shape [{rotary_dim // 2}], got {got}")
    _check_scaling(scaling)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    magnitude = 1.0
    if scaling.kind == "ntk":
        base *= scaling.factor ** (rotary_dim / max(rotary_dim - 2, 1))
    frequencies = base**-exponents
    if scaling.kind == "linear":
        frequencies /= scaling.factor
    elif scaling.kind == "yarn":
        frequencies, magnitude = _yarn(frequencies, base, rotary_dim, scaling)
    elif scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling.kind == "longrope":
        frequencies, magnitude = _longrope(frequencies, max_position, scaling)
    elif scaling.kind == "proportional":
        frequencies /= scaling.factor
        frequencies[scaling.num_rotated // 2 :] = 0.0
    elif scaling.kind not in ("none", "ntk"):
        kinds = "none, linear, ntk, yarn, llama3, longrope or proportional"
        raise ValueError(f"scaling.kind must be {kinds}, got {scaling.kind!r}")
    if frequency_factors is not None:
        frequencies = frequencies / frequency_factors.double()
    table = torch.empty(max_position, rotary_dim, dtype=torch.float32)
    cos, sin = table.chunk(2, dim=-1)
    positions = torch.arange(max_position, dtype=torch.float64)
    for start in range(0, max_position, TABLE_SLICE):  # a long table at once would need four times its size in fp64
        rows = slice(start, start + TABLE_SLICE)
        angles = torch.outer(positions[rows], frequencies)
        cos[rows] = angles.cos() * magnitude
        sin[rows] = angles.sin() * magnitude
    return table


def _check_scaling(scaling: RopeScaling) -> None:
    shortest = {"yarn": 1, "llama3": 1, "longrope": 2}.get(scaling.kind, 0)  # longrope divides by the logarithm
    if scaling.original_max_position < shortest:
        raise ValueError(
            f"{scaling.kind} scaling needs at least {shortest} as original_max_position, "
            f"got {scaling.original_max_position}"
        )
    if not 0 < scaling.factor <= sys.float_info.max:
        raise ValueError(f"scaling.factor must be a positive, finite number, got {scaling.factor}")


def _yarn(frequencies: Tensor, base: float, rotary_dim: int, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Interpolate slow dimensions, keep fast ones, and blend linearly between them (YaRN, section 3.2)."""

    def dimension_of(rotations: float) -> float:
        wavelength = scaling.original_max_position / (rotations * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(base))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    interpolated = ramp.clamp(0, 1)
    magnitude = scaling.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies / scaling.factor * interpolated + frequencies * (1 - interpolated), magnitude


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Interpolate long wavelengths, keep short ones, and blend those between (Llama 3.1)."""
    rotations = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


def _longrope(frequencies: Tensor, max_position: int, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Divide each frequency by its own factor, which the model's authors found by search (LongRoPE, section 3)."""
    factors = scaling.factors(max_position)
    if len(factors) != len(frequencies):
        raise ValueError(f"longrope needs {len(frequencies)} factors, got {len(factors)}")
    magnitude = scaling.attention_factor
    if magnitude is None:
        growth = math.log(max(scaling.factor, 1.0)) / math.log(scaling.original_max_position)
        magnitude = math.sqrt(1.0 + growth)
    return frequencies / torch.tensor(factors, dtype=torch.float64), magnitude


def rotary_embedding(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool = False) -> None:
    """Rotate queries and keys in place by their positions.

    Args:
        q: [tokens, q_heads, head_dim]; fp32, bf16 or fp16; changed in place.
        k: [tokens, kv_heads, head_dim], dtype of ``q``; changed in place. Both may be strided views whose last two
            dimensions are contiguous (slices of a fused QKV projection).
        positions: [tokens] int64; on CUDA a token whose position is outside the table stays unrotated.
        cos_sin_cache: [max_position, rotary_dim] fp32 from :func:`cos_sin_cache`; ``rotary_dim <= head_dim``, and the
            remaining elements of a head are not rotated.
        interleaved: ``False`` rotates the pairs (i, i + rotary_dim / 2) (GPT-NeoX, Hugging Face), ``True`` the pairs
            (2i, 2i + 1) (GPT-J, Llama's original code).

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; on the CPU also a position outside the table.

    Devices: CPU, CUDA.

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864.

    >>> import torch, fastinfer.ops as ops
    >>> q, k = torch.randn(1, 1, 64).repeat(5, 1, 1), torch.randn(1, 1, 64).repeat(5, 1, 1)  # 5 equal tokens
    >>> ops.rotary_embedding(q, k, torch.arange(5), ops.cos_sin_cache(64, 5))
    >>> scores = q[:, 0] @ k[:, 0].T
    >>> torch.allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-3)  # they only depend on the distance
    True
    """
    inference_only("rotary_embedding", "q k", q, k)
    ops.rotary_embedding.default(q, k, positions, cos_sin_cache, interleaved)


def norm_rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slot_mapping: Tensor,
    norm_v: bool = False,
    query_scales: Tensor | None = None,
) -> None:
    """Normalise, rotate and store: the steps between the QKV projection and attention, in one pass over memory.

    The result equals ``rms_norm`` of each head of q and k (if a weight is passed), then :func:`rotary_embedding` of
    both and :func:`fastinfer.ops.store_kv_cache`, except for roundings: intermediate values stay in fp32, q is rounded
    once, and the rotated k is rounded or quantised directly for the cache.

    Args:
        q: [tokens, q_heads, head_dim]; fp32, bf16 or fp16. Normalised and rotated in place.
        k, v: [tokens, kv_heads, head_dim], dtype of ``q``; not changed. q, k and v may be strided views whose last two
            dimensions are contiguous (slices of a fused QKV projection).
        q_norm_weight, k_norm_weight: [head_dim]; fp32 or the dtype of ``q``, both the same; or ``None`` for no norm.
        eps: ``eps`` of the norms.
        positions, cos_sin_cache, interleaved: as in :func:`rotary_embedding`.
        k_cache, v_cache, k_scale, v_scale, slot_mapping: as in :func:`fastinfer.ops.store_kv_cache`. For a token with
            slot -1, q is still normalised and rotated.
        norm_v: whether each head of v is normalised, too, without a weight.
        query_scales: [max_position] fp32, factors by which queries at each position are multiplied last; ``None`` for
            none.

    Raises:
        RuntimeError: the same as :func:`rotary_embedding` and :func:`fastinfer.ops.store_kv_cache`.

    Devices: CPU, CUDA.

    Source: QK-norm: Henry et al., 2020, https://arxiv.org/abs/2010.04245; factors of queries: Llama 4's attention in
    transformers; for the other steps see :func:`rotary_embedding` and :func:`fastinfer.ops.store_kv_cache`.

    >>> import torch, fastinfer.ops as ops
    >>> q, k, v = torch.randn(3, 4, 64).split([2, 1, 1], dim=1)  # slices of a fused projection
    >>> positions, table, weight = torch.arange(3), ops.cos_sin_cache(64, 8), torch.ones(64)
    >>> q_wanted, k_wanted = (torch.nn.functional.rms_norm(t, (64,), eps=1e-6) for t in (q, k))
    >>> ops.rotary_embedding(q_wanted, k_wanted, positions, table)
    >>> k_cache, v_cache = torch.zeros(2, 1, 16, 1, 64)
    >>> caches = k_cache, v_cache, None, None, torch.arange(3)
    >>> ops.norm_rotary_store(q, k, v, weight, weight, 1e-6, positions, table, False, *caches)
    >>> torch.allclose(q, q_wanted, atol=1e-5), torch.allclose(k_cache[0, :3], k_wanted, atol=1e-5)
    (True, True)
    """
    inference_only("norm_rotary_store", "q k", q, k)
    inference_only("norm_rotary_store", "v", v)
    inference_only("norm_rotary_store", "k_cache v_cache", k_cache, v_cache)
    ops.norm_rotary_store.default(
        q,
        k,
        v,
        q_norm_weight,
        k_norm_weight,
        eps,
        positions,
        cos_sin_cache,
        interleaved,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        slot_mapping,
        norm_v,
        query_scales,
    )


def latent_rotary_store(
    q_latent: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool,
    query_scales: Tensor | None,
    cache: Tensor,
    scale: Tensor | None,
    slot_mapping: Tensor,
) -> Tensor:
    """Make queries and cached rows of multi-head latent attention: the steps before attention, in one pass over memory.

    A cached row is a token's only key, of all heads: its latent, normalised, and behind it the rotated elements. The
    value is the latent. A query has a part for each of the two.

    Args:
        q_latent: [tokens, heads, rank]; fp32, bf16 or fp16, contiguous; the queries' products with the matrices that
            expand latents to keys.
        q_rope: [tokens, heads, rotary_dim], dtype of ``q_latent``; elements to rotate; tokens and heads may be strided.
        kv: [tokens, rank + rotary_dim], dtype of ``q_latent``; latents, and behind them the elements of the key to
            rotate; rows may be strided.
        norm_weight: [rank]; fp32 or the dtype of ``q_latent``; weight of the RMSNorm of the latents.
        eps: ``eps`` of the norm.
        positions, cos_sin_cache, interleaved: as in :func:`rotary_embedding`; the table has ``rotary_dim`` columns.
        query_scales: [max_position] fp32, factors of the queries at each position; ``None`` for none.
        cache: [num_blocks, block_size, 1, rank + rotary_dim]; fp32, bf16, fp16, int8 or float8_e4m3fn; written in
            place.
        scale: [num_blocks, block_size, 1] fp32 for int8 and float8_e4m3fn, else ``None``; see
            :func:`fastinfer.ops.store_kv_cache`.
        slot_mapping: [tokens] int64; ``block * block_size + offset``; a token with slot -1 is not stored.

    Returns:
        [tokens, heads, rank + rotary_dim], dtype of ``q_latent``: the queries for :func:`fastinfer.ops.paged_attention`
        with the cache as its keys and ``cache[..., :rank]`` as its values.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; the scale is missing, or passed for a cache that
            has none; on the CPU also a position outside the table or a slot outside the cache. On CUDA such a token is
            not rotated, or not stored.

    Devices: CPU, CUDA.

    Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434; factors of queries: Llama 4's attention in transformers.

    >>> import torch, fastinfer.ops as ops
    >>> q_latent, q_rope, kv = torch.randn(3, 4, 32), torch.randn(3, 4, 8), torch.randn(3, 40)
    >>> cache, table = torch.zeros(2, 16, 1, 40), ops.cos_sin_cache(8, 10)
    >>> rotary = torch.arange(3), table, False, None
    >>> q = ops.latent_rotary_store(q_latent, q_rope, kv, torch.ones(32), 1e-6, *rotary, cache, None, torch.arange(3))
    >>> q.shape
    torch.Size([3, 4, 40])
    >>> torch.allclose(cache[0, :3, 0, :32], torch.nn.functional.rms_norm(kv[:, :32], (32,), eps=1e-6), atol=1e-5)
    True
    """
    inference_only("latent_rotary_store", "q_latent q_rope", q_latent, q_rope)
    inference_only("latent_rotary_store", "kv cache", kv, cache)
    return ops.latent_rotary_store.default(
        q_latent,
        q_rope,
        kv,
        norm_weight,
        eps,
        positions,
        cos_sin_cache,
        interleaved,
        query_scales,
        cache,
        scale,
        slot_mapping,
    )
