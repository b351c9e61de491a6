"""GGUF files of Ling 3 (Bailing hybrid), and limits of SwiGLU in its files of both formats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.families import YARN, expected, load, make_model, save_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities
from torch import Tensor, nn
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from fastinfer.errors import FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder

FAMILY = "bailing-hybrid-published"
# Of layers with experts, some of which have none; behind them that of a layer for later tokens.
EXPERT_LIMITS, SHARED_LIMITS = [0.0, 0.0, 0.05, 0.0, 0.2, 0.1, 0.0], [0.0, 0.0, 0.0, 0.08, 0.15, 0.1, 0.0]


def logits_of(file: GGUFFile) -> Tensor:
    decoder = load_decoder(GGUFCheckpoint(file, exact=True), Precision.of("float32"), None)
    return log_probabilities(decoder, some_tokens(), "float32")


def written(folder: Path, model: Any, **metadata: Any) -> GGUFFile:
    """A model's file with other metadata."""
    write_gguf(folder / "model.gguf", model)
    file = GGUFFile(folder / "model.gguf")
    file.metadata |= {f"bailingmoe3.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return file


def limit_swiglu(model: Any) -> None:
    """Bound gates from above and the others on both sides, as transformers does for Step 3.7."""
    for number, layer in enumerate(model.model.layers):
        if number in (0, 1):
            continue
        experts = Step3p7Experts(model.config, swiglu_limit=EXPERT_LIMITS[number] or None)
        experts.load_state_dict(layer.mlp.experts.state_dict())
        layer.mlp.experts = experts
        if bound := SHARED_LIMITS[number]:
            shared = layer.mlp.shared_experts
            shared.act_fn = nn.Sequential(nn.SiLU(), nn.Hardtanh(-1.0, bound))  # it is above -0.3
            shared.up_proj = nn.Sequential(shared.up_proj, nn.Hardtanh(-bound, bound))


def test_metadata_are_those_of_the_folder(tmp_path: Path) -> None:
    file = written(tmp_path, save_model(tmp_path, FAMILY))
    config, folder = read_gguf_config(file), HFCheckpoint(tmp_path).config
    same = ("states", "state_layers", "latent_attention", "attention_scale", "unrotated_layers", "dense_layers")
    same += ("router", "interleaved_rope", "rotary_dim", "rope_theta", "head_gate", "shared_intermediate_size")
    assert [getattr(config, name) for name in same] == [getattr(folder, name) for name in same]
    heads = np.append(file.metadata["bailingmoe3.attention.head_count_kv"], 1)
    more = {"block_count": 7, "nextn_predict_layers": 1, "attention.head_count_kv": heads}
    file.metadata |= {f"bailingmoe3.{key}": value for key, value in more.items()}
    assert read_gguf_config(file) == config


def test_yarn(tmp_path: Path) -> None:
    """Without DeepSeek's factor on the scale of logits it has the usual one on cos and sin."""
    model = make_model(FAMILY, rope_parameters=YARN)
    metadata = {"type": "yarn", "factor": YARN["factor"], "original_context_length": 64}
    file = written(tmp_path, model, **{f"rope__scaling__{key}": value for key, value in metadata.items()})
    assert (logits_of(file) - expected(model, some_tokens())).abs().max() < 1e-4


def test_limits_of_swiglu(tmp_path: Path) -> None:
    """Lists of config.json may be shorter or longer, and have null for none."""
    model = save_model(tmp_path, FAMILY)
    plain = expected(model, some_tokens())
    limits = {"swiglu_clamp_exp": EXPERT_LIMITS[:-1], "swiglu_clamp_shexp": SHARED_LIMITS[:-1]}
    file = written(tmp_path, model, **{key: np.array(values, np.float32) for key, values in limits.items()})
    path = tmp_path / "config.json"
    lists = {"expert_swiglu_limit_list": EXPERT_LIMITS, "share_expert_swiglu_limit_list": [None, *SHARED_LIMITS[1:6]]}
    path.write_text(json.dumps(json.loads(path.read_text()) | lists))
    limit_swiglu(model)
    reference = expected(model, some_tokens())
    assert (reference - plain).abs().max() > 0.01
    assert (logits_of(file) - reference).abs().max() < 1e-4
    assert (log_probabilities(load(tmp_path), some_tokens(), "float32") - reference).abs().max() < 1e-4


def test_files_of_models_that_read_images(tmp_path: Path) -> None:
    """Rotated elements of such a model are as far apart as half of them, and their tensors in the same order."""
    model = make_model("bailing-hybrid")
    reference, config = expected(model, some_tokens()), model.config
    halves = [*range(0, config.qk_rope_head_dim, 2), *range(1, config.qk_rope_head_dim, 2)]
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "kv_b_proj"):
            queries = layer.self_attn.q_proj.weight.data.view(config.num_attention_heads, -1, config.hidden_size)
            for rows in (*queries, layer.self_attn.kv_a_proj_with_mqa.weight.data):
                rows[-len(halves) :] = rows[-len(halves) :][halves]
    file = written(tmp_path, model, rope__dimension_sections=np.array([1, 2, 1, 0], np.int32))
    assert (logits_of(file) - reference).abs().max() < 1e-4
    del file.metadata["bailingmoe3.rope.dimension_sections"]
    assert (logits_of(file) - reference).abs().max() > 1e-3


def test_one_limit_for_all_layers(tmp_path: Path) -> None:
    file = written(tmp_path, make_model(FAMILY), swiglu_clamp_exp=0.5)
    config = read_gguf_config(file)
    file.metadata["bailingmoe3.swiglu_clamp_exp"] = np.full(config.num_layers, 0.5, np.float32)
    assert read_gguf_config(file) == config


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    written(folder, make_model(FAMILY))
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kda.head_dim": 24}, UnsupportedModelError, "bailingmoe3.kda.head_dim must be a multiple of 16 up to 256"),
        ({"kda.safe_gate": False}, UnsupportedModelError, "bailingmoe3.kda.safe_gate must be True, got False"),
        ({"kda.gate_lower_bound": 0.0}, GGUFFormatError, "kda.gate_lower_bound': expected -1000.0 to -0.001, got 0.0"),
        ({"kda.gate_lower_bound": None}, GGUFFormatError, "'bailingmoe3.kda.gate_lower_bound' is missing"),
        ({"attention.head_count_kv": np.array([0] * 6)}, GGUFFormatError, "expected 6 numbers, some 0"),
        ({"attention.head_count_kv": np.array([0, 0, 1])}, GGUFFormatError, "expected 6 values, one for"),
        ({"attention.head_count_kv": np.array([np.nan] * 6)}, GGUFFormatError, "expected sizes from 0, got"),
        ({"swiglu_clamp_exp": np.array([0.0] * 5)}, GGUFFormatError, "bailingmoe3.swiglu_clamp_exp: expected 6 values"),
        ({"swiglu_clamp_shexp": np.array([-1.0] * 6)}, GGUFFormatError, "swiglu_clamp_shexp: expected numbers from 0"),
    ],
)
def test_bad_metadata(change: dict[str, Any], error: type[FastinferError], message: str, good: Path) -> None:
    file = GGUFFile(good)
    for key, value in change.items():
        file.metadata[f"bailingmoe3.{key}"] = value
        if value is None:
            del file.metadata[f"bailingmoe3.{key}"]
    with pytest.raises(error) as caught:
        read_gguf_config(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_decays_of_another_sign(tmp_path: Path) -> None:
    """Files without a bound, such as those of Kimi Linear, have a sign."""
    file = written(tmp_path, make_model(FAMILY))
    file.tensors["blk.0.ssm_a"].data.reshape(-1).view("<f4")[:] *= -1
    with pytest.raises(GGUFFormatError, match=r"tensor 'blk.0.ssm_a' must be positive, got -"):
        load_decoder(GGUFCheckpoint(file), Precision.of("float32"), None)
