"""Small random models of every supported family, made by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder

TOKENS = 150  # past every window, and past the length that the scaled ones were trained on

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 32}  # not hidden_size / num_attention_heads
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 16, **HEADS}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3", HEADS),
    "gemma2": (
        "Gemma2",
        HEADS
        | {"sliding_window": 16, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3Text", HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 20, "num_hidden_layers": 7}),
    "qwen2-plain": ("Qwen2", {}),
    # As GGUF files can say it: with the head's own width as scale.
    "gemma2-plain": ("Gemma2", HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 32, "num_hidden_layers": 3}),
    "gemma3-plain": ("Gemma3Text", HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 32, "num_hidden_layers": 7}),
    "phi3": ("Phi3", {"sliding_window": 40}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 320}),
    "mixtral": ("Mixtral", MIXTURE),
    "qwen3-moe": ("Qwen3Moe", HEADS | {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}),
    "qwen3-moe-renormalized": (
        "Qwen3Moe",
        HEADS | {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
}


def make_model(family: str, seed: int = 0, **more: Any) -> Any:
    """A model in fp32; weights that start as ones or zeros are random, too, or a mistake with them would not show."""
    name, changes = FAMILIES[family]
    sizes = {} if name == "GPT2" else SIZES
    config = getattr(transformers, f"{name}Config")(**(sizes | changes | more))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    kind = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 5)
            elif name == "GPT2" and "h." in parameter_name:
                parameter.mul_(5)
    return model


def save_model(folder: Path, family: str, **options: Any) -> Any:
    """Write it as a folder of safetensors; returns the model."""
    model = make_model(family)
    model.save_pretrained(folder, **options)
    return model


def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_decoder(HFCheckpoint(folder), Precision.of(dtype), None)


def some_tokens() -> list[int]:
    return torch.randint(3, 320, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()


def expected(model: object, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)  # type: ignore[operator]
