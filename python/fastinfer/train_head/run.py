"""A run: the model answers prompts for some time, and a head learns from the answers for the rest of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from fastinfer import hub
from fastinfer.evaluation.recording import MAX_SEQS
from fastinfer.models import load_model, open_checkpoint
from fastinfer.models.decoder import Decoder
from fastinfer.models.eagle_head import usual_aux_layers
from fastinfer.train_head.head import TrainableHead
from fastinfer.train_head.initial import head_sizes, initial_weights
from fastinfer.train_head.prompts import read_prompts
from fastinfer.train_head.recorder import LENGTH, Answer, Recorder
from fastinfer.train_head.trainer import NO_TOKEN, Trainer
from fastinfer.train_head.writer import HeadDescription, write_head
from fastinfer.utils.checks import check_new_folder

DRAFT_VOCAB_SIZE = 8192
# Share of the time after which the model writes no more messages.
WRITING = 0.2
# Share of the time that is then left in which it answers prompts.
ANSWERING = 0.35
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class HeadReport:
    """Report of a run.

    Attributes:
        num_too_long: messages that were left out, as their prompts leave no room for an answer.
        num_answers, num_tokens: answers that the head learned from, and their tokens.
        passes: number of times that it saw each.
        before, after: acceptance of the first and second draft on held-out prompts, each of those whose
            predecessors were accepted, before and after the training.
        coverage: share of the model's next tokens, on held-out prompts, that the head can draft.
    """

    num_too_long: int
    num_answers: int
    num_tokens: int
    passes: float
    before: list[float]
    after: list[float]
    coverage: float


def train_head(model_name: str, data: str, minutes: float, out: Path, progress: Progress) -> HeadReport:
    """Train a draft head for a model, and write it.

    Args:
        model_name: name or path of the model.
        data: path of a file of prompts, or ``"self"``, see :func:`fastinfer.train_head.prompts.read_prompts`.
        minutes: time of the whole run. The first messages and answers are always completed, and the training takes at
            least as long as the answers.
        out: folder to write, new or empty.
        progress: function that is called with a text, and the share of the time that has passed.

    Raises:
        FastinferError: the model cannot be loaded or has other layers than a Llama, or the prompts cannot be read.
    """
    start, seconds = time.monotonic(), 60 * minutes

    def share() -> float:
        return (time.monotonic() - start) / seconds

    check_new_folder("out", out)
    path = hub.resolve(model_name)
    checkpoint = open_checkpoint(path)
    aux_layers = usual_aux_layers(checkpoint.config.num_layers)
    sizes = head_sizes(checkpoint, len(aux_layers), min(DRAFT_VOCAB_SIZE, checkpoint.config.vocab_size))
    model, tokenizer = load_model(path, max_model_len=LENGTH)
    assert isinstance(model, Decoder)
    recorder = Recorder(model, tokenizer, aux_layers)
    progress("prompts", share())
    prompts = read_prompts(data, recorder.engine, lambda: share() >= WRITING)
    learned, began = prompts.learned, share()
    unseen = list(recorder.answers(prompts.held_out[: 2 * MAX_SEQS], 0, greedy=True))
    answers: list[Answer] = []
    for first in count(0, MAX_SEQS):
        batch = [learned[index % len(learned)] for index in range(first, first + MAX_SEQS)]
        # Every second answer is greedy; of a prompt that comes again they take turns.
        for answer in recorder.answers(batch, first + first // len(learned)):
            answers.append(answer)
            progress(f"{len(answers)} answers", share())
        if share() >= began + ANSWERING * (1.0 - began):
            break
    draft_tokens = choose_tokens(answers, checkpoint.config.vocab_size, sizes.draft_vocab_size)
    column_of = torch.full((checkpoint.config.vocab_size,), NO_TOKEN)
    column_of[draft_tokens] = torch.arange(len(draft_tokens))
    head = TrainableHead(sizes, initial_weights(checkpoint, sizes, draft_tokens))
    trainer = Trainer(head, lambda tokens: model.embedding.rows(tokens, torch.float32), column_of)
    before = trainer.acceptance(unseen)
    answered = share()
    remaining = max(1.0 - answered, 0.0)
    passes = trainer.train(
        answers,
        # The first answers may take more than their share of a short time.
        max(remaining, answered - began) * seconds,
        lambda done, loss: progress(f"{len(answers)} answers, loss {loss:.3f}", 1.0 - (1.0 - done) * remaining),
    )
    description = HeadDescription(sizes, checkpoint.config.vocab_size, aux_layers, model_name)
    write_head(out, head.tensors(), draft_tokens, description)
    top = torch.cat([answer.top_tokens[:, 0] for answer in unseen]).long()
    return HeadReport(
        num_too_long=prompts.num_too_long,
        num_answers=len(answers),
        num_tokens=sum(len(answer.tokens) for answer in answers),
        passes=passes,
        before=before,
        after=trainer.acceptance(unseen),
        coverage=float((column_of[top] != NO_TOKEN).float().mean()),
    )


def choose_tokens(answers: list[Answer], vocab_size: int, size: int) -> Tensor:
    """Return the tokens that the model is likeliest to write, [size] int64 in ascending order."""
    expected = torch.zeros(vocab_size)
    for answer in answers:
        expected.index_add_(0, answer.top_tokens.flatten(), answer.top_probs.flatten().float())
    return expected.topk(size).indices.sort().values
