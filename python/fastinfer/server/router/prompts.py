"""A request's prompt as a chain of hashes, and the seed that makes its stream repeatable."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

BLOCK_BYTES = 128
# Longer prompts are told apart by their first 128 KiB.
MAX_BLOCKS = 1024
# Where the interfaces have the prompt, in the order in which chat templates write it.
PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")
# What separates cached prefixes beside the API key.
SCOPE_FIELDS = ("model", "cache_salt")
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Prompt:
    """A prompt for the index of prefixes.

    Attributes:
        hashes: hash of the text up to the end of each block of 128 bytes.
        num_bytes: length of the text, of which the hashes may cover the beginning alone.
    """

    hashes: tuple[int, ...] = ()
    num_bytes: int = 0


NO_PROMPT = Prompt()


def find_prompt(body: dict[str, Any], scope: bytes) -> Prompt:
    """Return the prompt of a request of any interface.

    Args:
        body: the request.
        scope: what separates the prefixes of different clients: their keys.
    """
    try:
        text = b"".join(orjson.dumps(body[name]) for name in PROMPT_FIELDS if body.get(name) is not None)
    except orjson.JSONEncodeError:  # nested too deeply, which is for a replica to refuse
        return NO_PROMPT
    chain = hash((scope, *(str(body.get(name)) for name in SCOPE_FIELDS)))
    hashes = []
    for start in range(0, min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        chain = hash((chain, text[start : start + BLOCK_BYTES]))
        hashes.append(chain)
    return Prompt(tuple(hashes), len(text))


def parse_object(body: bytes) -> dict[str, Any]:
    """Return a body as an object; an empty one if it is none, which is for a replica to refuse."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def with_seed(body: bytes, *, is_repeatable: bool) -> bytes:
    """Return the request with a seed, so that every replica draws the same tokens.

    Args:
        body: a JSON object that is not empty.
        is_repeatable: whether a repetition shall get the same answer; otherwise the seed is random.
    """
    number = int.from_bytes(sha256(body).digest()[:8], "big") if is_repeatable else secrets.randbits(63)
    # Of a field that is there twice, the last one counts: a seed that is null is replaced. What the rest of the body
    # says is not written anew, since integers may have more than 64 bits.
    return b'%b,"seed":%d}' % (body.rstrip()[:-1], number & MAX_SEED)


def join_headers(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> bytes:
    """Return the values of some headers as one text."""
    return b"\n".join(value for name, value in headers if name in names)
