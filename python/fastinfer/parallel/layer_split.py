"""Division of a model's layers into consecutive stages that take about the same time."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from fastinfer.errors import RequestError
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig
from fastinfer.models.layer_places import possible_ends
from fastinfer.parallel.support import refuse_parts
from fastinfer.utils.checks import show


def stages_of(checkpoint: Checkpoint, num_stages: int, lengths: Sequence[int] | None = None) -> list[range]:
    """Return the layers of each stage of a model; a single stage may have any layers.

    Args:
        checkpoint: an open checkpoint.
        num_stages: number of stages.
        lengths: number of layers of each stage; ``None`` for stages of about the same cost.

    Raises:
        UnsupportedModelError: the model has parts that stages do not share yet.
        RequestError: the layers cannot form so many stages, or not those of ``lengths``.
    """
    config = checkpoint.config
    if lengths is not None:
        check_stages(config, lengths)
    if num_stages == 1:
        return [range(config.num_layers)]
    refuse_parts(checkpoint, "pipeline_parallel_size", num_stages)
    starts = stage_starts(config)
    if num_stages > len(starts):
        raise RequestError(
            f"pipeline_parallel_size must be at most {len(starts)}, the most stages that the layers of this model can "
            f"form, got {num_stages}"
        )
    if lengths is not None:
        return [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
    layers = [layer_cost(config, layer) for layer in range(config.num_layers)]
    return split_layers(layers, config.vocab_size * config.hidden_size, num_stages, starts)


def check_stages(config: ModelConfig, lengths: Sequence[int]) -> None:
    """Check that the layers of a model can be divided into stages of so many layers.

    Raises:
        RequestError: they cannot.
    """
    if sum(lengths) != config.num_layers:
        raise RequestError(
            f"pipeline_parallel_layers must add up to the model's {config.num_layers} layers, got {show(lengths)}"
        )
    for start in accumulate(lengths[:-1]):
        if start not in stage_starts(config):
            raise RequestError(
                f"pipeline_parallel_layers must keep layer {start} in the stage of the layer before it, whose input, "
                f"keys or values it needs, got {show(lengths)}"
            )


def stage_starts(config: ModelConfig) -> list[int]:
    """Return the layers with which a stage may begin, in ascending order.

    A layer stays in the stage of the one whose input, keys and values or choice of tokens it shares.
    """
    return [0, *possible_ends(config)[:-1]]


def split_layers(costs: Sequence[float], head_cost: float, num_stages: int, starts: Sequence[int]) -> list[range]:
    """Divide layers into consecutive stages so that the most expensive stage is as cheap as possible.

    Each stage gets a layer. Of equally good divisions, the first stages get the most layers.

    Args:
        costs: the cost of each layer, in any unit.
        head_cost: cost of the output layer, which the last stage has. The embedding costs nothing: a step reads a row
            of it for each token.
        num_stages: number of stages, at most as many as ``starts``.
        starts: layers with which a stage may begin, in ascending order, the first one included.

    Returns:
        The layers of each stage.
    """
    sums = [0.0, *accumulate(costs)]
    ends = [*starts[1:], len(costs)]
    # best[end]: cost of the most expensive of the stages so far, which have the layers before `end`; and their ends.
    best: dict[int, tuple[float, list[int]]] = {end: (sums[end], [0, end]) for end in ends}
    for stage in range(1, num_stages):
        head = head_cost if stage == num_stages - 1 else 0.0
        best = {
            end: min(
                (
                    (max(worst, sums[end] - sums[start] + head), [*before, end])
                    for start, (worst, before) in best.items()
                    if start < end
                ),
                key=lambda division: (division[0], [-end for end in division[1]]),
            )
            for end in ends[stage:]
        }
    return [range(start, end) for start, end in pairwise(best[len(costs)][1])]


def layer_cost(config: ModelConfig, layer: int) -> int:
    """Return the number of weights that a layer's products use for a token.

    A step of few tokens takes as long as reading them, a step of many takes as long as multiplying by them. Of experts
    only those count that a token is routed to.
    """
    hidden, matrices = config.hidden_size, 3 if config.gated else 2
    latent = config.latent_attention
    if config.has_state(layer):
        assert config.states is not None
        attention = hidden * (config.states.input_size + config.states.output_size)
    elif latent is None:
        inputs = config.q_size(layer) + config.gate_size(layer) + 2 * config.kv_size(layer)
        attention = hidden * (inputs + config.attention_size(layer))
    else:
        queries = config.num_heads * latent.query_dim
        query = latent.query_rank * (hidden + queries) if latent.query_rank else hidden * queries
        per_head = latent.plain_dim + latent.value_dim
        attention = query + hidden * latent.row_dim + latent.rank * config.num_heads * per_head
        attention += hidden * config.attention_size(layer)
        if config.indexer is not None and config.has_indexer(layer):
            heads, size = config.indexer.num_heads, config.indexer.head_dim
            attention += hidden * (size + heads) + latent.query_rank * heads * size
    attention += 3 * hidden * config.per_layer_size  # the layer's own input, its gate and its output
    if not config.has_mlp(layer):
        return attention
    if not config.has_experts(layer):
        return attention + matrices * hidden * config.mlp_size(layer)
    experts = config.experts_per_token * config.intermediate_size * config.expert_width
    experts += config.shared_intermediate_size * hidden
    return attention + matrices * experts + hidden * (config.num_experts + 2 * config.expert_latent_size)
