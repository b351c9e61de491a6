"""Changes of files that keep most of their structure: of JSON values, of headers, and of bytes.

A case is a folder's files by name. Everything is drawn from the generator that is passed in.
"""

import copy
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

Case = dict[str, bytes]
Span = tuple[int, int, str]  # offset, bytes, and "number" or "string"

INTEGERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    12,
    31,
    32,
    255,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**64 - 1,
)
TEXTS = (
    "",
    "a",
    " ",
    "\0",
    "\n",
    "\ud800",
    "</s>",
    "▁",
    "Ġ",
    "日本",
    "x" * 10_000,
    "(a+)+$",
    "re:(.+)+#",
    "{% for %}",
    "../a",
    "<0xFF>",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -1, -(2**31), 10**400),
    *(*INTEGERS, *TEXTS, [], {}, [[]], [0] * 1000, {"": None}),
)  # fmt: skip


def mutate(case: Case, random: Random) -> Case:
    """Change one or a few places of one or two files."""
    changed = dict(case)
    while True:
        name = random.choice(sorted(changed))
        change = CHANGES.get(name.rpartition(".")[2], change_bytes)
        if random.random() < 0.15:
            change = change_bytes
        try:
            changed[name] = change(changed[name], random)
        except (
            ValueError,
            KeyError,
            IndexError,
            RecursionError,
            struct.error,
        ):  # earlier changes have left no structure
            changed[name] = change_bytes(changed[name], random)
        if random.random() < 0.5:
            return changed


def change_bytes(data: bytes, random: Random) -> bytes:
    """Overwrite, insert, remove or repeat some bytes, or cut the rest off."""
    at = random.randrange(len(data) + 1)
    if random.random() < 0.5:
        at = min(at, random.randrange(256))  # headers come first
    length = random.choice((1, 1, 1, 2, 4, 8, 64))
    kind = random.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + length :]
    if kind == 2:
        return data[:at] + random.randbytes(length) + data[at:]
    if kind == 3:
        return data[:at] + data[at : at + length] * random.choice((2, 3, 1000)) + data[at + length :]
    number = random.choice(INTEGERS).to_bytes(8, "little")[:length]
    new = number if kind == 4 else random.randbytes(length)
    return data[:at] + new + data[at + len(new) :]


# ---- JSON ----


def change_json(data: bytes, random: Random) -> bytes:
    """Change one place of a JSON text."""
    values = json.loads(data)
    return json.dumps(change_value(values, random)).encode()


def change_value(value: Any, random: Random) -> Any:
    """Replace a value, or change something inside it; the deeper, the rarer."""
    children = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not children or random.random() < 0.1:
        return _another_value(value, random)
    value = copy.copy(value)
    key = random.choice(children)
    kind = random.randrange(12)
    if kind == 0:
        del value[key]
    elif kind == 1:
        value[key] = copy.deepcopy(value[random.choice(children)])
    elif kind == 2 and isinstance(value, dict):
        value[str(random.choice(TEXTS))] = value.pop(key)
    elif kind == 2:
        value.insert(key, value[key])
    else:
        value[key] = change_value(value[key], random)
    return value


def _another_value(value: Any, random: Random) -> Any:
    kind = random.randrange(4)
    if kind == 0 and type(value) in (int, float):
        return random.choice((value + 1, value - 1, -value, value * 2, value // 2, 1e3 * random.random()))
    if kind == 0 and isinstance(value, str):
        at = random.randrange(len(value) + 1)
        return value[:at] + random.choice(TEXTS) + value[at + random.randrange(2) :]
    if kind == 1:
        return random.choice(([value], {"a": value}, [value] * 3, str(value)))
    return random.choice(VALUES)


# ---- safetensors: the length of the header in 8 bytes, a JSON object, data ----


def change_safetensors(data: bytes, random: Random) -> bytes:
    """Change the header and its length with it, or the length alone, or the data."""
    (length,) = struct.unpack_from("<Q", data)
    header, values = data[8 : 8 + length], data[8 + length :]
    if random.random() < 0.1:
        return struct.pack("<Q", random.choice((*INTEGERS, length + 1, length - 1))) + header + values
    if random.random() < 0.1:
        return data[: 8 + length] + change_bytes(values, random)
    header = change_json(header, random)
    return struct.pack("<Q", len(header)) + header + values


# ---- GGUF: see fastinfer/formats/gguf.py ----

WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def change_gguf(data: bytes, random: Random) -> bytes:
    """Change a number or a string of the header, or remove or repeat a metadata value."""
    spans, entries = gguf_places(data)
    if random.random() < 0.1:
        (count,) = struct.unpack_from("<Q", data, 16)
        begin, end = random.choice(entries)
        copies = random.choice((0, 2))
        count = count + copies - 1
        return data[:16] + struct.pack("<Q", count) + data[24:begin] + data[begin:end] * copies + data[end:] + bytes(64)
    # Strings of vocabularies would crowd out all else.
    kind = random.choice(("number", "string"))
    offset, width, _ = random.choice([span for span in spans if span[2] == kind])
    if kind == "number":
        old = int.from_bytes(data[offset : offset + width], "little")
        new = random.choice((*INTEGERS, old + 1, old - 1, old * 2, old ^ (1 << random.randrange(8 * width))))
        return data[:offset] + (new % 2 ** (8 * width)).to_bytes(width, "little") + data[offset + width :]
    text = _another_value(data[offset : offset + width].decode(errors="replace"), random)
    encoded = text.encode(errors="surrogatepass") if isinstance(text, str) else random.randbytes(3)
    return data[: offset - 8] + struct.pack("<Q", len(encoded)) + encoded + data[offset + width :] + bytes(64)


def gguf_places(data: bytes) -> tuple[list[Span], list[tuple[int, int]]]:
    """Return all numbers and strings of a header, and where each metadata value begins and ends."""
    spans: list[Span] = []
    at = 4

    def number(width: int) -> int:
        nonlocal at
        spans.append((at, width, "number"))
        at += width
        if at > len(data):
            raise ValueError("a header beyond the file")
        return int.from_bytes(data[at - width : at], "little")

    def string() -> None:
        nonlocal at
        length = number(8)
        spans.append((at, length, "string"))
        at += length

    def value(kind: int) -> None:
        nonlocal at
        if kind == 9:
            kind, count = number(4), number(8)
            numbers = count if kind == 8 else min(count, 8)  # of many alike the first are enough
            for _ in range(numbers):
                value(kind)
            at += 0 if kind == 8 else (count - numbers) * WIDTHS[kind]
        elif kind == 8:
            string()
        else:
            number(WIDTHS[kind])

    number(4)
    tensors, keys = number(8), number(8)
    entries = []
    for _ in range(keys):
        begin = at
        string()
        value(number(4))
        entries.append((begin, at))
    for _ in range(tensors):
        string()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return spans, entries


CHANGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "json": change_json,
    "safetensors": change_safetensors,
    "gguf": change_gguf,
}
