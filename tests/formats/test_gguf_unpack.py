"""Unpacked blocks, put together again in fp32, are bitwise what the gguf package gives."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.gguf_unpack_reference import GRID_SCALES, dequantize, write_factors
from support.helpers import assert_bitwise

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFTensor, GGUFType
from fastinfer.formats.gguf_rows import GROUPS_OF_16, GROUPS_OF_32
from fastinfer.formats.gguf_unpack import DENSE_DTYPES, SUPPORTED_TYPES, read_rows, unpack, unpack_rows
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked
from fastinfer.models import gguf_checkpoint
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.utils.huge_pages import HugePages
from fastinfer.weights.pack import make_weight

# Form and range of integers.
FORMS = {
    GGUFType.Q4_0: (Int4, 0, 15),
    GGUFType.Q4_1: (Int4, 0, 15),
    GGUFType.Q5_0: (Int8, -16, 15),
    GGUFType.Q5_1: (Int8, 0, 31),
    GGUFType.Q8_0: (Int8, -128, 127),
    GGUFType.IQ4_NL: (Lut, 0, 15),
    GGUFType.IQ4_XS: (Lut, 0, 15),
    GGUFType.MXFP4: (Lut, 0, 15),
    GGUFType.Q4_K: (Int4, 0, 15),
    GGUFType.Q5_K: (Int8, 0, 31),
    GGUFType.IQ1_S: (Lut, 0, 10),
    GGUFType.IQ2_XXS: (Lut, 0, 10),
    GGUFType.IQ3_XXS: (Lut, 0, 15),
    GGUFType.IQ3_S: (Int4, 0, 15),
    GGUFType.TQ1_0: (Int4, 7, 9),
    GGUFType.TQ2_0: (Int4, 7, 10),
    GGUFType.Q1_0: (Int4, 7, 9),
    GGUFType.Q2_0: (Int4, 7, 10),
}
# Types whose scales are computed.
SCALED = (*GROUPS_OF_16, *GROUPS_OF_32)


def random_tensor(kind: GGUFType, rows: int = 5, columns: int | None = None) -> GGUFTensor:
    """Random bytes: every nibble, and scales of all sizes, infinities and NaNs."""
    columns = columns or 3 * max(32, kind.block_size)
    row_bytes = columns // kind.block_size * kind.block_bytes
    data = np.random.default_rng(kind).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    return GGUFTensor("blk.0.test", (rows, columns), kind, data)


def sensible_tensor(kind: GGUFType, rows: int = 64, columns: int = 1024, scale: float = 1e-3) -> GGUFTensor:
    """Random blocks whose fp16 factors are those of weights."""
    tensor = random_tensor(kind, rows, columns)
    blocks = tensor.data.reshape(rows, -1, kind.block_bytes)
    random = np.random.default_rng(0)
    write_factors(blocks, kind, *(random.uniform(0.5 * scale, scale, blocks.shape[:2]) for _ in range(2)))
    return tensor


def assert_bitwise_equal(ours: np.ndarray, expected: np.ndarray) -> None:
    """Bit by bit, but one NaN is as good as another."""
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(expected))
    bits = np.where(np.isnan(expected), 0, ours).view(np.uint32)
    np.testing.assert_array_equal(bits, np.where(np.isnan(expected), 0, expected).view(np.uint32))


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_random_blocks(kind: GGUFType) -> None:
    tensor = random_tensor(kind, rows=257)
    expected = dequantize(tensor.data, tensor.type)
    weight = unpack(tensor)
    assert weight.shape == tensor.shape
    assert_bitwise_equal(weight.dequantize().numpy(), expected)
    if isinstance(weight, Dense):
        assert weight.values.dtype == DENSE_DTYPES.get(kind, torch.float32)
    else:
        form, low, high = FORMS[kind]
        assert type(weight) is form
        assert (int(weight.q.min()), int(weight.q.max())) == (low, high)
        assert weight.q.dtype == (torch.int8 if form is Int8 else torch.uint8)


def test_real_model(model_path: Path) -> None:
    file = GGUFFile(model_path)
    names = ["output_norm.weight"]
    names += [
        f"blk.{layer}.{part}.weight" for layer in (0, 29) for part in ("attn_q", "attn_k", "ffn_down", "ffn_norm")
    ]
    for name in names:
        tensor = file.tensors[name]
        assert_bitwise_equal(
            unpack(tensor).dequantize().numpy(), dequantize(tensor.data, tensor.type).reshape(tensor.shape)
        )
    rows = file.tensors["token_embd.weight"].data[::97]
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)
    assert_bitwise_equal(unpack_rows(rows, GGUFType.Q8_0).dequantize().numpy(), expected)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_rows_can_be_reordered_while_packed(kind: GGUFType, exact: bool) -> None:
    tensor = sensible_tensor(kind, rows=7) if kind in SCALED else random_tensor(kind, rows=7)
    order = np.array([6, 0, 0, 3])
    picked, whole = unpack_rows(tensor.data[order], kind, exact=exact), unpack(tensor, exact=exact)
    assert picked.fits(whole)
    for name, part in vars(whole.rows(torch.from_numpy(order))).items():
        same = vars(picked)[name]
        assert type(part) is type(same)
        assert not isinstance(part, torch.Tensor) or torch.equal(part.view(torch.uint8), same.view(torch.uint8))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_one_block(kind: GGUFType, exact: bool) -> None:
    tensor = random_tensor(kind, rows=1, columns=max(32, kind.block_size))
    weight = unpack(tensor, exact=exact)
    assert weight.shape == tensor.shape
    assert weight.dequantize().shape == tensor.shape


@pytest.mark.parametrize("kind", [GGUFType.Q4_K, GGUFType.Q5_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
def test_scales_rounded_to_fp16(kind: GGUFType, scale: float) -> None:
    """Numbers below 2^-13, fp16's subnormal ones among them, are not rounded at all."""
    tensor = sensible_tensor(kind, scale=scale)
    exact, rounded = unpack(tensor), unpack(tensor, exact=False)
    for name in ("scales", "mins"):
        precise, half = getattr(exact, name), getattr(rounded, name)
        assert (precise.dtype, half.dtype) == (torch.float32, torch.float16)
        torch.testing.assert_close(half.float(), precise, rtol=2**-11, atol=0)
        small = precise.abs() < 2**-13
        assert small.any()
        assert torch.equal(half.float()[small], precise[small])
    assert torch.equal(exact.q, rounded.q)


@pytest.mark.parametrize("kind", [GGUFType.Q4_K, GGUFType.Q5_K, GGUFType.Q6_K], ids=lambda kind: kind.name)
def test_scales_that_fp16_cannot_hold_stay_fp32(kind: GGUFType) -> None:
    tensor = sensible_tensor(kind, scale=3e4)
    weight = unpack(tensor, exact=False)
    assert weight.scales.dtype == torch.float32
    assert weight.mins is None or weight.mins.dtype == torch.float32
    torch.testing.assert_close(
        weight.dequantize(), torch.from_numpy(dequantize(tensor.data, tensor.type)), rtol=0, atol=5e5
    )


@pytest.mark.parametrize("scale", [1e-2, 1e-6])
@pytest.mark.parametrize("kind", GROUPS_OF_16, ids=lambda kind: kind.name)
def test_joined_groups_are_rounded_to_eight_bits(kind: GGUFType, scale: float) -> None:
    """At most by half a step of the integers, and 128 times the rounding of their scale to fp16."""
    tensor = sensible_tensor(kind, scale=scale)
    weight = unpack(tensor, exact=False)
    assert isinstance(weight, Int8)
    assert weight.mins is None
    assert weight.scales.dtype == torch.float16
    expected = torch.from_numpy(dequantize(tensor.data, tensor.type)).unflatten(1, (-1, 32))
    error = (weight.dequantize().view_as(expected) - expected).abs()
    step = weight.scales.float().abs()[..., None]
    assert (error <= 0.5001 * step).all()
    # Nor is the step much larger than it must be: half of the groups' largest integers are small by chance.
    largest = expected.abs().amax(-1, keepdim=True)
    assert (step * 127 <= largest * 1.5 + 127 * 2**-24).float().mean() > 0.9


def test_joined_groups_of_nvfp4() -> None:
    """The larger of two groups keeps its numbers; those of the other are off by half a step at most."""
    tensor = random_tensor(GGUFType.NVFP4, rows=33)
    tensor.data.reshape(33, -1, 36)[..., :4] = np.random.default_rng(1).integers(0, 120, (33, 3, 4))
    factor = torch.tensor(2.0**-7)
    expected = torch.from_numpy(dequantize(tensor.data, tensor.type)).view(-1, 2, 16) * factor
    weight = read_rows(tensor.data, tensor.type, exact=False, factor=factor)
    assert isinstance(weight, Int8)
    error = (weight.dequantize().view_as(expected) - expected).abs()
    assert (error <= 0.501 * weight.scales.float().abs().view(-1, 1, 1)).all()
    kept = (error <= 2**-10 * expected.abs() + 2**-17).all(-1)
    assert kept.any(-1).all()
    assert not kept.all()
    exact = read_rows(tensor.data, tensor.type, exact=True, factor=factor)
    assert torch.equal(exact.dequantize().view_as(expected), expected)


@pytest.mark.parametrize("kind", [GGUFType.Q6_K, GGUFType.Q3_K, *sorted(set(GRID_SCALES) & set(GROUPS_OF_16))])
def test_larger_of_two_joined_groups_keeps_its_integers(kind: GGUFType) -> None:
    """Where their scales have one sign; so that its values are off by the rounding of the scale to fp16 alone."""
    tensor = sensible_tensor(kind, scale=1e-2)
    blocks = tensor.data.reshape(-1, kind.block_bytes)
    if kind is GGUFType.Q6_K:
        blocks[:, 192:208] &= 0x7F
    elif kind is GGUFType.Q3_K:
        blocks[:, 104:108] |= 0xAA  # the highest of six bits, whose offset is 32
    expected = torch.from_numpy(dequantize(tensor.data, tensor.type)).view(-1, 2, 16)
    error = (unpack(tensor, exact=False).dequantize().view_as(expected) - expected).abs()
    kept = (error <= 2**-10 * expected.abs() + 2**-17).all(-1)
    assert kept.any(-1).all()
    assert not kept.all()


def test_joining_groups_of_extreme_scales() -> None:
    """Q6_K's scales -128 and 127 with the integers -32: no integer wraps around."""
    tensor = sensible_tensor(GGUFType.Q6_K, rows=1, columns=256)
    block = tensor.data[0]
    block[:192] = 0  # every integer is -32
    block[192:208] = np.array([-128, 127, 127, -128, 127, -127, -127, 127, 0, 0, 0, -128, 5, -5, -1, 1], np.int8).view(
        np.uint8
    )
    expected = torch.from_numpy(dequantize(tensor.data, tensor.type))
    torch.testing.assert_close(unpack(tensor, exact=False).dequantize(), expected, rtol=0.005, atol=0)


@pytest.mark.parametrize("kind", sorted(SCALED), ids=lambda kind: kind.name)
def test_zero_blocks(kind: GGUFType) -> None:
    tensor = sensible_tensor(kind, scale=0.0)
    for exact in (True, False):
        assert not unpack(tensor, exact=exact).dequantize().any()


@pytest.mark.filterwarnings("error")
def test_dense_is_the_file_itself(model_path: Path) -> None:
    tensor = GGUFFile(model_path).tensors["output_norm.weight"]
    weight = unpack(tensor)
    assert isinstance(weight, Dense)
    assert weight.values.shape == tensor.shape == (576,)
    assert weight.values.data_ptr() == tensor.data.ctypes.data


@pytest.mark.parametrize("kind", sorted(set(GGUFType) - set(SUPPORTED_TYPES)), ids=lambda kind: kind.name)
def test_unsupported_type(kind: GGUFType) -> None:
    tensor = random_tensor(kind)
    with pytest.raises(UnsupportedModelError, match=rf"'blk\.0\.test' is stored as {kind.name}; supported are .*Q4_1"):
        unpack(tensor)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_a_large_matrix_in_parts(
    kind: GGUFType, exact: bool, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed part by part it is what it is as a whole; 100 rows of 3 blocks, parts of 16 and of 48 rows."""
    columns = 3 * max(32, kind.block_size)
    tensor = (sensible_tensor if kind in SCALED else random_tensor)(kind, 100, columns)
    checkpoint = GGUFCheckpoint(GGUFFile(model_path), exact=exact)
    monkeypatch.setitem(checkpoint.file.tensors, "blk.0.ffn_down.weight", tensor)
    whole = make_weight(checkpoint.linear("layers.0.down_proj", 100, columns), 8)
    for part_rows, count in ((1, 7), (33, 3)):
        monkeypatch.setattr(gguf_checkpoint, "PART_ELEMENTS", part_rows * columns)
        parts = list(checkpoint.parts("layers.0.down_proj", 100, columns))
        at_once = kind in DENSE_DTYPES or (exact and kind is GGUFType.NVFP4)
        assert len(parts) == (1 if at_once else count)
        for memory in (None, HugePages()):
            weight = make_weight(iter(parts), 8, memory=memory, out_features=100)
            assert type(weight) is type(whole)
            for name, expected in vars(whole).items():
                got = getattr(weight, name)
                if isinstance(expected, torch.Tensor):
                    assert_bitwise(got, expected)
                else:
                    assert got == expected


def test_a_layers_matrix_in_parts(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of rows that it has as a whole: Llama's Q and K are stored in another."""
    monkeypatch.setattr(gguf_checkpoint, "PART_ELEMENTS", 64 * 576)
    checkpoint = GGUFCheckpoint(GGUFFile(model_path))
    whole, parts = (read("layers.0.q_proj", 576, 576) for read in (checkpoint.linear, checkpoint.parts))
    assert_bitwise(torch.cat([part.dequantize() for part in parts]), whole.dequantize())


@pytest.mark.parametrize(
    "parts",
    [
        [Dense(torch.zeros(16, 32)), Int4(torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 1))],
        [Int4(torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 1), mins) for mins in (torch.ones(16, 1), None)],
        [Dense(torch.zeros(7, 32)), Dense(torch.zeros(16, 32))],
        [Dense(torch.zeros(16, 32)), Dense(torch.zeros(17, 32))],
        [Dense(torch.zeros(16, 32))],
    ],
    ids=["forms", "minimums", "rows", "too many", "too few"],
)
def test_parts_that_do_not_fit(parts: list[Unpacked]) -> None:
    with pytest.raises(ValueError, match=r"parts must (have one form, fill|fill) 32 rows"):
        make_weight(iter(parts), 8, out_features=32)
