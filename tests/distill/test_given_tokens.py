"""The prompt of written texts is context that the teacher did not write: its tokens are not predicted."""

from pathlib import Path

import pytest
import torch
from support.tiny_folder import write_tiny_folder
from torch.nn.functional import cross_entropy

from fastinfer.distill.judge import Judge
from fastinfer.distill.layers import drop_layers
from fastinfer.distill.losses import WholeTargets, logit_loss
from fastinfer.distill.objective import Objective
from fastinfer.distill.shards import Shards
from fastinfer.distill.student import Student
from fastinfer.distill.teacher import Teacher
from fastinfer.distill.texts import Texts, read_texts
from fastinfer.evaluation.perplexity import log_probabilities

pytest.importorskip("transformers")
PROMPT = [70, 71, 72, 73, 74]
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("given") / "teacher", sizes={"num_hidden_layers": 3})


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Teacher:
    return Teacher(str(folder), LENGTH, top_k=16, temperature=1.0, whole=True)


@pytest.fixture
def student(folder: Path) -> Student:
    student = Student.open(folder, 3, is_cut=True)
    student.keep([0, 2])
    return student


@pytest.fixture
def texts(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> Texts:
    for module in ("shards", "texts"):
        monkeypatch.setattr(f"fastinfer.distill.{module}.SHARD_SECTIONS", 3)
    monkeypatch.setattr("fastinfer.distill.texts.EVALUATION_SECTIONS", 2)
    monkeypatch.setattr("fastinfer.distill.texts.user_prefix", lambda tokenizer: PROMPT)
    return read_texts("self", None, teacher, LENGTH)


@torch.no_grad()
def logits_and_tokens(student: Student, sections: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The student's logits of the tokens behind the prompt, and these tokens."""
    ids = torch.tensor(sections)
    rows = student.logits(ids[:, :-1])[:, len(PROMPT) - 1 :]
    return rows.flatten(0, 1).float(), ids[:, len(PROMPT) :].flatten()


def reference(teacher: Teacher, sections: list[list[int]]) -> torch.Tensor:
    """The teacher's log-probabilities of the same positions."""
    found = log_probabilities(teacher.model, sections, torch.float32)
    return torch.cat([rows[len(PROMPT) - 1 : -1] for rows in found])


def test_a_judgement_is_of_what_the_teacher_wrote(teacher: Teacher, student: Student, texts: Texts) -> None:
    judge = Judge(teacher, texts.evaluation, texts.evaluation_given)
    logits, tokens = logits_and_tokens(student, texts.evaluation)
    p, q = reference(teacher, texts.evaluation), logits.log_softmax(-1)
    found = judge(student)
    assert judge.teacher_loss == pytest.approx(float(cross_entropy(p, tokens)), abs=0.02)  # the judge's cache is bf16
    assert found.loss == pytest.approx(float(cross_entropy(q, tokens)), abs=1e-4)
    assert found.divergence == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), abs=0.02)
    assert found.acceptance == pytest.approx(float(torch.minimum(p, q).exp().sum(-1).mean()), abs=0.02)


@pytest.mark.parametrize("loss", ["logit", "ce"])
def test_losses_are_of_what_the_teacher_wrote(
    teacher: Teacher, student: Student, texts: Texts, tmp_path: Path, loss: str
) -> None:
    objective = Objective((loss,), "fkl", 1.0, (), None, 1, texts.given, teacher.log_probs)
    shard = Shards(tmp_path, teacher, texts, {})[0]
    sections = shard["ids"].tolist()
    logits, tokens = logits_and_tokens(student, sections)
    targets = WholeTargets(teacher.log_probs(shard["output"][:, len(PROMPT) - 1 :].flatten(0, 1)))
    expected = {
        "logit": logit_loss(logits.log_softmax(-1), targets, "fkl"),
        "ce": cross_entropy(logits, tokens),
    }
    assert objective(student, shard).item() == pytest.approx(float(expected[loss]), abs=1e-4)


def test_layers_are_dropped_by_what_the_teacher_wrote(
    student: Student, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    monkeypatch.setattr(
        "fastinfer.distill.layers.cross_entropy",
        lambda logits, tokens: counted.append(tokens.tolist()) or cross_entropy(logits, tokens),
    )
    drop_layers(student, 1, torch.tensor(texts.evaluation[:1]), texts.given)
    assert counted == [texts.evaluation[0][len(PROMPT) :]] * 2


def test_the_text_of_a_file_has_no_prompt(teacher: Teacher, texts: Texts, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("tea for two" * 10)
    assert (texts.given, texts.evaluation_given) == (len(PROMPT), len(PROMPT))
    for data, evaluation, given in (("self", str(file), (len(PROMPT), 1)), (str(file), None, (1, 1))):
        found = read_texts(data, evaluation, teacher, LENGTH)
        assert (found.given, found.evaluation_given) == given


def test_tokens_before_the_text_of_a_file_are_given(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher.tokenizer, "prefix", (3, 4))
    file = tmp_path / "text.txt"
    file.write_text("tea for two" * 10)
    for evaluation in (None, str(file)):
        found = read_texts(str(file), evaluation, teacher, LENGTH)
        assert (found.given, found.evaluation_given) == (2, 2)
        assert found.sections is not None
        assert all(section[:2] == [3, 4] and len(section) == LENGTH for section in found.sections + found.evaluation)
