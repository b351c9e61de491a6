"""Models whose layers, or whose experts, are in several places: bit for bit what they compute in one.

Here all places are on the CPU. Between them everything is copied as between devices.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.divided_models import FORMS, model_in
from support.families import save_model
from support.peft_adapter import adapter_of_all_modules
from support.random_checkpoint import RandomCheckpoint, int4
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import RequestError
from fastinfer.models import layer_places, load_weights, moe, open_checkpoint, placed_decoder
from fastinfer.models.batch import Batch, FeatureSlots, LastRows
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig
from fastinfer.models.decoder import Decoder
from fastinfer.models.image_tokens import ImageTokens
from fastinfer.models.kv_cache import KVCache, LayerCache
from fastinfer.models.layer_places import LayerPlace, possible_ends
from fastinfer.models.lora import AdapterSlots
from fastinfer.models.moe import MixtureOfExperts
from fastinfer.models.moves import moved
from fastinfer.models.offload import tensors_of
from fastinfer.models.placed_decoder import load_placed
from fastinfer.models.sparse_attention import SparseRows
from fastinfer.utils.places import Place, parse_places

# The shape of SmolLM2, with fewer layers and tokens.
SMOLLM2 = ModelConfig(
    architecture="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=5,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rotary_dim=64,
    vocab_size=512,
    max_position=128,
    norm_eps=1e-5,
)
NARROW = replace(SMOLLM2, hidden_size=192, intermediate_size=256)
EXPERTS = replace(NARROW, num_experts=4, experts_per_token=2, dense_layers=frozenset({0}), dense_intermediate_size=256)
CONFIGS = {"smollm2": SMOLLM2, "multi-query": replace(NARROW, num_kv_heads=1), "experts": EXPERTS}
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 9, [300], [271, 82, 81]]
PLACES = ["cpu,cpu", "cpu=1,cpu=3,cpu=1", "cpu+cpu", "cpu+cpu=3,cpu=2"]


def place_layers(config: ModelConfig, text: str) -> tuple[LayerPlace, ...]:
    places = parse_places(text)
    return layer_places.place_layers(config, places, [place.share or 1.0 for place in places])


def compute(model: Decoder, device: str | list[str], adapters: bool = False) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of all tokens of the texts, with what nothing has written in the cache as NaN."""
    num_blocks = sum(-(-len(text) // 16) for text in TEXTS)
    cache = KVCache.of_model(model.config, [num_blocks], 16, torch.float32, device, state_dtype=model.dtype)
    for tensor in (tensor for layer in cache for tensor in layer.tensors):
        tensor.fill_(float("nan"))
    batch, ids = Batch.of_texts(TEXTS, 16), None
    if adapters:  # the first text has the one in slot 1
        ids = torch.tensor([1] * len(TEXTS[0]) + [-1] * (len(batch.token_ids) - len(TEXTS[0])), dtype=torch.int32)
        batch = replace(batch, adapter_ids=ids)
    hidden = model.forward(batch, cache)
    return hidden, model.logits(hidden, torch.arange(len(hidden)), ids)


def check_places(checkpoint: Checkpoint, text: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the model in one place, and count the copies of hidden states."""
    config, num_copies = checkpoint.config, [0]

    def counted(value: Any, device: str) -> Any:
        num_copies[0] += 1
        return moved(value, device)

    places = place_layers(config, text)
    expected = compute(load_weights(checkpoint, dtype, "cpu", None), "cpu")
    model = load_placed(places, checkpoint, dtype, "cpu", None)
    for module in (placed_decoder, moe):
        monkeypatch.setattr(module, "moved", counted)
    found = compute(model, model.layer_devices)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    apart = [layer for place in places if place.experts for layer in place.layers if config.has_experts(layer)]
    # The last place gives them back to the first.
    assert num_copies[0] == (len(places) if len(places) > 1 else 0) + 2 * len(apart)


@pytest.mark.parametrize("text", PLACES)
@pytest.mark.parametrize(
    ("config", "dtype"),
    [("smollm2", "auto"), ("smollm2", "bfloat16"), ("multi-query", "float32"), ("experts", "auto")],
)
def test_random_models(text: str, config: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = CONFIGS[config]
    if "+" in text and not sizes.num_experts:
        with pytest.raises(RequestError, match=r"device: cpu\+cpu needs a model with experts, got one without"):
            place_layers(sizes, text)
        return
    check_places(RandomCheckpoint(sizes, lambda _, values: int4(values)), text, dtype, monkeypatch)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_weights(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_places(model_in(form), "cpu,cpu+cpu,cpu", "auto", monkeypatch)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("gemma2", "cpu,cpu"),
        ("gpt-oss", "cpu+cpu=2,cpu=3"),
        ("deepseek-v3", "cpu,cpu+cpu"),
        ("glm-dsa", "cpu,cpu+cpu"),
        ("llama4", "cpu,cpu+cpu"),
        ("qwen3-next", "cpu+cpu,cpu"),
        ("granite-hybrid", "cpu,cpu+cpu"),
        ("nemotron-h-moe", "cpu,cpu+cpu"),
        ("falcon-h1", "cpu,cpu"),
        ("lfm2-moe", "cpu=1,cpu+cpu=5"),
        ("gemma4-moe", "cpu+cpu,cpu"),
        ("afmoe", "cpu=2,cpu+cpu=4"),
        ("gemma4-inputs", "cpu=1,cpu=6"),
    ],
)
def test_families(family: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, sinks, latent attention, states of each kind, shared experts, inputs and keys and values of others."""
    save_model(tmp_path, family)
    check_places(open_checkpoint(tmp_path), text, "auto", monkeypatch)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen2-moe", "cpu,cpu+cpu"),
        ("gemma2", "cpu,cpu,cpu"),
        ("granite-hybrid", "cpu+cpu"),
        ("deepseek-v2", "cpu,cpu"),
    ],
)
def test_adapters(family: str, text: str, tmp_path: Path) -> None:
    """Updates of all modules, of each expert by itself."""
    save_model(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path)
    places, config = place_layers(checkpoint.config, text), checkpoint.config
    found = []
    for model, own in (
        (load_weights(checkpoint, "auto", "cpu", None), ()),
        (load_placed(places, checkpoint, "auto", "cpu", None), places),
    ):
        slots = AdapterSlots(config, 2, 4, torch.float32, "cpu", own)
        slots.load(1, adapter_of_all_modules(slots, 3))
        assert isinstance(model, Decoder)
        found.append(compute(model.with_adapters(slots), "cpu", adapters=True))
    assert all(map(torch.equal, *found))
    plain = compute(load_weights(checkpoint, "auto", "cpu", None), "cpu")
    assert not torch.equal(plain[0][:72], found[0][0][:72])


def test_adapters_are_where_their_modules_are() -> None:
    places = (LayerPlace(range(2), "cpu"), LayerPlace(range(2, 5), "cpu", "meta"))
    slots = AdapterSlots(EXPERTS, 1, 4, torch.float32, "cpu", places)
    for index, modules in enumerate(slots.layers):
        for name, module in modules.items():
            is_away = index >= 2 and name.startswith("experts.")
            assert {tensor.device.type for tensor in tensors_of([module])} == {"meta" if is_away else "cpu"}


def test_sizes_of_experts(tmp_path: Path) -> None:
    """Those of a folder, whose experts have names of several forms."""
    for family in ("qwen3-moe", "mixtral", "granite-moe-shared", "gpt-oss", "nemotron-h-moe", "gemma4-moe"):
        save_model(tmp_path / family, family)
        checkpoint = open_checkpoint(tmp_path / family)
        parts, decoder = checkpoint.part_bytes("cpu"), load_weights(checkpoint, "auto", "cpu", None)
        for index, layer in enumerate(decoder.layers):
            mixture = getattr(layer.mlp, "experts", layer.mlp)
            actual = 0
            if isinstance(mixture, MixtureOfExperts):
                actual = sum(tensor.nbytes for tensor in tensors_of([mixture.gate_up, mixture.down]))
            assert parts[index, True] == pytest.approx(actual, rel=0.05), family


# ---- the division of layers ----


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("cpu=24,cuda=8", [4, 1]),
        ("cpu,cpu,cpu", [2, 1, 2]),
        ("cpu=1000,cpu=1,cpu=1", [3, 1, 1]),
        ("cpu=1,cpu=1,cpu=1000", [1, 1, 3]),
        ("cpu=0.5,cpu=2", [1, 4]),
        ("cpu,cpu,cpu,cpu,cpu", [1] * 5),
    ],
)
def test_layers_follow_the_shares(text: str, counts: list[int]) -> None:
    placed = place_layers(SMOLLM2, text)
    assert [len(place.layers) for place in placed] == counts
    assert [layer for place in placed for layer in place.layers] == list(range(5))


def test_layers_that_belong_together() -> None:
    shared = replace(SMOLLM2, kv_layers=(0, 1, 2, 1, 1))
    assert possible_ends(shared) == [1, 5]
    assert [place.layers for place in place_layers(shared, "cpu=4,cuda=1")] == [range(1), range(1, 5)]
    with pytest.raises(RequestError, match="device: expected at most 2 places for the model's layers, got 3"):
        place_layers(shared, "cpu,cpu,cpu")
    one_input = replace(SMOLLM2, stored_layers=((0, None), (0, 0), (1, 1), (2, None), (2, 2)))
    assert possible_ends(one_input) == [2, 3, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpu,", r"device: expected a list like cuda:0=24,cuda:1=8 or cuda\+cpu, got '' in it"),
        ("auto,cpu", "got 'auto' in it"),
        ("cuda:01,cpu", "got 'cuda:01' in it"),
        ("cpu+cpu+cpu", r"got 'cpu\+cpu\+cpu' in it"),
        ("cuda=-1,cpu=2", "got 'cuda=-1' in it"),
        ("cuda=nan,cpu=1", "got 'cuda=nan' in it"),
        ("cuda=0,cpu=1", "device: shares must be above 0, got 'cuda=0'"),
        ("cuda=3,cpu", "device: all places must have a share, or none, got 'cuda=3,cpu'"),
    ],
)
def test_lists_that_are_none(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_places(text)


def test_list_of_places() -> None:
    assert parse_places("cuda:1+cpu=12,cuda=0.5") == (Place("cuda:1", "cpu", 12.0), Place("cuda", None, 0.5))


# ---- copies ----


def test_everything_of_a_batch_is_copied() -> None:
    """To torch's device without memory, so that a tensor that stayed behind shows."""
    ids = torch.arange(3)
    batch = Batch(
        *[ids] * 4,
        block_tables=(ids, ids),
        slot_mappings=(ids,),
        logits_indices=ids,
        **dict.fromkeys(("adapter_ids", "logits_adapter_ids", "state_reads", "state_writes", "hidden"), ids),
        window_lens=ids,
        block_places=ids,
        row_start=ids,
        images=ImageTokens(ids, ids, ids, (slice(1, 2),), layer_token=7),
        sparse=SparseRows(0.9, 4, 3, ids, ids, ids),
        last=LastRows(ids, ids, ids, ids, 7),
        features=FeatureSlots(ids, ids),
    )
    copy = moved(batch, "meta")
    assert copy.images is not None
    assert copy.sparse is not None
    assert copy.last is not None
    assert copy.features is not None
    values = [
        getattr(part, field.name)
        for part in (copy, copy.images, copy.sparse, copy.last, copy.features)
        for field in fields(part)
    ]
    assert {tensor.device.type for tensor in tensors_of(values)} == {"meta"}
    assert None not in [value for value in values if not isinstance(value, Tensor)]
    assert batch.last is not None
    assert batch.last.rows is batch.token_ids is ids
    assert ids.device.type == "cpu"
    assert (copy.images.spans, copy.last.first_prompt_row) == ((slice(1, 2),), 7)
    routing = moved(ops.Routing(*[ids] * 4), "meta")
    assert isinstance(routing, ops.Routing)
    assert routing.row_ids.device.type == "meta"


def test_caches_are_on_the_device_of_their_layers() -> None:
    shared = replace(SMOLLM2, kv_layers=(0, 1, 2, 1, 1))
    devices = ["cpu", "meta", "meta", "meta", "meta"]
    cache = KVCache.of_model(shared, [4], 16, torch.float32, devices)
    assert [layer.k.device.type for layer in cache if isinstance(layer, LayerCache)] == devices
    for tensor in cache.layers[0].tensors:
        tensor.copy_(torch.arange(4.0)[:, None, None, None].expand_as(tensor))
    cache.copy_blocks([(1, 3), (2, 0)])
    assert cache.layers[0].tensors[0][:, 0, 0, 0].tolist() == [2, 1, 2, 1]
