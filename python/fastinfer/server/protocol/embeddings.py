"""Requests of ``/v1/embeddings`` and ``/v1/score``."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.many import Items
from fastinfer.server.protocol.sampling import MAX_ID_CHARS, ShortText

MAX_INPUTS = 2048  # OpenAI's

Texts = str | Annotated[Items[str], Field(min_length=1, max_length=MAX_INPUTS)]


def places(field: str, texts: Sequence[Any]) -> dict[str, Any]:
    """Return texts by their places in the request, such as ``input[3]``."""
    return {f"{field}[{index}]": text for index, text in enumerate(texts)}


class EmbeddingRequest(RequestModel):
    """A request for one vector per text."""

    input: (
        str
        | Annotated[Items[int], Field(min_length=1)]
        | Annotated[Items[str], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[Items[Annotated[Items[int], Field(min_length=1)]], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = Field(default=None, description="the vectors have the size of the model's hidden states")
    user: ShortText | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None

    def inputs(self) -> dict[str, str | list[int]]:
        """Return the texts by their places in the request."""
        given: Any = self.input
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return {"input": given} if is_one else places("input", given)


class ScoreRequest(RequestModel):
    """A request for the similarity of texts: one with each of several, or pairs."""

    text_1: Texts
    text_2: Texts
    model: str | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None

    def texts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the texts of both sides by their places in the request."""
        first, second = (
            {name: given} if isinstance(given, str) else places(name, given)
            for name, given in (("text_1", self.text_1), ("text_2", self.text_2))
        )
        return first, second
