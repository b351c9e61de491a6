"""Engines whose model is divided among processes, by tensors or by layers, give bit for bit what one process gives."""

from pathlib import Path
from typing import Any

import pytest
from support.divided import GREEDY, LIMITS, PROMPTS, SAMPLED, texts
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM
from fastinfer.sampling_params import BeamSearchParams


@pytest.fixture(scope="module", params=["llama3", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def whole(folder: Path) -> LLM:
    return LLM(str(folder), **LIMITS)


@pytest.fixture(scope="module", params=["tensor 2", "tensor 3", "pipeline 2", "pipeline 3"])
def divided(folder: Path, request: pytest.FixtureRequest) -> LLM:
    kind, size = request.param.split()
    return LLM(str(folder), **{f"{kind}_parallel_size": int(size)}, **LIMITS)


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
