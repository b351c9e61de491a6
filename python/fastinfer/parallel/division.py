"""Division of a model's weights among ranks.

Each rank has rows (outputs) of every large weight, so that no sum is divided and results are bitwise those of one rank.
Units that are not divided: a KV head with its query heads, as long as there are as many as ranks, or else a query head;
16 rows of gate and the same of up; 16 rows of other weights, which are a tile of the packed forms.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from fastinfer.errors import RequestError
from fastinfer.models.config import ModelConfig
from fastinfer.ops.pack import TILE_ROWS


@dataclass(frozen=True)
class Division:
    """Division of one model among ranks.

    Attributes:
        config: configuration of the whole model.
        rank: number of this rank.
        size: number of ranks.
    """

    config: ModelConfig
    rank: int
    size: int

    @property
    def local_config(self) -> ModelConfig:
        """Configuration of this rank's part: fewer heads and narrower MLPs, with the whole residual stream."""
        config, rank = self.config, self.rank
        return replace(
            config,
            num_heads=len(self.query_heads()[rank]),
            num_kv_heads=len(self.kv_heads()[rank]),
            intermediate_size=len(self.tiles(config.intermediate_size)[rank]),
            dense_intermediate_size=len(self.tiles(config.dense_intermediate_size)[rank]),
            shared_intermediate_size=len(self.tiles(config.shared_intermediate_size)[rank]),
        )

    def query_heads(self) -> list[range]:
        """Return the query heads of each rank."""
        heads, kv_heads, size = self.config.num_heads, self.config.num_kv_heads, self.size
        group = heads // kv_heads
        if size <= kv_heads:
            return [range(part.start * group, part.stop * group) for part in divided(kv_heads, size)]
        parts = []
        for kv_head, ranks in enumerate(divided(size, kv_heads)):
            parts += [
                range(kv_head * group + part.start, kv_head * group + part.stop) for part in divided(group, len(ranks))
            ]
        return parts

    def kv_heads(self) -> list[range]:
        """Return the KV heads of each rank; with more ranks than KV heads, several ranks have the same one."""
        group = self.config.num_heads // self.config.num_kv_heads
        return [range(part.start // group, -(-part.stop // group)) for part in self.query_heads()]

    def tiles(self, rows: int) -> list[range]:
        """Return the rows of each rank of a weight with this number of rows."""
        return [
            range(part.start * TILE_ROWS, min(part.stop * TILE_ROWS, rows))
            for part in divided(-(-rows // TILE_ROWS), self.size)
        ]

    def inner_size(self, name: str) -> int:
        """Return the width of the whole MLP or expert that a matrix is part of."""
        config, names = self.config, name.split(".")
        if "shared_expert" in names:
            return config.shared_intermediate_size
        return config.intermediate_size if "experts" in names else config.mlp_size(int(names[1]))

    def check(self) -> None:
        """Check that each rank gets a part.

        Raises:
            RequestError: there are more ranks than units of some weight.
        """
        config = self.config
        sizes = (
            config.hidden_size,
            config.vocab_size,
            config.intermediate_size,
            config.dense_intermediate_size,
            config.shared_intermediate_size,
        )
        most = min(config.num_heads, *(-(-size // TILE_ROWS) for size in sizes if size))
        if self.size > most or any(not part for part in self.query_heads()):
            raise RequestError(
                f"tensor_parallel_size must be at most {most} for this model, of which each rank gets whole heads and "
                f"{TILE_ROWS} rows of each weight, got {self.size}"
            )


def divided(count: int, parts: int) -> list[range]:
    """Divide 0..count - 1 into consecutive ranges whose lengths differ by at most one."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]
