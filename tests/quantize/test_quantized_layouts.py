"""Layouts of quantised weights, decoded bit by bit as the formats are documented, by the readers, by the libraries."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, QuantizationError
from fastinfer.formats.packed_integers import pack_integers, unpack_integers
from fastinfer.formats.quantized_checkpoint import read_linear
from fastinfer.formats.unpacked import Dense, Int4, Int8, Unpacked
from fastinfer.quantize.bitsandbytes_layout import BitsAndBytesLayout
from fastinfer.quantize.compressed_tensors_layout import CompressedTensorsLayout
from fastinfer.quantize.gptq_layout import GPTQLayout
from fastinfer.quantize.layout import WriterSettings
from fastinfer.quantize.rounding import NF4_TABLE, round_rows, round_to_nearest, round_to_nf4

ROWS, COLUMNS, GROUP = 96, 192, 64


def random_values(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Rows whose means differ, so that zero points do; in the first row all numbers are positive, in the next zero."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(rows, columns, generator=random) + torch.randn(rows, 1, generator=random)
    values[0] = values[0].abs() + 0.5
    values[1] = 0
    return values


def rounded(settings: WriterSettings, rows: int = ROWS) -> Unpacked:
    group_size = COLUMNS if settings.group_size == -1 else settings.group_size
    return round_to_nearest(random_values(rows), settings.bits, group_size, settings.symmetric)


def bits_of(words: Tensor, bits: int) -> list[list[int]]:
    """Each row of int32 words as one long number, cut into pieces from its lowest bits up."""
    numbers = [sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(row)) for row in words.tolist()]
    return [[number >> bits * i & 2**bits - 1 for i in range(32 * words.shape[1] // bits)] for number in numbers]


def affine(q: Any, zeros: Any, scales: Tensor) -> Tensor:
    """scale * (q - zero), all [rows, ...]."""
    q, zeros = torch.tensor(q).float(), torch.tensor(zeros).float()
    size = q.shape[1] // scales.shape[1]
    return (q - zeros.repeat_interleave(size, 1)) * scales.float().repeat_interleave(size, 1)


def assert_same(values: Tensor, weight: Unpacked) -> None:
    torch.testing.assert_close(values, weight.dequantize(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("columns", [32, 96])
def test_packing(bits: int, columns: int) -> None:
    values = torch.randint(0, 2**bits, (5, columns), generator=torch.Generator().manual_seed(bits)).byte()
    words = pack_integers(values, bits)
    assert words.shape == (5, columns * bits // 32)
    assert words.dtype == torch.int32
    assert bits_of(words, bits) == values.tolist()
    assert torch.equal(unpack_integers(words, bits), values)
    assert torch.equal(pack_integers(values.t().contiguous().t(), bits), words)


GPTQ = [WriterSettings(bits, size, sym) for bits in (2, 3, 4, 8) for size in (GROUP, -1) for sym in (True, False)]


@pytest.mark.parametrize("settings", GPTQ, ids=str)
def test_gptq(settings: WriterSettings) -> None:
    layout, weight = GPTQLayout(settings), rounded(settings)
    tensors, config = layout.tensors(weight), layout.config(["lm_head"])
    groups = 1 if settings.group_size == -1 else COLUMNS // GROUP
    assert {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()} == {
        "qweight": (torch.int32, [COLUMNS * settings.bits // 32, ROWS]),
        "qzeros": (torch.int32, [groups, ROWS * settings.bits // 32]),
        "scales": (torch.float16, [groups, ROWS]),
        "g_idx": (torch.int32, [COLUMNS]),
    }
    assert config["checkpoint_format"] == ("gptq" if settings.symmetric else "gptq_v2")
    assert (config["bits"], config["sym"], config["desc_act"]) == (settings.bits, settings.symmetric, False)
    assert tensors["g_idx"].tolist() == [i * groups // COLUMNS for i in range(COLUMNS)]
    q = bits_of(tensors["qweight"].t(), settings.bits)
    zeros = torch.tensor(bits_of(tensors["qzeros"], settings.bits)).t() + settings.symmetric
    assert_same(affine(q, zeros.tolist(), tensors["scales"].t()), weight)


def test_symmetric_gptq_stores_seven() -> None:
    settings = WriterSettings(4, GROUP, symmetric=True)
    assert set(GPTQLayout(settings).tensors(rounded(settings))["qzeros"].flatten().tolist()) == {0x77777777}


PACKED = [WriterSettings(bits, size, sym) for bits in (4, 8) for size in (GROUP, -1) for sym in (True, False)]


@pytest.mark.parametrize("rows", [ROWS, 37])
@pytest.mark.parametrize("settings", PACKED, ids=str)
def test_packed_compressed_tensors(settings: WriterSettings, rows: int) -> None:
    layout, weight = CompressedTensorsLayout(settings), rounded(settings, rows)
    tensors = layout.tensors(weight)
    assert tensors["weight_shape"].tolist() == [rows, COLUMNS]
    assert tensors["weight_shape"].dtype == torch.int64
    groups = 1 if settings.group_size == -1 else COLUMNS // GROUP
    assert tensors["weight_scale"].shape == (rows, groups)
    q = bits_of(tensors["weight_packed"], settings.bits)
    zeros = torch.full((rows, groups), 2 ** (settings.bits - 1))
    assert ("weight_zero_point" in tensors) is not settings.symmetric
    if not settings.symmetric:
        words = tensors["weight_zero_point"]
        assert words.shape == (-(-rows * settings.bits // 32), groups)
        zeros = torch.tensor(bits_of(words.t(), settings.bits)).t()[:rows]
    assert_same(affine(q, zeros.tolist(), tensors["weight_scale"]), weight)


def test_plain_compressed_tensors() -> None:
    settings = WriterSettings(8, int8_activations=True)
    layout, weight = CompressedTensorsLayout(settings), round_rows(random_values())
    tensors, config = layout.tensors(weight), layout.config(["lm_head"])
    assert tensors["weight"].dtype == torch.int8
    assert (tensors["weight_scale"].dtype, tensors["weight_scale"].shape) == (torch.float32, (ROWS, 1))
    assert_same(tensors["weight"].float() * tensors["weight_scale"], weight)
    group = config["config_groups"]["group_0"]
    assert config["format"] == group["format"] == "int-quantized"
    assert group["weights"]["strategy"] == "channel"
    assert group["input_activations"]["dynamic"] is True


def test_bitsandbytes() -> None:
    weight = round_to_nf4(random_values(ROWS + 1), GROUP)
    tensors = BitsAndBytesLayout(WriterSettings(4, GROUP), torch.bfloat16).tensors(weight)
    state = json.loads(bytes(tensors["weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert (state["dtype"], state["blocksize"], state["shape"]) == ("bfloat16", GROUP, [ROWS + 1, COLUMNS])
    assert tensors["weight"].shape == ((ROWS + 1) * COLUMNS // 2, 1)
    places = [place for byte in tensors["weight"].flatten().tolist() for place in (byte >> 4, byte & 15)]
    scales = tensors["weight.absmax"]
    assert torch.equal(scales, weight.scales.flatten())
    values = tensors["weight.quant_map"][torch.tensor(places)].view(-1, GROUP) * scales[:, None]
    expected = NF4_TABLE[weight.q.long()].view(-1, GROUP) * scales[:, None]
    assert torch.equal(values, expected)


def all_cases() -> list[Any]:
    cases = [(GPTQLayout(settings), rounded(settings)) for settings in GPTQ]
    cases += [(CompressedTensorsLayout(settings), rounded(settings)) for settings in PACKED]
    cases += [(CompressedTensorsLayout(WriterSettings(8, int8_activations=True)), round_rows(random_values()))]
    cases += [(BitsAndBytesLayout(WriterSettings(4, GROUP), torch.float32), round_to_nf4(random_values(), GROUP))]
    return cases


@pytest.mark.parametrize(("layout", "weight"), all_cases())
def test_readers(layout: Any, weight: Unpacked) -> None:
    tensors = {f"a.b.{part}": tensor for part, tensor in layout.tensors(weight).items()}
    read = read_linear(tensors, "a.b", json.loads(json.dumps(layout.config(["lm_head"]))))
    assert type(read) is type(weight)
    assert_same(read.dequantize(), weight)
    assert getattr(read, "int8_activations", False) == getattr(weight, "int8_activations", False)


def test_packed_integers_without_scales() -> None:
    layout = CompressedTensorsLayout(PACKED[0])
    tensors = {f"a.b.{part}": tensor for part, tensor in layout.tensors(rounded(PACKED[0])).items()}
    del tensors["a.b.weight_scale"]
    with pytest.raises(CheckpointFormatError, match=r"a\.b\.weight_scale' is missing"):
        read_linear(tensors, "a.b", layout.config(["lm_head"]))


@pytest.mark.parametrize(("bits", "rows"), [(2, 48), (4, 40), (8, 40)])
def test_rows_need_not_be_whole_tiles(bits: int, rows: int) -> None:
    settings = WriterSettings(bits, GROUP)
    weight = rounded(settings).rows(torch.arange(rows))
    layout = GPTQLayout(settings)
    tensors = {f"a.b.{part}": tensor for part, tensor in layout.tensors(weight).items()}
    assert_same(read_linear(tensors, "a.b", layout.config([])).dequantize(), weight)


def test_minimums_may_be_rounded_products() -> None:
    settings = WriterSettings(4, GROUP)
    weight = rounded(settings)
    assert isinstance(weight, Int4)
    assert weight.mins is not None
    other = Int4(weight.q, weight.scales, weight.mins * (1 + 2**-22))
    first, second = (GPTQLayout(settings).tensors(each) for each in (weight, other))
    assert all(torch.equal(first[name], second[name]) for name in first)


Q, SCALES = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8), torch.ones(ROWS, COLUMNS // GROUP)
FOUR = WriterSettings(4, GROUP)


@pytest.mark.parametrize(
    ("settings", "weight", "message"),
    [
        (FOUR, Int4(Q[:44], SCALES[:44]), "a multiple of 8 outputs for gptq, got 44"),
        (WriterSettings(3, GROUP), Int4(Q[:48], SCALES[:48]), "a multiple of 32 outputs for gptq, got 48"),
        (FOUR, Int4(Q[:, :96], SCALES), "a multiple of 64 inputs, got 96"),
        (FOUR, Int4(Q, SCALES[:, :1]), "3 scales per row for 192 inputs, got 1"),
        (WriterSettings(4, -1), Int4(Q[:, :48], SCALES[:, :1]), "a multiple of 32 inputs, got 48"),
        (FOUR, Int4(Q, SCALES + 1e-4), "scales that fp16 holds"),
        (FOUR, Int4(Q, SCALES * float("inf")), "scales that fp16 holds, got inf"),
        (FOUR, Int4(Q, SCALES, SCALES / 3), "whole multiples"),
        (FOUR, Int4(Q, SCALES, -16 * SCALES), "0 .. 15, got integers up to 0 and zero points 16 .. 16"),
        (FOUR, Int4(Q, SCALES, SCALES), "zero points -1 .. -1"),
        (FOUR, Int4(Q + 16, SCALES), "got integers up to 16"),
        (WriterSettings(3, GROUP), Int4(Q, SCALES), "0 .. 7"),
        (FOUR, Int4(Q, SCALES, permutation=torch.arange(COLUMNS)), "a permutation"),
        (WriterSettings(4, GROUP, symmetric=True), Int4(Q, SCALES, -7 * SCALES), "expected 8 as every zero point"),
        (FOUR, Int8(Q.char(), SCALES), "form Int8"),
        (FOUR, Dense(Q.float()), "form Dense"),
    ],
)
def test_gptq_refuses(settings: WriterSettings, weight: Unpacked, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        GPTQLayout(settings).tensors(weight)


@pytest.mark.parametrize(
    ("settings", "weight", "message"),
    [
        (WriterSettings(8, -1), round_rows(random_values()), "form Int8"),
        (WriterSettings(8, int8_activations=True), Int8(Q.char(), SCALES), "form Int8"),
        (WriterSettings(8, int8_activations=True), Int8(Q.char(), SCALES, int8_activations=True), "one scale per row"),
        (FOUR, round_to_nf4(random_values(), GROUP), "form Lut"),
    ],
)
def test_compressed_tensors_refuses(settings: WriterSettings, weight: Unpacked, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        CompressedTensorsLayout(settings).tensors(weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WriterSettings(4, 48), "a multiple of 32, or -1 for whole rows, got 48"),
        (lambda: GPTQLayout(WriterSettings(5)), "expected one of .* got 5"),
        (lambda: GPTQLayout(WriterSettings(8, int8_activations=True)), "use compressed-tensors"),
        (lambda: CompressedTensorsLayout(WriterSettings(3)), "expected 4 or 8 for compressed-tensors, got 3"),
        (lambda: CompressedTensorsLayout(WriterSettings(4, int8_activations=True)), "expected 8 with int8_act"),
        (lambda: BitsAndBytesLayout(WriterSettings(8), torch.half), "expected 4 for bitsandbytes, got 8"),
        (lambda: BitsAndBytesLayout(WriterSettings(4, -1), torch.half), "for bitsandbytes, got -1"),
        (lambda: BitsAndBytesLayout(FOUR, torch.half).tensors(Int4(Q, SCALES)), "form Int4"),
    ],
)
def test_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        make()


@pytest.mark.parametrize("settings", [*PACKED, WriterSettings(8, int8_activations=True)], ids=str)
def test_compressed_tensors_library(settings: WriterSettings) -> None:
    library = pytest.importorskip("compressed_tensors")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    layout = CompressedTensorsLayout(settings)
    weight = round_rows(random_values()) if settings.int8_activations else rounded(settings)
    config = library.quantization.QuantizationConfig.model_validate(layout.config(["lm_head"]))
    scheme = config.config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    ours = {name: tensor.contiguous() for name, tensor in layout.tensors(weight).items()}
    values = compressor.decompress(ours, scheme)["weight"]
    # It computes in the scales' dtype.
    torch.testing.assert_close(values.float(), weight.dequantize(), rtol=2**-10, atol=1e-6)

    state = {"weight": weight.dequantize(), "weight_scale": ours["weight_scale"].float()}
    if "weight_zero_point" in ours:
        zeros = unpack_integers(ours["weight_zero_point"].t().contiguous(), settings.bits)[:, :ROWS].t()
        state["weight_zero_point"] = (zeros.int() - 2 ** (settings.bits - 1)).to(torch.int8)
    theirs = compressor.compress(state, scheme)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name].to(theirs[name].dtype)) for name in ours)


def test_bitsandbytes_library() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    settings = WriterSettings(4, GROUP)
    weight = round_to_nf4(random_values(), GROUP)
    tensors = BitsAndBytesLayout(settings, torch.float32).tensors(weight)
    packed = tensors.pop("weight")
    state = functional.QuantState.from_dict(tensors, device=torch.device("cpu"))
    values = functional.dequantize_4bit(packed, state)
    layout = BitsAndBytesLayout(settings, torch.float32)
    read = read_linear({f"a.{k}": v for k, v in layout.tensors(weight).items()}, "a", layout.config([]))
    assert torch.equal(values, read.dequantize())
    assert torch.equal(values, weight.dequantize())
