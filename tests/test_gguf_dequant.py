"""Unpacked blocks, put together again in fp32, are bitwise what the gguf package gives."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFTensor, GGUFType
from fastinfer.formats.gguf_dequant import DENSE_DTYPES, INT4_TYPES, INT8_TYPES, Dense, Int4, Int8, unpack, unpack_rows

SUPPORTED = [*DENSE_DTYPES, *INT4_TYPES, *INT8_TYPES]


def random_tensor(kind: GGUFType, rows: int = 5, blocks: int = 3) -> GGUFTensor:
    """Random bytes: every nibble, and scales of all sizes, infinities and NaNs."""
    values = blocks * 32
    row_bytes = values // kind.block_size * kind.block_bytes
    data = np.random.default_rng(kind).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    return GGUFTensor("blk.0.test", (rows, values), kind, data)


def dequantize(weight: Dense | Int4 | Int8) -> np.ndarray:
    if isinstance(weight, Dense):
        return weight.values.float().numpy()
    q = weight.q.float()
    if isinstance(weight, Int4) and weight.mins is None:
        q -= 8
    values = q.view(*weight.scales.shape, 32) * weight.scales.float()[..., None]
    if weight.mins is not None:
        values += weight.mins.float()[..., None]
    return values.flatten(-2).numpy()


def assert_bitwise_equal(ours: np.ndarray, expected: np.ndarray) -> None:
    """Bit by bit, but one NaN is as good as another."""
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(expected))
    bits = np.where(np.isnan(expected), 0, ours).view(np.uint32)
    np.testing.assert_array_equal(bits, np.where(np.isnan(expected), 0, expected).view(np.uint32))


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_random_blocks(kind: GGUFType) -> None:
    tensor = random_tensor(kind, rows=257)
    expected = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType(kind))
    weight = unpack(tensor)
    assert_bitwise_equal(dequantize(weight), expected)
    if isinstance(weight, Int4):
        assert (weight.q.dtype, int(weight.q.max())) == (torch.uint8, 15)
    elif isinstance(weight, Int8):
        limits = {GGUFType.Q8_0: (-128, 127), GGUFType.Q5_0: (-16, 15), GGUFType.Q5_1: (0, 31)}[kind]
        assert (weight.q.dtype, int(weight.q.min()), int(weight.q.max())) == (torch.int8, *limits)
    else:
        assert weight.values.dtype == DENSE_DTYPES[kind]


def test_real_model(model_path: Path) -> None:
    file = GGUFFile(model_path)
    names = ["output_norm.weight"]
    names += [
        f"blk.{layer}.{part}.weight" for layer in (0, 29) for part in ("attn_q", "attn_k", "ffn_down", "ffn_norm")
    ]
    for name in names:
        tensor = file.tensors[name]
        expected = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType(tensor.type)).reshape(tensor.shape)
        assert_bitwise_equal(dequantize(unpack(tensor)), expected)
    rows = file.tensors["token_embd.weight"].data[::97]
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)
    assert_bitwise_equal(dequantize(unpack_rows(rows, GGUFType.Q8_0)), expected)


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_rows_can_be_reordered_while_packed(kind: GGUFType) -> None:
    tensor = random_tensor(kind, rows=7)
    order = np.array([6, 0, 0, 3])
    picked, whole = unpack_rows(tensor.data[order], kind), unpack(tensor)
    assert type(picked) is type(whole)
    for name, part in vars(picked).items():
        full = vars(whole)[name]
        assert (part is None) == (full is None)
        assert part is None or torch.equal(part.view(torch.uint8), full[torch.from_numpy(order)].view(torch.uint8))


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_one_block(kind: GGUFType) -> None:
    weight = unpack(random_tensor(kind, rows=1, blocks=1))
    assert (weight.values if isinstance(weight, Dense) else weight.q).shape == (1, 32)


@pytest.mark.filterwarnings("error")
def test_dense_is_the_file_itself(model_path: Path) -> None:
    tensor = GGUFFile(model_path).tensors["output_norm.weight"]
    weight = unpack(tensor)
    assert isinstance(weight, Dense)
    assert weight.values.shape == tensor.shape == (576,)
    assert weight.values.data_ptr() == tensor.data.ctypes.data


@pytest.mark.parametrize("kind", sorted(set(GGUFType) - set(SUPPORTED)), ids=lambda kind: kind.name)
def test_unsupported_type(kind: GGUFType) -> None:
    tensor = random_tensor(kind, blocks=8)
    with pytest.raises(UnsupportedModelError, match=rf"'blk\.0\.test' is stored as {kind.name}; supported are .*Q4_1"):
        unpack(tensor)
