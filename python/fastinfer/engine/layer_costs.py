"""Measurement of what a layer takes on the GPUs of a group, when the engine starts; not yet run on several GPUs.

It assumes that all layers take about the same time. It counts the sums after attention and after the MLP, but not the
few other exchanges of some models: with these, halves would hide more.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from fastinfer import ops
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.kv_cache_size import KVCacheSize
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.moves import moved
from fastinfer.parallel.group import Group
from fastinfer.parallel.nano_batches import LayerCosts
from fastinfer.parallel.stage import Stage

# Tokens of the measured steps: so few that a product reads weights most of the time, and at most so many that the
# arithmetic of a token takes as long as in any larger step.
FEW, MANY = 16, 4096
REPEATS = 3


@torch.inference_mode()
def measure_layer_costs(
    model: Stage, kv_cache: KVCache, size: KVCacheSize, config: EngineConfig, group: Group
) -> LayerCosts:
    """Measure the costs on all ranks, which call this together and get the same result: that of the slowest.

    Args:
        model: the rank's part of the model, with all layers.
        kv_cache: its KV cache, which holds nothing yet: the first blocks are overwritten.
        size: size of the cache.
        config: configuration of the engine.
        group: the group of ranks.
    """
    counts, num_layers, times = (FEW, max(FEW + 1, min(MANY, config.max_num_batched_tokens))), len(model.layers), []
    num_sums = sum(1 + model.config.has_mlp(layer) for layer in model.indices) / num_layers
    for count in counts:
        batch = moved(prompts(count, size, config.block_size, model.config.vocab_size), config.device)
        sums = torch.zeros(count, model.config.hidden_size, dtype=model.dtype, device=config.device)
        times += [
            seconds(partial(model.forward, batch, kv_cache)) / num_layers,
            seconds(partial(ops.all_reduce, sums, group.team.memory, group.rank)) * num_sums,
        ]
    with group.together():
        all_times = ops.all_gather(torch.tensor([times]), group.memory, group.rank, [len(times)] * group.size)
    first, first_sums, second, second_sums = all_times.view(group.size, -1).amax(0).tolist()
    return LayerCosts.of_times(counts, (first, second), (first_sums, second_sums))


def prompts(count: int, size: KVCacheSize, block_size: int, vocab_size: int) -> Batch:
    """Return prompts of this many tokens together, all of whose keys and values are in the first block of each group.

    The tokens are different ones, which choose different experts.
    """
    tokens = [index % vocab_size for index in range(count)]
    texts = [tokens[start : start + size.max_model_len] for start in range(0, count, size.max_model_len)]
    batch, num_groups = Batch.of_texts(texts, block_size), len(size.windows)
    return replace(
        batch,
        block_tables=(torch.zeros_like(batch.block_tables[0]),) * num_groups,
        slot_mappings=(batch.slot_mappings[0] % block_size,) * num_groups,
    )


def seconds(run: Callable[[], object]) -> float:
    """Return the time that the current GPU takes for a call, whose kernels have been loaded by a first one."""
    run()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)
