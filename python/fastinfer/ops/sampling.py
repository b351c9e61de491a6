"""Sampling of the next token of every sequence in one call."""

from typing import NamedTuple

from torch import Tensor

from fastinfer.ops._library import inference_only, ops


class Sampled(NamedTuple):
    """Sampled tokens with their log-probabilities, the result of :func:`sample`.

    Attributes:
        tokens: [rows] int64; the sampled tokens.
        logprobs: [rows] fp32; log-probabilities of the sampled tokens; [0] if none were requested.
        top_logprobs: [rows, num_logprobs] fp32; the largest log-probabilities of each row in descending order.
        top_tokens: [rows, num_logprobs] int64; the tokens of ``top_logprobs``.

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
    """Sample one token per row, each row with its own parameters.

    The filters run in the same order as in vLLM: penalties; bias; mask; temperature; min_p relative to the largest
    probability; top_k; top_p over the renormalised probabilities that top_k left. Equal logits are ordered by token id,
    so top_k keeps exactly k tokens.

    Each token is drawn by the Gumbel-max trick: it maximises the logit over the temperature plus Gumbel noise, which is
    made by Philox-4x32-10 and keyed only by seed, position and token. So it does not depend on the rest of the batch or
    on the size of the vocabulary. Two rows with the same seed and position that keep similar probabilities, as those of
    a draft model and its target, mostly draw the same token: with a probability of at least (1 - TV) / (1 + TV), where
    TV is their total variation distance. CPU and GPU draw the same token from the same logits, except for the rounding
    of sums at the limit of top_p and for ties within the rounding of fp64. The GPU does not sort the vocabulary: it
    finds the limits of top_k and top_p by a search with pivots.

    Bit masks have token t in bit t % 32 of word t // 32, like those of xgrammar and llguidance.

    Args:
        logits: [rows, vocab] fp32; contiguous; vocab up to 2^24. ``-inf`` excludes a token.
        temperature: [rows] fp32 >= 0; 0 chooses the largest logit (the first among equals).
        top_k: [rows] int32; 0 for all tokens.
        top_p: [rows] fp32 in (0, 1]; 1 for all tokens.
        min_p: [rows] fp32 in [0, 1]; 0 for all tokens.
        seeds, positions: [rows] int64; the pair selects the noise.
        penalties: [rows, 3] fp32; columns repetition (> 0; 1 is off), presence and frequency (0 is off). Positive
            logits of tokens in the prompt or the output are divided by repetition, negative ones multiplied by it. Then
            presence, and frequency times the count, are subtracted from the logits of tokens in the output.
        output_counts: [rows, vocab] int32; number of times each token is in the output. Only with penalties.
        prompt_mask: [rows, ceil(vocab / 32)] int32; bit 1 for tokens in the prompt. Only with penalties.
        mask: [rows, ceil(vocab / 32)] int32; bit 0 for tokens that are forbidden, for instance by a grammar.
        bias_start: [rows + 1] int32, from 0 to n, not decreasing; row r has the biases ``bias_start[r]`` to
            ``bias_start[r + 1] - 1``. The three ``bias_`` arguments are passed together.
        bias_tokens: [n] int32; tokens that the biases belong to. If a row names a token twice, both are added.
        bias_values: [n] fp32; numbers to add to the logits; ``-inf`` forbids the token.
        num_logprobs: number of most likely tokens whose log-probabilities to return, at most 20, in addition to that of
            the sampled token. ``None`` for no log-probabilities at all, which saves the exponentials of a whole row on
            the CPU.

    Returns:
        The :class:`Sampled` tokens. Log-probabilities are natural logarithms under the unmodified logits, before
        penalties, bias, mask and temperature. If fewer than ``num_logprobs`` logits are finite, the remaining places
        have token -1 with ``-inf``.

    Raises:
        RuntimeError: a shape or dtype does not fit; on the CPU also a value out of range, or a row that has a NaN or no
            finite logit left after bias and mask. A GPU does not check values, because that would stall the host: such
            a row has -1 and NaN in all its results. A temperature, top_k, top_p or min_p out of range acts like the
            nearest in range, and one that is NaN like 0 or off. Penalties are used as they are. Biases of tokens out of
            range and biases of +inf or NaN are ignored.

    Devices: CPU, CUDA.

    Source: top_p: Holtzman et al., 2019, https://arxiv.org/abs/1904.09751; min_p: Nguyen et al., 2024,
    https://arxiv.org/abs/2407.01082; Philox: Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405; noise
    that two distributions share: Daliri et al., 2024, https://arxiv.org/abs/2408.07978; noise made from the top down:
    Maddison et al., 2014, https://arxiv.org/abs/1411.0030; pivots: https://flashinfer.ai/2025/03/10/sampling.html.

    >>> import torch, fastinfer.ops as ops
    >>> logits, seeds, positions = torch.randn(2, 100), torch.tensor([7, 7]), torch.tensor([0, 0])
    >>> off = torch.zeros(2, dtype=torch.int32), torch.ones(2), torch.zeros(2)  # top_k, top_p, min_p
    >>> greedy = ops.sample(logits, torch.zeros(2), *off, seeds, positions)
    >>> torch.equal(greedy.tokens, logits.argmax(-1))
    True
    >>> torch.allclose(greedy.logprobs, logits.log_softmax(-1).amax(-1), atol=1e-5)
    True
    >>> same = logits[:1].repeat(2, 1)
    >>> a, b = ops.sample(same, torch.ones(2), *off, seeds, positions).tokens  # same seed and position, same token
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
