"""The engine on the CUDA kernels, emulated, against the engine on the CPU's; and how decode steps become CUDA graphs.

Both compute with bf16 hidden states and the same weights, quantised ones in the layout of their device. The CUDA
kernels round in other places, so that logits are compared as in teacher forcing: both engines go on with the tokens
that the CPU has drawn.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_cuda_graph import Calls, is_batch_invariant, use_fakes, use_graphs
from support.helpers import device_fixture
from support.mixed_decoder import CONFIG, mixed_decoder
from support.peft_adapter import write_adapter
from support.random_checkpoint import RandomCheckpoint, int4
from support.toy import VOCAB_SIZE, ToyTokenizer, always_speculate, check_blocks, drain
from torch import Tensor

from fastinfer import hub
from fastinfer.engine import batch_inputs
from fastinfer.engine.batch_inputs import StepResult
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.draw import Draw
from fastinfer.engine.engine import Engine
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.runner import Runner
from fastinfer.errors import ModelNotFoundError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.formats.unpacked import Dense
from fastinfer.models.batch import Batch
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.loader import load_decoder
from fastinfer.models.offload import tensors_of
from fastinfer.sampling_params import SamplingParams

pytestmark = pytest.mark.unsanitized
EXHAUSTIVE = pytest.mark.exhaustive
device = device_fixture("cuda", "emulated")

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LIMITS: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32}


@pytest.fixture(autouse=True)
def sparse_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts attend to everything, in the engine on the CPU, too; and tokens choose from the fourth page on."""
    monkeypatch.setattr(EngineConfig, "sparse_prompts", False)
    for module in ("engine.cache_sizes", "models.kv_cache"):
        monkeypatch.setattr(f"fastinfer.{module}.has_value_codes", lambda *_: False)
    monkeypatch.setattr(batch_inputs, "DENSE_PAGES", 3)


class Forced(Engine):
    """Notes the logits of every draw by the sequence's seed and length, and follows another engine's tokens."""

    def __init__(self, device: str, tokens: dict[tuple[int, ...], int] | None = None, **limits: Any) -> None:
        # A step that is launched ahead would go on with the tokens that the GPU has drawn.
        options = {**LIMITS, "device": device, "enforce_eager": True, "async_scheduling": False, **limits}
        super().__init__(mixed_decoder(device), ToyTokenizer(), EngineConfig(**options))  # type: ignore[arg-type]
        self.logits: dict[tuple[int, ...], Tensor] = {}
        self.tokens: dict[tuple[int, ...], int] = {}
        for tensor in (tensor for cache in self.worker.kv_cache for tensor in cache.tensors):
            tensor.view(torch.uint8).fill_(0xFF)  # NaN, or -1 where that is none
        launch = self.sampler.launch

        def forced(result: StepResult, rows: list[LogitsRow]) -> Draw:
            drawn = launch(result, rows).tokens()
            for index, (row, token) in enumerate(zip(rows, drawn, strict=True)):
                key = (row.sequence.seed, *row.sequence.token_ids, *row.drafts)
                self.logits[key] = result.logits[index].cpu().clone()
                self.tokens[key] = (tokens or {}).get(key, token.token_id)
                drawn[index] = token._replace(token_id=self.tokens[key])
            return Draw(lambda: drawn)

        self.sampler.launch = forced  # type: ignore[method-assign]


def assert_close(engine: Forced, expected: Forced, limit: float = 0.06) -> None:
    """The logits of all that both have drawn. bf16 (0.4 %) makes a difference of 1 to 2 % after three layers, with a
    cache in fp8 of up to 4 %, in int4 of up to 10 %, as other codes are the nearest; one wrong slot or scale makes it
    as large as the logits."""
    assert engine.logits.keys() == expected.logits.keys()
    for key, logits in engine.logits.items():
        error = (logits - expected.logits[key]).norm() / expected.logits[key].norm()
        assert error < limit, f"{key}: relative error {error}"


def serve(engine: Forced, prompts: list[list[int]], params: SamplingParams = PARAMS, **names: Any) -> Forced:
    for seed, prompt in enumerate(prompts):
        engine.add_request(prompt, replace(params, seed=seed), **names)
    drain(engine)
    check_blocks(engine)
    return engine


def prompts(count: int, length: int = 20) -> list[list[int]]:
    return [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(1 + 5 * i % length)] for i in range(count)]


# ---- the same requests on both ----

Make = Callable[..., Forced]


def decodes(make: Make) -> Forced:
    return serve(make(), prompts(5))


def chunked_prefill(make: Make) -> Forced:
    return serve(make(max_num_batched_tokens=7), prompts(4, 40))


def large_prefill(make: Make) -> Forced:
    """Products of more than 64 tokens have kernels of their own."""
    return serve(make(max_num_batched_tokens=96), [list(range(60)), list(range(40))], replace(PARAMS, max_tokens=2))


def prefix_hits(make: Make) -> Forced:
    engine = make()
    for last in (1, 2, 3):
        serve(engine, [[*range(20), last]])
    assert engine.stats().num_hit_tokens == 2 * 16
    return engine


def preemptions(make: Make) -> Forced:
    engine = serve(make(num_kv_blocks=12, max_model_len=40), prompts(5), replace(PARAMS, max_tokens=16))
    assert engine.stats().num_preemptions > 0
    return engine


def speculation(make: Make) -> Forced:
    """Drafts from the text itself, some of them right, so that queries are ragged."""
    engine = always_speculate(make(num_speculative_tokens=3))
    serve(engine, [[1, 2, 3] * 5, [4, 5] * 4, [6]], replace(PARAMS, max_tokens=10))  # type: ignore[arg-type]
    assert engine.stats().num_drafted_tokens > 0
    return engine  # type: ignore[return-value]


def copies_on_write(make: Make) -> Forced:
    return serve(make(), prompts(2), replace(PARAMS, n=2, temperature=1.0))


def int8_cache(make: Make) -> Forced:
    return serve(make(kv_cache_dtype=torch.int8), prompts(3))


def fp8_cache(make: Make) -> Forced:
    return serve(make(kv_cache_dtype=torch.float8_e4m3fn), prompts(3))


def int4_cache(make: Make) -> Forced:
    return serve(make(kv_cache_dtype=torch.uint8), prompts(3))


def sampling(make: Make) -> Forced:
    """All that the sampling operator takes."""
    params = replace(PARAMS, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, logprobs=3)
    return serve(make(), prompts(3), replace(params, logit_bias={3: -100.0}, min_tokens=2, ignore_eos=False))


def one_long_context(make: Make) -> Forced:
    """The multiprocessors share one sequence."""
    return serve(make(max_num_batched_tokens=96), [[i % VOCAB_SIZE for i in range(85)]])


def sparse_attention(make: Make) -> Forced:
    """In the last layer each generated token reads some pages of up to seven."""
    engine = make(max_num_batched_tokens=64, sparse_attention=0.6)
    return serve(engine, [[i % VOCAB_SIZE for i in range(50)], [3, 1, 4]], replace(PARAMS, max_tokens=4))


SCENARIOS = [
    decodes,
    chunked_prefill,
    large_prefill,
    prefix_hits,
    preemptions,
    speculation,
    copies_on_write,
    int8_cache,
    fp8_cache,
    int4_cache,
    sampling,
    one_long_context,
]


@pytest.fixture
def expected(request: pytest.FixtureRequest) -> Forced:
    """What the CPU kernels give; to be asked for before ``device`` replaces them."""
    scenario: Callable[[Make], Forced] = request.getfixturevalue("scenario")
    return scenario(partial(Forced, "cpu"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_logits_are_close_to_the_cpus(scenario: Callable[[Make], Forced], expected: Forced, device: str) -> None:
    limit = 0.15 if scenario is int4_cache else 0.06
    assert_close(scenario(partial(Forced, device, expected.tokens)), expected, limit)


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    for seed in range(2):
        write_adapter(tmp_path / str(seed), CONFIG, rank=3 + seed, seed=seed)
    return [tmp_path / str(seed) for seed in range(2)]


def with_adapters(make: Make, adapters: list[Path]) -> Forced:
    engine = make(max_loras=2, max_lora_rank=8)
    for index, folder in enumerate(adapters):
        engine.load_adapter(str(index), folder)
    for seed, (prompt, name) in enumerate(zip(prompts(4), ["0", None, "1", "0"], strict=True)):
        engine.add_request(prompt, replace(PARAMS, seed=seed), adapter=name)
    drain(engine)
    return engine


@pytest.fixture
def expected_with_adapters(adapters: list[Path]) -> Forced:
    return with_adapters(partial(Forced, "cpu"), adapters)


def test_adapters(expected_with_adapters: Forced, adapters: list[Path], device: str) -> None:
    tokens = expected_with_adapters.tokens
    assert_close(with_adapters(partial(Forced, device, tokens), adapters), expected_with_adapters)
    without = serve(Forced(device), prompts(4))
    key = (2, *prompts(4)[2])
    change = without.logits[key] - expected_with_adapters.logits[key]
    assert change.norm() > without.logits[key].norm() / 5


@pytest.fixture
def expected_embeddings() -> list[Any]:
    return embeddings("cpu")


def embeddings(device: str) -> list[Any]:
    engine = Forced(device)
    ids = [engine.add_embedding_request([5, 6, 7], pooling=pooling) for pooling in ("mean", "last")]
    ids.append(engine.add_request([5, 6, 7, 8], replace(PARAMS, max_tokens=1, prompt_logprobs=2)))
    outputs = drain(engine)
    scored = [entries for entries in outputs[ids[2]].prompt_logprobs if entries]
    logprobs = [[entry.logprob for entry in entries.values()][:1] for entries in scored]
    return [torch.tensor(outputs[ids[0]].embedding), torch.tensor(outputs[ids[1]].embedding), torch.tensor(logprobs)]


def test_embeddings_and_scores(expected_embeddings: list[Any], device: str) -> None:
    for values, theirs in zip(embeddings(device), expected_embeddings, strict=True):
        torch.testing.assert_close(values, theirs, atol=0.2, rtol=0)
        assert (values - theirs).norm() < 0.03 * theirs.norm()


def logits_of_text(model: Decoder, dtype: torch.dtype, device: str) -> Tensor:
    """After each of a few tokens."""
    ids = torch.tensor([504, 3575, 282, 4649, 314])  # The capital of France is
    cache = KVCache.of_model(model.config, [2], 8, dtype, device)

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    count = torch.arange(len(ids), device=device)
    table = int32(1).view(1, 1)
    batch = Batch(ids.to(device), count, int32(0, len(ids)), int32(len(ids)), (table,), (count + 8,), count)
    return model.logits(model.forward(batch, cache), batch.logits_indices).float().cpu()


@pytest.fixture
def default_model() -> tuple[GGUFFile, Tensor]:
    """The default model's file, and what it gives in fp32 on the CPU."""
    try:
        file = GGUFFile(hub.resolve(hub.DEFAULT_MODEL))
    except ModelNotFoundError as error:  # machines with GPUs are often offline
        pytest.skip(str(error))
    return file, logits_of_text(load_decoder(GGUFCheckpoint(file), Precision.of("float32"), 64), torch.float32, "cpu")


def test_the_default_model(default_model: tuple[GGUFFile, Tensor], device: str) -> None:
    """In fp16, whose rounding is small enough to show any other difference: 0.2 to 0.4 %."""
    file, expected = default_model
    logits = logits_of_text(
        load_decoder(GGUFCheckpoint(file), Precision.of("float16", "cuda"), 64, device), torch.float16, device
    )
    assert torch.equal(logits.argmax(1), expected.argmax(1))
    assert ((logits - expected).norm(dim=1) < 0.01 * expected.norm(dim=1)).all()


# ---- deterministic ----

MIXED_PROMPTS = [
    [(5 * i + 3 * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 6, 70, 13, 36, 17))
]
deterministic = partial(Forced, deterministic=True)
# Each text goes from one block to the next.
serve_mixed = partial(serve, prompts=MIXED_PROMPTS, params=replace(PARAMS, max_tokens=9))


def graphed(device: str, **limits: Any) -> Forced:
    if device == "cpu":  # emulated
        return use_graphs(deterministic(device, **limits))  # type: ignore[return-value]
    return deterministic(device, enforce_eager=False, **limits)


def twice(engine: Forced) -> Forced:
    serve_mixed(engine)
    engine.logits.clear()
    serve_mixed(engine)
    assert engine.stats().num_hit_tokens > 100
    return engine


def with_preemptions(engine: Forced) -> Forced:
    serve_mixed(engine)
    assert engine.stats().num_preemptions > 0
    return engine


def with_drafts(engine: Forced) -> Forced:
    serve_mixed(always_speculate(engine))
    assert engine.stats().num_drafted_tokens > 0
    return engine


WAYS: dict[str, Callable[[str], Forced]] = {
    "batched": lambda device: serve_mixed(deterministic(device, max_num_batched_tokens=96)),
    "chunked": lambda device: serve_mixed(deterministic(device, max_num_batched_tokens=19)),
    "prefix hits": lambda device: twice(deterministic(device)),
    "preempted": lambda device: with_preemptions(deterministic(device, num_kv_blocks=13, max_model_len=88)),
    "drafts": lambda device: with_drafts(deterministic(device, num_speculative_tokens=3)),
    "graphs": lambda device: serve_mixed(graphed(device)),
}


def alone(device: str, **limits: Any) -> Forced:
    """One request after the other, each prompt in one step."""
    return serve_mixed(Forced(device, max_num_seqs=1, max_num_batched_tokens=96, **limits))


def differing_logits(engine: Forced, expected: Forced) -> list[tuple[int, ...]]:
    assert engine.logits.keys() >= expected.logits.keys()  # drafts have more
    return [key for key, logits in expected.logits.items() if not torch.equal(engine.logits[key], logits)]


def test_deterministic(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a bit of any logits depends on how a request is computed."""
    if device == "cpu":
        use_fakes(monkeypatch)
    expected = alone(device, deterministic=True, enable_prefix_caching=False)
    assert not any(logits.isnan().any() for logits in expected.logits.values())
    for name, way in WAYS.items():
        assert differing_logits(way(device), expected) == [], name


@pytest.mark.parametrize(
    "cache_dtype",
    [torch.int8, pytest.param(torch.float8_e4m3fn, marks=EXHAUSTIVE), pytest.param(torch.uint8, marks=EXHAUSTIVE)],
)
def test_deterministic_caches(cache_dtype: torch.dtype, device: str) -> None:
    limits = {"deterministic": True, "kv_cache_dtype": cache_dtype}
    engine = serve_mixed(Forced(device, max_num_batched_tokens=19, **limits))
    assert differing_logits(engine, alone(device, **limits)) == []


def test_deterministic_sparse_attention(device: str) -> None:
    """Also beside prompts, which attend to everything; and with room for all pages it is dense."""

    def run(prepare: Callable[[Any], Any] = lambda engine: engine, **limits: Any) -> Forced:
        engine = prepare(deterministic(device, **limits))
        return serve(engine, MIXED_PROMPTS[2:4], replace(PARAMS, max_tokens=4))

    one_by_one = {"max_num_seqs": 1, "max_num_batched_tokens": 96}
    dense, expected = run(**one_by_one), run(**one_by_one, sparse_attention=0.6)
    assert {key[0] for key in differing_logits(expected, dense)} == {0}  # the longer one
    assert differing_logits(run(max_num_batched_tokens=19, sparse_attention=0.6), expected) == []
    assert differing_logits(run(always_speculate, num_speculative_tokens=3, sparse_attention=0.6), expected) == []
    assert differing_logits(run(**one_by_one, sparse_attention=1.0), dense) == []


def assert_the_same_beside_adapters(adapters: list[Path], device: str) -> None:
    """A request without an adapter is computed as those beside it that have one."""

    def logits_of_base(names: list[str | None]) -> dict[tuple[int, ...], Tensor]:
        engine = deterministic(device, max_loras=2, max_lora_rank=8)
        for index, folder in enumerate(adapters):
            engine.load_adapter(str(index), folder)
        for seed, name in enumerate(names):
            engine.add_request(MIXED_PROMPTS[3], replace(PARAMS, seed=seed), adapter=name)
        drain(engine)
        return {key: logits for key, logits in engine.logits.items() if key[0] == 0}

    expected, found = logits_of_base([None, None]), logits_of_base([None, "0", "1"])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], logits) for key, logits in expected.items())


def test_deterministic_beside_adapters(adapters: list[Path], device: str) -> None:
    assert_the_same_beside_adapters(adapters, device)


def test_deterministic_beside_adapters_on_the_cpu(adapters: list[Path]) -> None:
    """Whose own kernels, too, round at another place where gate and up are not fused."""
    assert_the_same_beside_adapters(adapters, "cpu")


def test_graphs_are_captured_within(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of a draft model, too."""
    seen: list[bool] = []
    monkeypatch.setattr(
        "fastinfer.engine.worker.Runner",
        lambda *args, **names: seen.append(is_batch_invariant()) or Runner(*args, **names),
    )
    config = EngineConfig(**LIMITS, device=device, enforce_eager=True, deterministic=True, num_speculative_tokens=2)
    model = mixed_decoder(device)
    Engine(model, ToyTokenizer(), config, draft_model=model)  # type: ignore[arg-type]
    assert seen == [True, True]
    assert not is_batch_invariant()


def test_otherwise_logits_differ(device: str) -> None:
    """Without the context logits differ, so that the test above can fail."""
    engine, expected = serve_mixed(Forced(device)), alone(device)
    shared = engine.logits.keys() & expected.logits.keys()
    assert any(not torch.equal(engine.logits[key], expected.logits[key]) for key in shared)


def test_a_row_without_a_token_ends_its_request_alone(device: str) -> None:
    """The CUDA operator gives -1 for it, where the CPU's raises."""
    engine = Forced(device)
    bad, good = (engine.add_request([1, 2], replace(PARAMS, seed=seed)) for seed in (0, 1))
    launch = engine.sampler.launch

    def poisoned(result: StepResult, rows: list[LogitsRow]) -> Draw:
        for index, row in enumerate(rows):
            if row.sequence.request_id == bad and len(row.sequence) == 4:
                result.logits[index, 5] = float("nan")
        return launch(result, rows)

    engine.sampler.launch = poisoned  # type: ignore[method-assign]
    outputs = drain(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert "must have a finite logit" in outputs[bad].outputs[0].stop_reason
    assert outputs[good].outputs[0].finish_reason == "length"


# ---- CUDA graphs ----


@pytest.fixture
def recorded(device: str, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes engines with CUDA graphs, or fakes where there is no GPU."""

    def make(**limits: Any) -> Forced:
        if device != "cpu":
            return Forced(device, enforce_eager=False, **limits)
        return use_graphs(Forced(device, **limits))  # type: ignore[return-value]

    if device == "cpu":
        use_fakes(monkeypatch)
    return make


@pytest.mark.parametrize(
    "scenario",
    [
        decodes,
        chunked_prefill,
        large_prefill,
        prefix_hits,
        preemptions,
        speculation,
        copies_on_write,
        int8_cache,
        sampling,
        sparse_attention,
    ],
)
def test_graphs_change_nothing(scenario: Callable[[Make], Forced], device: str, recorded: Make) -> None:
    """Not a bit, though most steps are padded."""
    expected, engine = scenario(partial(Forced, device)), scenario(recorded)
    assert engine.stats().num_eager_steps == engine.stats().num_failed_graphs == 0
    assert engine.tokens == expected.tokens
    for key, logits in engine.logits.items():
        assert not logits.isnan().any()
        assert torch.equal(logits, expected.logits[key]), key


def test_graphs_with_adapters(adapters: list[Path], device: str, recorded: Make) -> None:
    expected = with_adapters(partial(Forced, device), adapters)
    engine = with_adapters(recorded, adapters)
    assert engine.tokens == expected.tokens
    assert all(torch.equal(logits, expected.logits[key]) for key, logits in engine.logits.items())


def test_graphs_with_experts(device: str, recorded: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles change at 12 and at 48 tokens: padding beyond would change the order of sums."""
    config = replace(CONFIG, num_layers=1, num_experts=6, experts_per_token=4, intermediate_size=512)

    def decoder(device: str) -> Decoder:
        checkpoint = RandomCheckpoint(
            config, lambda name, values: int4(values) if "expert" in name else Dense(values.bfloat16())
        )
        return load_decoder(checkpoint, Precision(torch.bfloat16, 32, 32, torch.bfloat16), None, device)

    monkeypatch.setitem(globals(), "mixed_decoder", decoder)
    engines = []
    for make in (partial(Forced, device), recorded):
        engine = make(max_num_batched_tokens=64, enable_prefix_caching=False)
        for length in (3, 10, 12, 13, 40, 47, 50, 60):
            serve(engine, [[(7 * i + length) % VOCAB_SIZE for i in range(length)]], replace(PARAMS, max_tokens=2))
        engines.append(engine)
    expected, engine = engines
    assert engine.stats().num_eager_steps == 0
    assert engine.tokens == expected.tokens
    assert all(torch.equal(logits, expected.logits[key]) for key, logits in engine.logits.items())


class Drawing(Engine):
    """Follows no other engine's tokens."""

    def __init__(self, device: str, enforce_eager: bool, **limits: Any) -> None:
        config = EngineConfig(**{**LIMITS, "device": device, "enforce_eager": enforce_eager, **limits})
        super().__init__(mixed_decoder(device), ToyTokenizer(), config)  # type: ignore[arg-type]


def captured(device: str, **limits: Any) -> Engine:
    """An engine with CUDA graphs, or fakes where there is no GPU."""
    return use_graphs(Drawing(device, True, **limits)) if device == "cpu" else Drawing(device, False, **limits)


HOT = 10.0  # the random model mostly repeats itself
KINDS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.0},
    {"min_tokens": 4, "stop_token_ids": list(range(20)), "ignore_eos": False},
    {"logprobs": 2},
    {"presence_penalty": 0.5},
    {"logit_bias": {3: 5.0}},
]


def random_requests(engine: Engine, seed: int) -> list[tuple[list[int], Any]]:
    """Requests of many kinds that come and end at different times, mostly of those that a graph draws for."""
    rng = random.Random(seed)
    outputs = {}
    for number in range(10):
        kind = KINDS[rng.randrange(len(KINDS) if number % 5 == 4 else 4)]
        params = {"temperature": HOT, "seed": number, "max_tokens": rng.randint(1, 12), "ignore_eos": True, **kind}
        engine.add_request([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))], SamplingParams(**params))
        for _ in range(rng.randint(0, 3)):
            outputs.update({output.request_id: output for output in engine.step()})
    outputs.update(drain(engine))
    check_blocks(engine)
    return [(outputs[name].outputs[0].token_ids, outputs[name].outputs[0].logprobs) for name in sorted(outputs)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=EXHAUSTIVE), pytest.param(2, marks=EXHAUSTIVE)])
def test_drawing_in_graphs_changes_nothing(seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched ahead or not: the tokens of random batches, some of whose draws need more than a graph gives."""
    if device == "cpu":
        use_fakes(monkeypatch)
    expected = random_requests(Drawing(device, True, async_scheduling=False), seed)
    for ahead in (False, True):
        engine = captured(device, async_scheduling=ahead)
        assert random_requests(engine, seed) == expected
        assert engine.stats().num_failed_draws == 0


def test_a_row_without_a_token_in_a_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its request alone, with the error of a draw by the sampler."""
    if device == "cpu":
        use_fakes(monkeypatch)
    params = SamplingParams(temperature=HOT, seed=5, max_tokens=8, ignore_eos=True)

    def serve(engine: Engine, *limits: int) -> list[Any]:
        for limit in limits:
            engine.add_request([1, 2], replace(params, max_tokens=limit))
        return [output.outputs[0] for output in drain(engine).values()]

    [expected] = serve(Drawing(device, True), 8)
    tokens = expected.token_ids
    place = next(i for i in range(2, 8) if tokens[i] not in (1, 2, *tokens[:i]))
    logits = Runner._logits

    def poisoned(runner: Runner, hidden: Tensor, batch: Batch) -> Tensor:
        bad = batch.token_ids[batch.logits_indices] == tokens[place]
        return logits(runner, hidden, batch).masked_fill(bad[:, None], float("nan"))

    monkeypatch.setattr(Runner, "_logits", poisoned)
    reasons = set()
    for make in (partial(Drawing, device, True), partial(captured, device)):
        for ahead in (False, True):
            bad, good = serve(make(async_scheduling=ahead), 8, place)
            assert (bad.finish_reason, bad.token_ids) == ("error", tokens[: place + 1])
            assert (good.finish_reason, good.token_ids) == ("length", tokens[:place])
            reasons.add(bad.stop_reason)
    [reason] = reasons
    assert "logits[0] must have a finite logit" in reason


def test_a_step_with_prompts_is_a_replay_the_logits_and_a_draw(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        use_fakes(monkeypatch)
    engines = [Drawing(device, True), captured(device)]
    calls = Calls(monkeypatch)
    for engine in engines:
        engine.add_request([1, 2, 3], PARAMS)
        engine.step()
        engine.add_request(list(range(9)), PARAMS)
        with calls:
            engine.step()
    names = [name.split(".")[1] for name in calls.names if name.startswith("fastinfer")]
    names = [name for name in names if name != "set_constant_weights"]  # launches nothing
    assert len(names) > 20
    # Of the second engine: the rows, the output layer and the draw.
    assert names[-3:] == ["embedding", "int8_gemm", "sample"]
    assert names[-4] == "sample"


# ---- sleeping, and a second GPU ----


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("level", [1, 2])
def test_a_gpu_is_free_while_the_engine_sleeps(level: int) -> None:
    before = torch.cuda.memory_allocated()
    config = EngineConfig(**LIMITS, device="cuda")

    def load_models() -> list[Any]:
        return [mixed_decoder("cuda")]

    engine = Engine(*load_models(), ToyTokenizer(), config, load_models=load_models)  # type: ignore[arg-type]

    def texts() -> list[list[int]]:
        ids = [engine.add_request(prompt, PARAMS) for prompt in prompts(5)]
        outputs = drain(engine)
        return [outputs[request_id].outputs[0].token_ids for request_id in ids]

    expected, awake = texts(), torch.cuda.memory_allocated()
    weights = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(engine.model))
    cache = sum(tensor.untyped_storage().nbytes() for layer in engine.worker.kv_cache for tensor in layer.tensors)
    engine.sleep(level)
    assert torch.cuda.memory_allocated() - before <= awake - before - weights - cache
    engine.wake_up()
    assert texts() == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_the_second_gpu_computes_what_the_first_one_does() -> None:
    """With graphs, while the first one is the thread's current GPU."""
    first, second = (decodes(partial(Forced, name, enforce_eager=False)) for name in ("cuda:0", "cuda:1"))
    assert torch.cuda.current_device() == 0
    assert second.tokens == first.tokens
    assert all(torch.equal(logits, second.logits[key]) for key, logits in first.logits.items())
