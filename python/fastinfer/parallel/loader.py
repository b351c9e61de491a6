"""Loading of one rank's part of a model."""

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Unpacked
from fastinfer.models.checkpoint import Checkpoint, split_name
from fastinfer.models.config import Precision
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.norm import RMSNorm
from fastinfer.models.state_config import LinearAttentionConfig
from fastinfer.parallel.division import Division, Layout
from fastinfer.parallel.fused_norms import with_fused_norms
from fastinfer.parallel.group import Group, Team
from fastinfer.parallel.matrix_rows import OUTPUTS, has_columns, input_widths
from fastinfer.parallel.reduced_weights import ReducedExperts, ReducedOutput
from fastinfer.parallel.reduction import Reduction
from fastinfer.parallel.sharded_adapters import ShardedAdapterSlots, SlotSizes
from fastinfer.parallel.sharded_checkpoint import ShardedCheckpoint
from fastinfer.parallel.sharded_norm import ShardedHeadsNorm
from fastinfer.parallel.sharded_weights import ShardedExperts, ShardedOutput, ShardedRows
from fastinfer.parallel.stage import Stage, StageLoader
from fastinfer.utils.torch_threads import one_torch_thread
from fastinfer.weights.expert_weights import ExpertWeights
from fastinfer.weights.weight import Weight


def load_shard(
    checkpoint: Checkpoint,
    dtype: str,
    max_model_len: int | None,
    group: Group,
    slots: SlotSizes | None = None,
    layers: range | None = None,
    layout: Layout = "gather",
    device: str = "cpu",
) -> Stage:
    """Load a rank's part of a stage, which computes whole hidden states and logits together with its team.

    Args:
        checkpoint: an open checkpoint.
        dtype: name of the dtype, see :meth:`fastinfer.models.config.Precision.of`.
        max_model_len: length of the longest sequence in tokens; ``None`` for the model's own limit.
        group: the group of ranks.
        slots: sizes of the slots for LoRA adapters; ``None`` for a model without.
        layers: layers of the stage; ``None`` for all.
        layout: what the ranks have of output projections, see :mod:`fastinfer.parallel.division`.
        device: device of the part.

    Raises:
        FastinferError: as for :func:`fastinfer.models.load_weights`.
    """
    team, precision = group.team, Precision.of(dtype, device)
    layers = layers or range(checkpoint.config.num_layers)
    division = Division(checkpoint.config, team.rank, team.size, layout)
    reader: LayerReader
    if team.size == 1:
        reader = LayerReader(checkpoint, precision, device)
    else:
        reader = ShardedReader(ShardedCheckpoint(checkpoint, division), precision, division, team, device)
    with one_torch_thread():
        stage = StageLoader(reader, max_model_len, layers).stage()
    if layout == "reduce":
        stage = with_fused_norms(stage)
    return stage if slots is None else stage.with_adapters(ShardedAdapterSlots(division, group, layers, *slots))


class ShardedReader(LayerReader):
    """Reader of a rank's part of layers, whose output projections exchange their inputs and outputs, or their sums.

    Args:
        checkpoint: the rank's part of a checkpoint.
        precision: precision in which the model computes.
        division: division of the model.
        group: the ranks that have parts of the same layers.
        device: device of the part.
    """

    def __init__(
        self, checkpoint: Checkpoint, precision: Precision, division: Division, group: Team, device: str
    ) -> None:
        super().__init__(checkpoint, precision, device)
        self._division = division
        self._group = group

    def weight(
        self,
        names: tuple[str, ...],
        unpacked: Unpacked,
        bias: Tensor | None,
        activation_bits: int | None = None,
        factor: float = 1.0,
    ) -> Weight:
        if self._division.has_whole_states and names[0].endswith(".in_proj") and activation_bits is None:
            return self._whole_output(unpacked, bias)
        is_sum, name = has_columns(self._division, names[0]), names[0]
        own_bias = None if is_sum and self._group.rank else bias
        local = super().weight(names, unpacked, own_bias, activation_bits, factor)
        if is_sum:  # that of a shared expert is a part of the sum over experts
            return local if ".shared_expert." in name else ReducedOutput(local, Reduction(self._group))
        if name.rpartition(".")[2] not in OUTPUTS:
            return local
        in_widths, out_widths = input_widths(self._division, name), self._widths(self.config.hidden_size)
        columns = torch.arange(out_widths[self._group.rank], device=self.device)
        return ShardedOutput(local, self._group, in_widths, out_widths, columns)

    def own_experts(self) -> range:
        return self._division.experts()

    def experts(self, names: list[tuple[str, ...]], unpacked: list[Unpacked], bias: Tensor | None) -> ExpertWeights:
        local = super().experts(names, unpacked, bias)
        if self._division.has_whole_experts:
            return ReducedExperts(local, self._division.experts(), Reduction(self._group))
        name = names[0][0]
        if name.rpartition(".")[2] not in OUTPUTS:
            return local
        in_widths = input_widths(self._division, name)
        assert in_widths is not None
        return ShardedExperts(local, self._group, in_widths, self._widths(self._division.output_size(name)))

    def vocabulary(self, name: str, rows: int, width: int | None = None, columns: Tensor | None = None) -> Weight:
        widths = self._widths(rows)
        parts = self.vocabulary_parts(name, rows, width, columns)
        bias = self.vocabulary_bias(name, rows)
        if bias is not None:
            bias = bias.split(widths)[self._group.rank]
        local = self.make(parts, self.precision.logits_activation_bits, bias, widths[self._group.rank])
        return ShardedRows(local, self._group, widths)

    def heads_norm(self, name: str, size: int) -> RMSNorm:
        config, division = self._division.config, self._division
        layer, part, _ = split_name(name)
        heads = division.query_heads(layer) if part == "q_norm" else division.kv_heads(layer)
        widths = [len(part) * config.head_dim for part in heads]
        norm = super().heads_norm(name, sum(widths))
        return ShardedHeadsNorm(norm.weight, norm.eps, self._group, widths)

    def order_of_value_heads(self, sizes: LinearAttentionConfig) -> Tensor | None:
        whole = self._division.config.states
        assert isinstance(whole, LinearAttentionConfig)
        if self._division.layout == "reduce":  # its columns are in the order of the inputs
            return None
        return super().order_of_value_heads(whole)

    def _whole_output(self, unpacked: Unpacked, bias: Tensor | None) -> Weight:
        """Pack the rank's rows of a whole matrix, whose whole outputs all ranks need."""
        tiles = self._division.tiles(unpacked.shape[0])
        rows = torch.arange(tiles[self._group.rank].start, tiles[self._group.rank].stop)
        local = self.make(unpacked.rows(rows), self.precision.activation_bits, None if bias is None else bias[rows])
        return ShardedRows(local, self._group, [len(part) for part in tiles])

    def _widths(self, rows: int) -> list[int]:
        return [len(part) for part in self._division.tiles(rows)]
