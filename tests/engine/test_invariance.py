"""A request's text is the same however it is computed: greedy decoding of the default model, scheduled in every way.

``FASTINFER_INVARIANCE_PROMPTS`` says how many prompts of 1 to 1,500 tokens; few by default, as 64 take some minutes.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import DATA
from support.toy import always_speculate, check_blocks, drain

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.models import Model, load_model
from fastinfer.sampling_params import SamplingParams
from fastinfer.tokenizers.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

NUM_PROMPTS = int(os.environ.get("FASTINFER_INVARIANCE_PROMPTS", "8"))
NUM_KV_BLOCKS = 2048 if NUM_PROMPTS >= 64 else 384
MAX_PROMPT = 1500 if NUM_PROMPTS >= 64 else 300
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> tuple[Model, Tokenizer]:
    return load_model(model_path, "auto", "cpu", 2048)


@pytest.fixture(scope="module")
def make(loaded: tuple[Model, Tokenizer]) -> Make:
    def make(**limits: Any) -> Engine:
        config = {"max_model_len": 2048, "kv_cache_dtype": torch.float16, "deterministic": True} | limits
        config.setdefault("num_kv_blocks", NUM_KV_BLOCKS)
        engine = Engine(*loaded, EngineConfig(**config))
        for tensor in (tensor for cache in engine.worker.kv_cache for tensor in cache.tensors):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 127)
        return engine

    return make


@pytest.fixture(scope="module")
def prompts(loaded: tuple[Model, Tokenizer]) -> list[list[int]]:
    """Pieces of a text, so that the model goes on with something; some begin with the same words."""
    tokens = loaded[1].encode((DATA / "project_documents.txt").read_text())
    rng = random.Random(0)
    lengths = [1, 2, MAX_PROMPT, *(int(MAX_PROMPT ** rng.random()) for _ in range(NUM_PROMPTS - 3))]
    starts = [rng.choice((0, rng.randrange(len(tokens) - MAX_PROMPT))) for _ in lengths]
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@pytest.fixture(scope="module")
def expected(make: Make, prompts: list[list[int]]) -> list[list[int]]:
    """One by one, without a cache of prefixes and without graphs."""
    engine = make(enable_prefix_caching=False, enforce_eager=True, max_num_batched_tokens=2048)
    return [texts(engine, [prompt])[0] for prompt in prompts]


def texts(engine: Engine, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[list[int]]:
    """The completions; all of a prompt's must be the same."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = drain(engine, 100_000)
    check_blocks(engine)
    for request_id in ids:
        assert len({tuple(completion.token_ids) for completion in outputs[request_id].outputs}) == 1
    return [outputs[request_id].outputs[0].token_ids for request_id in ids]


def test_batched(make: Make, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert texts(make(), prompts) == expected


def test_chunked(make: Make, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert texts(make(max_num_batched_tokens=64), prompts) == expected


def test_after_prefix_hits(make: Make, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = make()
    for _ in range(2):
        assert texts(engine, prompts) == expected
    assert engine.stats().num_hit_tokens > sum(map(len, prompts)) / 3


def test_under_preemption(make: Make, prompts: list[list[int]], expected: list[list[int]]) -> None:
    longest = MAX_PROMPT + 16
    blocks = -(-longest // 4) + 3
    engine = make(num_kv_blocks=blocks, block_size=4, max_model_len=longest, enable_prefix_caching=False)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # the short ones run together
    found = texts(engine, [prompts[index] for index in order])
    assert found == [expected[index] for index in order]
    assert engine.stats().num_preemptions > 0


def test_with_speculation(make: Make, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = always_speculate(make(num_speculative_tokens=5))
    assert texts(engine, prompts) == expected
    assert engine.stats().num_accepted_tokens > 0


def test_with_a_draft_model(
    loaded: tuple[Model, Tokenizer], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """The model itself: it must always be right."""
    config = EngineConfig(max_model_len=2048, kv_cache_dtype=torch.float16, num_speculative_tokens=3)
    engine = always_speculate(Engine(*loaded, config, draft_model=loaded[0]))
    assert texts(engine, prompts[:8]) == expected[:8]
    assert engine.stats().num_accepted_tokens == engine.stats().num_drafted_tokens > 0


def test_three_copies(make: Make, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert texts(make(), prompts, replace(PARAMS, n=3)) == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_a_quantised_cache(make: Make, prompts: list[list[int]], dtype: torch.dtype) -> None:
    alone = make(kv_cache_dtype=dtype, enable_prefix_caching=False, enforce_eager=True)
    expected = [texts(alone, [prompt])[0] for prompt in prompts[:8]]
    engine = make(kv_cache_dtype=dtype, max_num_batched_tokens=64)
    for _ in range(2):
        assert texts(engine, prompts[:8]) == expected
    assert texts(engine, prompts[:8], replace(PARAMS, n=3)) == expected
