"""Requests of ``/v1/completions``."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from fastinfer.server.protocol.many import Items
from fastinfer.server.protocol.sampling import SamplingFields

MAX_PROMPTS = 1024


class CompletionRequest(SamplingFields):
    """A request to continue texts."""

    renamed: ClassVar = {**SamplingFields.renamed, "prompt_token_ids": "prompt"}

    prompt: (
        str
        | Annotated[Items[int], Field(min_length=1)]
        | Annotated[Items[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[Items[Annotated[Items[int], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: None = Field(default=None, description="the model only continues texts")

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts as a list."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
