"""The training of draft heads: the torch layers compute what the engine does, and what is learned loads into it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle_heads import (
    DRAFT_VOCAB,
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    THETA,
    VOCAB_SIZE,
    drafted_logits,
    random_head,
)
from support.scripts import load_script
from support.tiny_folder import write_tiny_folder
from support.toy import always_speculate
from torch.nn.functional import log_softmax

from fastinfer import LLM, SamplingParams
from fastinfer.cli.main import main
from fastinfer.errors import FastinferError
from fastinfer.train_head import prompts, run
from fastinfer.train_head.head import HeadSizes, TrainableHead
from fastinfer.train_head.prompts import read_prompts
from fastinfer.train_head.recorder import Answer
from fastinfer.train_head.run import train_head
from fastinfer.train_head.trainer import NUM_STEPS, Examples, draft_loss, num_right

SIZES = HeadSizes(HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, 3, DRAFT_VOCAB, EPS, THETA)


def test_the_torch_layers_draft_as_the_reference_does() -> None:
    """Every step of the unrolled training is the draft of that depth in a row."""
    head = random_head()
    layers = TrainableHead(
        SIZES, {name: values for name, values in head.items() if name.endswith("weight") and "embed" not in name}
    )
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB_SIZE, (2, 9), generator=generator)
    aux = torch.randn(2, 9, 3 * HIDDEN, generator=generator)
    steps = layers(head["embed_tokens.weight"][tokens], aux, 3)
    for text in range(2):
        for num_drafts, logits in enumerate(steps):
            for end in range(num_drafts + 2, 10):
                known = list(aux[text, : end - num_drafts - 1].split(HIDDEN, -1))
                expected = drafted_logits(head, known, tokens[text, :end].tolist(), num_drafts)
                torch.testing.assert_close(logits[text, end - 1], expected, atol=1e-4, rtol=1e-4)


def some_examples() -> Examples:
    """Two answers of 3 and 4 tokens; the head has the even tokens as its columns."""
    column_of = torch.where(torch.arange(20) % 2 == 0, torch.arange(20) // 2, -1)

    def answer(length: int, first: int, top: list[list[int]]) -> Answer:
        probs = torch.tensor([[0.5, 0.25]]).repeat(len(top), 1).half()
        return Answer(torch.arange(length), torch.zeros(length, 3), first, torch.tensor(top, dtype=torch.int32), probs)

    answers = [answer(5, 2, [[2, 4], [3, 6], [8, 1]]), answer(6, 2, [[4, 2], [6, 8], [10, 2], [12, 2]])]
    return Examples.of(answers, column_of)


def test_the_loss_counts_the_tokens_that_the_head_has() -> None:
    examples = some_examples()
    logits = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(3))
    logprobs = log_softmax(logits, -1)
    third = 1 / 3
    rows = [
        logprobs[0, 2, 1] * 2 * third + logprobs[0, 2, 2] * third,
        logprobs[0, 3, 3],
        logprobs[0, 4, 4],
        *(
            logprobs[1, row, a] * 2 * third + logprobs[1, row, b] * third
            for row, a, b in ((2, 2, 1), (3, 3, 4), (4, 5, 1), (5, 6, 1))
        ),
    ]
    torch.testing.assert_close(draft_loss([logits, logits], examples), -torch.stack(rows).mean(), atol=1e-4, rtol=1e-4)


def test_a_draft_counts_after_right_ones_alone() -> None:
    """The head drafts the columns 1, 3, 4 and 2, 3, 5, 6 but is wrong once in each depth."""
    examples = some_examples()
    right = torch.nn.functional.one_hot(examples.columns[..., 0].clamp(min=0), 10).float()
    wrong = right.roll(1, -1)
    first, second = right.clone(), right.clone()
    first[1, 3], second[1, 3] = wrong[1, 3], wrong[1, 3]
    # Rows of two drafts begin at tokens 2 and 3 of the first answer and 2, 3 and 4 of the second. Token 3 is out of the
    # head's vocabulary in the first answer.
    assert num_right([first, second], examples).tolist() == [5, 3, 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 7, "max_position_embeddings": 512}
    folder = write_tiny_folder(tmp_path_factory.mktemp("model") / "model", "llama2", sizes=sizes)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_head_is_trained_and_drafts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "DRAFT_VOCAB_SIZE", 64)
    data, out = tmp_path / "prompts.txt", tmp_path / "head"
    data.write_text("\n".join(["long " * 40, *(f"message {index}" for index in range(40))]))
    arguments = ["train-head", "--model", str(model), "--data", str(data), "--minutes", "0.05", "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "the model's tokens can be drafted" in printed
    assert "messages left out, as their prompts have more than 128 tokens: 1" in printed
    report = json.loads((out / "training_report.json").read_text())
    assert report["num_answers"] >= 32
    assert len(report["before"]) == len(report["after"]) == NUM_STEPS
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    llm = LLM(str(model), max_model_len=96, draft_model=str(out), num_speculative_tokens=3)
    always_speculate(llm.engine)
    found = llm.generate(["message 3", "and"], params)
    expected = LLM(str(model), max_model_len=96).generate(["message 3", "and"], params)
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    assert llm.engine.stats().num_drafted_tokens > 20
    with pytest.raises(FastinferError, match="out: expected a new or empty folder"):
        train_head(str(model), str(data), 1.0, out, lambda text, share: None)


def test_the_example(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also that the training ends if the first answers have taken the whole time."""
    monkeypatch.setattr(run, "DRAFT_VOCAB_SIZE", 64)
    monkeypatch.setattr(run, "MAX_SEQS", 4)
    example, out = load_script("examples/train_head.py"), tmp_path / "head"
    assert example.main([str(out), "--model", str(model), "--minutes", "0.001", "--max-tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^1 +[\d.]+% +[\d.]+%$", printed, re.MULTILINE)
    answers = re.findall(r"\[(without drafts|with the head): \d+ tokens/s\]\n(.*?)\n\n", printed, re.DOTALL)
    assert [name for name, _ in answers] == ["without drafts", "with the head"]
    assert answers[0][1] == answers[1][1]


def test_the_time_covers_loading_and_messages(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over after loading, so that no more than the first messages and answers are written."""
    copy = shutil.copytree(model, tmp_path / "model")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for message in messages %}user: {{ message.content }}{% endfor %}"
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(run, "DRAFT_VOCAB_SIZE", 64)
    monkeypatch.setattr(run, "MAX_SEQS", 4)
    monkeypatch.setattr(prompts, "FIRST_MESSAGES", 2)
    written: list[prompts.Prompts] = []

    def read(*args: Any) -> prompts.Prompts:
        written.append(read_prompts(*args))
        return written[0]

    monkeypatch.setattr(run, "read_prompts", read)
    shares = []
    report = train_head(str(copy), "self", 1e-4, tmp_path / "head", lambda text, share: shares.append((text, share)))
    text, share = shares[0]
    assert text == "prompts"
    assert share > 1.0
    assert len(written[0].learned) + len(written[0].held_out) < prompts.NUM_MESSAGES / 4
    assert report.num_answers == 4


@pytest.mark.parametrize(
    ("family", "text", "message"),
    [
        ("llama2", "one line", "2 messages, one in each line, whose prompts have at most 128 tokens, got 1"),
        ("llama2", f"short\n{'long ' * 40}\n{'longer ' * 4000}", "at most 128 tokens, got 1 and 2 longer"),
        ("llama2", None, "data must be a file for a model without a chat template, got 'self'"),
        ("gemma2", "a\nb", "a head is trained for models with the layers of a Llama, got Gemma2ForCausalLM"),
    ],
)
def test_what_cannot_be_trained(tmp_path: Path, family: str, text: str | None, message: str) -> None:
    folder, data = write_tiny_folder(tmp_path / "model", family, sizes={"num_hidden_layers": 7}), tmp_path / "data"
    data.write_text(text or "")
    with pytest.raises(FastinferError, match=message):
        train_head(str(folder), "self" if text is None else str(data), 1.0, tmp_path / "out", lambda *_: None)
