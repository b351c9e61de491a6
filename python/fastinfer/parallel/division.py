"""Division of a model's weights among ranks, in one of two layouts.

With ``"gather"`` each rank has rows (outputs) of every large weight, so that no sum is divided and results are bitwise
those of one rank. With ``"reduce"`` (Megatron-LM, https://arxiv.org/abs/1909.08053) it has columns (inputs) of output
projections, those of the outputs that it computes before them, and some of the experts; the ranks' results are added.

Units that are not divided: a KV head with its query heads, as long as there are as many as ranks, or else a query head;
the same of the heads of states; an expert whose outputs are added; 16 rows of gate and the same of up, 32 or more if
they are inputs of what is added; 16 rows of other weights, which are a tile of the packed forms.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from fastinfer.errors import RequestError
from fastinfer.models.config import ModelConfig
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config, ShortConvConfig, StateConfig
from fastinfer.ops.pack import TILE_ROWS

Layout = Literal["gather", "reduce"]
LAYOUTS: tuple[Layout, ...] = ("gather", "reduce")
# Inputs of quantised weights that are divided together, if they can be: blocks of a file, and groups with one scale.
INPUT_UNITS = (256, 128, 64)
INPUT_UNIT = 32


@dataclass(frozen=True)
class Division:
    """Division of one model among ranks.

    Attributes:
        config: configuration of the whole model.
        rank: number of this rank.
        size: number of ranks.
        layout: what the ranks have of output projections, see above.
    """

    config: ModelConfig
    rank: int
    size: int
    layout: Layout = "gather"

    @property
    def local_config(self) -> ModelConfig:
        """Configuration of this rank's part: fewer heads and narrower MLPs, with the whole residual stream."""
        config, rank = self.config, self.rank
        return replace(
            config,
            num_heads=max(len(self.query_heads(layer)[rank]) for layer in self._attention_layers()),
            layer_heads=tuple(len(self.query_heads(layer)[rank]) for layer in range(len(config.layer_heads))),
            num_kv_heads=len(self.kv_heads(self._attention_layers()[0])[rank]),
            kv_shapes=tuple(
                replace(shape, num_heads=len(self.kv_heads(layer)[rank]))
                for layer, shape in enumerate(config.kv_shapes)
            ),
            states=None if config.states is None else self._local_states(config.states),
            intermediate_size=len(self._mlp_tiles()[rank]),
            dense_intermediate_size=len(self.inner_tiles(config.dense_intermediate_size)[rank]),
            shared_intermediate_size=len(self.inner_tiles(config.shared_intermediate_size)[rank]),
        )

    def query_heads(self, layer: int) -> list[range]:
        """Return the query heads of a layer of each rank: of whole KV heads, as there are in the layers with most."""
        most = max(map(self._num_kv_heads, self._attention_layers()), default=1)
        return divided_groups(self.config.query_heads(layer), most, self.size)[0]

    def kv_heads(self, layer: int) -> list[range]:
        """Return the KV heads of a layer that each rank has; several ranks may have the same one."""
        group = self.config.query_heads(layer) // self._num_kv_heads(layer)
        return [range(part.start // group, -(-part.stop // group)) for part in self.query_heads(layer)]

    def state_heads(self) -> tuple[list[range], list[range]]:
        """Return the heads of linear attention or Mamba-2 of each rank, and the key heads or groups that they have."""
        states = self.config.states
        if isinstance(states, LinearAttentionConfig):
            return divided_groups(states.num_value_heads, states.num_key_heads, self.size)
        assert isinstance(states, Mamba2Config)
        return divided_groups(states.num_heads, states.num_groups, self.size)

    @property
    def has_whole_states(self) -> bool:
        """Whether each rank computes the states of all heads, for a norm of more heads than a rank would have."""
        states = self.config.states
        return isinstance(states, Mamba2Config) and states.has_norm and states.num_groups < self.size

    def tiles(self, rows: int) -> list[range]:
        """Return the rows of each rank of a weight with this number of rows."""
        return divided_units(rows, TILE_ROWS, self.size)

    def inner_tiles(self, rows: int) -> list[range]:
        """Return the same for rows whose outputs are the inputs of an output projection."""
        unit = TILE_ROWS
        if self.layout == "reduce" and rows >= INPUT_UNIT * self.size:
            unit = next((unit for unit in INPUT_UNITS if rows % (unit * self.size) == 0), INPUT_UNIT)
        return divided_units(rows, unit, self.size)

    @property
    def has_whole_experts(self) -> bool:
        """Whether each rank has some experts, instead of a part of each."""
        return self.layout == "reduce" and self.config.num_experts > 0

    def experts(self) -> range:
        """Return the experts of which this rank has a part."""
        count = self.config.num_experts
        return divided(count, self.size)[self.rank] if self.has_whole_experts else range(count)

    def inner_size(self, name: str) -> int:
        """Return the width of the whole MLP or expert that a matrix is part of."""
        config, names = self.config, name.split(".")
        if "shared_expert" in names:
            return config.shared_intermediate_size
        if "experts" in names:
            return config.intermediate_size
        layer = int(names[1])
        is_beside = config.mlp_beside_experts and config.has_experts(layer)
        return config.dense_intermediate_size if is_beside else config.mlp_size(layer)

    def output_size(self, name: str) -> int:
        """Return the number of outputs of an output projection."""
        return self.config.expert_width if ".experts." in name else self.config.hidden_size

    def check(self) -> None:
        """Check that each rank gets a part.

        Raises:
            RequestError: there are more ranks than units of some weight, or heads do not divide alike in all layers.
        """
        config = self.config
        sizes = (
            config.hidden_size,
            config.vocab_size,
            0 if self.has_whole_experts else config.expert_latent_size,
            0 if self.has_whole_experts else config.intermediate_size,
            config.dense_intermediate_size,
            config.shared_intermediate_size,
        )
        most = min(self._num_heads(), *(-(-size // TILE_ROWS) for size in sizes if size))
        layers = self._attention_layers()
        if self.size > most or not all(all(self.query_heads(layer)) for layer in layers):
            raise RequestError(
                f"tensor_parallel_size must be at most {most} for this model, of which each rank gets whole heads and "
                f"{TILE_ROWS} rows of each weight, got {self.size}"
            )
        for layer in layers:
            pairs = zip(self.query_heads(layer), self.kv_heads(layer), strict=True)
            group = config.query_heads(layer) // self._num_kv_heads(layer)
            if any(len(kv) > 1 and len(query) != group * len(kv) for query, kv in pairs):
                raise RequestError(
                    f"tensor_parallel_size must divide the heads of all layers alike, which {self.size} does not"
                )

    def _mlp_tiles(self) -> list[range]:
        """Return the rows of each rank of the MLPs, or of each of its experts."""
        rows = self.config.intermediate_size
        return [range(rows)] * self.size if self.has_whole_experts else self.inner_tiles(rows)

    def _attention_layers(self) -> list[int]:
        """Return the layers with keys and values."""
        return [layer for layer in range(self.config.num_layers) if not self.config.has_state(layer)]

    def _num_kv_heads(self, layer: int) -> int:
        """Return the number of heads of a layer that have keys of their own; a latent is common to all heads."""
        return 1 if self.config.latent_attention is not None else self.config.kv_shape(layer).num_heads

    def _num_heads(self) -> int:
        """Return the most ranks that get heads of every kind."""
        config, states = self.config, self.config.states
        counts = [min(map(config.query_heads, self._attention_layers()), default=config.num_heads)]
        if self.has_whole_experts:
            counts.append(config.num_experts)
        if config.qk_norm == "all":  # its input is gathered, with each KV head from one rank
            counts.append(config.num_kv_heads)
        if isinstance(states, LinearAttentionConfig):
            counts.append(states.num_value_heads)
        elif isinstance(states, Mamba2Config) and not self.has_whole_states:
            counts.append(states.num_heads)
        return min(counts)

    def _local_states(self, states: StateConfig) -> StateConfig:
        """Return the sizes of the rank's part of layers with states."""
        if isinstance(states, ShortConvConfig):
            return replace(states, conv_dim=len(self.inner_tiles(states.conv_dim)[self.rank]))
        if self.has_whole_states:
            return states
        heads, groups = (len(parts[self.rank]) for parts in self.state_heads())
        if isinstance(states, LinearAttentionConfig):
            return replace(states, num_value_heads=heads, num_key_heads=groups)
        return replace(states, num_heads=heads, num_groups=groups)


def divided(count: int, parts: int) -> list[range]:
    """Divide 0..count - 1 into consecutive ranges whose lengths differ by at most one."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def divided_units(rows: int, unit: int, parts: int) -> list[range]:
    """Divide 0..rows - 1 in units of this many, of which the last one may have fewer."""
    return [range(part.start * unit, min(part.stop * unit, rows)) for part in divided(-(-rows // unit), parts)]


def divided_groups(num_heads: int, num_groups: int, size: int) -> tuple[list[range], list[range]]:
    """Divide heads among ranks, and return the heads of each rank and the groups that these are in.

    Groups stay whole as long as there are as many as ranks; otherwise several ranks have heads of the same group.
    """
    group = num_heads // num_groups
    if size <= num_groups:
        groups = divided(num_groups, size)
        return [range(part.start * group, part.stop * group) for part in groups], groups
    heads, groups = [], []
    for number, ranks in enumerate(divided(size, num_groups)):
        heads += [range(number * group + part.start, number * group + part.stop) for part in divided(group, len(ranks))]
        groups += [range(number, number + 1)] * len(ranks)
    return heads, groups
