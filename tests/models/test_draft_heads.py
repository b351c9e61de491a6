"""EAGLE-3 heads in the formats of others: their drafts are those of a reference, and change no text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import eagle_heads
from support.eagle_heads import drafted_logits, random_head, write_specforge, write_speculators
from support.tiny_folder import write_tiny_folder
from support.toy import always_speculate
from torch import Tensor

from fastinfer import LLM, SamplingParams
from fastinfer.engine.batch_inputs import StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.errors import CheckpointFormatError, FastinferError, RequestError, UnsupportedModelError

NUM_LAYERS = 7
PROMPTS: Any = [{"prompt_token_ids": [5, 9, 200, 31, 7] * count} for count in (1, 9, 4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "block_size": 8, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "model", sizes={"num_hidden_layers": NUM_LAYERS})


def with_head(model: Path, head: Path, **options: Any) -> LLM:
    llm = LLM(str(model), draft_model=str(head), num_speculative_tokens=3, **OPTIONS | options)
    always_speculate(llm.engine)
    return llm


def recorded_drafts(llm: LLM) -> list[tuple[list[int], int, Tensor]]:
    """What the head drafts from now on: the text, how many of its last tokens are drafts, and the logits."""
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


@pytest.mark.parametrize(
    ("write", "num_aux", "settings", "expected_aux"),
    [
        (write_speculators, 3, {}, (2, 3, 4)),
        (
            write_speculators,
            2,
            {"eagle_aux_hidden_state_layer_ids": [1, NUM_LAYERS], "norm_before_residual": True, "fc_norm": True},
            (1, NUM_LAYERS),
        ),
        (
            write_speculators,
            3,
            {"model_type": "qwen3", "norm_before_fc": True, "norm_output": True},
            (2, 3, 4),
        ),
        (write_specforge, 3, {}, (2, 3, 4)),
        (write_specforge, 2, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4]}}, (1, 5)),
    ],
)
def test_drafts_are_those_of_the_reference(
    model: Path,
    tmp_path: Path,
    write: Callable[..., Path],
    num_aux: int,
    settings: dict[str, Any],
    expected_aux: tuple[int, ...],
) -> None:
    head = random_head(num_aux, **settings)
    llm = with_head(model, write(tmp_path / "head", head, **settings))
    drafts = recorded_drafts(llm)
    found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    alone = LLM(str(model), **OPTIONS).generate(PROMPTS, GREEDY)
    assert found == [output.outputs[0].token_ids for output in alone]
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert {num_drafts for _, num_drafts, _ in drafts} == {0, 1, 2}
    for tokens, num_drafts, logits in drafts[::5]:
        text = torch.tensor([tokens[: len(tokens) - num_drafts - 1]])
        with torch.no_grad():
            states = _layer_inputs(whole, text)
        aux = [states[layer] for layer in expected_aux]
        expected = drafted_logits(head, aux, tokens, num_drafts, **settings)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def _layer_inputs(model: Any, text: Tensor) -> list[Tensor]:
    """Inputs of all layers, and the output of the last one before the norm."""
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, args, out: outputs.append((args[0][0], out))) for layer in model.model.layers
    ]
    model(text)
    for hook in hooks:
        hook.remove()
    last = outputs[-1][1]
    return [pair[0] for pair in outputs] + [(last[0] if isinstance(last, tuple) else last)[0]]
