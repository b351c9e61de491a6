"""Names of the tensors in a LoRA adapter, which are those of the model's modules in transformers.

The project's names are those of :mod:`fastinfer.models.checkpoint`, such as ``layers.3.q_proj``,
``layers.3.experts.5.gate_proj``, ``layers.3.shared_expert.gate_proj`` or ``lm_head``. Modules that contain several of
its matrices, with their rows concatenated, are ``qkv_proj`` and ``gate_up_proj``; ``query_key_value`` has the rows of
each head together.
"""

import re
from typing import NamedTuple

# Projections of a layer by their names in transformers.
_LAYER = {
    **{f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")},
    **{f"mlp.{name}": name for name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")},
    "mlp.gate": "router",
    "block_sparse_moe.gate": "router",  # Mixtral before transformers 5
    "mlp.router": "router",  # GPT-OSS
    "mlp.router.gate": "router",  # AFMoE
    "mlp.gate.wg": "router",  # HunYuan
    "block_sparse_moe.router": "router",  # Granite
    "mlp.shared_expert_gate": "shared_expert_gate",
    **{
        f"mlp.{owner}.{name}": f"shared_expert.{name}"
        for owner in ("shared_expert", "shared_experts", "shared_mlp")
        for name in ("gate_proj", "up_proj", "down_proj")
    },
    "shared_mlp.input_linear": "shared_expert.gate_up_proj",  # Granite
    "shared_mlp.output_linear": "shared_expert.down_proj",
    **{f"self_attn.{name}": name for name in ("q_a_proj", "q_b_proj", "kv_b_proj")},
    "self_attn.kv_a_proj_with_mqa": "kv_a_proj",
    **{
        f"linear_attn.{name}": name
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_qkvz", "in_proj_ba", "out_proj")
    },
    **{f"linear_attn.{name}_proj": f"in_proj_{name}" for name in ("q", "k", "v", "a", "b")},  # OLMo Hybrid
    "linear_attn.g_proj": "in_proj_z",
    "linear_attn.o_proj": "out_proj",
    "self_attn.b_proj": "in_proj_b",  # Kimi Linear
    "self_attn.g_a_proj": "in_proj_z",
    "self_attn.g_b_proj": "in_proj_z_up",
    "self_attn.forget_gate.f_a_proj": "in_proj_a",
    "self_attn.forget_gate.f_b_proj": "in_proj_a_up",
    "self_attn.forget_gate.f_proj": "in_proj_a",  # Bailing hybrid
    **{f"{owner}.{name}": name for owner in ("mamba", "conv", "mixer") for name in ("in_proj", "out_proj")},
    "self_attn.out_proj": "o_proj",  # LFM2
    "self_attn.g_proj": "output_gate",  # LFM3, Step 3.5, Laguna, Bailing hybrid
    "self_attn.gate_proj": "output_gate",  # AFMoE, Muse Glimmer
    **{f"feed_forward.{name}": name for name in ("gate_proj", "up_proj", "down_proj")},  # Falcon-H1
    "feed_forward.w1": "gate_proj",
    "feed_forward.w3": "up_proj",
    "feed_forward.w2": "down_proj",
    "feed_forward.gate": "router",
    "feed_forward.router": "router",  # Llama 4
    **{f"feed_forward.shared_expert.{name}": f"shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    # Nemotron-H
    **{f"mixer.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")},
    **{f"mixer.shared_experts.{name}": f"shared_expert.{name}" for name in ("up_proj", "down_proj")},
    "mixer.gate": "router",
    "self_attn.dense": "o_proj",  # Phi
    "mlp.fc1": "up_proj",  # also NanoChat
    "mlp.fc2": "down_proj",
    "attention.query_key_value": "query_key_value",  # GPT-NeoX
    "attention.dense": "o_proj",
    "mlp.dense_h_to_4h": "up_proj",
    "mlp.dense_4h_to_h": "down_proj",
    "attn.c_attn": "qkv_proj",  # GPT-2
    "attn.c_proj": "o_proj",
    "mlp.c_fc": "up_proj",
    "mlp.c_proj": "down_proj",
}
# Projections of an expert that is a module of its own, as before transformers 5.
_EXPERT = {
    **{name: name for name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")},
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}
# Tensors of all experts, in the order in which PEFT wraps them, the first one innermost.
FUSED_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
_OUTPUTS = ("lm_head", "embed_out")  # embed_out: GPT-NeoX
# Last parts of the names that can be targeted.
TARGETS = tuple(dict.fromkeys([name.rpartition(".")[2] for name in _LAYER] + [*_EXPERT, *_OUTPUTS]))

_TENSOR = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<half>[AB])\.weight")
_MODULE = re.compile(
    r"(?:(?:(?:thinker\.)?model(?:\.language_model|\.text_model)?|language_model\.model|transformer|gpt_neox)\.)?"
    r"(?:layers|h)\.(?P<layer>\d{1,4})\."
    r"(?P<part>[a-z_]+\.(?:experts\.(?P<expert>\d{1,4})\.(?P<expert_part>\w+)|experts(?P<wrappers>(?:\.base_layer)*)|shared_(?:experts?|mlp)\.\w+|router\.gate|gate\.wg|forget_gate\.\w+|\w+))"
)
# PEFT saves the weight and bias to which an adapter of the output layer belongs, too. An adapter does not change them.
_BASE_WEIGHT = re.compile(r"base_model\.model\.(?:lm_head|embed_out)\.base_layer\.(?:weight|bias)")


class AdapterModule(NamedTuple):
    """A module that an adapter changes.

    Attributes:
        name: name of the module in the model, without PEFT's wrappers: ``model.layers.3.mlp.experts``.
        weight: the project's name of its matrix: ``layers.3.q_proj``; for a tensor of all experts that of the
            experts, ``layers.3.experts``.
        depth: for a tensor of all experts the number of wrappers around this one; ``None`` for other modules.
    """

    name: str
    weight: str
    depth: int | None = None


def is_base_weight(tensor: str) -> bool:
    """Return whether a tensor is a copy of a weight of the model."""
    return _BASE_WEIGHT.fullmatch(tensor) is not None


def parse_tensor(tensor: str) -> tuple[AdapterModule, str] | None:
    """Return the module of a tensor, and ``"A"`` or ``"B"``; ``None`` for a tensor that is not supported."""
    if (match := _TENSOR.fullmatch(tensor)) is None:
        return None
    module = _parse_module(match["module"])
    return None if module is None else (module, match["half"])


def _parse_module(name: str) -> AdapterModule | None:
    if name in _OUTPUTS:
        return AdapterModule(name, "lm_head")
    if (match := _MODULE.fullmatch(name)) is None:
        return None
    layer, part, wrappers = f"layers.{match['layer']}", match["part"], match["wrappers"]
    if part.partition(".")[0] in ("mlp", "block_sparse_moe", "feed_forward", "mixer"):
        if wrappers is not None:
            return AdapterModule(name.removesuffix(wrappers), f"{layer}.experts", wrappers.count("."))
        if match["expert"] is not None:
            projection = _EXPERT.get(match["expert_part"])
            if projection is None:
                return None
            return AdapterModule(name, f"{layer}.experts.{int(match['expert'])}.{projection}")
    return AdapterModule(name, f"{layer}.{_LAYER[part]}") if part in _LAYER else None
