"""Layers of every quantised format of Hugging Face checkpoints, against plain loops over the documented layouts."""

from collections.abc import Callable

import pytest
import torch
from support.packed_layers import (
    NAME,
    Layer,
    awq_layer,
    bitsandbytes_layer,
    fbgemm_layer,
    float_quantized_layer,
    fp8_layer,
    gptq_layer,
    int8_layer,
    int_quantized_layer,
    mlx_float_layer,
    mlx_layer,
    modelopt_fp8_layer,
    mxfp4_layer,
    mxfp8_layer,
    nvfp4_layer,
    pack_quantized_layer,
    quark_layer,
)

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.packed_integers import unpack_integers
from fastinfer.formats.quantized_checkpoint import parse_quantization_config, read_linear
from fastinfer.formats.unpacked import Dense, Grouped, Int4, Int8, Lut
from fastinfer.weights.expert_weights import LutExperts, make_expert_weights
from fastinfer.weights.pack import make_weight
from fastinfer.weights.weight import LutWeight


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def read(layer: Layer, exact: bool = True) -> Grouped:
    weight = read_linear(layer.tensors, NAME, layer.config, exact=exact)
    assert isinstance(weight, Grouped)
    return weight


def assert_exact(layer: Layer) -> Grouped:
    """fp16 scales and small integers: sums and products are exact in fp32."""
    weight = read(layer)
    assert torch.equal(weight.dequantize().double(), layer.weight)
    return weight


class TestGPTQ:
    @pytest.mark.parametrize("version", [1, 2])
    @pytest.mark.parametrize("act_order", [False, True])
    @pytest.mark.parametrize("symmetric", [False, True])
    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    def test_bits(self, bits: int, symmetric: bool, act_order: bool, version: int) -> None:
        weight = assert_exact(gptq_layer(bits, symmetric=symmetric, act_order=act_order, version=version))
        assert type(weight) is (Int8 if bits == 8 else Int4)
        assert (weight.permutation is not None) == act_order
        # Fewer than four bits have room for their zeros; more have only where these are the middle.
        assert (weight.mins is None) == (symmetric or bits < 4)
        assert weight.scales.dtype == (torch.float16 if weight.mins is None else torch.float32)

    @pytest.mark.parametrize("group_size", [32, 96, 128, -1, 1024])
    def test_group_sizes(self, group_size: int) -> None:
        layer = gptq_layer(columns=384, group_size=min(group_size, 384))
        layer.config["group_size"] = group_size  # more than there are inputs: all of them
        weight = assert_exact(layer)
        assert weight.scales.shape == (64, 384 // group_size if 0 < group_size <= 384 else 1)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("symmetric", [False, True])
    def test_scales_of_other_dtypes(self, dtype: torch.dtype, symmetric: bool) -> None:
        layer = gptq_layer(symmetric=symmetric)
        exact = read(layer)
        layer.tensors[f"{NAME}.scales"] = layer.tensors[f"{NAME}.scales"].to(dtype)
        if dtype == torch.float32:
            assert exact.fits(read(layer))
            assert torch.equal(read(layer).dequantize(), exact.dequantize())
        else:
            torch.testing.assert_close(read(layer).dequantize(), exact.dequantize(), rtol=2**-8, atol=0)

    def test_fast_minimums_are_fp16(self) -> None:
        layer = gptq_layer()
        weight = read(layer, exact=False)
        assert weight.mins is not None
        assert (weight.scales.dtype, weight.mins.dtype) == (torch.float16, torch.float16)
        error = (weight.dequantize() - layer.weight).abs()
        assert error.max() <= weight.mins.abs().max() * 2**-11
        assert error.any()

    def test_three_bits_as_autogptq_packs_them(self) -> None:
        """Words that AutoGPTQ 0.7.1 has made."""
        q = [1, 1, 3, 7, 5, 5, 7, 3] * 4
        zeros = [*range(1, 8)] * 4 + [1, 2, 3, 4]
        words = torch.tensor([[0xC97EDEC9, 0xDEC97EDE, 0x7EDEC97E], [0xD11AC688, 0x6B1A2358, 0x688D6344]])
        values = unpack_integers(words.to(torch.int32), 3)
        assert values[0].tolist() == q
        assert (values[1] + 1).tolist() == zeros

    def test_groups_of_inputs_count_whatever_the_settings_say(self) -> None:
        layer = gptq_layer(act_order=True)
        layer.config["desc_act"] = False
        assert assert_exact(layer).permutation is not None

    def test_rows_of_a_packed_weight_have_the_order_of_the_inputs(self) -> None:
        layer = gptq_layer(act_order=True)
        rows = make_weight(read(layer), 32).rows(None, torch.float32)
        torch.testing.assert_close(rows.double(), layer.weight)

    def test_order_without_groups_is_missing(self) -> None:
        layer = gptq_layer(act_order=True)
        del layer.tensors[f"{NAME}.g_idx"]
        with pytest.raises(CheckpointFormatError, match="g_idx' is missing"):
            read(layer)

    @pytest.mark.parametrize("value", [-1, 4, 2**31 - 1, 0])
    def test_groups_of_unequal_size(self, value: int) -> None:
        layer = gptq_layer(act_order=True)
        group = layer.tensors[f"{NAME}.g_idx"]
        group[group.argmax()] = value
        with pytest.raises(CheckpointFormatError, match="g_idx': expected 4 groups of 64 inputs each"):
            read(layer)

    @pytest.mark.parametrize(("columns", "group_size"), [(576, 128), (256, 16), (96, 48), (256, 0), (256, -2)])
    def test_groups_that_the_kernels_do_not_have(self, columns: int, group_size: int) -> None:
        layer = gptq_layer(columns=columns, group_size=-1)
        layer.config["group_size"] = group_size
        expected = f"groups of {group_size} in {columns} inputs; the kernels need a multiple of 32 that divides"
        with pytest.raises(UnsupportedModelError, match=expected):
            read(layer)


class TestAWQ:
    @pytest.mark.parametrize("group_size", [32, 64, 128, -1])
    def test_groups(self, group_size: int) -> None:
        weight = assert_exact(awq_layer(group_size=group_size))
        assert isinstance(weight, Int4)
        assert weight.permutation is None

    def test_order_within_a_word(self) -> None:
        layer = awq_layer(rows=8, columns=32, group_size=32)
        layer.tensors[f"{NAME}.qweight"].fill_(0x75316420)
        weight = read(layer)
        assert torch.equal(weight.q, torch.arange(8, dtype=torch.uint8)[:, None].expand(8, 32))


class TestBitsAndBytes:
    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("kind", ["nf4", "fp4"])
    @pytest.mark.parametrize("block_size", [32, 64, 256])
    def test_table(self, kind: str, nested: bool, block_size: int) -> None:
        layer = bitsandbytes_layer(kind, block_size=block_size, nested=nested)
        weight = read(layer)
        assert isinstance(weight, Lut)
        assert weight.scales.dtype == torch.float32
        torch.testing.assert_close(weight.dequantize().double(), layer.weight, rtol=1e-6, atol=1e-6)

    def test_inputs_are_not_rounded(self) -> None:
        """The table's entries are no integers; those of MXFP4 are."""
        for layer, bits in ((bitsandbytes_layer(), 32), (mxfp4_layer(), 8)):
            weight, experts = make_weight(read(layer), 8), make_expert_weights([read(layer)] * 2, 8)
            assert isinstance(weight, LutWeight)
            assert isinstance(experts, LutExperts)
            assert weight.activation_bits == experts.activation_bits == bits

    def test_fast_scales_are_fp16(self) -> None:
        layer = bitsandbytes_layer(nested=False)
        weight = read(layer, exact=False)
        assert weight.scales.dtype == torch.float16
        torch.testing.assert_close(weight.dequantize().double(), layer.weight, rtol=2**-11, atol=0)

    def test_int8(self) -> None:
        layer = int8_layer()
        weight = read(layer)
        assert isinstance(weight, Int8)
        assert not weight.int8_activations
        torch.testing.assert_close(weight.dequantize().double(), layer.weight, rtol=1e-6, atol=0)

    def test_other_storage(self) -> None:
        """``bnb_4bit_quant_storage``: the same bytes under another dtype."""
        layer = bitsandbytes_layer()
        expected = read(layer).dequantize()
        stored = layer.tensors[f"{NAME}.weight"]
        layer.tensors[f"{NAME}.weight"] = stored.flatten().view(torch.bfloat16)[:, None]
        assert torch.equal(read(layer).dequantize(), expected)

    def test_block_across_rows(self) -> None:
        with pytest.raises(UnsupportedModelError, match="groups of 64 in 96 inputs"):
            read(bitsandbytes_layer(columns=96))

    @pytest.mark.parametrize("text", [b"", b"{", b"[" * 10000, b"3", b'{"shape": [40, 256]}', b"\xff"])
    def test_damaged_state(self, text: bytes) -> None:
        layer = bitsandbytes_layer()
        name = f"{NAME}.weight.quant_state.bitsandbytes__nf4"
        layer.tensors[name] = torch.tensor(list(text), dtype=torch.uint8)
        with pytest.raises(CheckpointFormatError, match="bitsandbytes__nf4"):
            read(layer)

    def test_other_layout(self) -> None:
        layer = int8_layer()
        layer.tensors[f"{NAME}.weight_format"].fill_(2)
        with pytest.raises(UnsupportedModelError, match="weight_format 2 is not implemented"):
            read(layer)


class TestCompressedTensors:
    @pytest.mark.parametrize("act_order", [False, True])
    @pytest.mark.parametrize("symmetric", [False, True])
    @pytest.mark.parametrize("group_size", [32, 128, -1])
    @pytest.mark.parametrize("bits", [4, 8])
    def test_packed(self, bits: int, group_size: int, symmetric: bool, act_order: bool) -> None:
        layer = pack_quantized_layer(bits, group_size=group_size, symmetric=symmetric, act_order=act_order)
        weight = assert_exact(layer)
        assert type(weight) is (Int4 if bits == 4 else Int8)
        assert (weight.mins is None) == symmetric

    def test_zeros_of_rows_that_fill_no_word(self) -> None:
        assert_exact(pack_quantized_layer(rows=37, symmetric=False))

    @pytest.mark.parametrize("strategy", ["channel", "tensor"])
    def test_w8a8(self, strategy: str) -> None:
        layer = int_quantized_layer(strategy=strategy)
        weight = read(layer)
        assert isinstance(weight, Int8)
        assert weight.int8_activations
        assert weight.scales.shape == (40, 1)
        torch.testing.assert_close(weight.dequantize().double(), layer.weight, rtol=1e-6, atol=0)

    def test_w8a16(self) -> None:
        layer = int_quantized_layer()
        layer.config["config_groups"]["group_0"]["input_activations"] = None
        weight = read(layer)
        assert isinstance(weight, Int8)
        assert not weight.int8_activations

    def test_groups_without_order(self) -> None:
        """-1 everywhere: the groups are in order."""
        layer = pack_quantized_layer()
        layer.tensors[f"{NAME}.weight_g_idx"] = torch.full((256,), -1, dtype=torch.int32)
        assert assert_exact(layer).permutation is None

    @pytest.mark.parametrize(
        ("targets", "ignore", "quantized"),
        [
            (["Linear"], [], True),
            ([NAME], [], True),
            (["re:.*down_proj"], [], True),
            (["re:down_proj"], [], False),
            (["Embedding"], [], False),
            (["Linear"], [NAME], False),
            (["Linear"], ["re:model.*proj$"], False),
            (["Linear"], ["lm_head", "model"], True),
        ],
    )
    def test_targets(self, targets: list[str], ignore: list[str], quantized: bool) -> None:
        layer = int_quantized_layer()
        layer.config["config_groups"]["group_0"]["targets"] = targets
        layer.config["ignore"] = ignore
        if quantized:
            assert isinstance(read(layer), Int8)
        else:
            layer.tensors = {f"{NAME}.weight": torch.ones(2, 3)}
            assert isinstance(read_linear(layer.tensors, NAME, layer.config), Dense)

    def test_name_is_a_better_match_than_a_class(self) -> None:
        config = pack_quantized_layer(8).config
        group = pack_quantized_layer(4).config["config_groups"]["group_0"]
        config["config_groups"]["group_1"] = group | {"targets": ["re:.*down_proj"]}
        format = parse_quantization_config(config)
        assert format.scheme(NAME).bits == 4  # type: ignore[union-attr]
        assert format.scheme("model.layers.0.mlp.up_proj").bits == 8  # type: ignore[union-attr]


def fast(layer: Layer) -> Int8:
    weight = read_linear(layer.tensors, NAME, layer.config, exact=False)
    assert isinstance(weight, Int8)
    assert not weight.int8_activations
    return weight


class TestFP8:
    """All finite numbers of e4m3 occur, negative zeros and the smallest ones included."""

    LAYERS = pytest.mark.parametrize(
        "make",
        [
            fp8_layer,
            lambda: fp8_layer(block=(128, 128)),
            lambda: fp8_layer(block=None),
            lambda: fp8_layer(block=None, scale_shape=(1,)),
            lambda: float_quantized_layer("channel"),
            lambda: float_quantized_layer("block"),
            lambda: float_quantized_layer("tensor"),
            modelopt_fp8_layer,
            fbgemm_layer,
            lambda: quark_layer("per_channel"),
            lambda: quark_layer("per_tensor"),
            mxfp8_layer,
            lambda: mxfp8_layer(modelopt=True),
            lambda: mlx_float_layer("mxfp8"),
        ],
    )

    @LAYERS
    def test_exact(self, make: Callable[[], Layer]) -> None:
        layer = make()
        weight = read_linear(layer.tensors, NAME, layer.config)
        assert isinstance(weight, Dense)
        torch.testing.assert_close(weight.values.double(), layer.weight, rtol=2**-23, atol=0)

    @LAYERS
    def test_int8(self, make: Callable[[], Layer]) -> None:
        """A group's error is at most half a step, plus what fp16 rounds off its scale where the largest is cut."""
        layer = make()
        weight = fast(layer)
        error = (weight.dequantize().double() - layer.weight).unflatten(1, (-1, 32)).abs().amax(-1)
        step = layer.weight.unflatten(1, (-1, 32)).abs().amax(-1) / 127
        assert (error <= 0.57 * step).all()
        assert error.any()

    def test_naive_format(self) -> None:
        """The type of the numbers tells what ``naive-quantized`` stands for."""
        layer = float_quantized_layer()
        layer.config["format"] = "naive-quantized"
        torch.testing.assert_close(read_linear(layer.tensors, NAME, layer.config).dequantize().double(), layer.weight)
        layer = int_quantized_layer()
        layer.config["format"] = "naive-quantized"
        assert read(layer).shape == (40, 96)

    def test_zeros(self) -> None:
        layer = fp8_layer(columns=96, block=None)
        layer.tensors[f"{NAME}.weight"][:, 32:64] = -0.0
        assert not fast(layer).dequantize()[:, 32:64].any()

    def test_large_matrix_is_converted_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = fp8_layer()
        whole = fast(layer)
        monkeypatch.setattr("fastinfer.formats.fp8.PART", 128)
        parts = fast(layer)
        assert torch.equal(parts.q, whole.q)
        assert torch.equal(parts.scales, whole.scales)

    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
    def test_nan(self, part: str, exact: bool) -> None:
        layer = fp8_layer()
        layer.tensors[f"{NAME}.{part}"][-1, -1] = torch.nan
        with pytest.raises(CheckpointFormatError, match=f"{NAME}.{part}': expected finite numbers"):
            read_linear(layer.tensors, NAME, layer.config, exact=exact)

    def test_inputs_that_fill_no_group(self) -> None:
        layer = fp8_layer(columns=63)
        assert read_linear(layer.tensors, NAME, layer.config).shape == (33, 63)
        with pytest.raises(UnsupportedModelError, match="groups of 32 in 63 inputs"):
            fast(layer)


class TestNVFP4:
    LAYERS = pytest.mark.parametrize("modelopt", [False, True])

    @LAYERS
    def test_exact(self, modelopt: bool) -> None:
        layer = nvfp4_layer(modelopt=modelopt)
        weight = read_linear(layer.tensors, NAME, layer.config)
        assert isinstance(weight, Dense)
        torch.testing.assert_close(weight.values.double(), layer.weight, rtol=2**-22, atol=0)

    @LAYERS
    def test_the_group_with_the_larger_scale_stays_exact(self, modelopt: bool) -> None:
        layer = nvfp4_layer(rows=40, modelopt=modelopt)
        weight = fast(layer)
        scales = layer.tensors[f"{NAME}.weight_scale"].float().unflatten(1, (-1, 2))
        largest = scales.amax(-1, keepdim=True)
        got, expected = (x.double().unflatten(1, (-1, 2, 16)) for x in (weight.dequantize(), layer.weight))
        is_larger = scales == largest
        torch.testing.assert_close(got[is_larger], expected[is_larger], rtol=2**-11, atol=0)
        step = largest.double() * 0.0117 / 20
        error = (got - expected).abs().amax(-1)
        assert (error <= step / 2 + 2**-11 * expected.abs().amax(-1)).all()
        assert error[~is_larger].any()

    def test_groups_of_zeros(self) -> None:
        layer = nvfp4_layer()
        layer.tensors[f"{NAME}.weight_scale"][0] = 0
        assert not fast(layer).dequantize()[0].any()

    def test_scale_that_is_not_finite(self) -> None:
        layer = nvfp4_layer()
        layer.tensors[f"{NAME}.weight_global_scale"].zero_()
        with pytest.raises(CheckpointFormatError, match="weight_scale': expected finite numbers"):
            fast(layer)


class TestMLX:
    @pytest.mark.parametrize("group_size", [32, 64, 128])
    @pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
    def test_bits(self, bits: int, group_size: int) -> None:
        layer = mlx_layer(bits, group_size=group_size)
        weight = read(layer)
        assert type(weight) is (Int8 if bits > 4 else Int4)
        torch.testing.assert_close(weight.dequantize().double(), layer.weight, rtol=1e-6, atol=1e-6)
        assert (read(layer, exact=False).dequantize() - layer.weight).abs().max() < 2e-3

    def test_nvfp4(self) -> None:
        layer = mlx_float_layer("nvfp4")
        weight = read_linear(layer.tensors, NAME, layer.config)
        assert isinstance(weight, Dense)
        torch.testing.assert_close(weight.values.double(), layer.weight, rtol=2**-22, atol=0)
        largest = layer.weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
        error = (fast(layer).dequantize() - layer.weight).unflatten(1, (-1, 32)).abs()
        assert (error <= largest / 40).all()

    def test_single_layers_and_defaults(self) -> None:
        """A layer's own settings replace those of all others, the mode included."""
        layer = mlx_float_layer("mxfp4")
        own = {"mode": "mxfp4"}
        config = {"quant_method": "mlx", "mode": "affine", "bits": 6, "group_size": 32, NAME: own}
        assert torch.equal(read(Layer(layer.tensors, config, layer.weight)).dequantize().double(), layer.weight)
        layer = mlx_layer(4, group_size=64)
        config = {"quant_method": "mlx", "mode": "mxfp8", "bits": 8, "group_size": 32, NAME: {"bits": 4}}
        assert type(read(Layer(layer.tensors, config, layer.weight))) is Int4

    def test_numbers_that_are_not_finite(self) -> None:
        for mode, number in (("mxfp4", 255), ("mxfp8", 255), ("nvfp4", 127)):
            layer = mlx_float_layer(mode)
            layer.tensors[f"{NAME}.scales"][1, 2] = number
            with pytest.raises(CheckpointFormatError, match=f"{NAME}.scales': expected"):
                read_linear(layer.tensors, NAME, layer.config)


class TestMXFP4:
    @pytest.mark.parametrize("make", [mxfp4_layer, lambda: quark_layer("mxfp4"), lambda: mlx_float_layer("mxfp4")])
    def test_numbers(self, make: Callable[[], Layer]) -> None:
        assert isinstance(assert_exact(make()), Lut)


class TestAutoRound:
    @pytest.mark.parametrize(
        ("packing", "make"),
        [
            ("auto_round:auto_gptq", gptq_layer),
            ("auto_round", lambda: gptq_layer(version=2)),
            ("auto_round:auto_awq", awq_layer),
        ],
    )
    def test_packing(self, packing: str, make: Callable[[], Layer]) -> None:
        layer = make()
        layer.config = {
            "quant_method": "auto-round",
            "packing_format": packing,
            "bits": 4,
            "group_size": 64,
            "sym": False,
            "data_type": "int",
            "extra_config": {"lm_head": {"bits": 16}},
        }
        assert_exact(layer)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("packing_format", "auto_round:llm_compressor", "packing_format 'auto_round:llm_compressor' is not"),
            ("data_type", "mx_fp", "data_type 'mx_fp' is not implemented; supported: int"),
            ("act_bits", 8, "act_bits 8 is not implemented; supported: 16"),
            ("extra_config", {"layers.0": {"bits": 5}}, "bits 5 is not implemented"),
            ("extra_config", {"layers.0": {"act_bits": 8}}, "act_bits 8 is not implemented"),
            ("extra_config", {"(.*)*": {"bits": 8}}, "expected regular expressions with at most 4 repetitions"),
        ],
    )
    def test_refused(self, key: str, value: object, message: str) -> None:
        config = {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 64, key: value}
        with pytest.raises(UnsupportedModelError, match=message):
            parse_quantization_config(config)
