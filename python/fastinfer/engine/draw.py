"""A draw whose tokens a GPU may still be computing."""

from collections.abc import Callable

import torch
from torch import Tensor

from fastinfer.engine.sampled_token import SampledToken


class Draw:
    """The tokens of one draw.

    Args:
        collect: function that waits for the tokens and returns them, one per row of logits.
        token_ids: [rows] int64 token ids in the GPU's memory; ``None`` on a CPU.

    Attributes:
        errors: rows that failed before they were drawn, and why.
    """

    def __init__(self, collect: Callable[[], list[SampledToken]], token_ids: Tensor | None = None) -> None:
        self._collect = collect
        self._token_ids = token_ids
        self.errors: dict[int, Exception] = {}

    def tokens(self) -> list[SampledToken]:
        """Wait for the tokens and return them; a row that failed has a token with an error."""
        tokens = self._collect()
        for index, error in self.errors.items():
            tokens[index] = SampledToken(-1, error=error)
        return tokens

    @property
    def token_ids(self) -> Tensor:
        """The token ids on the device of the logits, [rows] int64; negative for a row that failed."""
        if self._token_ids is None:
            self._token_ids = torch.tensor([token.token_id for token in self.tokens()])
        return self._token_ids
