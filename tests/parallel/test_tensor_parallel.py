"""Engines whose model is divided among processes give bit for bit what one process gives."""

from pathlib import Path
from typing import Any

import pytest
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams
from fastinfer.errors import FastinferError
from fastinfer.sampling_params import BeamSearchParams

# Long prompts are computed in chunks of 24 tokens, and the last one repeats the beginning of the first.
PROMPTS = [{"prompt_token_ids": ids} for ids in ([*range(3, 60)], [7, 8, 9], [*range(90, 200)], [*range(3, 40), 5])]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=11, top_p=0.9, logprobs=2, ignore_eos=True, n=2)
LIMITS: dict[str, Any] = {"kv_cache_memory": 2**22, "max_num_batched_tokens": 24, "block_size": 8}


def texts(llm: LLM, params: SamplingParams) -> list[Any]:
    """Tokens and log-probabilities of all completions."""
    outputs = llm.generate(PROMPTS, params)
    return [(part.token_ids, part.logprobs) for output in outputs for part in output.outputs]


@pytest.fixture(scope="module", params=["llama3", "mixtral"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def whole(folder: Path) -> LLM:
    return LLM(str(folder), **LIMITS)


@pytest.fixture(scope="module", params=[2, 3])
def divided(folder: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(str(folder), tensor_parallel_size=request.param, **LIMITS)


def test_texts(whole: LLM, divided: LLM) -> None:
    for params in (GREEDY, SAMPLED, GREEDY):  # the second time with prefix hits
        assert texts(divided, params) == texts(whole, params)
    assert divided.engine.stats().num_hit_tokens > 0


def test_steps_replay_graphs(divided: LLM) -> None:
    texts(divided, GREEDY)
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


def test_steps_operator_by_operator(folder: Path, whole: LLM) -> None:
    eager = LLM(str(folder), tensor_parallel_size=2, enforce_eager=True, **LIMITS)
    assert texts(eager, GREEDY) == texts(whole, GREEDY)


def test_sleep(whole: LLM, divided: LLM) -> None:
    with pytest.raises(FastinferError, match="level must be 1 with tensor_parallel_size"):
        divided.sleep(2)
    divided.sleep()
    assert divided.engine.is_sleeping
    divided.wake_up()
    assert texts(divided, GREEDY) == texts(whole, GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer in 1..64, got 0"),
        ({"kv_offloading_size": 0.1}, "kv_offloading_size must be None with tensor_parallel_size=2, got 0.1"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size must be at most 4 for this model"),
    ],
)
def test_what_is_not_supported_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FastinferError, match=message):
        LLM(str(folder), **{"tensor_parallel_size": 2, **options})
