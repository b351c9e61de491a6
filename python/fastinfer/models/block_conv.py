"""Convolutions over the tokens of a block, before and after attention and MLP of a draft head's layer."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer.models.attention import Attention
from fastinfer.models.batch import Batch
from fastinfer.models.decoder import DecoderLayer
from fastinfer.models.kv_cache import LayerCache
from fastinfer.models.latent_attention import LatentPlan
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.mlp import GatedMLP
from fastinfer.models.norm import RMSNorm
from fastinfer.models.state_cache import StateCache
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class BlockConv:
    """Causal convolutions of each channel over the tokens of a block, before and after a part of a layer.

    The kernel of a channel is one of its own, plus one that the groups of neighbouring channels share and that is a
    projection of what the first convolution reads. No operator has such kernels; these few products of elements are
    computed in torch and in fp32.

    Source: DFlash2, https://github.com/z-lab/dflash.

    Attributes:
        base: [2, taps, groups, group_size] fp32; own kernels of the channels, of the convolutions before and after. The
            first tap is that of the token itself, the next one that of the token before, and so on.
        projection: [2 * taps * groups, hidden], whose outputs are the groups' kernels in the same order.
    """

    base: Tensor
    projection: Weight

    def before(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the input of the part.

        Args:
            x: [tokens, hidden].
            places: [tokens] place of each token in its block, from 0; the tokens of a block follow each other.

        Returns:
            [tokens, hidden], and the kernels that :meth:`after` needs.
        """
        kernels = self.projection.linear(x).float().unflatten(1, self.base.shape[:3])
        return self._convolve(x, kernels[:, 0], 0, places), kernels[:, 1]

    def after(self, x: Tensor, kernels: Tensor, places: Tensor) -> Tensor:
        """Convolve the output of the part, [tokens, hidden], with the kernels that :meth:`before` has returned."""
        return self._convolve(x, kernels, 1, places)

    def _convolve(self, x: Tensor, kernels: Tensor, side: int, places: Tensor) -> Tensor:
        values = x.float().unflatten(1, self.base.shape[2:])
        weights = self.base[side] + kernels[..., None]
        out: Tensor = weights[:, 0] * values
        for tap in range(1, self.base.shape[1]):
            products = weights[tap:, tap] * values[:-tap]
            out[tap:] += products.masked_fill_((places[tap:] < tap)[:, None, None], 0.0)
        return out.flatten(1).to(x.dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvolvedLayer(DecoderLayer):
    """Layer with convolutions around attention and MLP, which have no norms of their own.

    Attributes:
        attention_norm, mlp_norm: norms of their inputs, before the convolutions.
        attention_conv, mlp_conv: the convolutions.
    """

    attention_norm: RMSNorm
    mlp_norm: RMSNorm
    attention_conv: BlockConv
    mlp_conv: BlockConv

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        cache: LayerCache | StateCache,
        plan: Tensor | LatentPlan | None,
        lora: LayerAdapters | None,
        inputs: Tensor | None = None,
        before: Tensor | None = None,
    ) -> Tensor:
        places = batch.block_places
        assert places is not None
        assert isinstance(self.attention, Attention)
        assert isinstance(self.mlp, GatedMLP)
        assert isinstance(cache, LayerCache)
        assert isinstance(plan, Tensor)
        source, kernels = self.attention_conv.before(self.attention_norm(x), places)
        attended = self.attention(source, None, batch, cache, plan, lora)
        x = x + self.attention_conv.after(attended, kernels, places)
        source, kernels = self.mlp_conv.before(self.mlp_norm(x), places)
        return x + self.mlp_conv.after(self.mlp(source, None, lora), kernels, places)
