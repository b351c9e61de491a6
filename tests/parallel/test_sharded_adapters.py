"""Adapters of models that are divided among ranks: bit for bit the updates of a whole model."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.families import save_model
from support.peft_adapter import adapter_of_all_modules
from support.ranks import in_ranks
from torch import Tensor

from fastinfer.models import Model, load_weights, open_checkpoint
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.lora import AdapterSlots
from fastinfer.parallel.group import Group
from fastinfer.parallel.loader import load_shard
from fastinfer.parallel.sharded_adapters import ShardedAdapterSlots, SlotSizes

SIZES = SlotSizes(2, 4, torch.float32)
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 4, [300], [271, 82, 81]]
FAMILIES = [
    "llama-biases",
    "gemma2",
    "gpt2",
    "qwen2-moe",
    "qwen3-next",
    "granite-hybrid",
    "granite-hybrid-dense",
    "deepseek-v2",
    "mimo-v2-flash",
    "kimi-linear",
    "bailing-hybrid",
]
# The norm of all heads needs a KV head for each rank.
CASES = [*((family, size) for family in FAMILIES for size in (2, 3)), ("olmo-hybrid", 2)]


def logits(model: Model) -> Tensor:
    """Logits of texts of which the first two have adapters."""
    batch = Batch.of_texts(TEXTS, 16)
    adapters = torch.tensor(
        [slot for text, slot in zip(TEXTS, (1, 0, -1), strict=True) for _ in text], dtype=torch.int32
    )
    batch = replace(batch, adapter_ids=adapters)
    cache = KVCache.of_model(model.config, [5], 16, torch.float32, "cpu")
    return model.logits(model.forward(batch, cache), torch.arange(len(adapters)), adapters)


@pytest.mark.parametrize(("family", "size"), CASES)
def test_updates_are_bitwise_those_of_one_rank(family: str, size: int, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    whole = load_weights(open_checkpoint(tmp_path), "auto", "cpu", None)
    slots = AdapterSlots(whole.config, *SIZES)
    for slot, rank in enumerate((2, 4)):
        slots.load(slot, adapter_of_all_modules(slots, rank))
    expected = logits(whole.with_adapters(slots))

    def run(group: Group) -> Tensor:
        model = load_shard(open_checkpoint(tmp_path), "auto", None, group, SIZES)
        assert isinstance(model.adapters, ShardedAdapterSlots)
        slots = model.adapters

        def send(words: list[int]) -> None:
            group.send(words)
            slots.follow(words[1:])

        if group.rank == 0:
            slots.send = send
            whole_slots = slots._whole
            adapters = [adapter_of_all_modules(whole_slots, rank) for rank in (2, 4)]
            for slot, adapter in enumerate(adapters):
                slots.load(slot, adapter)
            group.send([])
        else:
            while words := group.receive():
                slots.follow(words[1:])
                group.finish()
            group.finish()
        return logits(model)

    for got in in_ranks(size, run):
        assert torch.equal(got, expected)


def test_interrupted_load_leaves_no_matrices_to_the_next_one(tmp_path: Path) -> None:
    save_model(tmp_path, "llama-biases")
    group = Group.create(1)
    slots = load_shard(open_checkpoint(tmp_path), "auto", None, group, SIZES).adapters
    assert isinstance(slots, ShardedAdapterSlots)
    sent: list[list[int]] = []

    def interrupted(words: list[int]) -> None:
        if len(sent) == 2:
            signal.raise_signal(signal.SIGINT)
        sent.append(words)

    slots.send = interrupted
    first, second = (adapter_of_all_modules(slots._whole, rank) for rank in (2, 4))
    with pytest.raises(KeyboardInterrupt):
        slots.load(0, first)
    slots.send = sent.append
    slots.load(0, second)
    for words in sent:
        slots.follow(words[1:])
    expected = AdapterSlots(slots._division.config, *SIZES)
    expected.load(0, adapter_of_all_modules(expected, 4))
    for ours, theirs in zip(slots.layers, expected.layers, strict=True):
        for name, module in theirs.items():
            assert torch.equal(ours[name].a[0], module.a[0])
            assert torch.equal(ours[name].b[0], module.b[0])
