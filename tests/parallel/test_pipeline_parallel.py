"""Engines with stages: preemption and abortion while steps are in flight, and refusals."""

from pathlib import Path
from typing import Any

import pytest
from support.divided import GREEDY, LIMITS, LONG, PROMPTS, SAMPLED, texts
from support.kv_files import kv_files, wait_for_files
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams
from fastinfer.errors import FastinferError
from fastinfer.parallel.stage import Stage


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


def test_stages_of_chosen_layers(llama: Path) -> None:
    one = LLM(str(llama), **LIMITS)
    divided = LLM(str(llama), pipeline_parallel_size=2, pipeline_parallel_layers=[1, 3], **LIMITS)
    assert isinstance(divided.engine.worker.model, Stage)
    assert divided.engine.worker.model.indices == range(1, 4)  # the last stage is in this process
    for params in (GREEDY, SAMPLED):
        assert texts(divided, params) == texts(one, params)


def test_other_stages_do_not_share_blocks_on_disk(llama: Path, tmp_path: Path) -> None:
    """The parts of a block follow each other in the order of the ranks, so its bytes depend on the stages."""
    options = LIMITS | {"pipeline_parallel_size": 2, "kv_offloading_dir": str(tmp_path)}
    expected = texts(LLM(str(llama), **LIMITS), GREEDY)
    for layers in ([1, 3], [3, 1]):
        llm = LLM(str(llama), pipeline_parallel_layers=layers, **options)
        assert texts(llm, GREEDY) == expected
        assert llm.engine.offloading is not None
        assert llm.engine.offloading.disk is not None
        wait_for_files(llm.engine.offloading.disk)
        assert llm.engine.stats().num_loaded_disk_blocks == 0
    assert kv_files(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer in 1..64, got 0"),
        ({"tensor_parallel_layout": "reduce"}, "tensor_parallel_layout must be gather with pipeline_parallel_size=2"),
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size must be at most 4"),
        ({"pipeline_parallel_layers": [4]}, r"pipeline_parallel_layers must be a list of .*, got \[4\]"),
        ({"pipeline_parallel_layers": "13"}, "pipeline_parallel_layers must be a list of .*, got '13'"),
        ({"pipeline_parallel_layers": [0, 4]}, r"pipeline_parallel_layers must be an integer in 1\.\..*, got 0"),
        ({"pipeline_parallel_layers": [1, True]}, r"pipeline_parallel_layers must be an integer in 1\.\..*, got True"),
        ({"pipeline_parallel_layers": [1, 2]}, r"pipeline_parallel_layers must add up to .* 4 layers, got \[1, 2\]"),
        ({"pipeline_parallel_size": 1, "pipeline_parallel_layers": [3]}, "must add up to the model's 4 layers"),
        ({"tensor_parallel_size": 33}, r"tensor_parallel_size \* pipeline_parallel_size must be at most 64, got 66"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size must be at most 4 for this model"),
    ],
)
def test_what_is_not_supported_is_refused(llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FastinferError, match=message):
        LLM(str(llama), **{"pipeline_parallel_size": 2, **options})
