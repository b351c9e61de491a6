"""Folders as published checkpoints are, where transformers writes the same model in another form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

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


def _rename(fields: Fields, names: dict[str, str]) -> None:
    """Give fields other names, those that are there."""
    for name, published in names.items():
        if name in fields:
            fields[published] = fields.pop(name)


def _kimi_linear(fields: Fields) -> None:
    kinds = fields.pop("layer_types")
    fields["linear_attn_config"] = {
        "short_conv_kernel_size": fields.pop("linear_conv_kernel_dim"),
        "head_dim": fields.pop("linear_head_dim"),
        "num_heads": fields.pop("linear_num_heads"),
        # Counted from 1.
        "full_attn_layers": [layer + 1 for layer, kind in enumerate(kinds) if kind == "full_attention"],
        "kda_layers": [layer + 1 for layer, kind in enumerate(kinds) if kind == "linear_attention"],
    }
    names = {
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
        "num_local_experts": "num_experts",
        "max_position_embeddings": "model_max_length",
    }
    _rename(fields, names)
    fields["first_k_dense_replace"] = fields.pop("mlp_layer_types").count("dense")
    fields |= {"moe_router_activation_func": "sigmoid", "mla_use_nope": True}


def _bailing(fields: Fields) -> None:
    fields |= {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "head_dim": fields.pop("linear_head_dim"),
        "rope_theta": fields.pop("rope_parameters")["rope_theta"],
        "norm_topk_prob": fields.pop("moe_renormalize", True),
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
        "score_function": "sigmoid",
        "partial_rotary_factor": 0.5,
        "rotary_dim": fields["qk_rope_head_dim"],
        "moe_shared_expert_intermediate_size": fields["moe_intermediate_size"],
    }
    names = {
        "model_max_length": "max_position_embeddings",
        "num_expert_group": "n_group",
        "num_local_experts": "num_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "n_shared_experts": "num_shared_experts",
    }
    _rename(fields, names)
    for name in ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_conv_kernel_dim"):
        fields.pop(name, None)


def _step(fields: Fields) -> None:
    text = fields["text_config"]
    rope, kinds = text.pop("rope_parameters"), text["layer_types"]
    full = rope["full_attention"]
    layers = [rope[kind] for kind in kinds]
    text |= {
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": text.pop("num_sliding_attention_heads"),
            "num_attention_groups": text["num_key_value_heads"],
            "head_dim": text["head_dim"],
        },
        "num_attention_groups": text.pop("num_key_value_heads"),
        "moe_layers_enum": ",".join(str(i) for i, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"),
        "moe_num_experts": text.pop("n_routed_experts"),
        "moe_top_k": text.pop("num_experts_per_tok"),
        "norm_expert_weight": True,
        "moe_router_activation": "sigmoid",
        "use_moe_router_bias": True,
        "use_head_wise_attn_gate": True,
        "rope_theta": [layer["rope_theta"] for layer in layers],
        "partial_rotary_factors": [layer["partial_rotary_factor"] for layer in layers],
        "rope_scaling": {name: full[name] for name in full.keys() - {"rope_theta", "partial_rotary_factor"}},
    }
    for name in ("per_layer_config", "num_local_experts", "mtp_layer_types", "mtp_mlp_layer_types"):
        text.pop(name, None)


def _granite_swa(fields: Fields) -> None:
    if fields.get("layer_rope_theta"):
        fields["no_rope_layers"] = [int(bool(theta)) for theta in fields["layer_rope_theta"]]


# By the beginning of the name in families.py.
PUBLISHED: dict[str, Callable[[Fields], None]] = {
    "granite-hybrid": _granite_hybrid,
    "granite-swa": _granite_swa,
    "kimi-linear": _kimi_linear,
    "bailing-hybrid": _bailing,
    "step3.7": _step,
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


def changed_by_publishing(family: str) -> Callable[[Fields], None] | None:
    """Return the change of config.json; ``None`` if transformers writes the published form."""
    if family.startswith("cohere2-moe"):
        return None
    return next((to for name, to in PUBLISHED.items() if family == name or family.startswith(f"{name}-")), None)


def publish(folder: Path, family: str) -> bool:
    """Bring a folder into the published form; returns whether it has changed."""
    change = changed_by_publishing(family)
    if change is None:
        return False
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    if family.startswith("kimi-linear"):
        _rename_dense_layers(folder / "model.safetensors", fields["first_k_dense_replace"])
    return True


def _rename_dense_layers(path: Path, count: int) -> None:
    tensors = load_file(path)
    for layer in range(count):
        prefix = f"model.layers.{layer}."
        tensors = {
            name.replace(f"{prefix}block_sparse_moe.", f"{prefix}mlp."): values for name, values in tensors.items()
        }
    save_file(tensors, path, metadata={"format": "pt"})
