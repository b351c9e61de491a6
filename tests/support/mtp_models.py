"""Random models with a layer for multi-token prediction, and what that drafts, by the layers of transformers."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from support.families import FAMILIES, make_model
from support.gguf_model_file import write_gguf
from support.tiny_folder import write_byte_tokenizer

NUM_LAYERS = 4
APPENDED = {"token_norm": "enorm", "feature_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}
NEXTN = {"token_norm": "enorm", "feature_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head_norm"}
UNDER_MTP = {"token_norm": "pre_fc_norm_embedding", "feature_norm": "pre_fc_norm_hidden", "fc": "fc", "norm": "norm"}


class MTPModel:
    """A model of transformers whose last layer, behind the others, predicts the token after the next one.

    Attributes:
        whole: the model with all layers, whose configuration counts those before the last one.
        parts: the norms and the projection of the last layer's input and output, by the names of fastinfer.
    """

    def __init__(self, family: str) -> None:
        changes: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS + 1}
        if family.startswith("qwen"):
            changes["layer_types"] = [f"{kind}_attention" for kind in ("linear", "linear", "linear", "full", "full")]
        changes["tie_word_embeddings"] = FAMILIES[family][1].get("tie_word_embeddings", False)
        self.whole = make_model(family, **changes)
        config = self.whole.config
        generator = torch.Generator().manual_seed(3)
        self.parts = {
            name: 1 + torch.randn(config.hidden_size, generator=generator) / 10
            for name in ("token_norm", "feature_norm", "norm")
        }
        shape = config.hidden_size, 2 * config.hidden_size
        self.parts["fc"] = torch.randn(shape, generator=generator) / config.hidden_size**0.5
        self._is_qwen = family.startswith("qwen")
        config.num_hidden_layers = NUM_LAYERS
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(config, name, None) is not None:
                setattr(config, name, getattr(config, name)[:NUM_LAYERS])

    def write(self, folder: Path) -> Path:
        """Write the folder as the model's authors do."""
        self.whole.save_pretrained(folder)
        write_byte_tokenizer(folder)
        path, last = folder / "model.safetensors", f"model.layers.{NUM_LAYERS}."
        tensors = load_file(path)
        if self._is_qwen:
            renamed = {name.replace(last, "mtp.layers.0."): values for name, values in tensors.items()}
            # Its norms have a weight of one less.
            own = {f"mtp.{UNDER_MTP[name]}.weight": v - int(v.dim() == 1) for name, v in self.parts.items()}
        else:
            renamed = dict(tensors)
            own = {f"{last}{APPENDED[name]}.weight": values for name, values in self.parts.items()}
            # Copies that the folders have, too; nothing may read these.
            own |= {
                f"{last}{name}.weight": torch.full_like(tensors["model.embed_tokens.weight"], torch.nan)
                for name in ("embed_tokens", "shared_head.head")
            }
        save_file(renamed | own, path)
        return folder

    def write_gguf(self, path: Path) -> Path:
        """Write a GGUF file."""
        tokens = ["t", "u", "tu", *(f"t{index}" for index in range(3, self.whole.config.vocab_size))]
        copy = torch.full_like(self.whole.lm_head.weight.detach(), torch.nan)
        nextn = {NEXTN[name]: values for name, values in self.parts.items()} | {"shared_head_head": copy}
        write_gguf(path, self.whole, tokens=tokens, nextn=nextn)
        return path

    def drafted_logits(self, tokens: list[int], num_drafts: int) -> Tensor:
        """Logits [vocab] after a text whose last tokens are drafts."""
        base, config = self.whole.model, self.whole.config
        num_known = len(tokens) - num_drafts - 1
        with torch.no_grad():
            features = base(torch.tensor([tokens[:num_known]]), use_cache=False).last_hidden_state[0]
            features = torch.cat([features[:1], features])  # the first token reads its own
            for count in range(len(tokens) - num_drafts, len(tokens) + 1):
                embedded = base.embed_tokens(torch.tensor(tokens[:count]))
                joined = torch.cat([self._norm("token_norm", embedded), self._norm("feature_norm", features)], -1)
                x = nn.functional.linear(joined, self.parts["fc"])[None]
                positions = torch.arange(count)[None]
                out = base.layers[NUM_LAYERS](
                    x,
                    position_embeddings=base.rotary_emb(x, positions),
                    attention_mask=torch.full((1, 1, count, count), -torch.inf).triu(1),
                    position_ids=positions,
                )
                normed = self._norm("norm", out[0] if isinstance(out, tuple) else out)
                normed = normed.view(count, config.hidden_size)
                features = torch.cat([features, normed[-1:]])
            return self.whole.lm_head(normed[-1])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.whole.config.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self.parts[name]
