"""When two halves of a step pay, and that they are bitwise the whole step."""

import random
from dataclasses import replace

import pytest
import torch
from support.divided_models import config_of
from support.random_checkpoint import RandomCheckpoint, int4

from fastinfer.models import load_weights
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache
from fastinfer.parallel.nano_batches import LayerCosts, halves_of, split

# Microseconds of a layer of a model of 8 billion parameters on two GPUs: weights as long as 300 tokens.
FAST_LINK = LayerCosts(weights=60, token=0.2, exchange=10, exchanged_token=0.01)
SLOW_LINK = LayerCosts(weights=60, token=0.2, exchange=40, exchanged_token=0.15)


@pytest.mark.parametrize(
    ("lengths", "costs", "expected"),
    [
        ([1] * 64, FAST_LINK, None),  # weights would be read twice
        ([1] * 64, SLOW_LINK, None),
        ([512] * 4, FAST_LINK, None),  # little to hide
        ([512] * 4, SLOW_LINK, 2),
        ([2048], SLOW_LINK, None),  # one sequence
        ([1, 2047], SLOW_LINK, None),  # no halves
        ([100, 900, 950, 50, 30], SLOW_LINK, 2),
        ([512] * 4, replace(SLOW_LINK, exchange=0, exchanged_token=0), None),  # nothing to hide
    ],
)
def test_plan(lengths: list[int], costs: LayerCosts, expected: int | None) -> None:
    assert split(lengths, "cuda", costs) == expected
    assert split(lengths, "cpu", costs) is None


@pytest.mark.parametrize("kind", ["attention", "linear attention", "mamba2", "latent attention", "experts"])
def test_halves_are_bitwise_the_whole(kind: str) -> None:
    model = load_weights(RandomCheckpoint(config_of(kind), lambda _, values: int4(values)), "auto", "cpu", None)
    numbers = random.Random(kind)
    texts = [[numbers.randrange(320) for _ in range(numbers.randint(1, 40))] for _ in range(6)]
    batch = Batch.of_texts(texts, 16)
    assert batch.state_writes is not None
    batch.state_writes[batch.query_start[1:].long() - 1] = torch.arange(6, dtype=torch.int32)
    ends = torch.cat([batch.query_start[1:].long() - 1, torch.tensor([0])]).sort().values
    batch = replace(batch, logits_indices=ends)

    def run(*parts: Batch) -> tuple[torch.Tensor, ...]:
        cache = KVCache.of_model(model.config, [18], 16, torch.float32, "cpu", num_states=6, state_dtype=model.dtype)
        for row in cache.rows:
            row.zero_()
        hidden = [model.forward(part, cache) for part in parts]
        logits = [model.logits(*pair) for pair in zip(hidden, (part.logits_indices for part in parts), strict=True)]
        return torch.cat(hidden), torch.cat(logits), *(row.clone() for row in cache.rows)

    whole = run(batch)
    for count in range(1, 6):
        assert all(map(torch.equal, run(*halves_of(batch, count)), whole))
