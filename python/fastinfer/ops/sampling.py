"""Choosing the next token of every sequence in one call."""

from torch import Tensor

from fastinfer.ops._library import ops


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row, each row with its own parameters.

    Order of the filters, as in vLLM: temperature; min_p against the largest probability; top_k; top_p of what top_k
    left, renormalised. Ties are broken by the smaller token id, so that top_k keeps exactly k. The draw is the inverse
    of the cumulative distribution at a Philox-4x32-10 number (Salmon et al., 2011,
    https://doi.org/10.1145/2063384.2063405) keyed by seed and position alone: it depends on nothing else in the batch.

    Args:
        logits: [rows, vocab] fp32; contiguous. ``-inf`` excludes a token; a row with NaN or without any finite value
            raises.
        temperature: [rows] fp32 >= 0; 0 takes the largest logit (the first of equals).
        top_k: [rows] int32; 0 for all.
        top_p: [rows] fp32 in (0, 1]; 1 for all.
        min_p: [rows] fp32 in [0, 1]; 0 for all.
        seeds, positions: [rows] int64; the pair selects the random number.

    Returns:
        tokens [rows] int64, and logprobs [rows] fp32: the natural logarithm of the token's probability under the
        unmodified logits.

    Devices: CPU.
    """
    return ops.sample.default(logits, temperature, top_k, top_p, min_p, seeds, positions)
