"""Image encoders of Gemma 3 in GGUF files: a SigLIP tower, pooled squares of patches, and a projection."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig
from fastinfer.models.gemma_images import BEGIN, TOKEN, GemmaImages, check_windows
from fastinfer.models.image_modules import make_module
from fastinfer.models.mmproj_fields import MmprojFields, size
from fastinfer.models.mmproj_tensors import MmprojTensors, has_swapped_mlp, mlp_width

_LAYER = re.compile(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_NAMES = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
}
_LAYER_NAMES = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


@dataclass(frozen=True)
class Gemma3Encoder:
    """An image encoder of Gemma 3, not yet loaded.

    Attributes:
        fields: what the file's metadata say.
        tensors: the file's tensors.
        side: number of tokens in each row of an image.
        token: spelling of the token that stands for an image.
        token_id: its id.
        marker: what stands for an image in a conversation.
    """

    fields: MmprojFields
    tensors: MmprojTensors
    side: int
    token: str
    token_id: int
    marker: str = BEGIN

    @classmethod
    def of(cls, file: GGUFFile, fields: MmprojFields, model: GGUFFile, config: ModelConfig) -> "Gemma3Encoder":
        """Describe the encoder of a file for a model.

        Raises:
            GGUFFormatError, CheckpointFormatError: the file's sizes are wrong, or the model has no token for images.
        """
        tensors, scale = MmprojTensors(file), size(file, "projector.scale_factor", 4)
        side = fields.image_size // fields.patch_size
        if side == 0 or side % scale:
            raise GGUFFormatError(
                f"{file.path}: expected a multiple of {scale} patches in each row of an image, got {side}"
            )
        tensors.check_shape("v.position_embd.weight", (side**2, fields.width))
        tokens = model.get("tokenizer.ggml.tokens", list)
        # Some files of the model leave out the tokens behind those of SentencePiece, of which this is one. No
        # conversation has padding, so its token can stand for an image, too.
        padding = model.get("tokenizer.ggml.padding_token_id", int, -1)
        token_id = tokens.index(TOKEN) if TOKEN in tokens else padding
        if not 0 <= token_id < len(tokens):
            raise GGUFFormatError(f"{model.path}: images need a token {TOKEN!r} or a padding token, got neither")
        return cls(
            fields=fields,
            tensors=tensors,
            side=side // scale,
            token=tokens[token_id],
            token_id=token_id,
        )

    def load(self, config: ModelConfig, dtype: torch.dtype, device: str) -> GemmaImages:
        """Load the modules."""
        from transformers import Gemma3Config, Gemma3ImageProcessorPil, SiglipVisionConfig
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        fields, count = self.fields, self.side**2
        check_windows(self.tensors.name, config, count)
        vision = SiglipVisionConfig(
            hidden_size=fields.width,
            intermediate_size=mlp_width(self.tensors),
            num_hidden_layers=fields.num_layers,
            num_attention_heads=fields.num_heads,
            image_size=fields.image_size,
            patch_size=fields.patch_size,
            layer_norm_eps=fields.norm_eps,
            vision_use_head=False,  # the decoder reads the patches alone
        )
        whole = Gemma3Config(
            vision_config=vision, text_config={"hidden_size": config.hidden_size}, mm_tokens_per_image=count
        )
        is_swapped = has_swapped_mlp(self.tensors, fields.width)
        return GemmaImages(
            tower=self.tensors.load(make_module(vision, dtype), lambda name: self._tower(name, is_swapped), device),
            projector=self.tensors.load(Gemma3MultiModalProjector(whole).to(dtype), self._projector, device),
            processor=Gemma3ImageProcessorPil(
                size={"height": fields.image_size, "width": fields.image_size},
                image_mean=fields.mean,
                image_std=fields.std,
            ),
            token_id=self.token_id,
            count=count,
            token=self.token,
        )

    def _tower(self, name: str, is_swapped: bool) -> Tensor:
        """Read a tensor of the tower by its name there."""
        if match := _LAYER.fullmatch(name):
            part = _LAYER_NAMES[match[2]]
            part = _SWAPPED.get(part, part) if is_swapped else part
            return self.tensors.get(f"v.blk.{match[1]}.{part}.{match[3]}")
        module, _, kind = name.rpartition(".")
        return self.tensors.get(f"{_NAMES[module]}.{kind}")

    def _projector(self, name: str) -> Tensor:
        """Read a tensor of the projection by its name there."""
        if name == "mm_input_projection_weight":
            return self.tensors.get("mm.input_projection.weight")
        return self.tensors.get("mm.soft_emb_norm.weight") - 1  # the module adds 1, as the converter has done


def gemma3_width(tensors: MmprojTensors) -> tuple[str, int]:
    """Return the name of the last tensor, and its number of outputs."""
    name = "mm.input_projection.weight"
    return name, tensors.shape(name)[-1]
