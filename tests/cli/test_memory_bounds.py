"""``fastinfer info --memory``: its sizes are those of loaded models and real caches, its times what the rates allow."""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle_heads import random_head, write_speculators
from support.families import save_model
from support.gguf_model_file import write_gguf
from support.mtp_models import MTPModel
from support.random_checkpoint import RandomCheckpoint, int4
from support.tiny_folder import write_tiny_folder
from torch import Tensor

from fastinfer import _C, LLM
from fastinfer.cli import memory_bounds, memory_description, memory_report
from fastinfer.cli.added_memory import draft_memory
from fastinfer.cli.main import main
from fastinfer.cli.memory_bounds import (
    KV_DTYPES,
    Rates,
    Weights,
    all_state_bytes,
    attended_positions,
    dtype_name,
    head_layouts,
    kv_cache_bytes,
    module_token_bytes,
    positions_of_last,
    sparse_attention_bytes,
)
from fastinfer.cli.memory_description import describe
from fastinfer.engine.config import EngineConfig
from fastinfer.errors import RequestError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.formats.unpacked import Lut
from fastinfer.hub import DEFAULT_MODEL
from fastinfer.models import load_weights, open_checkpoint, open_mtp_checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.kv_cache import KVCache, num_blocks_for
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.loader import DecoderLoader, load_decoder

# Experts of a token, and all; with a shared expert and its gate, and with a bias of the choice.
MIXTURES = {"mixtral": (2, 4), "qwen3-moe": (3, 8), "qwen2-moe-plain": (3, 8), "minimax-m2": (2, 9)}
RATES = Rates(read_bytes=1e10, byte_operations=1e12, float_operations=1e11)


def tensors_of(value: Any) -> dict[int, Tensor]:
    """All tensors of nested dataclasses and tuples, shared ones once."""
    if isinstance(value, Tensor):
        return {value.data_ptr(): value}
    parts = (
        value
        if isinstance(value, tuple)
        else [getattr(value, f.name) for f in fields(value)]
        if is_dataclass(value)
        else []
    )
    return {pointer: tensor for part in parts for pointer, tensor in tensors_of(part).items()}


def test_weights_are_those_of_the_loaded_model(model_path: Path) -> None:
    checkpoint = open_checkpoint(model_path)
    weights = Weights.of(checkpoint)
    loaded = load_decoder(checkpoint, Precision.of("auto"), None)
    sizes = {pointer: tensor.nbytes for pointer, tensor in tensors_of(loaded).items()}
    assert weights.memory_bytes == sum(sizes.values())
    assert weights.step_bytes == weights.memory_bytes - loaded.layers[0].attention.cos_sin_cache.nbytes
    assert (weights.logits_byte_operations, weights.logits_float_operations) == (2 * 49152 * 576, 0)
    layer = 576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536
    assert (weights.byte_operations, weights.float_operations) == (2 * 30 * layer, 0)


def test_an_embedding_that_is_not_tied_is_stored_and_not_read(model_path: Path) -> None:
    file = GGUFFile(model_path)
    tied = Weights.of(GGUFCheckpoint(file))
    file.tensors["output.weight"] = file.tensors["token_embd.weight"]
    checkpoint = GGUFCheckpoint(file)
    untied = Weights.of(checkpoint)
    embedding = DecoderLoader(LayerReader(checkpoint, Precision.of("auto"), "cpu"), None).embedding()
    size = sum(tensor.nbytes for tensor in tensors_of(embedding).values())
    assert untied == replace(tied, memory_bytes=tied.memory_bytes + size)


@pytest.mark.parametrize(
    "family", ["llama2", "llama3", "llama-biases", "gemma3", "gpt2", "phi3", "granite", "hunyuan", *MIXTURES]
)
def test_weights_of_a_folder(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers with the same tensors and window one is read."""
    save_model(tmp_path, family)
    read = []
    layer_of = DecoderLoader.layer
    monkeypatch.setattr(DecoderLoader, "layer", lambda self, index: read.append(index) or layer_of(self, index))
    weights = Weights.of(open_checkpoint(tmp_path))
    assert len(read) == (2 if family == "gemma3" else 1)
    loaded = load_decoder(open_checkpoint(tmp_path), Precision.of("auto"), None)
    sizes = {pointer: tensor.nbytes for pointer, tensor in tensors_of(loaded).items()}
    assert weights.memory_bytes == sum(sizes.values())
    attention = [layer.attention for layer in loaded.layers]
    rotations = [table for part in attention for table in (part.cos_sin_cache, part.first_cos_sin_cache)]
    tables = {table.data_ptr() for table in rotations if table is not None}
    unread = sum(sizes[pointer] for pointer in tables)
    if loaded.position_embedding is not None:
        unread += loaded.position_embedding.nbytes
    if loaded.lm_head is not loaded.embedding:
        unread += sum(tensor.nbytes for tensor in tensors_of(loaded.embedding).values())
    stacks = [stack for layer in loaded.layers if family in MIXTURES for stack in (layer.mlp.gate_up, layer.mlp.down)]
    experts = sum(tensor.nbytes for stack in stacks for tensor in tensors_of(stack).values())
    assert weights.expert_bytes == experts
    assert weights.step_bytes == weights.memory_bytes - unread - experts
    chosen, count = MIXTURES.get(family, (0, 1))
    for tokens in (1, 4, 1000):
        read = weights.step_bytes + experts * (1 - (1 - chosen / count) ** tokens)
        assert weights.read_bytes(loaded.config, tokens) == pytest.approx(read)


def test_operations_of_a_mixture_are_those_of_one_token(tmp_path: Path) -> None:
    """Dense weights are counted as floating point, packed ones as bytes, the logits' likewise."""
    model = save_model(tmp_path / "dense", "mixtral")
    weights = Weights.of(open_checkpoint(tmp_path / "dense"))
    attention, router, expert = 2 * 64 * 64 + 2 * 32 * 64, 4 * 64, 3 * 64 * 96
    assert weights.float_operations == 2 * 4 * (attention + router + 2 * expert)
    assert (weights.byte_operations, weights.logits_byte_operations) == (0, 0)
    assert weights.logits_float_operations == 2 * 320 * 64
    write_gguf(tmp_path / "dense.gguf", model)
    assert Weights.of(open_checkpoint(tmp_path / "dense.gguf")).float_operations == weights.float_operations
    source = RandomCheckpoint(
        replace(open_checkpoint(tmp_path / "dense").config, vocab_size=320), form=lambda _, v: int4(v)
    )
    packed = Weights.of(source)
    # The router's products are exact.
    assert (packed.byte_operations, packed.float_operations) == (2 * 4 * (attention + 2 * expert), 2 * 4 * router)
    found = describe(str(tmp_path / "dense"), 64, 2, RATES)
    size = Weights.of(open_checkpoint(tmp_path / "dense"), 64).memory_bytes
    assert (found["architecture"], found["weights_bytes"]) == ("MixtralForCausalLM", size)


def test_layers_that_store_nothing_are_needed_for_one_token(tmp_path: Path) -> None:
    """Two of four layers; they have queries alone."""
    save_model(tmp_path, "llama3")
    source = RandomCheckpoint(replace(open_checkpoint(tmp_path).config, num_layers=4, kv_layers=(0, 1, 0, 1)))
    weights = Weights.of(source)
    queries, keys, mlp = 2 * 64 * 64, 2 * 32 * 64, 3 * 64 * 96
    assert weights.float_operations == 2 * 2 * (queries + keys + mlp)
    assert weights.reading_float_operations == 2 * 2 * (queries + mlp)
    assert attended_positions(source.config, 10).total() == 2 * 55 + 2 * 10


@pytest.mark.parametrize("table", [torch.arange(16.0), torch.linspace(-1, 1, 16)], ids=["integers", "fractions"])
def test_tables_of_integers_are_multiplied_as_bytes(table: Tensor, tmp_path: Path) -> None:
    save_model(tmp_path, "llama3")
    config = replace(open_checkpoint(tmp_path).config, num_experts=0)

    def form(name: str, values: Tensor) -> Lut:
        q = torch.zeros(values.shape, dtype=torch.uint8)
        return Lut(q, torch.ones(len(values), values.shape[1] // 32).half(), table=table)

    weights = Weights.of(RandomCheckpoint(config, form))
    operations = 2 * 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    expected = (operations, 0) if table[1] == 1 else (0, operations)
    assert (weights.byte_operations, weights.float_operations) == expected


@pytest.mark.parametrize("family", ["llama3", "gemma3", "granite-hybrid", "deepseek-v3", "glm-dsa"])
@pytest.mark.parametrize(("context", "batch"), [(200, 3), (64, 1)])
def test_sizes_are_those_of_an_engine(family: str, context: int, batch: int, tmp_path: Path) -> None:
    """With tables of so many positions, blocks of windows beside a step of prompts, and slots of snapshots."""
    folder = write_tiny_folder(tmp_path, family)
    found = describe(str(folder), context, batch, RATES)
    engine = LLM(str(folder), max_model_len=context, max_num_seqs=batch).engine
    sizes = {pointer: tensor.nbytes for pointer, tensor in tensors_of(engine.model).items()}
    assert found["weights_bytes"] == sum(sizes.values())
    caches = {tensor.data_ptr(): tensor.nbytes for cache in engine.worker.kv_cache for tensor in cache.tensors}
    assert found["kv_cache_bytes"][found["head_layout"]]["float16"] == sum(caches.values())


def test_states_of_drafts_have_slots(tmp_path: Path) -> None:
    config = open_checkpoint(write_tiny_folder(tmp_path, "granite-hybrid")).config
    sizes = [kv_cache_bytes(config, config.num_kv_heads, torch.int8, 64, 3, num_drafts=count) for count in (0, 2)]
    assert sizes[1] - sizes[0] == 3 * 2 * all_state_bytes(config)


def test_a_context_longer_than_any_rotary_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of such a model a part can be used."""
    save_model(tmp_path, "llama3")
    source = open_checkpoint(tmp_path)
    short = Weights.of(source)
    source.config = replace(source.config, max_position=2**30)  # type: ignore[misc]
    more = (2**30 - 256) * source.config.rotary_dim * 4
    assert Weights.of(source) == replace(short, memory_bytes=short.memory_bytes + more)
    monkeypatch.setattr(memory_description, "open_checkpoint", lambda path: source)
    assert describe(str(tmp_path), 1000, 2, RATES)["context"] == 1000


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 200])
def test_attended_positions(tokens: int, tmp_path: Path) -> None:
    """Layers with a window of 16 and without one."""
    save_model(tmp_path, "gemma3")
    config = open_checkpoint(tmp_path).config
    assert {config.window(index) for index in range(7)} == {0, 16}
    assert module_token_bytes(config, KV_DTYPES) == {}
    expected = sum(
        min(position, config.window(index) or position) for index in range(7) for position in range(1, tokens + 1)
    )
    assert attended_positions(config, tokens).total() == expected


@pytest.mark.parametrize("tokens", [0, 1, 39, 40, 41, 200])
def test_attended_positions_of_chunks(tokens: int, tmp_path: Path) -> None:
    """Four layers with chunks of 40 and one without."""
    save_model(tmp_path, "llama4")
    config = open_checkpoint(tmp_path).config
    assert config.windows == (40, 40, 0, 40, 40)
    expected = sum(4 * (position % 40 + 1) + position + 1 for position in range(tokens))
    assert attended_positions(config, tokens).total() == expected
    assert positions_of_last(config, tokens + 1, range(5)).total() == 4 * (tokens % 40 + 1) + tokens + 1


def test_attended_positions_of_chosen_tokens(tmp_path: Path) -> None:
    save_model(tmp_path, "glm-dsa")
    config = open_checkpoint(tmp_path).config
    assert attended_positions(config, 30).total() == 5 * sum(min(position, 12) for position in range(1, 31))
    assert positions_of_last(config, 30, range(5)).total() == 5 * 12


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("context", "batch"), [(1, 1), (100, 3), (64, 2), (3000, 2)])
def test_kv_cache_bytes_are_those_of_a_real_cache(
    dtype: torch.dtype, context: int, batch: int, model_path: Path
) -> None:
    config = replace(read_gguf_config(GGUFFile(model_path)), num_layers=4)
    block_size = EngineConfig().block_size
    num_blocks = batch * num_blocks_for(context, block_size)
    for with_key_codes in (False, True):
        tensors = KVCache.of_model(config, [num_blocks], block_size, dtype, "cpu", with_key_codes=with_key_codes)
        real = sum(tensor.nbytes for cache in tensors for tensor in cache.tensors)
        expected = kv_cache_bytes(config, config.num_kv_heads, dtype, context, batch)
        assert expected + with_key_codes * sparse_attention_bytes(config, context, batch) == real
    assert module_token_bytes(config, [dtype]) == {dtype_name(dtype): expected // (num_blocks * block_size)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "layouts"),
    [
        (9, 3, {"GQA": 3, "MHA": 9, "MQA": 1}),
        (8, 8, {"MHA": 8, "MQA": 1}),
        (8, 1, {"MQA": 1, "MHA": 8}),
        (1, 1, {"MQA": 1, "MHA": 1}),
    ],
)
def test_head_layouts(heads: int, kv_heads: int, layouts: dict[str, int], model_path: Path) -> None:
    config = replace(read_gguf_config(GGUFFile(model_path)), num_heads=heads, num_kv_heads=kv_heads)
    assert list(head_layouts(config).items()) == list(layouts.items())


def test_one_sequence_is_bound_by_reading() -> None:
    found = describe(DEFAULT_MODEL, 1024, 1, RATES)
    rotary_bytes = 1024 * 64 * 4
    for dtype, seconds in found["decode_step_s"].items():
        read = found["weights_bytes"] - rotary_bytes + found["kv_cache_bytes"]["GQA"][dtype]
        assert seconds == pytest.approx(read / 1e10)


def test_a_step_reads_what_the_windows_show(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3")
    config = open_checkpoint(tmp_path).config
    windows = [config.window(index) for index in range(config.num_layers)]
    assert {0, 16} == set(windows)
    found = {context: describe(str(tmp_path), context, 1, RATES)["decode_step_s"] for context in (64, 96)}
    token = 2 * config.num_kv_heads * config.head_dim * 4
    assert found[96]["float32"] - found[64]["float32"] == pytest.approx(windows.count(0) * 32 * token / 1e10)


def test_many_sequences_are_bound_by_arithmetic() -> None:
    """Attention's products are counted as floating point, those with packed weights as bytes."""
    batch, context = 512, 256
    found = describe(DEFAULT_MODEL, context, batch, RATES)
    products = 2 * (30 * (576 * 960 + 576 * 576 + 3 * 576 * 1536) + 49152 * 576)
    attention = 30 * 9 * 64 * 2 * 2 * context
    assert found["decode_step_s"]["int8"] == pytest.approx(batch * (products / 1e12 + attention / 1e11))


def test_prefill_is_the_sum_over_its_tokens() -> None:
    """Of the operations of each, the logits' apart, which only the last has."""
    context, batch = 300, 2
    found = describe(DEFAULT_MODEL, context, batch, RATES)
    layers = 2 * 30 * (576 * 960 + 576 * 576 + 3 * 576 * 1536)
    seconds = sum(layers / 1e12 + 30 * 9 * 64 * 4 * position / 1e11 for position in range(1, context + 1))
    assert found["prefill_s"] == pytest.approx(batch * (seconds + 2 * 49152 * 576 / 1e12))


def test_prefill_in_tiles() -> None:
    """But not its logits. A decode step, and what is slower in tiles, take the other rates."""
    context, batch = 300, 2
    layers = 2 * 30 * (576 * 960 + 576 * 576 + 3 * 576 * 1536) * context
    attention = 30 * 9 * 64 * 4 * sum(range(1, context + 1))
    for tiles, seconds in (
        ((4e12, 2e12), layers / 4e12 + attention / 2e12),
        ((1, 1), layers / 1e12 + attention / 1e11),
    ):
        rates = Rates(RATES.read_bytes, RATES.byte_operations, RATES.float_operations, *tiles)
        found = describe(DEFAULT_MODEL, context, batch, rates)
        assert found["prefill_s"] == pytest.approx(batch * (seconds + 2 * 49152 * 576 / 1e12))
        assert found["decode_step_s"] == describe(DEFAULT_MODEL, context, batch, RATES)["decode_step_s"]


def test_rates_are_the_best_of_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of less than 30 ms do not count, and an instruction that the CPU does not have is no ceiling."""
    work = {"read": 5.0, "byte_dot": 3.0, "fp32_fma": 2.0, "bf16_dot": 0.0, "int8_tiles": 7.0, "bf16_tiles": 0.0}
    loads = itertools.cycle([4.0, 1.0, 2.0])  # of the machine, by other programs

    def roofline(name: str, memory: object, passes: int) -> tuple[float, float]:
        return work[name] * passes, 0.001 * passes if passes < 4 else 0.01 * passes * next(loads)

    monkeypatch.setattr(_C, "roofline", roofline)
    monkeypatch.setattr(memory_bounds, "READ_BYTES", 64)
    rates = Rates.measure()
    assert list(vars(rates).values()) == pytest.approx([500, 300, 200, 700, 0])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A machine of 8 GiB, of which as much is available as its argument says."""
    monkeypatch.setattr(Rates, "measure", lambda: RATES)
    monkeypatch.setattr(memory_description, "machine_facts", lambda: {"cpu": {"memory": 8 << 30}})

    def set_available(count: int) -> None:
        monkeypatch.setattr(memory_description, "available_memory", lambda device: count)

    set_available(4 << 30)
    return set_available


def fits_by_dtype(text: str) -> dict[str, str]:
    """The table's column, by the first word of each row."""
    lines = text.partition("KV cache")[2].partition("\n\n")[0].splitlines()[1:]
    return {line.split()[0]: next(word for word in line.split() if word in ("yes", "no")) for line in lines}


DTYPE_NAMES = ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "int4"]


def test_command(machine: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["info", "--memory", DEFAULT_MODEL, "--context", "512", "--batch", "4"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["head_layout"] == "GQA"
    assert (found["context"], found["batch"]) == (512, 4)
    assert found["kv_cache_bytes"]["MHA"]["int8"] == 3 * found["kv_cache_bytes"]["GQA"]["int8"]
    assert found["total_bytes"]["float32"] == found["weights_bytes"] + found["kv_cache_bytes"]["GQA"]["float32"]
    assert (found["memory_bytes"], found["available_bytes"]) == (8 << 30, 4 << 30)
    machine(found["total_bytes"]["float16"])
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for part in (
        "92.2 MiB as packed",
        "8.00 GiB, 137.2 MiB of it available",
        "4 of 512 tokens",
        "GQA 45.0 MiB (this model)",
        "22.0 MiB for each 1,000 tokens of prompt modules",
        "lower bounds",
        "float16 (default)",
    ):
        assert part in text
    assert fits_by_dtype(text) == dict.fromkeys(DTYPE_NAMES, "yes") | {"float32": "no"}


@pytest.mark.usefixtures("machine")
def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--memory", DEFAULT_MODEL, "--batch", str(2**20)]) == 0
    text = capsys.readouterr().out
    assert "1048576 of 8192 tokens" in text
    assert fits_by_dtype(text) == dict.fromkeys(DTYPE_NAMES, "no")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--memory", "no/such"], "model 'no/such'"),
        (["--memory", __file__], "expected a GGUF file, got text"),
        (["--memory", DEFAULT_MODEL, "--context", "8193"], "--context must be an integer in 1..8192, got 8193"),
        (["--memory", DEFAULT_MODEL, "--context", "0"], "--context"),
        (["--memory", DEFAULT_MODEL, "--context", "-1"], "--context"),
        (["--memory", DEFAULT_MODEL, "--batch", "0"], "--batch"),
        (["--memory", DEFAULT_MODEL, "--batch", str(2**63)], "--batch must be an integer in 1..1048576"),
        (["--memory", DEFAULT_MODEL, "--batch", "1.5"], "--batch"),
        (["--memory", DEFAULT_MODEL, "--plan", "int4_gemm", "1", "1", "32"], "not allowed with argument"),
        (["--memory"], "--memory"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_mistakes(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert error in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.usefixtures("machine")
def test_no_layer_drops_what_is_before_its_window_beside_a_draft_model(tmp_path: Path) -> None:
    """The engine has all layers in one group then."""
    model = save_model(tmp_path, "gemma3")
    alone, described = (describe(str(tmp_path), 128, 3, RATES, draft_model=name) for name in (None, str(tmp_path)))
    whole = kv_cache_bytes(
        replace(open_checkpoint(tmp_path).config, windows=()), model.config.num_key_value_heads, torch.bfloat16, 128, 3
    )
    assert next(iter(alone["kv_cache_bytes"].values()))["bfloat16"] < whole
    assert next(iter(described["kv_cache_bytes"].values()))["bfloat16"] == whole


def test_memory_of_a_draft_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights with the table of positions, its keys and values, and the features."""
    head = write_speculators(tmp_path / "head", random_head())
    checkpoint = open_checkpoint(head)
    found = draft_memory(checkpoint, KV_DTYPES, 100, 3)
    loaded = load_weights(checkpoint, "auto", "cpu", 100)
    assert found.weights_bytes == sum(tensor.nbytes for tensor in tensors_of(loaded).values())
    block_size = EngineConfig().block_size
    for dtype in KV_DTYPES:
        cache = KVCache.of_model(checkpoint.config, [3 * num_blocks_for(100, block_size)], block_size, dtype, "cpu")
        assert found.kv_cache_bytes[dtype_name(dtype)] == sum(rows.nbytes for rows in cache.rows)
    model = str(write_tiny_folder(tmp_path / "model"))
    alone, described = (describe(model, 100, 3, RATES, draft_model=name) for name in (None, str(head)))
    added = found.weights_bytes + found.kv_cache_bytes["int8"]
    assert described["total_bytes"]["int8"] == alone["total_bytes"]["int8"] + added
    assert alone["draft"] is None
    assert main(["info", "--memory", model, "--context", "100", "--draft-model", str(head)]) == 0
    assert re.search(r"draft +[\d.]+ MiB of weights and a cache of [\d.]+ MiB, which", capsys.readouterr().out)
    with pytest.raises(RequestError, match=r"--memory: expected a whole model, got the draft head .*head"):
        describe(str(head), 100, 3, RATES)
    with pytest.raises(RequestError, match="the draft head must have the model's hidden size of 576, got 64"):
        describe(DEFAULT_MODEL, 100, 3, RATES, draft_model=str(head))


def test_memory_of_the_layers_for_multi_token_prediction_that_are_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One per draft, as far as the model has them: here two."""
    model = MTPModel("deepseek-v3", 2).write(tmp_path)

    def described(*options: str) -> Any:
        assert (
            main(["info", "--json", "--memory", str(model), "--context", "100", "--draft-model", "mtp", *options]) == 0
        )
        return json.loads(capsys.readouterr().out)["draft"]

    one, two = (asdict(draft_memory(open_mtp_checkpoint(model, max_layers=n), KV_DTYPES[:-1], 100, 1)) for n in (1, 2))
    assert two["weights_bytes"] > one["weights_bytes"]
    assert described() == described("--speculate", "1") == one
    assert described("--speculate", "2") == described("--speculate", "5") == two


def test_memory_of_each_device(tmp_path: Path) -> None:
    """The experts of three of four layers are on the CPU; with shares, devices need not exist."""
    save_model(tmp_path, "qwen3-moe")
    found = describe(str(tmp_path), 64, 2, RATES, "cuda:0+cpu=3,cuda:1=1")
    first, cpu, second = (
        next(part for part in found["devices"] if part["device"] == name) for name in ("cuda:0", "cpu", "cuda:1")
    )
    assert (first["num_layers"], cpu["num_layers"], second["num_layers"]) == (3, 0, 1)
    assert cpu["num_layers_of_experts"] == 3
    assert cpu["weights_bytes"] > 0
    caches = [part["kv_cache_bytes"] for part in (first, cpu, second)]
    assert caches == [3 * caches[2], 0, found["kv_cache_bytes"]["GQA"]["bfloat16"] // 4]
    assert "3 layers" in memory_report.report(found)
    with pytest.raises(RequestError, match="device: expected at most 4 places"):
        describe(str(tmp_path), 64, 2, RATES, ",".join(["cpu"] * 5))
