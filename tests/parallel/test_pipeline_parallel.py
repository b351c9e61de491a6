"""Engines whose layers are divided among processes give bit for bit what one process gives, and end in good order."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, AsyncEngine, SamplingParams
from fastinfer.errors import FastinferError
from fastinfer.parallel import group as group_module
from fastinfer.sampling_params import BeamSearchParams

# Long prompts are computed in chunks of 24 tokens, and the last one repeats the beginning of the first.
PROMPTS = [{"prompt_token_ids": ids} for ids in ([*range(3, 60)], [7, 8, 9], [*range(90, 200)], [*range(3, 40), 5])]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=11, top_p=0.9, logprobs=2, ignore_eos=True, n=2)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
LIMITS: dict[str, Any] = {"kv_cache_memory": 2**22, "max_num_batched_tokens": 24, "block_size": 8}


def texts(llm: LLM, params: SamplingParams) -> list[Any]:
    """Tokens and log-probabilities of all completions."""
    outputs = llm.generate(PROMPTS, params)
    return [(part.token_ids, part.logprobs) for output in outputs for part in output.outputs]


def is_alive(pid: int) -> bool:
    """Whether there is such a process that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module", params=["llama3", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def whole(folder: Path) -> LLM:
    return LLM(str(folder), **LIMITS)


@pytest.fixture(scope="module", params=[2, 3])
def divided(folder: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(str(folder), pipeline_parallel_size=request.param, **LIMITS)


def test_texts(whole: LLM, divided: LLM) -> None:
    for params in (GREEDY, SAMPLED, GREEDY):  # the second time with prefix hits
        assert texts(divided, params) == texts(whole, params)
    assert divided.engine.stats().num_hit_tokens > 0
    assert divided.engine.stats().num_failed_graphs == 0


def test_log_likelihoods(whole: LLM, divided: LLM) -> None:
    items: Any = [PROMPTS[2], ({"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]})]
    assert divided.score(items) == whole.score(items)


def test_embeddings(whole: LLM, divided: LLM) -> None:
    for pooling in ("mean", "last"):
        ours, theirs = (llm.embed(PROMPTS, pooling=pooling) for llm in (divided, whole))
        assert [output.embedding for output in ours] == [output.embedding for output in theirs]


def test_beam_search(whole: LLM, divided: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    ours, theirs = (llm.beam_search(PROMPTS[:2], params) for llm in (divided, whole))
    assert [out.token_ids for o in ours for out in o.outputs] == [out.token_ids for o in theirs for out in o.outputs]


def test_sleep_is_refused(divided: LLM) -> None:
    with pytest.raises(FastinferError, match="sleep needs pipeline_parallel_size=1"):
        divided.sleep()


def test_preempted_requests_without_graphs(llama: Path) -> None:
    """In a cache of 256 tokens, which is less than the requests have together."""
    limits = LIMITS | {"dtype": "bfloat16", "max_model_len": 130, "kv_cache_memory": 2**17, "enforce_eager": True}
    one, two = (LLM(str(llama), pipeline_parallel_size=size, **limits) for size in (1, 2))
    prompts: Any = [{"prompt_token_ids": [*range(3 + i, 10 + 2 * i)]} for i in range(6)]
    params = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
    ours, theirs = (llm.generate(prompts, params) for llm in (two, one))
    assert [output.outputs[0].token_ids for output in ours] == [output.outputs[0].token_ids for output in theirs]
    assert two.engine.stats().num_preemptions > 0


def test_aborted_request_leaves_its_steps(llama: Path) -> None:
    one, two = (LLM(str(llama), pipeline_parallel_size=size, **LIMITS) for size in (1, 2))
    outputs = two.stream_outputs(PROMPTS[2], LONG)
    next(outputs)
    outputs.close()
    assert texts(two, GREEDY) == texts(one, GREEDY)
    assert two.engine.block_manager.num_used == 0


def test_killed_rank_ends_the_step_with_its_name(llama: Path) -> None:
    llm = LLM(str(llama), pipeline_parallel_size=3, **LIMITS)
    assert llm.engine.ranks is not None
    pids = llm.engine.ranks.pids
    outputs = llm.stream_outputs(PROMPTS[0], LONG)
    next(outputs)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        list(outputs)
    assert str(raised.value) == "pipeline parallelism ended: rank 2 ended by signal SIGKILL"
    wait_for(lambda: not any(map(is_alive, pids)))
    with pytest.raises(RuntimeError, match="pipeline parallelism ended: rank 2 ended by signal SIGKILL"):
        llm.generate([PROMPTS[0]], LONG)


def test_stopped_rank_ends_the_step_at_the_deadline(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "DEADLINE", 3.0)
    llm = LLM(str(llama), pipeline_parallel_size=2, **LIMITS)
    assert llm.engine.ranks is not None
    [pid] = llm.engine.ranks.pids
    outputs = llm.stream_outputs(PROMPTS[0], LONG)
    next(outputs)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"pipeline parallelism ended: rank 1 did not .* within 3000 ms"):
        list(outputs)
    wait_for(lambda: not is_alive(pid))


def test_dead_engine_says_so(llama: Path) -> None:
    engine = AsyncEngine.from_model(str(llama), pipeline_parallel_size=2, **LIMITS)
    assert engine._engine.ranks is not None
    [pid] = engine._engine.ranks.pids
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: engine.health().is_dead)
    assert engine.health().refusal == "the engine is dead: pipeline parallelism ended: rank 1 ended by signal SIGKILL"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer in 1..64, got 0"),
        ({"max_loras": 1}, "max_loras must be 0 with pipeline_parallel_size=2, got 1"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens must be 0 with pipeline_parallel_size=2, got 3"),
        ({"kv_offloading_size": 0.1}, "kv_offloading_size must be None with pipeline_parallel_size=2, got 0.1"),
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size must be at most 4"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1 with pipeline_parallel_size=2, got 2"),
    ],
)
def test_what_is_not_supported_is_refused(llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FastinferError, match=message):
        LLM(str(llama), **{"pipeline_parallel_size": 2, **options})
