"""The tokens that a request's ``allowed_token_ids`` and ``bad_words`` allow."""

from collections.abc import Iterable

import numpy as np

from fastinfer.sampling_params import SamplingParams
from fastinfer.tokenizers.tokenizer import Tokenizer


class TokenRules:
    """Rules that a request's parameters give, whatever its text; its completions share them.

    Args:
        params: sampling parameters.
        tokenizer: tokenizer that splits the bad words.
        vocab_size: number of columns of the logits.

    Attributes:
        mask: [ceil(vocab / 32)] int32, the tokens that are allowed anywhere: bit t % 32 of word t // 32.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.mask = np.full(-(-vocab_size // 32), -1, np.int32)
        if params.allowed_token_ids is not None:
            self.mask[:] = 0
            for token_id in params.allowed_token_ids:
                allow(self.mask, token_id)
        self._phrases = []
        for tokens in _token_sequences(params.bad_words or (), tokenizer):
            if len(tokens) == 1:
                forbid(self.mask, tokens[0])
            else:
                self._phrases.append(tokens)
        self._num_relevant = max((len(tokens) - 1 for tokens in self._phrases), default=0)

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> "TokenRules | None":
        """Return the rules of a request, or ``None`` if its parameters allow any token."""
        has_rules = params.allowed_token_ids is not None or params.bad_words
        return cls(params, tokenizer, vocab_size) if has_rules else None

    def apply(self, mask: np.ndarray, text: list[int], num_prompt_tokens: int, drafts: list[int]) -> None:
        """Clear the bits of the tokens that are not allowed after a text.

        Args:
            mask: [ceil(vocab / 32)] int32 to change.
            text: prompt and generated tokens.
            num_prompt_tokens: number of the former.
            drafts: tokens that follow the text.
        """
        mask &= self.mask
        if not self._phrases:
            return
        recent = text[max(num_prompt_tokens, len(text) - self._num_relevant) :] + drafts
        for *begin, last in self._phrases:
            if recent[len(recent) - len(begin) :] == begin:
                forbid(mask, last)


def allow(mask: np.ndarray, token_id: int) -> None:
    """Set the bit of a token."""
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def forbid(mask: np.ndarray, token_id: int) -> None:
    """Clear the bit of a token."""
    mask.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def _token_sequences(words: Iterable[str], tokenizer: Tokenizer) -> set[tuple[int, ...]]:
    """Return the tokens of each word, at the beginning of a text and after a space."""
    spellings = {prefix + word.lstrip() for word in words for prefix in ("", " ")}
    return {tuple(tokenizer.encode(text, add_special_tokens=False, continues=True)) for text in spellings} - {()}
