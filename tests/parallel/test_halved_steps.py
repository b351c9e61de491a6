"""Engines whose ranks compute steps as two halves, forced on a CPU: bit for bit what whole steps give."""

from pathlib import Path
from typing import Any

import pytest
from support.divided import GREEDY, LIMITS, PROMPTS, SAMPLED, texts
from support.halved_ranks import halved_ranks
from support.peft_adapter import write_adapter
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams
from fastinfer.models import open_checkpoint

# Grouped queries, experts, states of each kind with attention, latents, and windows.
FAMILIES = ["llama3", "mixtral", "qwen3.5", "granite-hybrid-dense", "lfm2-biases", "deepseek-v2", "gemma3"]
# Steps of three chunks of prompts, or of some with tokens that are generated.
OPTIONS: dict[str, Any] = LIMITS | {"dtype": "float32", "tensor_parallel_size": 2, "max_num_seqs": 3}


def halved(folder: Path, **options: Any) -> LLM:
    with halved_ranks():
        return LLM(str(folder), **options)


def counts(llm: LLM) -> tuple[int, int]:
    """Numbers of halved steps, and of all that were not recorded."""
    worker = llm.engine._workers[0]
    assert worker.runner.halves is not None
    return worker.runner.halves.num_steps, worker.num_eager_steps


@pytest.mark.parametrize("family", FAMILIES)
def test_texts(family: str, tmp_path: Path) -> None:
    options = OPTIONS | {"tensor_parallel_layout": "reduce", "enforce_eager": True}
    folder = write_tiny_folder(tmp_path, family)
    whole, ours = LLM(str(folder), **options), halved(folder, **options)
    for params in (GREEDY, SAMPLED, GREEDY):  # the last with prefix hits
        assert texts(ours, params) == texts(whole, params)
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    both = [[output.prompt_logprobs for output in llm.generate(PROMPTS, params)] for llm in (ours, whole)]
    assert both[0] == both[1]
    assert ours.engine.stats().num_hit_tokens > 0
    num_halved, num_steps = counts(ours)
    assert 0 < num_halved < num_steps  # the last sequence is alone


@pytest.mark.parametrize("layout", ["reduce", "gather"])
def test_steps_beside_recorded_ones(layout: str, tmp_path: Path) -> None:
    options = OPTIONS | {"tensor_parallel_layout": layout}
    folder = write_tiny_folder(tmp_path)
    whole, ours = LLM(str(folder), **options), halved(folder, **options)
    for params in (GREEDY, SAMPLED, GREEDY):
        assert texts(ours, params) == texts(whole, params)
    assert ours.engine.stats().num_failed_graphs == 0
    assert counts(ours)[0] > 0


def test_adapters(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    config = open_checkpoint(folder).config
    options = OPTIONS | {"max_loras": 2, "max_lora_rank": 8, "enforce_eager": True}
    whole, ours = LLM(str(folder), **options), halved(folder, **options)
    for name in "01":
        write_adapter(tmp_path / name, config, rank=3, seed=int(name), size=2.0)
        for llm in (whole, ours):
            llm.load_adapter(name, tmp_path / name)
    for names in (["0", None, "1", "0"], [None] * 4):
        outputs = [llm.generate(PROMPTS, GREEDY, adapter=names) for llm in (ours, whole)]
        found = [[(part.token_ids, part.logprobs) for out in some for part in out.outputs] for some in outputs]
        assert found[0] == found[1]
    assert counts(ours)[0] > 0


def test_rows_that_alone_are_wanted_stay_whole(tmp_path: Path) -> None:
    """The model's last layers store nothing."""
    options = OPTIONS | {"enforce_eager": True}
    folder = write_tiny_folder(tmp_path, "gemma4-inputs")
    whole, ours = LLM(str(folder), **options), halved(folder, **options)
    assert texts(ours, GREEDY) == texts(whole, GREEDY)
    num_halved, num_steps = counts(ours)
    assert num_halved < num_steps


def test_nothing_is_halved_on_a_cpu_by_itself(tmp_path: Path) -> None:
    llm = LLM(str(write_tiny_folder(tmp_path)), enforce_eager=True, **OPTIONS)
    texts(llm, GREEDY)
    assert llm.engine._workers[0].runner.halves is None
