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
        config = self.config
        widths = {
            name: _width(self.tiles(getattr(config, name))[self.rank])
            for name in ("intermediate_size", "dense_intermediate_size", "shared_intermediate_size")
            if getattr(config, name)
        }
        return replace(
            config,
            num_heads=_width(self.query_heads()[self.rank]),
            num_kv_heads=_width(self.kv_heads()[self.rank]),
            **widths,
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

    def check(self) -> None:
        """Check that each rank gets a part.

        Raises:
            RequestError: there are more ranks than units of some weight.
        """
        config = self.config
        units = {
            "query heads of each KV head": config.num_heads // config.num_kv_heads * config.num_kv_heads,
            "hidden_size": config.hidden_size // TILE_ROWS,
            "intermediate_size": config.intermediate_size // TILE_ROWS,
            "vocab_size": config.vocab_size // TILE_ROWS,
        }
        for name in ("dense_intermediate_size", "shared_intermediate_size"):
            if getattr(config, name):
                units[name] = getattr(config, name) // TILE_ROWS
        most = min(units.values())
        if self.size > most or any(not part for part in self.query_heads()):
            raise RequestError(
                f"tensor_parallel_size must be at most {most} for this model, of which each rank gets whole heads and "
                f"{TILE_ROWS} rows of each weight, got {self.size}"
            )


def divided(count: int, parts: int) -> list[range]:
    """Divide 0..count - 1 into consecutive ranges whose lengths differ by at most one."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def _width(part: range) -> int:
    return len(part)
