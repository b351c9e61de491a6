"""Draft heads of models that are divided among ranks or places: no bit of a text or of a draft is another one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.drafts import GREEDY, OPTIONS, recorded_drafts, texts
from support.eagle_heads import random_head, write_speculators
from support.mtp_models import MTPModel
from support.tiny_folder import write_tiny_folder
from support.toy import always_speculate

from fastinfer import LLM
from fastinfer.errors import RequestError

SIZES = {"llama3": {"num_hidden_layers": 7}}


def write_eagle(folder: Path, family: str) -> tuple[Path, Path]:
    """Write a model and a head with the model's embedding."""
    head = random_head()
    del head["embed_tokens.weight"]
    model = write_tiny_folder(folder / "model", family, sizes=SIZES.get(family))
    return model, write_speculators(folder / "head", head)


# Families, for each the number of layers for multi-token prediction, 0 for an EAGLE-3 head, and where the model is.
@pytest.mark.parametrize(
    ("family", "num_mtp", "places"),
    [
        ("llama3", 0, {"tensor_parallel_size": 3}),
        # The model's last layers store nothing, and compute all rows for the head's sake.
        ("gemma4-inputs", 0, {"tensor_parallel_size": 2}),
        ("llama3", 0, {"device": "cpu=2,cpu=1,cpu=4"}),
        ("deepseek-v3", 2, {"tensor_parallel_size": 2}),
        ("qwen3.5", 1, {"tensor_parallel_size": 3}),
        ("glm4-moe", 1, {"device": "cpu=3,cpu+cpu=1"}),
    ],
    ids=str,
)
def test_texts_and_drafts(family: str, num_mtp: int, places: dict[str, Any], tmp_path: Path) -> None:
    if num_mtp:
        model, head = MTPModel(family, num_mtp).write(tmp_path / "model"), Path("mtp")
    else:
        model, head = write_eagle(tmp_path, family)
    plain = LLM(str(model), **OPTIONS)
    whole, divided = (
        LLM(str(model), draft_model=str(head), num_speculative_tokens=3, **OPTIONS, **where) for where in ({}, places)
    )
    expected = texts(plain, GREEDY)
    drafts = []
    for llm in (whole, divided):
        always_speculate(llm.engine)
        drafts.append(recorded_drafts(llm))
        assert texts(llm, GREEDY) == expected
        assert llm.engine.stats().num_failed_graphs == 0
    assert {depth for _, depth, _ in drafts[0]} == {0, 1, 2}
    for ours, theirs in zip(*drafts, strict=True):
        assert ours[:2] == theirs[:2]
        assert torch.equal(ours[2], theirs[2])
    divided.sleep(level=2)
    divided.wake_up()
    count = len(drafts[1])
    assert texts(divided, GREEDY) == expected
    assert torch.equal(drafts[1][count][2], drafts[0][0][2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1 with a draft head, got 2"),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_layout": "reduce"},
            "tensor_parallel_layout must be 'gather' with a draft head, got 'reduce'",
        ),
    ],
)
def test_refused_divisions(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, head = write_eagle(tmp_path, "llama3")
    with pytest.raises(RequestError, match=message):
        LLM(str(model), draft_model=str(head), num_speculative_tokens=1, **options)
