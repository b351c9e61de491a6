"""Engines whose model is divided among processes, by tensors or by layers, give bit for bit what one process gives."""

from pathlib import Path
from typing import Any

import pytest
from support.divided import GREEDY, LIMITS, PROMPTS, SAMPLED, texts
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams
from fastinfer.sampling_params import BeamSearchParams
from fastinfer.structured_output import StructuredOutputsParams

# Families, and for each the numbers of ranks of a stage and of stages.
DIVISIONS = [
    *[("llama3", 3, 1), ("llama3", 1, 3)],
    *[("mixtral", 2, 1), ("gemma4-inputs", 1, 2), ("mixtral", 2, 2)],
    *[("qwen3.5", 1, 3), ("granite-hybrid-dense", 2, 2), ("deepseek-v2", 1, 2)],
]


@pytest.fixture(scope="module", params=DIVISIONS, ids=str)
def division(request: pytest.FixtureRequest) -> tuple[str, int, int]:
    found: tuple[str, int, int] = request.param
    return found


@pytest.fixture(scope="module")
def folder(division: tuple[str, int, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"), division[0])


@pytest.fixture(scope="module")
def whole(folder: Path) -> LLM:
    return LLM(str(folder), **LIMITS)


@pytest.fixture(scope="module")
def divided(folder: Path, division: tuple[str, int, int]) -> LLM:
    _, tensor, pipeline = division
    return LLM(str(folder), tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **LIMITS)


def test_texts(whole: LLM, divided: LLM) -> None:
    least = SamplingParams(temperature=2.0, seed=3, min_tokens=9, max_tokens=10, stop_token_ids=[*range(3, 130)])
    for params in (GREEDY, SAMPLED, least, GREEDY):  # the second time with prefix hits
        assert texts(divided, params) == texts(whole, params)
    assert divided.engine.stats().num_hit_tokens > 0
    assert divided.engine.stats().num_failed_graphs == 0


def test_grammars(whole: LLM, divided: LLM) -> None:
    grammar = StructuredOutputsParams(regex="[0-9]{3,20}(x|yz)")
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=1, structured_outputs=grammar)
    found = texts(divided, params)
    assert found == texts(whole, params)
    assert all(output.outputs[0].text[:3].isdecimal() for output in divided.generate(PROMPTS, params))


def test_log_probabilities_of_prompts(whole: LLM, divided: LLM) -> None:
    """Of which the other ranks of a stage compute a part, after the later steps that they have begun already."""
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    ours, theirs = (llm.generate(PROMPTS, params) for llm in (divided, whole))
    assert [output.prompt_logprobs for output in ours] == [output.prompt_logprobs for output in theirs]


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
