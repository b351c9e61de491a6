"""The folder of a trained head, in the format of speculators, with weights of 4 bits."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastinfer.quantize.compressed_tensors_layout import CompressedTensorsLayout
from fastinfer.quantize.layout import WriterSettings
from fastinfer.quantize.rounding import round_to_nearest
from fastinfer.train_head.head import HeadSizes
from fastinfer.utils.safetensors_file import write_tensors

# A draft takes the time to read the head's weights: of 16 bits it would be twice as long.
BITS, GROUP_SIZE = 4, 32


@dataclass(frozen=True)
class HeadDescription:
    """Description of a head for config.json.

    Attributes:
        sizes: sizes of the head.
        vocab_size: number of tokens of the model.
        aux_layers: the layers whose inputs the head reads.
        model: name of the model.
    """

    sizes: HeadSizes
    vocab_size: int
    aux_layers: tuple[int, ...]
    model: str


def write_head(out: Path, weights: dict[str, Tensor], draft_tokens: Tensor, description: HeadDescription) -> None:
    """Write config.json and model.safetensors.

    Args:
        out: the folder.
        weights: tensors of the head, by their names in the file.
        draft_tokens: [draft_vocab] int64, the token of each column of the logits.
        description: what config.json says.
    """
    layout = CompressedTensorsLayout(WriterSettings(bits=BITS, group_size=GROUP_SIZE))
    tensors = {"d2t": draft_tokens - torch.arange(len(draft_tokens))}
    tensors["t2d"] = torch.zeros(description.vocab_size, dtype=torch.bool).index_fill(0, draft_tokens, True)
    for name, values in weights.items():
        if values.dim() == 1:
            tensors[name] = values.float()
            continue
        packed = layout.tensors(round_to_nearest(values.float(), BITS, GROUP_SIZE, False))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
    out.mkdir(parents=True, exist_ok=True)
    write_tensors({name: values.contiguous() for name, values in tensors.items()}, out / "model.safetensors")
    text = json.dumps(_config(description) | {"quantization_config": layout.config(["embed_tokens"])}, indent=2)
    (out / "config.json").write_text(text + "\n")


def _config(description: HeadDescription) -> dict[str, Any]:
    sizes = description.sizes
    layer = {
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": description.vocab_size,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "draft_vocab_size": sizes.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(description.aux_layers),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": description.model, "architectures": []},
        },
    }
