"""Gradients of a cut real model from records of the likeliest tokens, against those from whole distributions."""

from pathlib import Path

import pytest
import torch
from support.paths import DATA
from torch.nn.functional import cosine_similarity

from fastinfer.distill.losses import WholeTargets, logit_loss
from fastinfer.distill.objective import Objective
from fastinfer.distill.settings import DIVERGENCES, TOP_K, WHOLE
from fastinfer.distill.student import Student
from fastinfer.distill.teacher import Teacher
from fastinfer.evaluation.perplexity import log_probabilities

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
LENGTH = 256
KEPT = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 19, 20, 21, 22, 23, 24, 27, 28, 29]


def gradient(student: Student, loss: torch.Tensor) -> torch.Tensor:
    """The gradient of all trained parameters, in fp64: sums of 70 million products in fp32 are wrong by a percent."""
    student.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten().double() for p in student.model.parameters() if p.grad is not None])


def test_records_have_the_gradient_of_whole_distributions(model_path: Path) -> None:
    teachers = {
        is_whole: Teacher(str(model_path), LENGTH, top_k=TOP_K, temperature=1.0, whole=is_whole)
        for is_whole in (False, True)
    }
    text = (DATA / "python_import_system.txt").read_text()
    ids = teachers[True].tokenizer.encode(text)[:LENGTH]
    student = Student.open(model_path, 30, is_cut=True)
    student.keep(KEPT)
    student.model.eval()
    [found] = log_probabilities(teachers[True].model, [ids], torch.float32)
    whole = WholeTargets(found[:-1].float())
    for divergence in DIVERGENCES:
        is_whole = divergence in WHOLE
        [records] = teachers[is_whole].record([ids])
        shard = {"ids": torch.tensor([ids]), **{name: row[None, :-1] for name, row in records.items()}}
        objective = Objective(("logit",), divergence, 1.0, (), None, 1, 1, teachers[is_whole].log_probs)
        log_probs = student.logits(torch.tensor([ids[:-1]]))[0].float().log_softmax(-1)
        expected = gradient(student, logit_loss(log_probs, whole, divergence))
        cosine = cosine_similarity(gradient(student, objective(student, shard)), expected, dim=0)
        assert cosine >= 0.99, divergence
