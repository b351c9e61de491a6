"""Rows of GGUF files, unpacked and packed straight from the file, are bitwise what plain numpy makes of them."""

import itertools

import numpy as np
import pytest
import torch
from support import reference
from support.gguf_unpack_reference import FACTORS, two_level_reference, unpack_reference, write_factors
from support.helpers import assert_bitwise, num_threads
from torch import Tensor

from fastinfer import _C, ops
from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf_rows import FIVE_BIT_TYPES, QUANTIZED_TYPES, TWO_LEVEL_BITS, GGUFRows
from fastinfer.formats.gguf_types import GGUFType
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked, concatenate
from fastinfer.weights.expert_weights import QuantizedExperts, make_expert_weights
from fastinfer.weights.pack import make_weight

SHAPES = [(1, 1), (15, 3), (17, 2), (33, 9), (64, 1)]  # rows and blocks


def random_file(kind: GGUFType, rows: int, blocks: int, scale: float, before: int = 7) -> np.ndarray:
    """View rows [rows, row_bytes] of a file whose blocks have random bits, and scales of both signs up to a size."""
    rng = np.random.default_rng([kind, rows, blocks])
    file = rng.integers(0, 256, before + rows * blocks * kind.block_bytes + 5, dtype=np.uint8)
    data = file[before:-5].reshape(rows, -1)
    view = data.reshape(rows, blocks, kind.block_bytes)
    if kind is GGUFType.MXFP4:  # exponents that fp16 has, or all
        view[..., 0] = rng.integers(*((104, 144) if scale > 1e-3 else (0, 256)), view.shape[:2])
        return data
    factors = []
    for _ in FACTORS.get(kind, (0,)):
        numbers = (rng.uniform(-scale, scale, view.shape[:2])).astype(np.float16)
        numbers[rng.random(numbers.shape) < 0.1] = 0
        factors.append(numbers)
    write_factors(view, kind, *factors)
    return data


def assert_same(weight: Unpacked, expected: Unpacked) -> None:
    assert type(weight) is type(expected)
    assert vars(weight).keys() == vars(expected).keys()
    for name, value in vars(expected).items():
        got = getattr(weight, name)
        if isinstance(value, Tensor):
            assert_bitwise(got, value)
        else:
            assert got == value, name


def packed_reference(weight: Unpacked) -> tuple[Tensor, Tensor, Tensor | None]:
    assert isinstance(weight, Int4 | Int8 | Lut)
    rows, columns = weight.shape
    tiles = -(-rows // 16)
    q = torch.zeros(16 * tiles, columns, dtype=weight.q.dtype)
    q[:rows] = weight.q
    if isinstance(weight, Int8):
        qweight = q.view(tiles, 16, columns // 32, 8, 4).permute(0, 2, 3, 1, 4)
    else:
        low, high = q.view(tiles, 16, columns // 32, 4, 2, 4).permute(4, 0, 2, 3, 1, 5)
        qweight = low | high << 4
    mins = None if weight.mins is None else ops.pack_scales(weight.mins)
    return qweight.contiguous(), ops.pack_scales(weight.scales), mins


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("scale", [1e-2, 1e-6])
@pytest.mark.parametrize("kind", QUANTIZED_TYPES, ids=lambda kind: kind.name)
def test_unpacked_and_packed(kind: GGUFType, scale: float, threads: int) -> None:
    for (rows, blocks), exact in itertools.product(SHAPES, [False, True]):
        data = random_file(kind, rows, blocks, scale)
        weight, expected = GGUFRows.of(data, kind, exact), unpack_reference(data, kind, exact)
        with num_threads(threads):
            unpacked, packed = weight.unpack(), make_weight(weight, 8)
        assert_same(unpacked, expected)
        if kind in TWO_LEVEL_BITS:
            q, numbers = two_level_reference(data, kind)
            pack = {4: reference.int4_pack, 5: reference.int5_pack, 6: reference.int6_pack}[TWO_LEVEL_BITS[kind]]
            assert_bitwise(packed.qweight, pack(q))
            stored = (packed.scales,) if packed.mins is None else (packed.scales, packed.mins)
            for got, (integers, factors) in zip(stored, numbers, strict=True):
                assert_bitwise(got, ops.pack_two_level_scales(integers, factors))
            assert_bitwise(packed.rows(None, torch.float32), unpack_reference(data, kind, True).dequantize())
            continue
        if isinstance(expected, Dense):
            assert_bitwise(packed.values, expected.values)
            continue
        qweight, scales, mins = packed_reference(expected)
        if kind in FIVE_BIT_TYPES:
            qweight = reference.int5_pack((expected.q + (16 if mins is None else 0)).view(torch.uint8))
            assert_bitwise(packed.rows(None, torch.float32), expected.dequantize())
        assert_bitwise(packed.qweight, qweight)
        assert_bitwise(packed.scales, scales)
        assert (getattr(packed, "mins", None) is None) == (mins is None)
        if mins is not None:
            assert_bitwise(packed.mins, mins)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", QUANTIZED_TYPES, ids=lambda kind: kind.name)
def test_every_number_of_fp16(kind: GGUFType, exact: bool) -> None:
    """Infinities and NaNs among them: a damaged block is no better with us, and no worse."""
    data = random_file(kind, 256, 256, 1.0)
    blocks, numbers = data.reshape(256, 256, -1), np.arange(65536, dtype=np.uint16).reshape(256, 256)
    if kind is GGUFType.MXFP4:
        blocks[..., :2] = numbers[..., None].view(np.uint8)
    else:
        write_factors(blocks, kind, numbers.view(np.float16), np.ones_like(numbers, np.float16))
    weight, expected = GGUFRows.of(data, kind, exact).unpack(), unpack_reference(data, kind, exact)
    if isinstance(expected, Dense):
        assert torch.equal(weight.values.nan_to_num(12.5), expected.values.nan_to_num(12.5))
        return
    assert weight.scales.dtype == expected.scales.dtype
    assert torch.equal(weight.scales.isnan(), expected.scales.isnan())
    finite = expected.scales.isfinite()
    assert_bitwise(weight.scales[finite], expected.scales[finite])
    groups = [values.unflatten(1, (-1, 32)) for values in (weight.q, expected.q)]
    assert_bitwise(groups[0][finite], groups[1][finite])
    if expected.mins is not None:
        assert torch.equal(weight.mins.nan_to_num(12.5), expected.mins.nan_to_num(12.5))


@pytest.mark.parametrize("kind", [GGUFType.Q4_K, GGUFType.Q5_K, GGUFType.Q6_K], ids=lambda kind: kind.name)
def test_scales_too_large_for_fp16(kind: GGUFType) -> None:
    """One of them makes all scales fp32."""
    data = random_file(kind, 20, 3, 1e-2)
    write_factors(data.reshape(20, 3, -1)[17:18, 2:], kind, np.array([[6e4]]))
    weight, expected = GGUFRows.of(data, kind, False), unpack_reference(data, kind, False)
    assert expected.scales.dtype == torch.float32
    assert_same(weight.unpack(), expected)
    if kind in TWO_LEVEL_BITS:  # no product is stored
        exact = unpack_reference(data, kind, True).dequantize()
        assert_bitwise(make_weight(weight, 8).rows(None, torch.float32), exact)
        return
    packed, (qweight, scales, _) = make_weight(weight, 8), packed_reference(expected)
    assert_bitwise(packed.qweight, qweight)
    assert_bitwise(packed.scales, scales)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("unpacked", [False, True])
def test_scales_too_large_for_fp16_in_one_part(first: int, unpacked: bool) -> None:
    """Or in one of a mixture's experts: scales become fp32, exactly. Parts behind it are not rounded to fp16 at all."""
    parts = [random_file(GGUFType.IQ3_S, 32, 2, scale) for scale in (1e-2, 6e4)]
    parts = [parts[first], parts[1 - first]]
    rows: list[Unpacked] = [GGUFRows.of(part, GGUFType.IQ3_S, False) for part in parts]
    weights = [row.unpack() for row in rows] if unpacked else rows
    if not unpacked:
        file = np.concatenate(parts)
        weights = [GGUFRows.of(half, GGUFType.IQ3_S, False) for half in (file[:32], file[32:])]
    packed = make_weight(iter(weights), 8, out_features=64)
    exact = False, not unpacked and first == 1
    references = [unpack_reference(part, GGUFType.IQ3_S, e).dequantize() for part, e in zip(parts, exact, strict=True)]
    expected = torch.cat(references)
    assert packed.scales.dtype == packed.mins.dtype == torch.float32
    assert_bitwise(packed.rows(None, torch.float32), expected)
    if not unpacked:  # unpacked ones are refused, because their dtypes differ
        experts = make_expert_weights(weights, 8)
        assert_bitwise(experts.qweight.flatten(0, 1), packed.qweight)
        assert_bitwise(experts.scales.flatten(0, 1), packed.scales)
        assert_bitwise(experts.mins.flatten(0, 1), packed.mins)


def test_rows_of_several_tensors() -> None:
    """Views of one file whose types have one form are combined, in any order of rows."""
    parts = [random_file(kind, 5, 256 // kind.block_size, 1e-2) for kind in (GGUFType.Q5_0, GGUFType.Q6_K)]
    file = np.concatenate([part.reshape(-1) for part in parts])
    begin, views = 0, []
    for kind, part in zip((GGUFType.Q5_0, GGUFType.Q6_K), parts, strict=True):
        views.append(GGUFRows.of(file[begin : begin + part.size].reshape(part.shape), kind, False))
        begin += part.size
    expected = concatenate(
        [unpack_reference(part, kind, False) for part, kind in zip(parts, (GGUFType.Q5_0, GGUFType.Q6_K), strict=True)]
    )
    order = torch.tensor([9, 0, 4, 4, 5])
    assert views[0].fits(views[1])
    assert_same(concatenate(views).rows(order).unpack(), expected.rows(order))
    assert_bitwise(concatenate(views).dequantize(), expected.dequantize())
    assert [view.two_level_bits for view in (*views, concatenate(views))] == [0, 6, 0]
    assert_bitwise(make_weight(concatenate(views), 8).rows(None, torch.float32), expected.dequantize())
    other_form = GGUFRows.of(random_file(GGUFType.Q4_0, 5, 8, 1e-2), GGUFType.Q4_0, False)
    other_file = GGUFRows.of(parts[0], GGUFType.Q5_0, False)
    assert not views[0].fits(other_form)
    assert not views[0].fits(other_file)
    assert not views[0].fits(expected)


def test_experts_of_six_bits() -> None:
    """All of one type; a stack with another type whose unpacked form is the same is refused."""
    parts = [random_file(kind, 20, 512 // kind.block_size, 1e-2) for kind in (GGUFType.Q6_K, GGUFType.Q8_0)]
    file = np.concatenate([part.reshape(-1) for part in parts])
    sizes = parts[0].size, file.size
    six, eight = (
        GGUFRows.of(file[end - part.size : end].reshape(part.shape), kind, False)
        for part, end, kind in zip(parts, sizes, (GGUFType.Q6_K, GGUFType.Q8_0), strict=True)
    )
    experts, single = make_expert_weights([six, six.rows(torch.arange(19, -1, -1))], 8), make_weight(six, 8)
    assert isinstance(experts, QuantizedExperts)
    assert (experts.bits, experts.mins) == (6, None)
    assert_bitwise(experts.qweight[0], single.qweight)
    x, routing = torch.randn(3, 512), ops.route_experts(torch.tensor([[1.0, 0.0]] * 3), 1, False)
    assert_bitwise(experts.linear(x, routing), single.linear(x))
    with pytest.raises(UnsupportedModelError, match=r"got Int6 \[20, 512\] for expert 0 and Int8 \[20, 512\]"):
        make_expert_weights([six, eight], 8)


def arguments(**changes: object) -> dict[str, object]:
    sound = {
        "file": np.zeros(100, np.uint8),
        "offsets": np.array([0, 82], np.int64),
        "types": np.array([2, 2], np.uint8),
        "columns": 32,
        "packed": False,
        "q": np.zeros((2, 32), np.uint8),
        "scales": np.zeros((2, 1), np.float16),
        "mins": None,
    }
    return sound | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": np.array([0], np.int64)}, r"offsets must have 8 bytes for each of 2 types, got 8"),
        ({"offsets": np.array([0, 83], np.int64)}, r"row 1 must lie within the file's 100 bytes, got 18 bytes at 83"),
        ({"offsets": np.array([-1, 0], np.int64)}, r"row 0 must lie within .* got 18 bytes at -1"),
        ({"columns": 2**40}, r"row 0 must lie within"),
        ({"columns": 33}, r"row 0 must have whole blocks of a quantised type, got 33 columns of type 2"),
        ({"columns": -32}, r"row 0 must have whole blocks"),
        ({"types": np.array([2, 0], np.uint8)}, r"row 1 must have whole blocks .* columns of type 0"),
        ({"types": np.array([2, 8], np.uint8), "offsets": np.zeros(2, np.int64)}, r"one form, got 2 and 8"),
        ({"types": np.zeros(0, np.uint8), "offsets": np.zeros(0, np.int64)}, r"types must have at least one row"),
        ({"q": np.zeros(63, np.uint8)}, r"q must have 64 bytes, got 63"),
        ({"q": np.zeros(64, np.uint8), "packed": True}, r"q must have 256 bytes, got 64"),
        ({"scales": np.zeros(1, np.float16)}, r"scales must have 4 bytes, got 2"),
        ({"scales": np.zeros(2, np.float64)}, r"scales must be fp16 or fp32, got 8 bytes each"),
        ({"mins": np.zeros(2, np.float16)}, r"mins must be None"),
        ({"types": np.array([3, 3], np.uint8), "offsets": np.zeros(2, np.int64)}, r"mins must be a buffer"),
        ({"q": np.zeros((2, 64), np.uint8)[:, ::2]}, r"q must be contiguous"),
    ],
)
def test_wrong_arguments(changes: dict[str, object], message: str) -> None:
    assert _C.unpack_rows(**arguments())
    with pytest.raises(ValueError, match=message):
        _C.unpack_rows(**arguments(**changes))


def two_level_arguments(**changes: object) -> dict[str, object]:
    sound = {
        "file": np.zeros(420, np.uint8),
        "offsets": np.array([0, 210], np.int64),
        "types": np.array([14, 14], np.uint8),
        "columns": 256,
        "q": np.zeros(3072, np.uint8),
        "scales": np.zeros(288, np.int8),
        "mins": None,
    }
    return sound | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"offsets": np.array([0, 211], np.int64)},
            r"row 1 must lie within the file's 420 bytes, got 210 bytes at 211",
        ),
        ({"types": np.array([14, 8], np.uint8), "offsets": np.zeros(2, np.int64)}, r"two-level scales, got 14 and 8"),
        ({"types": np.array([8, 8], np.uint8), "offsets": np.zeros(2, np.int64)}, r"two-level scales, got 8 and 8"),
        ({"q": np.zeros(3071, np.uint8)}, r"q must have 3072 bytes, got 3071"),
        ({"scales": np.zeros(160, np.int8)}, r"scales must have 288 bytes, got 160"),
        ({"mins": np.zeros(288, np.int8)}, r"mins must be None"),
        (
            {"types": np.array([12, 12], np.uint8), "q": np.zeros(2048, np.uint8), "scales": np.zeros(160, np.int8)},
            r"mins must be a buffer",
        ),
    ],
)
def test_wrong_arguments_of_two_levels(changes: dict[str, object], message: str) -> None:
    _C.pack_two_level_rows(**two_level_arguments())
    with pytest.raises(ValueError, match=message):
        _C.pack_two_level_rows(**two_level_arguments(**changes))


def test_values_of_groups_of_16_alone() -> None:
    rows = {name: arguments()[name] for name in ("file", "offsets", "types", "columns")}
    with pytest.raises(ValueError, match="types must have groups of 16, got 2"):
        _C.dequantize_rows(**rows, values=np.zeros((2, 32), np.float32))


@pytest.mark.parametrize("kind", [GGUFType.Q4_0, GGUFType.Q4_K, GGUFType.Q6_K])
def test_columns(kind: GGUFType) -> None:
    """Whole blocks stay as they are in the file, others are unpacked."""
    size = kind.block_size
    rows = GGUFRows.of(random_file(kind, 17, 4, 0.1), kind, exact=False)
    whole = rows.dequantize()
    part = rows.columns(torch.arange(size, 3 * size))
    assert isinstance(part, GGUFRows)
    assert part.two_level_bits == rows.two_level_bits
    assert part.shape == (17, 2 * size)
    assert_bitwise(part.dequantize(), whole[:, size : 3 * size])
    cut = torch.cat([torch.arange(3 * size, 4 * size), torch.arange(32)])
    assert_bitwise(rows.columns(cut).dequantize(), whole[:, cut])
