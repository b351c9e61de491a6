"""``config.json`` as published checkpoints have it, where transformers writes other fields for the same model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fields = dict[str, Any]


def _granite_hybrid(fields: Fields) -> None:
    fields["layer_types"] = ["mamba" if kind == "linear_attention" else "attention" for kind in fields["layer_types"]]
    if not fields["num_local_experts"]:
        fields["num_experts_per_tok"] = 0


def _nemotron_h(fields: Fields) -> None:
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    pattern = "".join(letters[kind] for kind in fields.pop("layers_block_type"))
    fields |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    if "E" not in pattern:
        for name in [name for name in fields if "expert" in name or "moe" in name]:
            del fields[name]


def _mimo(fields: Fields) -> None:
    full, sliding = (fields["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    fields |= {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in fields["layer_types"]],
        "moe_layer_freq": [int(kind == "sparse") for kind in fields["mlp_layer_types"]],
        "rope_theta": full["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"],
        "swa_rope_theta": sliding["rope_theta"],
        "swa_head_dim": fields["head_dim"],
        "swa_v_head_dim": fields["v_head_dim"],
        "swa_num_attention_heads": fields["num_attention_heads"],
        "swa_num_key_value_heads": 2 * fields["num_key_value_heads"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    del fields["rope_parameters"]


def _glm4_moe_lite(fields: Fields) -> None:
    fields["first_k_dense_replace"] = fields.pop("mlp_layer_types").count("dense")


def _gpt_neox(fields: Fields) -> None:
    rope = fields.pop("rope_parameters")
    fields |= {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}


def _phimoe(fields: Fields) -> None:
    fields |= {
        "architectures": ["PhiMoEForCausalLM"],
        "rope_theta": fields.pop("rope_parameters")["rope_theta"],
        "original_max_position_embeddings": fields["max_position_embeddings"],
    }


def _mistral4(fields: Fields) -> None:
    text = dict(fields)
    del text["architectures"]
    fields.clear()
    fields |= {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}


# By the beginning of the name in families.py.
PUBLISHED: dict[str, Callable[[Fields], None]] = {
    "granite-hybrid": _granite_hybrid,
    "nemotron-h": _nemotron_h,
    "mimo-v2-flash": _mimo,
    "glm4-moe-lite": _glm4_moe_lite,
    "gpt-neox": _gpt_neox,
    "phimoe": _phimoe,
    "mistral4": _mistral4,
    "minimax-m2": lambda fields: fields.update(
        scoring_func="sigmoid",
        rotary_dim=int(fields["head_dim"] * fields["rope_parameters"]["partial_rotary_factor"]),
    ),
    "youtu": lambda fields: fields.pop("moe_intermediate_size"),
    "glm-plain": lambda fields: fields.update(seq_length=fields["max_position_embeddings"]),
    "gpt2": lambda fields: fields.update(n_ctx=fields["n_positions"]),
    "cohere2": lambda fields: fields.update(rotary_pct=1.0),
}


def publish(folder: Path, family: str) -> bool:
    """Rewrite config.json in a folder; returns whether it has changed."""
    changes = [change for name, change in PUBLISHED.items() if family == name or family.startswith(f"{name}-")]
    if family.startswith("cohere2-moe") or not changes:
        return False
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    changes[0](fields)
    path.write_text(json.dumps(fields))
    return True
