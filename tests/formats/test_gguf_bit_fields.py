"""Parts of blocks side by side, from C++."""

import numpy as np
import pytest
from support.helpers import num_threads

from fastinfer import _C
from fastinfer.formats.gguf_bit_fields import bit_fields, halves


def plain_bit_fields(blocks: np.ndarray, begin: int, end: int, bits: int, run: int, shift: int) -> np.ndarray:
    """One value after the other, as the docstring says."""
    return np.stack(
        [
            (blocks[..., byte + i] >> bit & 2**bits - 1) << shift
            for byte in range(begin, end, run)
            for bit in range(0, 8, bits)
            for i in range(run)
        ],
        axis=-1,
    ).astype(np.uint8)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("run", [2, 8, 16, 32, 64])
@pytest.mark.parametrize(("bits", "shift"), [(1, 0), (1, 7), (2, 4), (4, 0), (4, 4), (8, 0)])
def test_bit_fields(bits: int, shift: int, run: int, threads: int) -> None:
    rng = np.random.default_rng(run)
    for shape in ((1, 1), (3, 5), (7, 100)):
        blocks = rng.integers(0, 256, (*shape, 3 + 3 * run), dtype=np.uint8)
        for begin, end in ((0, run), (3, 3 + 3 * run), (1, 1 + 2 * run)):
            want = plain_bit_fields(blocks, begin, end, bits, run, shift)
            with num_threads(threads):
                values = bit_fields(blocks, begin, end, bits, run, shift)
            np.testing.assert_array_equal(values, want)


def test_halves() -> None:
    blocks = np.zeros((2, 3, 7), np.uint8)
    numbers = np.arange(6, dtype=np.float16).reshape(2, 3)
    blocks[..., 3:5] = numbers[..., None].view(np.uint8)
    np.testing.assert_array_equal(halves(blocks, 3), numbers)


SOUND = {"block_bytes": 20, "begin": 4, "end": 20, "bits": 4, "run": 16, "shift": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": 4}, "run must be 2, 8, 16, 32 or 64, got 4"),
        ({"bits": 3}, "bits must be 1, 2, 4 or 8, got 3"),
        ({"shift": 5}, "shift must be in 0..4, got 5"),
        ({"shift": -1}, "shift must be in 0..4, got -1"),
        ({"begin": 5}, "begin and end must have whole runs of a block between them, got 5 and 20"),
        ({"begin": -12}, "got -12 and 20"),
        ({"begin": 20}, "got 20 and 20"),
        ({"begin": 8, "end": 24}, "got 8 and 24"),
        ({"block_bytes": 30}, "values must have 64 bytes for whole blocks, got 96 for blocks of 60"),
        ({"block_bytes": 21}, "whole blocks"),
        ({"bits": 2}, "values must have 192 bytes"),
    ],
)
def test_bit_fields_refuses(change: dict[str, int], message: str) -> None:
    values, blocks = np.empty(96, np.uint8), np.zeros(60, np.uint8)
    _C.bit_fields(values, blocks, **SOUND)
    with pytest.raises(ValueError, match=message):
        _C.bit_fields(values, blocks, **SOUND | change)


def test_bit_fields_refuses_strides() -> None:
    values, blocks = np.empty(192, np.uint8), np.zeros((6, 20), np.uint8)
    with pytest.raises(ValueError, match="blocks must be contiguous, got strides"):
        _C.bit_fields(values[:96], blocks[::2], **SOUND)
    with pytest.raises(ValueError, match="values must be contiguous, got strides"):
        _C.bit_fields(values[::2], blocks[:3], **SOUND)
