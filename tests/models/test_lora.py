"""LoRA adapters on a decoder: against merged weights, mixed in a batch, in recorded graphs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.helpers import assert_bitwise
from support.paths import DATA
from support.peft_adapter import BLOCKS, MODULES, write_adapter
from support.teacher_forcing import log_probabilities
from support.tiny_decoder import CONFIG, make_batch, make_cache, make_decoder
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastinfer import ops
from fastinfer.errors import AdapterError
from fastinfer.formats.peft import read_adapter
from fastinfer.models import load_model
from fastinfer.models.batch import Batch
from fastinfer.models.decoder import Decoder
from fastinfer.models.lora import AdapterSlots


def forward(model: Decoder, batch: Batch) -> Tensor:
    """Logits of every token."""
    hidden = model.forward(batch, make_cache(model.config, model.dtype))
    return model.logits(hidden, torch.arange(len(hidden)), batch.adapter_ids)


def with_slots(model: Decoder, max_loras: int = 3, max_rank: int = 8) -> tuple[Decoder, AdapterSlots]:
    slots = AdapterSlots(model.config, max_loras, max_rank, model.dtype)
    for layer in slots.layers:
        for module in layer.values():
            module.a.fill_(torch.nan), module.b.fill_(torch.nan)
    return replace(model, adapters=slots), slots


@pytest.mark.parametrize("concatenated", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_equals_merged_weights(activation: str, concatenated: bool, tmp_path: Path) -> None:
    config = replace(CONFIG, activation=activation)
    deltas = write_adapter(tmp_path, config)
    model, slots = with_slots(make_decoder(config, concatenated=concatenated))
    slots.load(1, slots.prepare(read_adapter(tmp_path)))
    batch = make_batch([20, 5], [1, 1])
    expected = forward(make_decoder(config, deltas), batch_without(batch))
    plain = forward(model, batch_without(batch))
    torch.testing.assert_close(forward(model, batch), expected, rtol=2e-4, atol=2e-4)
    assert (expected - plain).abs().mean() > 0.3


@pytest.mark.parametrize("module", MODULES)
def test_each_module_alone(module: str, tmp_path: Path) -> None:
    deltas = write_adapter(tmp_path, CONFIG, modules=(module,), use_rslora=True)
    model, slots = with_slots(make_decoder())
    slots.load(0, slots.prepare(read_adapter(tmp_path)))
    batch = make_batch([20], [0])
    expected = forward(make_decoder(deltas=deltas), batch_without(batch))
    torch.testing.assert_close(forward(model, batch), expected, rtol=2e-4, atol=2e-4)
    assert (expected - forward(model, batch_without(batch))).abs().mean() > 0.02


def batch_without(batch: Batch) -> Batch:
    return replace(batch, adapter_ids=None)


def three_adapters(folder: Path, slots: AdapterSlots) -> None:
    write_adapter(folder / "0", CONFIG, 8, seed=1)
    write_adapter(folder / "1", CONFIG, 3, seed=2)
    write_adapter(folder / "2", CONFIG, 5, ("k_proj", "up_proj"), seed=3)
    for slot in range(3):
        slots.load(slot, slots.prepare(read_adapter(folder / str(slot))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_in_one_batch_equal_each_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    model, slots = with_slots(make_decoder(dtype=dtype))
    three_adapters(tmp_path, slots)
    lengths, adapters = [20, 7, 33, 1, 12], [1, -1, 0, 2, 1]
    together = forward(model, make_batch(lengths, adapters)).split(lengths)
    for length, adapter, expected in zip(lengths, adapters, together, strict=True):
        assert_bitwise(forward(model, make_batch([length], [adapter])), expected)
    if dtype == torch.float32:  # 16 bits are rounded once more, before the activation
        assert_bitwise(forward(model, make_batch([7])), together[1])


def test_a_recorded_step_sees_new_adapters(tmp_path: Path) -> None:
    model, slots = with_slots(make_decoder())
    three_adapters(tmp_path, slots)
    batch, cache = make_batch([1, 1, 1, 1], [0, 1, -1, 0]), make_cache()
    graph = ops.CPUGraph()
    with graph.capture():
        hidden = model.forward(batch, cache)
        out = model.logits(hidden, batch.logits_indices, batch.adapter_ids)
    assert batch.adapter_ids is not None
    batch.adapter_ids.copy_(torch.tensor([2, -1, 1, 1]))
    write_adapter(tmp_path / "new", CONFIG, 6, seed=9)
    slots.load(1, slots.prepare(read_adapter(tmp_path / "new")))
    slots.unload(2)
    graph.replay()
    assert_bitwise(out, forward(model, batch))
    fresh, fresh_slots = with_slots(make_decoder())
    fresh_slots.load(1, fresh_slots.prepare(read_adapter(tmp_path / "new")))
    assert_bitwise(out, forward(fresh, replace(batch, adapter_ids=torch.tensor([-1, -1, 1, 1], dtype=torch.int32))))


def test_an_adapter_that_does_not_fit_leaves_the_slot_as_it_was(tmp_path: Path) -> None:
    model, slots = with_slots(make_decoder())
    three_adapters(tmp_path, slots)
    batch = make_batch([20], [1])
    before = forward(model, batch)
    bad = {
        r"rank must be at most 8, got 9": (CONFIG, 9),
        r"layers\.2\.mlp\.down_proj: the model has 2 layers": (replace(CONFIG, num_layers=3), 4),
        r"down_proj\.lora_B .* \[64, 4\] for this model, got \[80, 4\]": (replace(CONFIG, hidden_size=80), 4),
        r"down_proj\.lora_A .* \[4, 96\] for this model, got \[4, 32\]": (replace(CONFIG, intermediate_size=32), 4),
        r"k_proj\.lora_B .* \[32, 4\] for this model, got \[64, 4\]": (replace(CONFIG, num_kv_heads=4), 4),
    }
    for named, (config, rank) in bad.items():
        write_adapter(tmp_path / "bad", config, rank)
        with pytest.raises(AdapterError, match=named) as caught:
            slots.load(1, slots.prepare(read_adapter(tmp_path / "bad")))
        assert str(tmp_path) in str(caught.value)
        assert_bitwise(forward(model, batch), before)


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_out_of_range(slot: int, tmp_path: Path) -> None:
    write_adapter(tmp_path, CONFIG)
    slots = AdapterSlots(CONFIG, 3, 8, torch.float32)
    with pytest.raises(ValueError, match=rf"slot must be in 0..2, got {slot}"):
        slots.load(slot, slots.prepare(read_adapter(tmp_path)))
    with pytest.raises(ValueError, match="slot"):
        slots.unload(slot)


def test_ids_need_adapters() -> None:
    with pytest.raises(ValueError, match="adapter_ids"):
        forward(make_decoder(), make_batch([3], [-1]))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_real_model_equals_transformers_with_merged_weights(model_path: Path, tmp_path: Path) -> None:
    """The rows of Q, K, gate and up have another order in the file, and in memory, than where adapters are trained."""
    model, tokenizer = load_model(model_path, "float32")
    assert isinstance(model, Decoder)
    deltas = write_adapter(tmp_path, model.config, 8, size=0.1)
    slots = AdapterSlots(model.config, 2, 16, torch.float32)
    slots.load(1, slots.prepare(read_adapter(tmp_path)))
    ids = tokenizer.encode((DATA / "license.txt").read_text())[:128]
    peer = AutoModelForCausalLM.from_pretrained(model_path.parent, gguf_file=model_path.name, dtype=torch.float32)
    with torch.inference_mode():
        plain = peer(torch.tensor([ids])).logits[0].log_softmax(-1)
        for (layer, module), delta in deltas.items():
            peer.model.layers[layer].get_submodule(f"{BLOCKS[module]}.{module}").weight += delta
        expected = peer(torch.tensor([ids])).logits[0].log_softmax(-1)
    got = log_probabilities(replace(model, adapters=slots), ids, "float32", adapter=1)
    assert (expected - plain).abs().mean() > 0.1
    assert (got - expected).abs().max() < 1e-3
