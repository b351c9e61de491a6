"""An EAGLE-3 head of torch layers, whose tensors have the names of the files."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

# Mask of attention logits; finite, so that a row without any key gives no NaN.
MASKED = -1e9


@dataclass(frozen=True)
class HeadSizes:
    """Sizes and constants of a head, see :class:`fastinfer.models.config.ModelConfig`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_aux: int
    draft_vocab_size: int
    norm_eps: float
    rope_theta: float


class TrainableHead(nn.Module):
    """One Llama layer that reads tokens and features, with a projection to a part of the vocabulary.

    Args:
        sizes: sizes of the head.
        weights: the initial tensors, by the names of the files.
    """

    def __init__(self, sizes: HeadSizes, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.sizes = sizes
        self._names = {name: name.replace(".", "_") for name in weights}
        for name, values in weights.items():
            self.register_parameter(self._names[name], nn.Parameter(values))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of the files."""
        return {name: getattr(self, own).detach() for name, own in self._names.items()}

    def forward(self, embeddings: Tensor, aux: Tensor, num_steps: int) -> list[Tensor]:
        """Compute logits of each draft in a row of drafts.

        Step 0 drafts from the features alone. In step s, a token's own input and those of the s - 1 tokens before come
        from the outputs of the steps before, as in a row of drafts, and the rest of the text from features.

        Args:
            embeddings: [texts, length, hidden], rows of the embedding.
            aux: [texts, length, num_aux * hidden], hidden states of the model.
            num_steps: number of drafts in a row.

        Returns:
            For each step, logits [texts, length, draft_vocab] of the token after each.
        """
        features = linear(aux, self._weight("fc"))
        tokens = self._norm(embeddings, "layers.0.input_layernorm")
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for _ in range(num_steps):
            # The first token reads its own features.
            features = self._layer(tokens, torch.cat([features[:, :1], features[:, :-1]], 1), keys, values)
            logits.append(linear(self._norm(features, "norm"), self._weight("lm_head")))
        return logits

    def _layer(self, tokens: Tensor, features: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        x = torch.cat([tokens, self._norm(features, "layers.0.hidden_norm")], -1)
        q, k, v = (self._heads(linear(x, self._weight(f"layers.0.self_attn.{name}_proj"))) for name in "qkv")
        keys.append(self._rotated(k))
        values.append(v)
        attended = self._attend(self._rotated(q), keys, values).transpose(1, 2).flatten(2)
        x = features + linear(attended, self._weight("layers.0.self_attn.o_proj"))
        normed = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (linear(normed, self._weight(f"layers.0.mlp.{name}_proj")) for name in ("gate", "up"))
        return x + linear(silu(gate) * up, self._weight("layers.0.mlp.down_proj"))

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend to the first step's keys up to a distance, and to one key of each later step."""
        groups, step, length = q.shape[1] // keys[0].shape[1], len(keys) - 1, q.shape[2]
        keys = [key.repeat_interleave(groups, 1) for key in keys]
        values = [value.repeat_interleave(groups, 1) for value in values]
        mask = torch.ones(length, length, dtype=torch.bool).tril(-step)
        scores = [(q @ keys[0].transpose(-1, -2)).masked_fill(~mask, MASKED)]
        shifted = values[:1]
        for index in range(1, step + 1):
            shift = step - index  # the token before by this many has the key of step `index`
            key, value = (_delayed(part, shift) for part in (keys[index], values[index]))
            scores.append((q * key).sum(-1, keepdim=True))
            shifted.append(value)
        probs = (torch.cat(scores, -1).float() * self.sizes.head_dim**-0.5).softmax(-1).to(q.dtype)
        out: Tensor = probs[..., :length] @ values[0]
        for index in range(1, step + 1):
            out = out + probs[..., length + index - 1, None] * shifted[index]
        return out

    def _weight(self, name: str) -> Tensor:
        weight: Tensor = getattr(self, self._names[f"{name}.weight"])
        return weight

    def _norm(self, x: Tensor, name: str) -> Tensor:
        normed: Tensor = rms_norm(x.float(), x.shape[-1:], self._weight(name), self.sizes.norm_eps)
        return normed

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.sizes.head_dim))
        return heads.transpose(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.sizes.head_dim // 2
        angles = torch.arange(x.shape[2])[:, None] * self.sizes.rope_theta ** (-torch.arange(half) / half)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _delayed(x: Tensor, shift: int) -> Tensor:
    """Shift [texts, heads, length, dim] to later tokens; the first tokens keep their own."""
    return x if shift == 0 else torch.cat([x[:, :, :shift], x[:, :, :-shift]], 2)
