"""When two halves of a step pay, and that they are bitwise the whole step."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.divided_models import KINDS, config_of
from support.random_checkpoint import RandomCheckpoint, int4
from support.ranks import in_ranks

from fastinfer.engine import layer_costs
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.halves import Halves
from fastinfer.engine.kv_cache_size import KVCacheSize
from fastinfer.engine.layer_costs import measure_layer_costs
from fastinfer.models import load_weights
from fastinfer.models.batch import Batch
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache
from fastinfer.ops.prompt import NO_ROW
from fastinfer.parallel.group import Group, Team
from fastinfer.parallel.loader import load_shard
from fastinfer.parallel.nano_batches import LayerCosts, split
from fastinfer.parallel.second_team import on_team

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


@pytest.mark.parametrize("costs", [FAST_LINK, SLOW_LINK])
def test_costs_of_measured_times(costs: LayerCosts) -> None:
    sizes = (16, 4096)
    exchanges = tuple(map(costs.exchanges, sizes))
    layers = tuple(costs.compute(size) + costs.exchanges(size) for size in sizes)
    found = LayerCosts.of_times(sizes, layers, exchanges)  # type: ignore[arg-type]
    for name, value in vars(costs).items():
        assert getattr(found, name) == pytest.approx(value)


def test_costs_are_never_negative() -> None:
    """Times of short kernels are noisy."""
    costs = LayerCosts.of_times((16, 4096), (1.0, 2.0), (3.0, 2.5))
    assert costs == LayerCosts(weights=0.0, token=0.0, exchange=3.0, exchanged_token=0.0)


@pytest.mark.parametrize(("max_tokens", "many"), [(8, 17), (100, 100), (10**6, 4096)])
def test_ranks_take_the_costs_of_the_slowest(max_tokens: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config_of("linear attention"), vocab_size=32)
    checkpoint = RandomCheckpoint(config, lambda _, values: int4(values))
    sizes: dict[int, list[int]] = {0: [], 1: []}
    # Of a step and of a sum, for few tokens and for many, on each rank.
    times = {0: [2.0, 0.25, 30.0, 3.0], 1: [4.0, 0.125, 20.0, 6.0]}

    own = threading.local()

    def run(group: Group) -> LayerCosts:
        own.times = iter(times[group.rank])
        model = load_shard(checkpoint, "float32", None, group, layout="reduce")
        forward = model.forward

        def noted(batch: Batch, cache: KVCache) -> Any:
            sizes[group.rank].append(len(batch.token_ids))
            hidden = forward(batch, cache)
            assert hidden.isfinite().all()
            return hidden

        object.__setattr__(model, "forward", noted)
        cache = KVCache.of_model(model.config, [3], 16, torch.float32, "cpu", num_states=1, state_dtype=model.dtype)
        for row in cache.rows:
            row.fill_(255)  # NaN
        size = KVCacheSize(windows=(0,), num_blocks=(3,), max_model_len=33, num_bytes=0, num_states=1)
        limits = EngineConfig(max_num_batched_tokens=max_tokens, block_size=16)
        return measure_layer_costs(model, cache, size, limits, group)

    def seconds(call: Callable[[], object]) -> float:
        call()
        time: float = next(own.times)
        return time

    monkeypatch.setattr(layer_costs, "seconds", seconds)
    costs = in_ranks(2, run)
    assert sizes == {0: [16, many], 1: [16, many]}
    # Two layers with two sums each.
    expected = LayerCosts.of_times((16, many), (2.0, 15.0), (0.5, 12.0))
    assert costs == [expected, expected]


def batch_of(kind: str) -> Batch:
    numbers = random.Random(kind)
    texts = [[numbers.randrange(320) for _ in range(numbers.randint(1, 40))] for _ in range(6)]
    batch = Batch.of_texts(texts, 16)
    assert batch.state_writes is not None
    batch.state_writes[batch.query_start[1:].long() - 1] = torch.arange(6, dtype=torch.int32)
    return batch


def results(model: Decoder, batch: Batch, halves_at: int | None = None, other: Decoder | None = None) -> Any:
    """Hidden states, logits, and all that is cached."""
    cache = KVCache.of_model(model.config, [18], 16, torch.float32, "cpu", num_states=6, state_dtype=model.dtype)
    for row in cache.rows:
        row.zero_()
    if halves_at is None:
        hidden = model.forward(batch, cache)
    else:

        def choose(lengths: Sequence[int]) -> int:
            assert list(lengths) == batch.query_start.diff().tolist()
            return halves_at

        halves = Halves((model, other or model), cache, torch.device("cpu"), choose)
        found = halves.forward(batch, batch.query_start.diff().tolist(), NO_ROW)
        assert found is not None
        assert halves.num_steps == 1
        hidden = found
    return hidden, model.logits(hidden, torch.arange(len(hidden))), *(row.clone() for row in cache.rows)


@pytest.mark.parametrize("kind", ["attention", "linear attention", "mamba2", "latent attention", "experts"])
def test_halves_are_bitwise_the_whole(kind: str) -> None:
    model = load_weights(RandomCheckpoint(config_of(kind), lambda _, values: int4(values)), "auto", "cpu", None)
    assert isinstance(model, Decoder)
    batch = batch_of(kind)
    whole = results(model, batch)
    for count in range(1, 6):
        assert all(map(torch.equal, results(model, batch, count), whole))


@pytest.mark.parametrize("layout", ["reduce", "gather"])
@pytest.mark.parametrize("kind", KINDS)
def test_halves_exchange_by_memory_of_their_own(kind: str, layout: Any) -> None:
    """In ranks: the second half uses the second memory alone, and no bit changes."""
    checkpoint, batch = RandomCheckpoint(config_of(kind), lambda _, values: int4(values)), batch_of(kind)
    others = [group.team for group in groups_of(2)]

    def run(group: Group) -> tuple[bool, int, int]:
        model = load_shard(checkpoint, "float32", None, group, layout=layout)
        second = on_team(model, others[group.rank])
        whole = results(model, batch)
        before = group.exchanged[0]
        same = all(map(torch.equal, results(model, batch, 3, second), whole))
        return same, before, group.exchanged[0] - before

    for same, whole, halves in in_ranks(2, run):
        assert same
        assert whole == halves  # those of the first half, and the logits


def groups_of(size: int) -> list[Group]:
    first = Group.create(size)
    return [first, *(Group(rank, size, *first.fds) for rank in range(1, size))]


def test_a_view_with_another_team_shares_all_else() -> None:
    checkpoint = RandomCheckpoint(config_of("experts"), lambda _, values: int4(values))
    model = load_shard(checkpoint, "auto", None, Group.create(2), layout="reduce")
    team = Team(0, 2, torch.zeros(1, dtype=torch.uint8))
    view = on_team(model, team)
    for ours, theirs in zip(view.layers, model.layers, strict=True):
        assert ours.mlp.norm is theirs.mlp.norm  # which was computed together with a sum
        assert ours.mlp.gate_up.local is theirs.mlp.gate_up.local
        assert ours.mlp.down.reduction.group is team is not theirs.mlp.down.reduction.group
        assert ours.attention.output.weight.local is theirs.attention.output.weight.local
        assert ours.attention.output.weight.reduction.group is team
    assert view.norm is model.norm
    assert on_team(model.norm, team) is model.norm


@pytest.mark.parametrize("field", ["images", "sparse", "hidden", "last", "features", "window_lens", "block_places"])
def test_what_stays_whole(field: str) -> None:
    halves = Halves((None, None), None, torch.device("cpu"), lambda lengths: 1)  # type: ignore[arg-type]
    batch = batch_of("attention")
    assert halves.forward(replace(batch, **{field: object()}), [1], NO_ROW) is None
    assert halves.forward(batch, [1], 0) is None  # a row of a prompt, which is computed differently
    halves = Halves((None, None), None, torch.device("cpu"), lambda lengths: None)  # type: ignore[arg-type]
    assert halves.forward(batch, [1], NO_ROW) is None
