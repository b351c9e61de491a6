"""Engines with stages: preemption and abortion while steps are in flight, and refusals."""

from pathlib import Path
from typing import Any

import pytest
from support.divided import GREEDY, LIMITS, LONG, PROMPTS, texts
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams
from fastinfer.errors import FastinferError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("family", "memory"), [("llama3", 2**17), ("lfm2", 90_000)])
def test_preempted_requests_without_graphs(family: str, memory: int, tmp_path: Path) -> None:
    """In a cache of 256 tokens, or of 176 and as much memory for states, which is less than the requests need."""
    write_tiny_folder(tmp_path, family)
    limits = LIMITS | {"dtype": "bfloat16", "max_model_len": 130, "kv_cache_memory": memory, "enforce_eager": True}
    one, two = (LLM(str(tmp_path), pipeline_parallel_size=size, **limits) for size in (1, 2))
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer in 1..64, got 0"),
        ({"tensor_parallel_layout": "reduce"}, "tensor_parallel_layout must be gather with pipeline_parallel_size=2"),
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size must be at most 4"),
        ({"tensor_parallel_size": 33}, r"tensor_parallel_size \* pipeline_parallel_size must be at most 64, got 66"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size must be at most 4 for this model"),
    ],
)
def test_what_is_not_supported_is_refused(llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FastinferError, match=message):
        LLM(str(llama), **{"pipeline_parallel_size": 2, **options})
