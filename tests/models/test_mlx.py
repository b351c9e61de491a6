"""Models as MLX quantises them, against transformers with the numbers for which they stand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import expected, load, some_tokens
from support.quantized_models import Packer, edit_config, mlx, mlx_float, save_quantized_model
from support.teacher_forcing import log_probabilities

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.models.config import Precision
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder

SETTINGS = {"bits": 4, "group_size": 64, "mode": "affine"}


def assert_like(folder: Path, model: Any) -> None:
    decoder = load_decoder(HFCheckpoint(folder, exact=True), Precision.of("float32"), None)
    got, reference = log_probabilities(decoder, some_tokens(), "float32"), expected(model, some_tokens())
    assert (got - reference).abs().max() < 1e-4 * max(1.0, float(reference.std()))
    assert len(set(got.argmax(-1).tolist())) > 5  # else everything would agree


def set_mlx_config(folder: Path, **layers: Any) -> None:
    settings = SETTINGS | layers
    edit_config(folder, quantization=settings, quantization_config=settings)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_bits(bits: int, tmp_path: Path) -> None:
    """All matrices, the embedding and the output layer among them; one has other bits, and one none."""
    other, dense = "model.layers.1.mlp.down_proj", "model.layers.2.self_attn.v_proj"

    def pack(module: str) -> Packer | None:
        return None if module == dense else mlx(8, 32) if module == other else mlx(bits, 64)

    model = save_quantized_model(tmp_path, "qwen3", pack)
    set_mlx_config(tmp_path, bits=bits, **{other: {"bits": 8, "group_size": 32}, dense: False})
    assert load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.uint32
    assert_like(tmp_path, model)


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_modes(mode: str, bits: int, group_size: int, tmp_path: Path) -> None:
    """All matrices in fp4 or fp8, but for one of integers, whose settings do not repeat MLX's defaults."""
    other = "model.layers.1.mlp.down_proj"
    model = save_quantized_model(tmp_path, "qwen3", lambda module: mlx(4, 64) if module == other else mlx_float(mode))
    set_mlx_config(tmp_path, mode=mode, bits=bits, group_size=group_size, **{other: {"bits": 4}})
    assert_like(tmp_path, model)


@pytest.mark.parametrize("family", ["llama3", "gemma3", "phi3", "cohere2"])
def test_families(family: str, tmp_path: Path) -> None:
    model = save_quantized_model(tmp_path, family, lambda module: mlx(4, 64))
    set_mlx_config(tmp_path)
    assert_like(tmp_path, model)


def join_experts(folder: Path) -> None:
    """Put the tensors of all experts into one, as MLX does."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    stacks: dict[str, list[torch.Tensor]] = {}
    tensors = load_file(folder / "model.safetensors")
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdecimal() else 0 for part in name.split(".")]):
        if match := re.fullmatch(r"(.*\.)experts\.\d+\.(\w+)(\.\w+)", name):
            before, projection, suffix = match.groups()
            joined = f"{before}switch_mlp.{names.get(projection, projection)}{suffix}"
            stacks.setdefault(joined, []).append(tensors.pop(name))
    assert stacks
    save_file(tensors | {name: torch.stack(parts) for name, parts in stacks.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("mixtral", {}),
        ("minimax-m2", {}),
        ("qwen2-moe", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 192}),
        ("qwen3-moe-some-dense", {"moe_intermediate_size": 64}),
        ("glm4-moe", {"moe_intermediate_size": 64}),
    ],
)
def test_mixtures(family: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """The experts of a projection are in one tensor; the router has 8 bits."""
    routers = []

    def pack(module: str) -> Packer:
        if not module.endswith(".gate"):
            return mlx(4, 64)
        routers.append(module)
        return mlx(8, 64)

    model = save_quantized_model(tmp_path, family, pack, **sizes)
    join_experts(tmp_path)
    set_mlx_config(tmp_path, **{name: {"bits": 8, "group_size": 64} for name in routers})
    assert_like(tmp_path, model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "mxfp6"}, "mode 'mxfp6' is not implemented; supported: affine, mxfp4, mxfp8, nvfp4"),
        ({"mode": "mxfp8"}, "bits 4 is not implemented; supported: 8"),
        ({"bits": 7}, "bits 7 is not implemented; supported: 4, 2, 3, 5, 6, 8"),
        ({"group_size": 16}, "group_size 16 is not implemented"),
        ({"model.layers.0.mlp.down_proj": {"bits": 4, "group_size": 64, "mode": "nvfp4"}}, "group_size 64 is not"),
        ({"mode": "mxfp4", "group_size": 32}, r"q_proj.scales': expected uint8, got float16"),
        ({"bits": 3}, r"q_proj.weight': expected the shape \[\d+, 12\], got \[\d+, 16\]"),
        ({"group_size": 128}, r"q_proj.weight': expected the shape \[\d+, 32\], got \[\d+, 16\]"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_quantized_model(tmp_path, "llama2", lambda module: mlx(4, 64) if "layers" in module else None)
    set_mlx_config(tmp_path, **settings)
    with pytest.raises((UnsupportedModelError, CheckpointFormatError), match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("family", ["gpt2", "gpt-oss", "qwen3.5"])
def test_families_whose_tensors_mlx_changes(family: str, tmp_path: Path) -> None:
    save_quantized_model(tmp_path, family, lambda module: None)
    set_mlx_config(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"config.json: quantization: MLX's format is not implemented for "):
        HFCheckpoint(tmp_path)
