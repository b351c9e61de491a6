"""Losses and their gradients against autograd on whole distributions, in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fastinfer.distill import losses
from fastinfer.distill.losses import Targets, WholeTargets, attention_loss, hidden_loss, logit_loss, mean_by_parts
from fastinfer.distill.settings import DIVERGENCES, WHOLE

ROWS, VOCAB = 7, 4999


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(divergence: str, p: Tensor, q: Tensor) -> Tensor:
    """The divergence of probabilities, by its definition."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    middle = (p + q) / 2
    losses: dict[str, Callable[[], Tensor]] = {
        "fkl": lambda: kl(p, q),
        "rkl": lambda: kl(q, p),
        "jsd": lambda: (kl(p, middle) + kl(q, middle)) / 2,
        "lk": lambda: -torch.minimum(p, q).sum(-1).log(),
    }
    return losses[divergence]().mean()


def targets(teacher: Tensor, k: int, temperature: float) -> Targets:
    p = (teacher / temperature).softmax(-1)
    chosen, tokens = p.topk(k)
    return Targets(tokens, chosen.log().half(), (1 - chosen.sum(-1)).clamp(min=1e-7).log().half())


def scaled_loss(logits: Tensor, found: Targets | WholeTargets, divergence: str, temperature: float = 1.0) -> Tensor:
    return logit_loss((logits / temperature).log_softmax(-1), found, divergence, temperature)


def gradients(loss: Callable[[Tensor], Tensor], student: Tensor) -> tuple[Tensor, Tensor]:
    leaf = student.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return value.detach().double(), leaf.grad


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_all_tokens_give_the_whole_divergence(divergence: str, temperature: float) -> None:
    teacher, student = random(ROWS, 19, seed=1), random(ROWS, 19, seed=2)
    p = (teacher / temperature).softmax(-1)
    expected = gradients(lambda x: temperature**2 * dense(divergence, p, (x / temperature).softmax(-1)), student)
    whole = targets(teacher, 19, temperature)
    for found, error in ((whole, 4e-3), (WholeTargets(p.log().float()), 1e-5)):  # the first are fp16
        results = gradients(lambda x, found=found: scaled_loss(x, found, divergence, temperature), student)
        for ours, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=error, atol=error / 10)


@pytest.mark.parametrize("part_rows", [1, 3, ROWS, 100])
def test_a_mean_by_parts_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch, part_rows: int) -> None:
    monkeypatch.setattr(losses, "PART_ROWS", part_rows)
    hidden, head, wanted = random(ROWS, 8, seed=1), random(8, 19, seed=2), random(ROWS, 19, seed=3).softmax(-1)
    seen = []

    def loss(rows: Tensor, part: slice) -> Tensor:
        seen.append(len(rows))
        return dense("fkl", wanted[part], (rows @ head).softmax(-1))

    found = gradients(lambda x: 3.0 * mean_by_parts(2.0 * x, loss), hidden)
    assert max(seen) <= part_rows
    expected = gradients(lambda x: 3.0 * loss(2.0 * x, slice(None)), hidden)
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if name not in WHOLE])
def test_stored_targets_have_the_gradient_of_whole_ones(divergence: str) -> None:
    """For a teacher as flat as a language model: 64 of 4,999 tokens have 88 % of the probability."""
    teacher = 2.2 * random(ROWS, VOCAB, seed=1) + 3.0 * random(ROWS, VOCAB, seed=3).relu().square()
    student = 0.9 * teacher + 0.7 * random(ROWS, VOCAB, seed=2)
    p = teacher.softmax(-1)
    _, expected = gradients(lambda x: dense(divergence, p, x.softmax(-1)), student)
    _, found = gradients(lambda x: scaled_loss(x, targets(teacher, 64, 1.0), divergence), student)
    assert cosine_similarity(found.flatten(), expected.flatten(), dim=0) >= 0.99


def test_hidden_loss() -> None:
    teacher, student = random(5, 33, seed=1), random(5, 33, seed=2)
    expected = gradients(
        lambda x: torch.stack([(a - b).dot(a - b) / b.dot(b) for a, b in zip(x, teacher, strict=True)]).mean(), student
    )
    for ours, reference in zip(gradients(lambda x: hidden_loss(x, teacher), student), expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def test_attention_loss() -> None:
    """Token by token: each has a distribution over itself and those before it; widths differ."""
    teacher, student, heads = random(2, 6, 12, seed=1), random(2, 6, 9, seed=2), 3

    def relation(x: Tensor, text: int, token: int, head: int) -> Tensor:
        part = x[text].chunk(heads, dim=-1)[head]
        return (part[: token + 1] @ part[token] / part.shape[-1] ** 0.5).softmax(-1)

    def reference(x: Tensor) -> Tensor:
        losses = []
        for text, token, head in torch.cartesian_prod(torch.arange(2), torch.arange(6), torch.arange(heads)).tolist():
            p, q = relation(teacher, text, token, head), relation(x, text, token, head)
            losses.append((p * (p / q).log()).sum())
        return torch.stack(losses).mean()

    expected = gradients(reference, student)
    for ours, wanted in zip(gradients(lambda x: attention_loss(x, teacher, heads), student), expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)
        assert wanted.abs().max() > 1e-3
