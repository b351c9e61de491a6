"""Models with multi-head latent attention: the logits of transformers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, SIZES, expected, load, make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import kv_cache_size
from fastinfer.errors import FastinferError, RequestError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import LatentAttentionConfig, Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.loader import load_decoder

LATENT_FAMILIES = [
    "deepseek-v2",
    "deepseek-v2-queries",
    "deepseek-v3",
    "deepseek-v3-mscale",
    "deepseek-v3-plain",
    "glm4-moe-lite",
    "mistral4",
    "youtu",
    "youtu-plain",
    "minicpm3",
    "axk1",
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_logits(family: str, seed: int, tmp_path: Path) -> None:
    model = make_model(family, seed)
    model.save_pretrained(tmp_path)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4
    assert len(set(got.argmax(-1).tolist())) > 5


def test_logits_with_the_heads_of_published_models(tmp_path: Path) -> None:
    heads = {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "kv_lora_rank": 512}
    model = make_model("glm4-moe-lite", num_hidden_layers=3, initializer_range=0.03, **heads)
    model.save_pretrained(tmp_path)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


def test_the_language_model_within_one_of_text_and_images(tmp_path: Path) -> None:
    text = {**SIZES, **FAMILIES["mistral4"][1], "model_type": "mistral4"}
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision |= {"head_dim": 16, "image_size": 28, "model_type": "pixtral"}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([some_tokens()])).logits[0]
    assert (got - logits.log_softmax(-1)).abs().max() < 1e-4


def test_gguf_files_of_both_ages_are_equal(tmp_path: Path) -> None:
    """Newer ones have the matrices of keys and values apart."""
    model = make_model("deepseek-v3-mscale")
    found = []
    for is_fused in (False, True):
        write_gguf(tmp_path / "model.gguf", model, is_fused=is_fused)
        checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
        assert ("layers.0.k_b_proj" in checkpoint) != is_fused
        found.append(
            log_probabilities(load_decoder(checkpoint, Precision.of("float32"), None), some_tokens(), "float32")
        )
    assert torch.equal(*found)


def test_sizes(tmp_path: Path) -> None:
    make_model("mistral4").save_pretrained(tmp_path)
    config = HFCheckpoint(tmp_path).config
    assert config.latent_attention == LatentAttentionConfig(56, 40, 24, 8, 20)
    assert (config.query_growth, config.query_length) == (0.5, 40)
    assert (config.num_kv_heads, config.head_dim, config.rotary_dim, config.max_position) == (1, 48, 8, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_the_cache_is_one_row_a_token(dtype: torch.dtype, tmp_path: Path) -> None:
    make_model("deepseek-v3").save_pretrained(tmp_path)
    config = HFCheckpoint(tmp_path).config
    options = EngineConfig(num_kv_blocks=7, block_size=16, kv_cache_dtype=dtype)
    cache = KVCache.of_model(config, [7], 16, dtype, "cpu")
    rows = [row.shape[1] * 7 for row in cache.rows]
    assert sum(rows) == kv_cache_size(options, [config]).num_bytes
    scale = 4 if dtype in (torch.int8, torch.float8_e4m3fn) else 0
    assert sum(rows) == 7 * 16 * config.num_layers * (48 * dtype.itemsize + scale)
    for layer in cache:
        assert layer.v.data_ptr() == layer.k.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 0.02), (torch.int8, 0.4), (torch.float8_e4m3fn, 0.8)])
def test_other_caches_are_close(dtype: torch.dtype, limit: float, tmp_path: Path) -> None:
    make_model("deepseek-v2").save_pretrained(tmp_path)
    decoder, found = load(tmp_path), []
    for cache_dtype in (torch.float32, dtype):
        found.append(log_probabilities(decoder, some_tokens()[:60], "float32", None, cache_dtype))
    error = (found[0] - found[1]).abs().mean()
    assert 0 < error < limit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": torch.uint8}, "kv_cache_dtype must not be int4"),
        ({"device": "cuda", "kv_cache_dtype": torch.int8}, "kv_cache_dtype must be auto, bfloat16 or float16 for a"),
        ({"device": "cuda", "kv_cache_dtype": torch.bfloat16}, r"must have one of the sizes .*, got \(40, 8\)"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_model("deepseek-v2").save_pretrained(tmp_path)
    config = HFCheckpoint(tmp_path).config
    with pytest.raises(RequestError, match=message):
        kv_cache_size(EngineConfig(num_kv_blocks=8, **options), [config])


def changed(folder: Path, family: str = "deepseek-v3", **changes: Any) -> Path:
    """A config.json with these changes; ``None`` removes a key."""
    make_model(family).save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


REFUSED = [
    ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ("deepseek-v3", {"qk_nope_head_dim": 0}, "qk_nope_head_dim: expected 1 to"),
    ("deepseek-v3", {"qk_rope_head_dim": 7}, "the rotated size must be even"),
    ("deepseek-v3", {"v_head_dim": "wide"}, "v_head_dim: expected int"),
    ("deepseek-v3", {"attention_bias": True}, "attention_bias must be False, got True"),
    ("deepseek-v3", {"num_key_value_heads": 3}, "num_key_value_heads must be 6, got 3"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
    ("deepseek-v3", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
    ("deepseek-v3", {"partial_rotary_factor": 0.7}, "partial_rotary_factor must be 1 or"),
    ("deepseek-v2", {"topk_method": "group_limited_greedy"}, "topk_method must be 'greedy'"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob must be False"),
    ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func must be 'softmax'"),
    ("glm4-moe-lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types: expected 4 of dense and sparse"),
    ("mistral4", {"rope_parameters": None}, "rope_parameters is missing"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_configurations_that_are_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = changed(tmp_path, family, **changes)
    with pytest.raises(FastinferError, match=message) as caught:
        read_hf_config(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q_a_layernorm", (55,)),
        ("kv_a_layernorm", (41,)),
        ("kv_a_proj_with_mqa", (47, 96)),
        ("kv_b_proj", (264, 41)),
        ("q_b_proj", (191, 56)),
    ],
)
def test_tensors_of_another_shape_are_named(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    make_model("deepseek-v3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.1.self_attn.{name}.weight"] = torch.zeros(shape)
    save_file(tensors, file)
    with pytest.raises(FastinferError, match=rf"model\.layers\.1\.self_attn\.{name}.* must have the shape"):
        load(tmp_path)


def test_a_bias_of_the_choice_says_that_scores_are_sigmoids(tmp_path: Path) -> None:
    """The first files of GLM-4.7-Flash do not say it otherwise."""
    for family, scoring in (("glm4-moe-lite", "sigmoid"), ("deepseek-v2", "softmax")):
        write_gguf(tmp_path / "model.gguf", make_model(family))
        file = GGUFFile(tmp_path / "model.gguf")
        file.metadata.pop("deepseek2.expert_gating_func")
        assert GGUFCheckpoint(file).config.router.scoring == scoring


@pytest.mark.parametrize("family", ["deepseek-v3-plain", "axk1"])
def test_a_bias_of_the_choice_that_is_missing(family: str, tmp_path: Path) -> None:
    """A.X K1's published files have none, though they have a norm of each layer that its dense layers do not use."""
    model = make_model(family)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if family == "axk1":
        assert "model.layers.3.post_mlp_layernorm.weight" in tensors
        tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.zeros(96)
    save_file({name: values for name, values in tensors.items() if not name.endswith("correction_bias")}, file)
    if family != "axk1":
        with pytest.raises(FastinferError, match="e_score_correction_bias' is missing"):
            load(tmp_path)
        return
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("axk1", {"scoring_func": "softmax", "topk_method": "greedy", "first_k_dense_replace": 0}),
        ("minicpm3", {"rope_interleave": True, "n_routed_experts": None}),
        ("youtu", {"moe_intermediate_size": 40}),
    ],
)
def test_settings_that_its_code_does_not_read(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    usual = read_hf_config(changed(tmp_path, family))
    assert read_hf_config(changed(tmp_path, family, **changes)) == usual


def test_factors_of_minicpm3_that_are_null(tmp_path: Path) -> None:
    path = changed(tmp_path, "minicpm3")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scale_depth": None, "dim_model_base": None}))
    config = read_hf_config(path)
    assert (config.embedding_scale, config.residual_scale, config.logits_scale) == (3.0, 1.0, 1.0)
    config = read_hf_config(changed(tmp_path, "minicpm3", scale_emb=None, scale_depth=None, dim_model_base=None))
    assert (config.embedding_scale, config.residual_scale, config.logits_scale) == (12.0, 0.7, 256 / 96)


def test_groups_of_softmax_scores_in_a_gguf_file_are_refused(tmp_path: Path) -> None:
    """DeepSeek-V2 chooses groups by their largest score."""
    write_gguf(tmp_path / "model.gguf", make_model("deepseek-v3-mscale"))
    file = GGUFFile(tmp_path / "model.gguf")
    file.metadata["deepseek2.expert_gating_func"] = 1
    with pytest.raises(UnsupportedModelError, match="expert_group_count must be 1 for softmax scores, got 4"):
        GGUFCheckpoint(file)


def test_fp8_in_blocks_as_deepseek_writes_it(tmp_path: Path) -> None:
    """Blocks of 128 by 128 cut through heads and their matrices."""
    sizes = {
        "q_lora_rank": 96,
        "kv_lora_rank": 160,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "moe_intermediate_size": 64,
    }
    make_model("deepseek-v3", **sizes).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    dense = load_file(file)
    stored, rounded = dict(dense), dict(dense)
    for name in [name for name in dense if name.endswith("_proj.weight")]:
        rows, columns = dense[name].shape
        counts = -(-rows // 128), -(-columns // 128)
        scales = torch.rand(counts) / 100 + 0.002
        spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        stored[name] = (dense[name] / spread).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        rounded[name] = stored[name].float() * spread
    found = []
    for tensors, settings in ((rounded, None), (stored, {"quant_method": "fp8", "weight_block_size": [128, 128]})):
        save_file(tensors, file)
        values = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings}
        (tmp_path / "config.json").write_text(json.dumps(values))
        decoder = load_decoder(HFCheckpoint(tmp_path, exact=True), Precision.of("float32"), None)
        found.append(log_probabilities(decoder, some_tokens(), "float32"))
    assert (found[0] - found[1]).abs().max() < 1e-4
