"""Choosing the next token of every sequence in one call."""

from typing import NamedTuple

from torch import Tensor

from fastinfer.ops._library import inference_only, ops


class Sampled(NamedTuple):
    """What :func:`sample` returns.

    Attributes:
        tokens: [rows] int64.
        logprobs: [rows] fp32, theirs; [0] where none were asked for.
        top_logprobs: [rows, num_logprobs] fp32, of each row's likeliest tokens in falling order.
        top_tokens: [rows, num_logprobs] int64, those tokens.

    >>> import torch, fastinfer.ops as ops
    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
    >>> sampled = ops.sample(logits, zero, zero.int(), one, zero, zero.long(), zero.long(), num_logprobs=2)
    >>> sampled.tokens, sampled.logprobs
    (tensor([1]), tensor([-0.4076]))
    >>> sampled.top_tokens, sampled.top_logprobs
    (tensor([[1, 2]]), tensor([[-0.4076, -1.4076]]))
    """

    tokens: Tensor
    logprobs: Tensor
    top_logprobs: Tensor
    top_tokens: Tensor


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    penalties: Tensor | None = None,
    output_counts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    mask: Tensor | None = None,
    bias_start: Tensor | None = None,
    bias_tokens: Tensor | None = None,
    bias_values: Tensor | None = None,
    num_logprobs: int | None = 0,
) -> Sampled:
    """Draw one token per row, each row with its own parameters.

    Order of the filters, as in vLLM: penalties; bias; mask; temperature; min_p against the largest probability; top_k;
    top_p of what top_k left, renormalised. Equal logits are in the order of their token ids, so that top_k keeps
    exactly k. The draw is the inverse of the cumulative distribution at a Philox-4x32-10 number keyed by seed and
    position alone: it depends on nothing else in the batch. CPU and GPU keep the same tokens, but for the rounding of
    sums at top_p's cut; they run through them in different orders, and so may draw different ones.

    The GPU does not sort the vocabulary: it searches the end of top_k and top_p with pivots.

    Bit masks hold token t in bit t % 32 of word t // 32, as those of xgrammar and llguidance do.

    Args:
        logits: [rows, vocab] fp32; contiguous; vocab up to 2^24. ``-inf`` excludes a token.
        temperature: [rows] fp32 >= 0; 0 takes the largest logit (the first of equals).
        top_k: [rows] int32; 0 for all.
        top_p: [rows] fp32 in (0, 1]; 1 for all.
        min_p: [rows] fp32 in [0, 1]; 0 for all.
        seeds, positions: [rows] int64; the pair selects the random number.
        penalties: [rows, 3] fp32, columns repetition (> 0; 1 is off), presence and frequency (0 is off). Logits of
            tokens in the prompt or the output are divided by repetition where positive, else multiplied by it; then
            presence, and frequency times the count, are subtracted from those of tokens in the output.
        output_counts: [rows, vocab] int32; how often the output has each token. Only with penalties.
        prompt_mask: [rows, ceil(vocab / 32)] int32; bit 1 where the prompt has the token. Only with penalties.
        mask: [rows, ceil(vocab / 32)] int32; bit 0 forbids the token, as a grammar does.
        bias_start: [rows + 1] int32, from 0 to n, not falling; row r has the biases ``bias_start[r]`` to
            ``bias_start[r + 1] - 1``. The three are given together.
        bias_tokens: [n] int32; the token whose logit a bias is added to. One that a row has twice gets both.
        bias_values: [n] fp32; ``-inf`` forbids the token.
        num_logprobs: of how many of the likeliest tokens to return the log-probabilities, at most 20, besides that of
            the token drawn. ``None`` for none at all: on the CPU that spares the exponentials of a whole row.

    Returns:
        :class:`Sampled`. Log-probabilities are natural, and under the unmodified logits: before penalties, bias, mask
        and temperature. Where fewer than ``num_logprobs`` logits are finite, the rest is token -1 with ``-inf``.

    Raises:
        RuntimeError: shapes and dtypes; on the CPU also values out of range, and a row with NaN or without any finite
            logit (that bias and mask allow). On the GPU, where looking would stall the host, such a row has -1 and NaN
            in all its results, parameters out of range act like the nearest in range, NaN like 0 or off, and biases
            of tokens out of range, of +inf or NaN are left out.

    Devices: CPU, CUDA (not yet run on a GPU).

    Source: top_p: Holtzman et al., 2019, https://arxiv.org/abs/1904.09751; min_p: Nguyen et al., 2024,
    https://arxiv.org/abs/2407.01082; Philox: Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405; pivots:
    https://flashinfer.ai/2025/03/10/sampling.html.

    >>> import torch, fastinfer.ops as ops
    >>> logits, seeds, positions = torch.randn(2, 100), torch.tensor([7, 7]), torch.tensor([0, 0])
    >>> off = torch.zeros(2, dtype=torch.int32), torch.ones(2), torch.zeros(2)  # top_k, top_p, min_p
    >>> greedy = ops.sample(logits, torch.zeros(2), *off, seeds, positions)
    >>> torch.equal(greedy.tokens, logits.argmax(-1))
    True
    >>> torch.allclose(greedy.logprobs, logits.log_softmax(-1).amax(-1), atol=1e-5)
    True
    >>> same = logits[:1].repeat(2, 1)
    >>> a, b = ops.sample(same, torch.ones(2), *off, seeds, positions).tokens  # one seed, one position: one draw
    >>> bool(a == b)
    True
    """
    inference_only("sample", "logits", logits)
    return Sampled(
        *ops.sample.default(
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            penalties,
            output_counts,
            prompt_mask,
            mask,
            bias_start,
            bias_tokens,
            bias_values,
            num_logprobs,
        )
    )
