"""Metadata that contradict each other, or that name what is not implemented: one clear error each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.families import make_model
from support.gguf_model_file import write_gguf

from fastinfer.errors import FastinferError, GGUFFormatError, RequestError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.loader import load_decoder

MISSING = object()

BAD: dict[str, tuple[type[FastinferError], str, dict[str, Any]]] = {
    "unknown architecture": (UnsupportedModelError, "mamba", {"general.architecture": "mamba"}),
    "no architecture": (GGUFFormatError, "general.architecture", {"general.architecture": MISSING}),
    "no layers": (GGUFFormatError, "block_count", {"llama.block_count": 0}),
    "huge width": (GGUFFormatError, "embedding_length", {"llama.embedding_length": 2**31}),
    "heads do not divide": (GGUFFormatError, "a multiple of 2 query heads", {"llama.attention.head_count_kv": 2}),
    "odd rotary size": (GGUFFormatError, "rotary size", {"llama.rope.dimension_count": 63}),
    "rotary size past the head": (GGUFFormatError, "rotary size", {"llama.rope.dimension_count": 128}),
    "yarn without its length": (GGUFFormatError, "original_context_length", {"llama.rope.scaling.type": "yarn"}),
    "rotary base of 1": (GGUFFormatError, "freq_base", {"llama.rope.freq_base": 1.0}),
    "unknown scaling": (UnsupportedModelError, "dynamic", {"llama.rope.scaling.type": "dynamic"}),
    "more experts used than there are": (
        GGUFFormatError,
        "expert_used_count.*1 to 4.*5",
        {"llama.expert_count": 4, "llama.expert_used_count": 5},
    ),
    "another choice of experts": (
        UnsupportedModelError,
        "expert_gating_func must be 1",
        {"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.expert_gating_func": 3},
    ),
    "more groups used than there are": (
        GGUFFormatError,
        "expert_group_used_count.*1 to 2.*3",
        {
            "llama.expert_count": 4,
            "llama.expert_used_count": 2,
            "llama.expert_group_count": 2,
            "llama.expert_group_used_count": 3,
        },
    ),
    "only layers for later tokens": (
        GGUFFormatError,
        "nextn_predict_layers, got 0",
        {"llama.nextn_predict_layers": 30},
    ),
    "epsilon is text": (GGUFFormatError, "epsilon", {"llama.attention.layer_norm_rms_epsilon": "small"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata(case: str, model_path: Path) -> None:
    error, named, change = BAD[case]
    file = GGUFFile(model_path)
    file.metadata |= change
    for key, value in change.items():
        if value is MISSING:
            del file.metadata[key]
    with pytest.raises(error, match=named) as caught:
        read_gguf_config(file)
    assert "\n" not in str(caught.value)


def written(folder: Path, family: str, **metadata: Any) -> GGUFFile:
    """A family's file with other metadata."""
    write_gguf(folder / "model.gguf", make_model(family))
    file = GGUFFile(folder / "model.gguf")
    architecture = file.metadata["general.architecture"]
    file.metadata |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return file


@pytest.mark.parametrize(("family", "num_layers"), [("gemma2-plain", 46), ("gemma3-plain", 62)])
def test_attention_scale_of_the_largest_gemmas(family: str, num_layers: int, tmp_path: Path) -> None:
    """No key says that theirs is not the usual one."""
    assert read_gguf_config(written(tmp_path, family, block_count=num_layers)).attention_scale == (64 / 4) ** -0.5
    assert read_gguf_config(written(tmp_path, family, block_count=num_layers - 1)).attention_scale is None


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({}, 256),
        ({"rope.scaling.original_context_length": 40}, 40),
        ({"rope.scaling.original_context_length": 40, "attention.temperature_length": 50}, 50),
    ],
)
def test_length_after_which_queries_grow(keys: dict[str, int], length: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("llama2"), name="mistral3")
    file = GGUFFile(tmp_path / "model.gguf")
    assert (read_gguf_config(file).query_growth, read_gguf_config(file).query_length) == (0.0, 1)
    file.metadata |= {f"mistral3.{key}": value for key, value in keys.items()}
    file.metadata["mistral3.attention.temperature_scale"] = 0.1
    config = read_gguf_config(file)
    assert (config.query_growth, config.query_length) == (0.1, length)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("phi3", {"attention__sliding_window": 0}),
        ("llama2", {"expert_count": 0, "expert_used_count": 0, "expert_feed_forward_length": 0}),
    ],
)
def test_zeros_for_what_a_model_does_not_have(family: str, keys: dict[str, int], tmp_path: Path) -> None:
    file = written(tmp_path, family, **keys)
    architecture = file.metadata["general.architecture"]
    config = read_gguf_config(file)
    for key in keys:
        del file.metadata[f"{architecture}.{key.replace('__', '.')}"]
    assert read_gguf_config(file) == config
    assert (config.windows, config.num_experts) == ((), 0)


def test_names_of_rotary_bases(tmp_path: Path) -> None:
    file = written(tmp_path, "gemma3-plain")
    del file.metadata["gemma3.rope.freq_base"]
    file.metadata |= {"gemma3.rope.global.freq_base": 30000.0, "gemma3.rope.local.freq_base": 20000.0}
    config = read_gguf_config(file)
    assert (config.rope_theta, config.local_rope_theta) == (30000.0, 20000.0)
    file.metadata |= {"gemma3.rope.freq_base": 50000.0, "gemma3.rope.freq_base_swa": 40000.0}
    config = read_gguf_config(file)
    assert (config.rope_theta, config.local_rope_theta) == (50000.0, 40000.0)


def test_granite_without_rotations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="without rotary positions are not implemented"):
        read_gguf_config(written(tmp_path, "granite-plain", rope__scaling__finetuned=False))


def test_falcon_h1_without_its_factors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"ssm\.has_mup: the first converter's files are not implemented"):
        read_gguf_config(written(tmp_path, "falcon-h1", ssm__has_mup=True))


def test_norms_of_queries_of_a_family_without_are_refused(model_path: Path) -> None:
    file = GGUFFile(model_path)
    file.tensors["blk.0.attn_q_norm.weight"] = file.tensors["output_norm.weight"]
    with pytest.raises(UnsupportedModelError, match=r"norms of queries \(blk\.0\.attn_q_norm\) are not implemented"):
        read_gguf_config(file)


def test_choice_of_experts_without_a_bias(tmp_path: Path) -> None:
    file = written(tmp_path, "glm4-moe")
    assert read_gguf_config(file).router.has_bias
    for name in [name for name in file.tensors if name.endswith("exp_probs_b.bias")]:
        del file.tensors[name]
    router = read_gguf_config(file).router
    assert (router.scoring, router.has_bias) == ("sigmoid", False)


def test_windows_by_layer(tmp_path: Path) -> None:
    """Layers for later tokens have none."""
    file = written(tmp_path, "mellum-plain", block_count=5, nextn_predict_layers=1, rope__freq_base_swa=500.0)
    config = read_gguf_config(file)
    assert (config.windows, config.local_rope_theta) == ((0, 16, 0, 16), 500.0)
    file.metadata["mellum.block_count"] = 6
    with pytest.raises(GGUFFormatError, match=r"sliding_window_pattern: expected 6 values, .* got 4"):
        read_gguf_config(file)


def test_sizes_of_each_layer(tmp_path: Path) -> None:
    """Files of Granite 4 without Mamba layers have them."""
    file = written(tmp_path, "granite-plain", attention__head_count_kv=np.full(3, 2, np.uint32))
    assert read_gguf_config(file).num_kv_heads == 2
    for heads, error, named in (
        (
            [2, 1, 2],
            UnsupportedModelError,
            r"granite\.attention\.head_count_kv must be the same for all layers, got \[",
        ),
        ([2, 2], GGUFFormatError, r"head_count_kv: expected 3 values, one for each layer, got 2"),
        ([0, 0, 0], GGUFFormatError, r"head_count_kv: expected sizes from 1, got \[0, 0, 0\]"),
    ):
        file.metadata["granite.attention.head_count_kv"] = np.array(heads, np.uint32)
        with pytest.raises(error, match=named):
            read_gguf_config(file)


def test_layers_of_granite_with_windows(tmp_path: Path) -> None:
    file = written(tmp_path, "granite-swa-published", block_count=6, nextn_predict_layers=1)
    config = read_gguf_config(file)
    assert (config.windows, config.unrotated_layers) == ((0, 16, 16, 16, 0), {2})
    windows = file.metadata.pop("granite_swa.attention.sliding_window_pattern")
    with pytest.raises(GGUFFormatError, match=r"'granite_swa\.attention\.sliding_window_pattern' is missing"):
        read_gguf_config(file)
    file.metadata["granite_swa.attention.sliding_window_pattern"] = windows
    file.metadata["granite_swa.attention.rope_pattern"] = windows[:4]
    with pytest.raises(GGUFFormatError, match=r"attention\.rope_pattern: expected 6 values, .* got 4"):
        read_gguf_config(file)
    del file.metadata["granite_swa.attention.rope_pattern"]
    assert read_gguf_config(file) == replace(config, unrotated_layers=frozenset())


def test_clamped_queries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"attention\.clamp_kqv must be 0, got 8\.0"):
        read_gguf_config(written(tmp_path, "olmo", attention__clamp_kqv=8.0))


def test_norms_of_cohere_2s_mixtures(tmp_path: Path) -> None:
    assert read_gguf_config(written(tmp_path, "cohere2-moe")).norm == "layer_norm"
    config = read_gguf_config(written(tmp_path, "cohere2-moe", attention__layer_norm_rms_epsilon=0.5))
    assert (config.norm, config.norm_eps) == ("rms_norm", 0.5)


def test_latent_attention(tmp_path: Path) -> None:
    with pytest.raises(GGUFFormatError, match=r"rope\.dimension_count: expected less than the key length 32, got 32"):
        read_gguf_config(written(tmp_path, "deepseek-v3-mscale", rope__dimension_count=32))
    # YaRN's factor counts if it is larger than 1.
    scales = [
        read_gguf_config(written(tmp_path, "deepseek-v3-mscale", rope__scaling__factor=factor)).attention_scale
        for factor in (0.5, 1.0, 4.0)
    ]
    assert scales[0] == scales[1] == 32**-0.5 < scales[2]


def test_yarn_of_latent_attention(tmp_path: Path) -> None:
    """Without DeepSeek's factor on the scale of logits it has the usual one on cos and sin."""
    file = written(tmp_path, "deepseek-v3-mscale")
    assert read_gguf_config(file).rope_scaling.attention_factor == 1.0
    del file.metadata["deepseek2.rope.scaling.yarn_log_multiplier"]
    assert read_gguf_config(file).rope_scaling.attention_factor is None


def test_experts_of_phi(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"phimoe\.expert_used_count must be 2, got 3"):
        read_gguf_config(written(tmp_path, "phimoe-published", expert_used_count=3))


def test_too_many_dense_layers(tmp_path: Path) -> None:
    with pytest.raises(GGUFFormatError, match=r"leading_dense_block_count.*got 4294967295"):
        read_gguf_config(written(tmp_path, "deepseek-v3-mscale", leading_dense_block_count=2**32 - 1))


def test_context_too_long_for_its_rotary_table(model_path: Path) -> None:
    """The file's claim alone must not cost gigabytes; a shorter max_model_len makes it usable."""
    file = GGUFFile(model_path)
    file.metadata["llama.context_length"] = 2**24
    with pytest.raises(RequestError, match="max_model_len"):
        load_decoder(GGUFCheckpoint(file), Precision.of("float32"), None)
    assert load_decoder(GGUFCheckpoint(file), Precision.of("float32"), 64).layers[0].attention.cos_sin_cache.shape == (
        64,
        64,
    )


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [("output_norm.weight", "missing", "missing"), ("blk.3.attn_k.weight", "shape", "shape")],
)
def test_bad_tensors(name: str, change: str, error: str, model_path: Path) -> None:
    file = GGUFFile(model_path)
    if change == "missing":
        del file.tensors[name]
    else:
        file.tensors[name] = file.tensors["blk.3.attn_q.weight"]
    with pytest.raises(GGUFFormatError, match=rf"{name}.*{error}"):
        load_decoder(GGUFCheckpoint(file), Precision.of("float32"), 64)
