"""Recorded steps against the same steps run operator by operator: bitwise the same logits and tokens."""

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from support.random_checkpoint import RandomCheckpoint, int4, int8
from support.toy import VOCAB_SIZE, ToyModel, ToyTokenizer, always_speculate, first_prompt_row, greedy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastinfer import ops
from fastinfer.engine import cpu_graphs
from fastinfer.engine import engine as engine_module
from fastinfer.engine.batch_inputs import StepResult
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.cpu_graphs import MAX_DECODED_TOKENS, OCCURRENCES
from fastinfer.engine.draw import Draw
from fastinfer.engine.engine import Engine
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.sampled_token import SampledToken
from fastinfer.formats.unpacked import Dense, Unpacked
from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.loader import load_decoder
from fastinfer.ops.prompt import NO_ROW
from fastinfer.sampling_params import SamplingParams

CONFIG = ModelConfig(
    architecture="random",
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rotary_dim=16,
    vocab_size=VOCAB_SIZE,
    max_position=96,
    norm_eps=1e-5,
)
PARAMS = SamplingParams(temperature=0.8, top_k=20, max_tokens=40, seed=3, ignore_eos=True)


def random_decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    """A small model with 4-bit layers, one of them with a QKV weight in two forms; and a dense embedding of ``dtype``
    that is also the last layer."""

    def form(name: str, values: Tensor) -> Unpacked:
        if name == "embedding":
            return Dense((values / 4).to(dtype))  # smaller, or it would outweigh the layers
        return int8(values) if name == "layers.1.v_proj" else int4(values)

    return load_decoder(RandomCheckpoint(CONFIG, form), Precision(dtype, 8, 8, dtype), None)


class Watched(Engine):
    """Notes the logits of every step."""

    def __init__(self, model: Decoder | None = None, **limits: object) -> None:
        super().__init__(model or random_decoder(), ToyTokenizer(), EngineConfig(**limits))  # type: ignore[arg-type]
        self.steps: list[tuple[Tensor, list[SampledToken]]] = []
        for tensor in (tensor for cache in self.worker.kv_cache for tensor in cache.tensors):
            tensor.fill_(float("nan"))
        launch = self.sampler.launch

        def watched(result: StepResult, rows: list[LogitsRow]) -> Draw:
            draw = launch(result, rows)
            self.steps.append((result.logits.clone(), draw.tokens()))
            return draw

        self.sampler.launch = watched  # type: ignore[method-assign]


def both(model: Decoder | None = None, **limits: object) -> Iterator[Watched]:
    for enforce_eager in (True, False):
        yield Watched(model, enforce_eager=enforce_eager, **limits)


def drain(engine: Watched) -> None:
    while engine.has_unfinished:
        engine.step()


def recorded_draws(engine: Engine) -> list[bool]:
    """Whether each of the recorded draws has masks."""
    results = [result for _, result in engine.worker.runner.graphs.recorded.values()]  # type: ignore[union-attr]
    return [has_masks for result in results if result.draws for has_masks in result.draws.graphs]


def assert_same_steps(eager: Watched, recorded: Watched) -> None:
    assert not eager.worker.runner.graphs
    assert recorded.worker.runner.graphs.recorded
    assert len(eager.steps) == len(recorded.steps)
    for (expected, expected_tokens), (logits, tokens) in zip(eager.steps, recorded.steps, strict=True):
        assert not expected.isnan().any()
        assert torch.equal(logits, expected)
        assert tokens == expected_tokens


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(1 + 5 * i % 23)] for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 3, 32])
def test_recorded_steps_are_the_eager_ones(block_size: int, dtype: torch.dtype) -> None:
    """Requests that come and end at different times, so that the batch has many sizes and block tables grow."""
    engines = list(both(random_decoder(dtype), block_size=block_size, kv_cache_dtype=dtype, max_num_batched_tokens=16))
    for engine in engines:
        for index, prompt in enumerate(prompts(7)):
            engine.add_request(prompt, replace(PARAMS, max_tokens=5 + 6 * index, seed=index))
            engine.step()
        drain(engine)
    assert_same_steps(*engines)
    assert len(engines[1].worker.runner.graphs.recorded) >= 6
    assert all(logits.dtype == dtype for logits, _ in engines[1].steps)


def test_draws_are_recorded_once() -> None:
    engine = Watched(enforce_eager=False, enable_prefix_caching=False)
    for _ in range(3):
        for index, prompt in enumerate(prompts(5)):
            engine.add_request(prompt, replace(PARAMS, max_tokens=5 + index))
        drain(engine)
        graphs = engine.worker.runner.graphs
        assert recorded_draws(engine) == [False] * len(graphs.recorded)  # type: ignore[union-attr]
    assert len(recorded_draws(engine)) >= 5


def test_after_preemptions() -> None:
    engines = list(both(block_size=2, num_kv_blocks=24, max_model_len=48))
    for engine in engines:
        for prompt in prompts(6):
            engine.add_request(prompt, PARAMS)
        drain(engine)
        assert engine.stats().num_preemptions > 0
    assert_same_steps(*engines)


@pytest.mark.parametrize("max_graphs", [2, 256])
def test_steps_that_verify_drafts(max_graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same number of tokens, cut into sequences in other ways each time; and graphs that make room for others."""
    monkeypatch.setattr(cpu_graphs, "MAX_GRAPHS", max_graphs)
    engines = list(both(block_size=3, num_speculative_tokens=3))
    for engine in engines:
        always_speculate(engine)
        for index, prompt in enumerate(prompts(4)):
            engine.add_request(prompt * 2, replace(PARAMS, temperature=0.5, top_k=3, seed=index))
        drain(engine)
        assert engine.stats().num_accepted_tokens > 5
        assert engine.stats().num_accepted_tokens < engine.stats().num_drafted_tokens
    assert_same_steps(*engines)
    assert len(engines[1].worker.runner.graphs.recorded) <= max_graphs
    assert max_graphs == 2 or len(engines[1].worker.runner.graphs.recorded) > 2


def test_after_aborts() -> None:
    engines = list(both(block_size=4))
    for engine in engines:
        ids = [engine.add_request(prompt, PARAMS) for prompt in prompts(5)]
        for _ in range(4):
            engine.step()
        for request_id in (ids[0], ids[3]):
            engine.abort(request_id)
            engine.step()
        engine.add_request([5, 6, 7], PARAMS)
        drain(engine)
    assert_same_steps(*engines)


def test_two_engines_in_one_process() -> None:
    """In turns, and then at the same time in two threads."""
    model = random_decoder()
    expected = Watched(model, enforce_eager=True)
    for prompt in prompts(4):
        expected.add_request(prompt, PARAMS)
    drain(expected)
    engines = [Watched(model) for _ in range(4)]
    for engine in engines:
        for prompt in prompts(4):
            engine.add_request(prompt, PARAMS)
    while engines[0].has_unfinished:
        engines[0].step()
        engines[1].step()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(drain, engines[2:]))
    for engine in engines:
        assert_same_steps(expected, engine)


class CountCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_replayed_step_calls_no_operator() -> None:
    engine = Watched(block_size=4)
    for prompt in prompts(3):
        engine.add_request(prompt, replace(PARAMS, max_tokens=None))
    for _ in range(3):
        engine.step()
    [(size, (_, result))] = engine.worker.runner.graphs.recorded.items()
    assert (size.num_seqs, size.num_tokens, size.num_logits) == (3, 3, 3)
    for _ in range(60):
        with CountCalls() as calls:
            engine.step()
        assert not [name for name in calls.names if name.startswith("fastinfer")]
    assert engine.worker.runner.graphs.recorded.keys() == {size}
    assert engine.worker.runner.graphs.recorded[size][1] is result


def test_many_requests_leave_nothing_behind() -> None:
    engine = Engine(random_decoder(), ToyTokenizer(), EngineConfig(block_size=4))  # type: ignore[arg-type]

    def serve(rounds: int) -> int:
        for _ in range(rounds):
            for prompt in prompts(4):
                engine.add_request(prompt, replace(PARAMS, max_tokens=10 + len(prompt)))
            while engine.has_unfinished:
                engine.step()
        gc.collect()
        return sys.getallocatedblocks()

    before = serve(5)
    assert serve(20) - before < 500  # about 2,000 tokens


def large(engine: Engine) -> set[int]:
    """The sizes of the recorded batches, without those of the few that came last and so also ended last."""
    return {size.num_seqs for size in engine.worker.runner.graphs.recorded if size.num_seqs > 5}  # type: ignore[union-attr]


def test_large_batches_are_recorded_when_they_have_come_often() -> None:
    engine = Watched(max_num_seqs=MAX_DECODED_TOKENS + 5)
    for index in range(MAX_DECODED_TOKENS + 5):
        engine.add_request([index % VOCAB_SIZE], replace(PARAMS, max_tokens=OCCURRENCES - 1 if index < 6 else 8))
    drain(engine)
    assert large(engine) == {MAX_DECODED_TOKENS - 1}
    for _ in range(MAX_DECODED_TOKENS + 5):
        engine.add_request([1, 2], replace(PARAMS, max_tokens=OCCURRENCES + 2))
    drain(engine)
    assert large(engine) == {MAX_DECODED_TOKENS - 1, MAX_DECODED_TOKENS + 5}


def test_prompts_that_come_often_are_recorded() -> None:
    """Chunks of long prompts, whole ones, and both beside sequences that decode; others are computed in between."""
    engines = list(both(block_size=4, max_num_batched_tokens=16, enable_prefix_caching=False))
    for engine in engines:
        for number in range(2 * OCCURRENCES):
            engine.add_request([1 + number] * 40, replace(PARAMS, max_tokens=1))
            drain(engine)
            for index, prompt in enumerate(prompts(7)):
                tokens = [(token + number) % VOCAB_SIZE for token in prompt * 3]
                engine.add_request(tokens, replace(PARAMS, max_tokens=2 + index, seed=number))
            drain(engine)
    assert_same_steps(*engines)
    recorded = engines[1].worker.runner.graphs.recorded
    assert any(size.num_tokens == 16 > size.num_seqs and size.num_logits < size.num_seqs for size in recorded)
    assert any(size.num_tokens > size.num_seqs == size.num_logits for size in recorded)
    assert any(size.num_tokens == 16 and size.num_logits == 0 for size in recorded)


def test_a_graph_is_replayed_for_the_same_rows_of_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of the same size: two prompts, and a prompt beside a sequence that decodes."""
    forward = Decoder.forward

    def with_roles(model: Decoder, batch: Batch, kv_cache: KVCache) -> Tensor:
        hidden, first = forward(model, batch, kv_cache), first_prompt_row()
        if first < len(hidden):
            ops.softcap(hidden[first:], 0.01)  # on the rows of prompts alone
        return hidden

    monkeypatch.setattr(Decoder, "forward", with_roles)
    monkeypatch.setattr(engine_module, "roles_differ", lambda device, exact: True)
    engines = list(both(block_size=4, enable_prefix_caching=False))
    for engine in engines:
        for number in range(OCCURRENCES + 2):
            engine.add_request([1 + number] * 4, replace(PARAMS, max_tokens=4))
            engine.add_request([2 + number] * 5, replace(PARAMS, max_tokens=1))
            engine.step()
            engine.add_request([3 + number] * 8, replace(PARAMS, max_tokens=2))
            drain(engine)
    assert_same_steps(*engines)
    sizes = [size for size in engines[1].worker.runner.graphs.recorded if size.num_seqs == 2]  # type: ignore[union-attr]
    assert {(size.num_tokens, size.first_prompt_row) for size in sizes} == {(9, 0), (9, 1), (2, NO_ROW)}


def test_sizes_that_were_counted_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_graphs, "MAX_COUNTED", 2)
    engine = Watched(enable_prefix_caching=False)
    for length in (3, 4, 5, 3, 4, 5, 3, 4, 5, 5, 5, 5):
        engine.add_request([1] * length, replace(PARAMS, max_tokens=1))
        drain(engine)
    assert [size.num_tokens for size in engine.worker.runner.graphs.recorded] == [5], "of the others too few since"


def test_a_size_that_was_forgotten_counts_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_graphs, "MAX_GRAPHS", 1)
    engine = Watched(enable_prefix_caching=False)
    recorded = []
    for length in (3, 3, 3, 4, 4, 4, 3, 3, 3):
        engine.add_request([1] * length, replace(PARAMS, max_tokens=1))
        drain(engine)
        recorded.append([size.num_tokens for size in engine.worker.runner.graphs.recorded])
    assert recorded == [[], [], [3], [3], [3], [4], [4], [4], [3]]


def test_an_exception_in_a_replay_leaves_the_engine_usable() -> None:
    engines = list(both(block_size=4))
    for engine in engines:
        for prompt in prompts(3):
            engine.add_request(prompt, PARAMS)
        for _ in range(5):
            engine.step()
    broken = engines[1]
    broken.worker.runner.inputs._block_tables[0, 1, 0] = 10_000
    with pytest.raises(RuntimeError, match=r"block_table\[1, 0\]"):
        broken.step()  # after which the sequences begin anew, and their rows of the table are written as a whole
    for engine in engines:
        drain(engine)
    assert_same_steps(*engines)


def test_a_model_that_cannot_be_recorded_runs_with_a_warning() -> None:
    engine = Engine(ToyModel(), ToyTokenizer(), EngineConfig(kv_cache_dtype=torch.float32))  # type: ignore[arg-type]
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12))
    engine.step()
    with pytest.warns(UserWarning, match="some sizes run operator by operator, which is slower: a CPUGraph records"):
        engine.step()
    while engine.has_unfinished:  # and no second warning: pytest would show it
        output = engine.step()[0]
    assert output.outputs[0].token_ids == greedy([1, 2, 3], 12)


def test_a_size_that_cannot_be_recorded_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Decoder.forward

    def with_torch(model: Decoder, batch: Batch, kv_cache: KVCache) -> Tensor:
        hidden = forward(model, batch, kv_cache)
        return hidden.clone() if len(batch.token_ids) == 2 else hidden  # no operator of the library

    monkeypatch.setattr(Decoder, "forward", with_torch)
    engines = list(both(block_size=4))
    for engine in engines:
        for number, prompt in enumerate(prompts(3)):
            engine.add_request(prompt, replace(PARAMS, max_tokens=10 * (number + 1)))
    eager, recorded = engines
    drain(eager)
    with pytest.warns(UserWarning, match="steps of some sizes run operator by operator"):
        drain(recorded)
    assert_same_steps(*engines)
    graphs = recorded.worker.runner.graphs
    assert graphs is not None
    assert {size.num_tokens for size in graphs.failed} == {2}
    assert {1, 3} <= {size.num_tokens for size in graphs.recorded}  # type: ignore[union-attr]
    stats = recorded.stats()
    assert stats.num_failed_graphs == len(graphs.failed)
    assert 10 <= stats.num_eager_steps < eager.stats().num_eager_steps


def test_draws_with_and_without_masks_in_turns() -> None:
    """Recorded draws find their masks where the last ones were, also in rows that have none any more."""
    engines = list(both(block_size=4))
    params = replace(PARAMS, temperature=2.0, ignore_eos=False, stop_token_ids=list(range(1, 40)))
    for engine in engines:
        for index, prompt in enumerate(prompts(6)):
            engine.add_request(prompt, replace(params, min_tokens=5 * index, seed=index))
        engine.step()
        engine.add_request([1, 2], replace(params, logprobs=2, min_tokens=12))  # not recorded while it runs
        drain(engine)
        engine.add_request([3], replace(params, min_tokens=9))
        engine.add_request([4], PARAMS)
        drain(engine)
    assert_same_steps(*engines)
    assert set(recorded_draws(engines[1])) == {False, True}
