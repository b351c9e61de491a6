"""The reader of PEFT's LoRA folders: what it reads, and what it refuses in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.peft_adapter import MODULES, write_adapter
from support.tiny_decoder import CONFIG

from fastinfer.errors import AdapterError
from fastinfer.formats.peft import read_adapter
from fastinfer.formats.peft_names import parse_tensor

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path, CONFIG)
    return tmp_path


def change(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    file = folder / "adapter_model.safetensors"
    merged = load_file(file) | tensors
    save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rslora", [False, True])
def test_reads_what_was_written(rslora: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    deltas = write_adapter(tmp_path, CONFIG, 5, dtype=dtype, use_rslora=rslora)
    adapter = read_adapter(tmp_path)
    assert adapter.max_rank == 5
    assert adapter.weights.keys() == {f"layers.{i}.{m}" for i in range(CONFIG.num_layers) for m in MODULES}
    for (layer, module), delta in deltas.items():
        low_rank = adapter.weights[f"layers.{layer}.{module}"]
        torch.testing.assert_close(low_rank.scale * low_rank.b.double() @ low_rank.a.double(), delta)


@pytest.mark.parametrize(
    "pattern", ["q_proj", "self_attn.q_proj", r".*\.q_proj", "layers.0.self_attn.q_proj", f"^{Q[17:]}$"]
)
def test_patterns_give_a_layer_its_own_rank_and_alpha(pattern: str, folder: Path) -> None:
    change(folder, rank_pattern={"proj": 3, pattern: 2}, alpha_pattern={"_proj": 3, pattern: 7})
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in tensors:
        if ("q_proj" if "layers" not in pattern else Q) in name:
            change_tensors(folder, **{name: tensors[name][:2] if "lora_A" in name else tensors[name][:, :2].clone()})
    weights = read_adapter(folder).weights
    assert (weights["layers.0.q_proj"].rank, weights["layers.0.q_proj"].scale) == (2, 3.5)
    assert (weights["layers.0.k_proj"].rank, weights["layers.0.k_proj"].scale) == (4, 1.5)
    assert weights["layers.1.q_proj"].rank == (4 if "layers" in pattern else 2)


def test_a_pattern_of_the_beginning_matches_no_end(folder: Path) -> None:
    change(folder, rank_pattern={"^layers.0.self_attn.q_proj$": 2}, alpha_pattern={"^self_attn.q_proj": 7})
    low_rank = read_adapter(folder).weights["layers.0.q_proj"]
    assert (low_rank.rank, low_rank.scale) == (4, 1.5)


def test_settings_that_are_missing(tmp_path: Path) -> None:
    """PEFT's defaults."""
    write_adapter(tmp_path, CONFIG, 8)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    kept = {key: value for key, value in settings.items() if key not in ("r", "lora_alpha")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(kept))
    assert {(low_rank.rank, low_rank.scale) for low_rank in read_adapter(tmp_path).weights.values()} == {(8, 1.0)}


def test_digests_differ_with_what_adapters_compute(folder: Path) -> None:
    first = read_adapter(folder).digest
    assert read_adapter(folder).digest == first
    change(folder, lora_alpha=7)
    assert read_adapter(folder).digest != first
    change(folder, lora_alpha=6)
    assert read_adapter(folder).digest == first
    name = f"{Q}.lora_A.weight"
    change_tensors(folder, **{name: 2 * load_file(folder / "adapter_model.safetensors")[name]})
    assert read_adapter(folder).digest != first


@pytest.mark.parametrize(
    "settings",
    [
        {
            "init_lora_weights": True,
            "use_dora": False,
            "modules_to_save": None,
            "inference_mode": True,
            "revision": None,
        },
        {
            "init_lora_weights": "gaussian",
            "lora_dropout": 0.1,
            "layers_to_transform": [0, 1],
            "loftq_config": {},
            "fan_in_fan_out": True,
        },
        {"init_lora_weights": "orthogonal"},
        {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "rank_pattern": {}, "alpha_pattern": {}},
    ],
    ids=str,
)
def test_settings_that_change_nothing(settings: dict[str, Any], folder: Path) -> None:
    change(folder, **settings)
    assert len(read_adapter(folder).weights) == CONFIG.num_layers * len(MODULES)


@pytest.mark.parametrize(
    "owner",
    ["model.", "model.language_model.", "language_model.model.", "model.text_model.", "thinker.model.language_model."],
)
def test_names_within_models_with_images(owner: str, folder: Path) -> None:
    expected = read_adapter(folder).weights
    file = folder / "adapter_model.safetensors"
    save_file(
        {
            name.replace("base_model.model.model.", f"base_model.model.{owner}"): values
            for name, values in load_file(file).items()
        },
        file,
    )
    assert read_adapter(folder).weights.keys() == expected.keys()


def test_names_of_a_model_without_a_head(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {n.replace("model.model.", "model."): t for n, t in tensors.items()}, folder / "adapter_model.safetensors"
    )
    assert len(read_adapter(folder).weights) == CONFIG.num_layers * len(MODULES)


@pytest.mark.parametrize(
    ("module", "weight"),
    [
        ("self_attn.gate_proj", "output_gate"),  # which PEFT alone cannot target in models with fused experts
        ("self_attn.g_proj", "output_gate"),
        ("mlp.router.gate", "router"),
        ("mlp.gate.wg", "router"),
        ("mlp.gate_proj", "gate_proj"),
    ],
)
def test_gates_of_several_kinds(module: str, weight: str) -> None:
    parsed = parse_tensor(f"base_model.model.model.layers.3.{module}.lora_A.weight")
    assert parsed is not None
    assert (parsed[0].weight, parsed[1]) == (f"layers.3.{weight}", "A")


BAD_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "other method": ("peft_type.*IA3", {"peft_type": "IA3"}),
    "bias": ("bias", {"bias": "all"}),
    "lora_bias": ("lora_bias", {"lora_bias": True}),
    "DoRA": ("use_dora", {"use_dora": True}),
    "a later variant": ("use_newlora", {"use_newlora": True}),
    "saved modules": ("modules_to_save.*lm_head", {"modules_to_save": ["lm_head"]}),
    "new tokens": ("trainable_token_indices", {"trainable_token_indices": [1, 2]}),
    "parameters": ("target_parameters", {"target_parameters": ["mlp.experts"]}),
    "parameters are text": ("target_parameters", {"target_parameters": "mlp.experts.down_proj"}),
    "tied weights": ("ensure_weight_tying", {"ensure_weight_tying": True}),
    "repeated layers": ("layer_replication", {"layer_replication": [[0, 1], [0, 1]]}),
    "activated": ("alora_invocation_tokens", {"alora_invocation_tokens": [1]}),
    "PiSSA": ("init_lora_weights.*pissa", {"init_lora_weights": "pissa"}),
    "another layer": ("target_modules.*embed_tokens", {"target_modules": ["q_proj", "embed_tokens"]}),
    "no rank": ("\\br\\b.*1\\.\\.65536", {"r": 0}),
    "rank is text": ("\\br\\b.*int", {"r": "8"}),
    "rank of the tensors": ("down_proj.lora_A.*\\[5, in\\].*\\[4, 96\\]", {"r": 5}),
    "alpha is text": ("lora_alpha", {"lora_alpha": "large"}),
    "alpha is no number": ("lora_alpha", {"lora_alpha": float("nan")}),
    "pattern is a list": ("rank_pattern", {"rank_pattern": [8]}),
    "pattern of rank 0": ("rank_pattern", {"rank_pattern": {"q_proj": 0}}),
    "regular expression": ("pattern", {"alpha_pattern": {"(a+)+b": 3}}),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_refused_settings(case: str, folder: Path) -> None:
    named, settings = BAD_SETTINGS[case]
    change(folder, **settings)
    with pytest.raises(AdapterError, match=named) as caught:
        read_adapter(folder)
    assert "\n" not in str(caught.value)


BAD_TENSORS: dict[str, tuple[str, dict[str, torch.Tensor | None]]] = {
    "an embedding": ("lora_embedding_A", {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 50)}),
    "a magnitude": ("magnitude", {f"{Q}.lora_magnitude_vector": torch.ones(64)}),
    "a whole module": ("lm_head", {"base_model.model.lm_head.weight": torch.ones(50, 64)}),
    "another projection": ("kv_proj", {Q.replace("q_proj", "kv_proj") + ".lora_A.weight": torch.ones(4, 64)}),
    "an expert's other matrix": ("w4", {Q[:31] + ".mlp.experts.0.w4.lora_A.weight": torch.ones(4, 64)}),
    "experts without target_parameters": (
        "target_parameters",
        {Q[:31] + f".mlp.experts.lora_{half}.weight": torch.ones(8, 8) for half in "AB"},
    ),
    "the same weight twice": (
        "are the same weight",
        {
            f"{Q}.lora_{half}.weight".replace("model.model.model", "model.model"): torch.ones(shape)
            for half, shape in (("A", (4, 64)), ("B", (64, 4)))
        },
    ),
    "no B": ("q_proj has lora_A only", {f"{Q}.lora_B.weight": None}),
    "no matrix": ("q_proj.lora_B.*shape", {f"{Q}.lora_B.weight": torch.ones(64)}),
    "another rank": ("q_proj.lora_B.*\\[out, 4\\].*\\[64, 3\\]", {f"{Q}.lora_B.weight": torch.ones(64, 3)}),
    "integers": ("q_proj.lora_A.*int8", {f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_refused_tensors(case: str, folder: Path) -> None:
    named, tensors = BAD_TENSORS[case]
    change_tensors(folder, **tensors)
    with pytest.raises(AdapterError, match=named) as caught:
        read_adapter(folder)
    assert "\n" not in str(caught.value)


def test_a_pickle_is_never_opened(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"pickle.*safetensors"):
        read_adapter(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"[1]", b"\xff" * 100, b"\xff" * 7 + b"\x7f{", b"[" * 100_000])
def test_damaged_files(content: bytes | None, name: str, folder: Path) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(AdapterError, match=name) as caught:
        read_adapter(folder)
    assert "\n" not in str(caught.value)


def test_an_adapter_without_tensors(folder: Path) -> None:
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="no tensors"):
        read_adapter(folder)
