"""Random models with layers for multi-token prediction, and what those draft, by the layers of transformers."""

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
    """A model of transformers whose last layers, behind the others, predict the tokens after the next one.

    Attributes:
        whole: the model with all layers, whose configuration counts those before the last ones.
        parts: for each of the last layers the norms and the projection of its input and output, by the names of
            fastinfer.
    """

    def __init__(self, family: str, num_mtp: int = 1) -> None:
        changes: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS + num_mtp}
        if family.startswith("qwen"):
            changes["layer_types"] = [f"{kind}_attention" for kind in ("linear", "linear", "linear", "full", "full")]
        changes["tie_word_embeddings"] = FAMILIES[family][1].get("tie_word_embeddings", False)
        self.whole = make_model(family, **changes)
        config = self.whole.config
        generator = torch.Generator().manual_seed(3)
        shape = config.hidden_size, 2 * config.hidden_size
        self.parts = []
        for _ in range(num_mtp):
            part = {
                name: 1 + torch.randn(config.hidden_size, generator=generator) / 10
                for name in ("token_norm", "feature_norm", "norm")
            }
            part["fc"] = torch.randn(shape, generator=generator) / config.hidden_size**0.5
            self.parts.append(part)
        self._is_qwen = family.startswith("qwen")
        config.num_hidden_layers = NUM_LAYERS
        if num_mtp > 1:  # one is what folders without the field have
            config.num_nextn_predict_layers = num_mtp
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(config, name, None) is not None:
                setattr(config, name, getattr(config, name)[:NUM_LAYERS])

    def write(self, folder: Path) -> Path:
        """Write the folder as the model's authors do."""
        self.whole.save_pretrained(folder)
        write_byte_tokenizer(folder)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        own = {}
        if self._is_qwen:
            [part] = self.parts
            last = f"model.layers.{NUM_LAYERS}."
            tensors = {name.replace(last, "mtp.layers.0."): values for name, values in tensors.items()}
            # Its norms have a weight of one less.
            own = {f"mtp.{UNDER_MTP[name]}.weight": v - int(v.dim() == 1) for name, v in part.items()}
        else:
            # Copies that the folders have, too; nothing may read these.
            copy = torch.full_like(tensors["model.embed_tokens.weight"], torch.nan)
            for layer, part in enumerate(self.parts, NUM_LAYERS):
                stored = {APPENDED[name]: values for name, values in part.items()}
                stored |= {name: copy.clone() for name in ("embed_tokens", "shared_head.head")}
                own |= {f"model.layers.{layer}.{name}.weight": values for name, values in stored.items()}
        save_file(tensors | own, path)
        return folder

    def write_gguf(self, path: Path) -> Path:
        """Write a GGUF file."""
        tokens = ["t", "u", "tu", *(f"t{index}" for index in range(3, self.whole.config.vocab_size))]
        copy = torch.full_like(self.whole.lm_head.weight.detach(), torch.nan)
        nextn = [
            {NEXTN[name]: values for name, values in part.items()} | {"shared_head_head": copy} for part in self.parts
        ]
        write_gguf(path, self.whole, tokens=tokens, nextn=nextn)
        return path

    def drafted_logits(self, tokens: list[int], num_drafts: int) -> Tensor:
        """Logits [vocab] after a text whose last tokens are drafts, each made by the next layer or by the last one."""
        num_known = len(tokens) - num_drafts - 1
        with torch.no_grad():
            outputs = self.whole.model(torch.tensor([tokens[:num_known]]), use_cache=False).last_hidden_state[0]
            for layer in range(min(num_drafts + 1, len(self.parts))):
                features = torch.cat([outputs[:1], outputs])  # the first token reads its own
                outputs = self._outputs(layer, tokens, features)
            while len(features) < len(tokens):
                features = torch.cat([features, outputs[-1:]])
                outputs = self._outputs(layer, tokens, features)
            return self.whole.lm_head(outputs[-1])

    def _outputs(self, layer: int, tokens: list[int], features: Tensor) -> Tensor:
        """Normalised outputs of a layer at the first tokens, as many as there are features."""
        base, part, count = self.whole.model, self.parts[layer], len(features)
        embedded = base.embed_tokens(torch.tensor(tokens[:count]))
        joined = torch.cat([self._norm(part["token_norm"], embedded), self._norm(part["feature_norm"], features)], -1)
        x = nn.functional.linear(joined, part["fc"])[None]
        positions = torch.arange(count)[None]
        out = base.layers[NUM_LAYERS + layer](
            x,
            position_embeddings=base.rotary_emb(x, positions),
            attention_mask=torch.full((1, 1, count, count), -torch.inf).triu(1),
            position_ids=positions,
        )
        normed = self._norm(part["norm"], out[0] if isinstance(out, tuple) else out)
        return normed.view(count, self.whole.config.hidden_size)

    def _norm(self, weight: Tensor, x: Tensor) -> Tensor:
        eps = self.whole.config.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight
