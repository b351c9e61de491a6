"""GPT-OSS against transformers in fp32: dense and MXFP4 experts, from folders and GGUF files, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import load, make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.mxfp4 import dequantize_mxfp4
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer import _C
from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder
from fastinfer.weights.expert_weights import DenseExperts, LutExperts

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
# With larger weights this model amplifies rounding errors tenfold.
SIZES: dict[str, Any] = {"intermediate_size": 96, "initializer_range": 0.06}
EXPERTS = "model.layers.0.mlp.experts"


def clamped_model() -> Any:
    """A model in whose experts gate and up go beyond their limits, some of them far."""
    model = make_model("gpt-oss", **SIZES | {"intermediate_size": 80})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts.gate_up" in name:
                parameter.mul_(8)
    return model


def pack_experts(model: Any, exponents: tuple[int, int]) -> dict[str, Tensor]:
    """Replace the experts' weights by random ones in MXFP4; returns the tensors of the checkpoint.

    Args:
        model: model of transformers, which gets the dequantised weights.
        exponents: range of the exponents of gate and up; those of down are smaller by 3.
    """
    tensors = dict(model.state_dict())
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, features, out = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, out, features // 32, 16), generator=generator).byte()
        scales = torch.randint(*exponents, blocks.shape[:-1], generator=generator).byte()
        if "down" in name:
            scales -= 3
        with torch.no_grad():
            model.get_parameter(name).copy_(dequantize_mxfp4(blocks, scales).mT)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return tensors


def save_packed(folder: Path, model: Any, tensors: dict[str, Tensor]) -> None:
    model.config.save_pretrained(folder)
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / "model.safetensors")
    set_config(folder, architectures=["GptOssForCausalLM"], quantization_config=MXFP4)


def set_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([some_tokens()])).logits[0].log_softmax(-1)


def share_beyond_limits(model: Any) -> float:
    """Share of the experts' gates and ups that are clamped."""
    beyond: list[Tensor] = []
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts._apply_gate = lambda both, apply=experts._apply_gate: (beyond.append(both.abs() > 7), apply(both))[1]
    logits_of(model)
    return float(torch.cat([part.float().flatten() for part in beyond]).mean())


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).abs().max() < 1e-4 * max(1.0, float(expected.std()))
    assert len(set(got.argmax(-1).tolist())) > 5  # else everything would agree


def test_a_folder(tmp_path: Path) -> None:
    model = clamped_model()
    model.save_pretrained(tmp_path)
    decoder = load(tmp_path)
    assert decoder.config.windows == (16, 0, 16, 0, 16)
    assert not decoder.config.rope_scaling.truncate
    assert all(isinstance(layer.mlp.gate_up, DenseExperts) for layer in decoder.layers)
    assert_near(log_probabilities(decoder, some_tokens(), "float32"), logits_of(model))
    assert share_beyond_limits(model) > 0.02


@pytest.mark.parametrize(("exponents", "dtype"), [((119, 127), torch.float16), ((100, 127), torch.float32)])
def test_a_folder_in_mxfp4(exponents: tuple[int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    """Scales that fp16 has, and some that it does not have; experts stay packed."""
    model = make_model("gpt-oss", **SIZES)
    save_packed(tmp_path, model, pack_experts(model, exponents))
    decoder = load(tmp_path)
    for layer in decoder.layers:
        assert isinstance(layer.mlp.gate_up, LutExperts)
        assert isinstance(layer.mlp.down, LutExperts)
        assert layer.mlp.gate_up.scales.dtype == layer.mlp.down.scales.dtype == dtype
    assert_near(log_probabilities(decoder, some_tokens(), "float32"), logits_of(model))
    assert share_beyond_limits(model) > 0.02


@pytest.mark.parametrize("exponents", [(119, 127), (100, 127)])
def test_a_gguf_file_in_mxfp4(exponents: tuple[int, int], tmp_path: Path) -> None:
    model = make_model("gpt-oss", **SIZES)
    pack_experts(model, exponents)
    types = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), gguf.GGMLQuantizationType.MXFP4)
    write_gguf(tmp_path / "model.gguf", model, types)
    decoder = load_decoder(GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf")), Precision.of("float32"), None)
    assert all(isinstance(layer.mlp.gate_up, LutExperts) for layer in decoder.layers)
    assert_near(log_probabilities(decoder, some_tokens(), "float32"), logits_of(model))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_less_precise_products_stay_near(dtype: str, tmp_path: Path) -> None:
    model = make_model("gpt-oss", **SIZES)
    save_packed(tmp_path, model, pack_experts(model, (116, 121)))
    got, expected = log_probabilities(load(tmp_path, dtype), some_tokens(), dtype), logits_of(model)
    in_tiles = _C.cpu_info()["isa"] in ("amx", "amx_emulated")  # where "auto" rounds to bf16
    limit = 0.1 if dtype == "bfloat16" else 0.03 if in_tiles else 0.02
    assert (got - expected).square().mean().sqrt() < limit * expected.std()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss")
    model = make_model("gpt-oss", **SIZES, num_hidden_layers=2)
    save_packed(folder, model, pack_experts(model, (119, 127)))
    return folder


def copy_of(good: Path, folder: Path) -> dict[str, Tensor]:
    (folder / "config.json").write_bytes((good / "config.json").read_bytes())
    return load_file(good / "model.safetensors")


@pytest.mark.parametrize(
    ("key", "value"),
    [("swiglu_limit", 6.0), ("swiglu_alpha", 1.0), ("hidden_act", "gelu")],
)
def test_other_activations_are_refused(key: str, value: Any, good: Path, tmp_path: Path) -> None:
    save_file(copy_of(good, tmp_path), tmp_path / "model.safetensors")
    set_config(tmp_path, **{key: value})
    with pytest.raises(UnsupportedModelError, match=rf"config.json: {key} must be .*, got {value!r}"):
        HFCheckpoint(tmp_path)


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def change(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: function(tensors[name]).contiguous()})


def nan(scales: Tensor) -> Tensor:
    scales[3, 5, 1] = 255
    return scales


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("model.layers.1.self_attn.sinks"), "tensor 'model.layers.1.self_attn.sinks' is missing"),
        (drop("model.layers.0.mlp.router.bias"), "tensor 'model.layers.0.mlp.router.bias' is missing"),
        (drop(f"{EXPERTS}.down_proj_bias"), f"tensor '{EXPERTS}.down_proj_bias' is missing"),
        (drop(f"{EXPERTS}.gate_up_proj_scales"), f"tensor '{EXPERTS}.gate_up_proj_scales' is missing"),
        (drop(f"{EXPERTS}.gate_up_proj_blocks"), f"tensor '{EXPERTS}.gate_up_proj' is missing"),
        (change("model.layers.1.self_attn.sinks", lambda t: t[1:]), r"sinks' must have the shape \[4\], got \[3\]"),
        (change(f"{EXPERTS}.gate_up_proj_scales", nan), "scales': expected exponents below 255"),
        (change(f"{EXPERTS}.gate_up_proj_scales", lambda t: t[:, 1:]), r"scales': expected the shape \[5, 192, 3\]"),
        (change(f"{EXPERTS}.gate_up_proj_blocks", lambda t: t.char()), "blocks': expected uint8, got int8"),
        (change(f"{EXPERTS}.gate_up_proj_blocks", lambda t: t[..., :8]), r"blocks': expected the shape \[any, any, a"),
        (
            lambda t: (
                change(f"{EXPERTS}.down_proj_blocks", lambda t: t[1:])(t),
                change(f"{EXPERTS}.down_proj_scales", lambda t: t[1:])(t),
            ),
            r"down_proj_blocks' must have the shape \[5, 96, 3, 16\], got \[4, 96, 3, 16\]",
        ),
        (change(f"{EXPERTS}.gate_up_proj_bias", lambda t: t[1:]), r"bias' must have the shape \[5, 192\], got \[4"),
        (change(f"{EXPERTS}.gate_up_proj_bias", lambda t: t[:, 2:]), r"bias' must have the shape \[5, 192\], got \[5"),
        (change(f"{EXPERTS}.gate_up_proj_bias", lambda t: t.repeat(1, 2)), r"bias' must have the shape \[5, 192\]"),
        (
            lambda t: (
                change(f"{EXPERTS}.gate_up_proj_blocks", lambda t: t.repeat(1, 2, 1, 1))(t),
                change(f"{EXPERTS}.gate_up_proj_scales", lambda t: t.repeat(1, 2, 1))(t),
            ),
            r"gate_up_proj_blocks' must have the shape \[5, 192, 3, 16\], got \[5, 384, 3, 16\]",
        ),
    ],
)
def test_damaged_tensors(damage: Callable[[Any], object], message: str, good: Path, tmp_path: Path) -> None:
    tensors = copy_of(good, tmp_path)
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=message):
        load(tmp_path)
