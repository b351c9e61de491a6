"""Log-probabilities of tokens in the forms of chats and of completions."""

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

from fastinfer.outputs import Logprob

# JSON has no infinity; vLLM's number for it.
MINUS_INFINITY = -9999.0

Position = dict[int, Logprob]


def chat_logprobs(
    token_ids: Iterable[int], positions: Iterable[Position], top: int, as_token_ids: bool
) -> dict[str, Any]:
    """Return ``logprobs`` of a chat's choice.

    Args:
        token_ids: the tokens.
        positions: the candidates at each of them.
        top: number of candidates to list at each.
        as_token_ids: whether to name tokens ``token_id:17``.
    """

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": _name(token_id, logprob, as_token_ids),
            "logprob": _number(logprob),
            "bytes": list(logprob.token_bytes),
        }

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        best = [entry(other, logprob) for other, logprob in _best(position, top)]
        content.append({**entry(token_id, position[token_id]), "top_logprobs": best})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Writes ``logprobs`` of a completion's choice, whose text offsets go on from call to call.

    Args:
        top: number of candidates to list at each token.
        as_token_ids: whether to name tokens ``token_id:17``.
    """

    def __init__(self, top: int, as_token_ids: bool) -> None:
        self._top = top
        self._as_token_ids = as_token_ids
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of(
        self, token_ids: Sequence[int], positions: Sequence[Position | None], texts: Sequence[bytes]
    ) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens.

        Args:
            token_ids: the tokens.
            positions: the candidates at each; ``None`` for the first token of a prompt, which nothing precedes.
            texts: what each token adds to the text; empty for one that is left out of it.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position, text in zip(token_ids, positions, texts, strict=True):
            # A character that was begun and is not continued has become U+FFFD.
            is_broken = bool(self._utf8.getstate()[0]) and bool(text) and not 0x80 <= text[0] < 0xC0
            offsets.append(self._offset + is_broken)
            self._offset += len(self._utf8.decode(text))
            if position is None:
                tokens.append(f"token_id:{token_id}" if self._as_token_ids else spelling(text))
                logprobs.append(None)
                top.append(None)
                continue
            tokens.append(self._name(token_id, position[token_id]))
            logprobs.append(_number(position[token_id]))
            best = _best(position, self._top) or [(token_id, position[token_id])]
            top.append({self._name(other, logprob): _number(logprob) for other, logprob in best})
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top if self._top else None,
            "text_offset": offsets,
        }

    def _name(self, token_id: int, logprob: Logprob) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else spelling(logprob.token_bytes)


def prompt_logprobs(positions: Iterable[Position | None]) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: per token its candidates by id."""
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _number(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token_id, entry in position.items()
        }
        for position in positions
    ]


def spelling(token: bytes) -> str:
    r"""Return a token as text; one that ends inside a character as ``bytes:\xe2\x82``, as OpenAI writes it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _name(token_id: int, logprob: Logprob, as_token_ids: bool) -> str:
    return f"token_id:{token_id}" if as_token_ids else logprob.decoded_token


def _number(entry: Logprob) -> float:
    return entry.logprob if math.isfinite(entry.logprob) else MINUS_INFINITY


def _best(position: Position, top: int) -> list[tuple[int, Logprob]]:
    """Return the most likely candidates; a position may have one more, the drawn token."""
    return sorted(position.items(), key=lambda item: item[1].rank)[:top]
