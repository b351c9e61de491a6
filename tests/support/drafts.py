"""Texts of an engine with a draft head, and what the head drafts."""

import gc
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor

from fastinfer import LLM, SamplingParams
from fastinfer.engine.batch_inputs import StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.logits_row import LogitsRow

PROMPTS: Any = [{"prompt_token_ids": [5, 9, 200, 31, 7] * count} for count in (1, 9, 4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "block_size": 8, "max_num_batched_tokens": 16}


def texts(llm: LLM, params: SamplingParams, **options: Any) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, params, **options)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def recorded_drafts(llm: LLM) -> list[tuple[list[int], int, Tensor]]:
    """Return the head's drafts from now on: the text, how many of its last tokens are drafts, and the logits."""
    worker, drafts = llm.engine.draft_worker, []
    assert worker is not None
    run = worker.run

    def record(chunks: list[Chunk], rows: list[LogitsRow], drawn: Tensor | None = None) -> StepResult:
        result = run(chunks, rows, drawn)
        for row, logits in zip(rows, result.logits, strict=True):
            drafts.append(([*row.sequence.token_ids, *row.drafts], len(row.drafts), logits.clone()))
        return result

    worker.run = record  # type: ignore[method-assign]
    return drafts


def check_adapter_and_sleep(llm: LLM, alone: LLM, adapter: Path) -> None:
    """Check that an engine with a head writes an adapter's texts as one without does, also after a sleep."""
    for engine in (llm, alone):
        engine.load_adapter("a", adapter)
    before = texts(llm, GREEDY, adapter="a")
    assert before == texts(alone, GREEDY, adapter="a") != texts(alone, GREEDY)
    worker = llm.engine.draft_worker
    assert worker is not None
    parts = [weakref.ref(part) for part in (worker.model, getattr(worker.model, "chain", None)) if part is not None]
    llm.sleep(2)
    gc.collect()
    assert all(part() is None for part in parts)  # whose weights are freed
    llm.wake_up()
    assert texts(llm, GREEDY, adapter="a") == before
