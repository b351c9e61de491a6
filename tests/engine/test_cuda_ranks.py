"""Models that are divided among GPUs, against the same model on one.

``make gpu-check`` runs this on a machine with two GPUs; tests/parallel/test_gpus.py runs it on two fake ones.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.halved_ranks import halved_ranks
from support.helpers import device_fixture
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams
from fastinfer.engine import batch_inputs
from fastinfer.engine.rank_worker import RankWorker
from fastinfer.parallel import peer_group

device = device_fixture("cuda")

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

# The first is computed in two steps.
PROMPTS = [{"prompt_token_ids": ids} for ids in ([*range(3, 33)], [7, 8, 9])]
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
LIMITS: dict[str, Any] = {"kv_cache_memory": 2**22, "max_num_batched_tokens": 24, "max_num_seqs": 2, "block_size": 8}
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_layout": "reduce"}


def texts(llm: LLM) -> list[tuple[list[int], Any, Any]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


@pytest.fixture(scope="module", params=["llama3", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp(request.param), request.param, SIZES)


@pytest.fixture(scope="module")
def divided(folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        if "mixtral" in folder.name:
            patch.setattr(batch_inputs, "MAX_CHANGES", 0)  # so that block tables are copied as a whole
        yield LLM(str(folder), device="cuda", **RANKS, **LIMITS)


def test_texts_are_those_of_one_gpu(folder: Path, divided: LLM, device: str) -> None:
    """But for rounding, and the same in each run, with new blocks and with cached ones."""
    found = texts(divided)
    assert texts(divided) == found
    stats = divided.engine.stats()
    assert (stats.num_eager_steps, stats.num_failed_graphs) == (0, 0)
    assert divided.engine._workers[0].runner.halves is None  # all steps are recorded
    whole = texts(LLM(str(folder), device="cuda", **LIMITS))
    for prompt, (_, _, ours), (_, _, theirs) in zip(PROMPTS, found, whole, strict=True):
        for token, own, other in zip(prompt["prompt_token_ids"][1:], ours[1:], theirs[1:], strict=True):
            # On the emulator at most 0.06. Sums without the other rank's part change some by 0.8 and more.
            assert own[token].logprob == pytest.approx(other[token].logprob, abs=0.2)


@pytest.mark.parametrize("folder", ["llama3"], indirect=True)
def test_exchanges_through_host_memory_change_no_bit(
    folder: Path, divided: LLM, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = texts(divided)
    monkeypatch.setenv(peer_group.DISABLED, "1")
    monkeypatch.delattr(peer_group, "_memories_of_gpus")
    assert texts(LLM(str(folder), device="cuda", **RANKS, **LIMITS)) == expected


def test_steps_in_halves_change_no_bit(folder: Path, device: str) -> None:
    """Also where they do not pay: each half has a stream, and memory for its exchanges."""
    options = RANKS | LIMITS | {"enforce_eager": True, "deterministic": True}
    expected = texts(LLM(str(folder), device="cuda", **options))
    with halved_ranks():
        llm = LLM(str(folder), device="cuda", **options)
    assert texts(llm) == expected
    worker = llm.engine._workers[0]
    assert isinstance(worker, RankWorker)
    assert worker.runner.halves is not None
    assert 0 < worker.runner.halves.num_steps < worker.num_eager_steps
    assert len({peers.memory.view(torch.int64)[5].item() for peers in worker._peers}) == 2  # addresses of their memory


def test_killed_rank_ends_the_step_with_its_name(divided: LLM, device: str) -> None:
    """Though kernels wait for it."""
    assert divided.engine.ranks is not None
    os.kill(divided.engine.ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="tensor parallelism ended: rank 1 ended by signal SIGKILL"):
        texts(divided)
