"""Models of text and images or sound, of which only the language model is computed, that of a family of its own.

``config.json`` says which family that is (``text_config.model_type``), and may leave out the sizes of its first model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.formats.text_fields import text_fields


@dataclass(frozen=True)
class TextPart:
    """A model that has a language model as a part.

    Attributes:
        kind: kind of the language model.
        is_fixed: whether that is so whatever the file says; else it is only so if the file says nothing.
        scales_logits: whether the logits have the factor or the cap that the language model alone gives them.
    """

    kind: str
    is_fixed: bool = False
    scales_logits: bool = False


@dataclass(frozen=True)
class TextKind:
    """A kind of language model.

    Attributes:
        architecture: its family.
        defaults: values of config.json that its writers may leave out, other than those of the family.
    """

    architecture: str
    defaults: Mapping[str, object] = field(default_factory=dict)


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, vocab: int, positions: int) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


_DEEPSEEK_V3 = TextKind("DeepseekV3ForCausalLM")
_KIMI = TextPart("deepseek_v3")

TEXT_PARTS: dict[str, TextPart] = {
    "AriaForConditionalGeneration": TextPart("aria_text", is_fixed=True),
    "AyaVisionForConditionalGeneration": TextPart("cohere2"),
    "Cohere2VisionForConditionalGeneration": TextPart("cohere2"),
    "GotOcr2ForConditionalGeneration": TextPart("qwen2"),
    "Granite4VisionForConditionalGeneration": TextPart("granite4_vision_text", is_fixed=True, scales_logits=True),
    "GraniteDoclingForConditionalGeneration": TextPart("granite_docling_text", is_fixed=True, scales_logits=True),
    "Idefics3ForConditionalGeneration": TextPart("llama"),
    "InternVLForConditionalGeneration": TextPart("qwen2"),
    "KimiK25ForConditionalGeneration": _KIMI,
    "Kimi_K25ForConditionalGeneration": _KIMI,
    "KimiVLForConditionalGeneration": _KIMI,
    "Lfm2VlForConditionalGeneration": TextPart("lfm2"),
    "Lfm3VlForConditionalGeneration": TextPart("lfm3"),
    "Llama4ForConditionalGeneration": TextPart("llama4_text", is_fixed=True),
    "LlavaForConditionalGeneration": TextPart("llama"),
    "LlavaNextForConditionalGeneration": TextPart("llama"),
    "LlavaOnevisionForConditionalGeneration": TextPart("qwen2"),
    "Ovis2ForConditionalGeneration": TextPart("qwen2"),
    "QianfanOCRForConditionalGeneration": TextPart("qwen3"),
    "Qwen2_5OmniForConditionalGeneration": TextPart("qwen2_5_omni_text", is_fixed=True),
    "Qwen2_5OmniModel": TextPart("qwen2_5_omni_text", is_fixed=True),
    "Qwen2_5OmniThinkerForConditionalGeneration": TextPart("qwen2_5_omni_text", is_fixed=True),
    "Qwen3OmniMoeForConditionalGeneration": TextPart("qwen3_omni_moe_text", is_fixed=True),
    "Qwen3OmniMoeThinkerForConditionalGeneration": TextPart("qwen3_omni_moe_text", is_fixed=True),
    "SmolVLMForConditionalGeneration": TextPart("llama"),
}
TEXT_KINDS: dict[str, TextKind] = {
    "aria_text": TextKind("AriaTextForCausalLM", _sizes(4096, 4096, 32, 32, 32000, 2048)),
    "cohere2": TextKind("Cohere2ForCausalLM", _sizes(8192, 22528, 40, 64, 256000, 8192)),
    "deepseek_v3": _DEEPSEEK_V3,
    "granite": TextKind("GraniteForCausalLM", _sizes(4096, 11008, 32, 32, 32000, 2048)),
    "granite4_vision_text": TextKind("GraniteForCausalLM", _sizes(4096, 11008, 32, 32, 32000, 2048)),
    "granite_docling_text": TextKind(
        "GraniteForCausalLM",
        _sizes(1024, 2048, 28, 16, 133800, 32768)
        | {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "embedding_multiplier": 12.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.263,
            "attention_multiplier": 0.015625,
        },
    ),
    "kimi_k2": _DEEPSEEK_V3,
    "lfm2": TextKind("Lfm2ForCausalLM", _sizes(2560, 12288, 32, 32, 65536, 128000) | {"num_key_value_heads": 8}),
    "lfm2_moe": TextKind("Lfm2MoeForCausalLM"),
    "lfm3": TextKind("Lfm3ForCausalLM", _sizes(2048, 7680, 24, 16, 128000, 128000)),
    "llama": TextKind("LlamaForCausalLM", _sizes(4096, 11008, 32, 32, 32000, 2048)),
    "llama4_text": TextKind("Llama4ForCausalLM", _sizes(5120, 8192, 48, 40, 202048, 131072)),
    "mistral": TextKind("MistralForCausalLM", _sizes(4096, 14336, 32, 32, 32000, 131072)),
    "phi3": TextKind("Phi3ForCausalLM", _sizes(3072, 8192, 32, 32, 32064, 4096)),
    "qwen2": TextKind("Qwen2ForCausalLM", _sizes(4096, 22016, 32, 32, 151936, 32768) | {"num_key_value_heads": 32}),
    "qwen2_5_omni_text": TextKind(
        "Qwen2ForCausalLM",
        _sizes(3584, 18944, 28, 28, 152064, 32768)
        | {"num_key_value_heads": 4, "rope_theta": 1e6, "sliding_window": 32768},
    ),
    "qwen3": TextKind(
        "Qwen3ForCausalLM",
        _sizes(4096, 22016, 32, 32, 151936, 32768) | {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_moe": TextKind("Qwen3MoeForCausalLM"),
    "qwen3_omni_moe_text": TextKind(
        "Qwen3MoeForCausalLM",
        _sizes(2048, 18944, 28, 28, 3584, 32768)
        | {
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
}
# Factors and caps of logits, and values without effect. The models' code passes the hidden states of the language model
# to an output layer of its own.
_PLAIN_LOGITS: dict[str, object] = {"logit_scale": 1.0, "logits_scaling": 1.0}


def text_part(config: JsonFields, name: str) -> tuple[str, JsonFields] | None:
    """Return the family of the language model within an architecture, and its fields; ``None`` if it has no such part.

    Raises:
        CheckpointFormatError: the fields are missing.
        UnsupportedModelError: the family is not implemented.
    """
    part = TEXT_PARTS.get(name)
    if part is None:
        return None
    fields = text_fields(config)
    if fields is None:
        raise CheckpointFormatError(f"{config.path}: text_config is missing")
    kind = part.kind if part.is_fixed else fields.get("model_type", str, part.kind)
    if kind not in TEXT_KINDS:
        raise UnsupportedModelError(
            f"{config.path}: text_config.model_type {kind!r:.80} is not implemented for {name}; supported are "
            f"{', '.join(TEXT_KINDS)}"
        )
    text = TEXT_KINDS[kind]
    plain = {} if part.scales_logits else _PLAIN_LOGITS
    fields.values = {**text.defaults, **fields.values, **plain}
    return text.architecture, fields
