"""Texts to learn from and texts to judge by, as token ids: those of a file, or those that the teacher writes."""

import hashlib
import random
from dataclasses import dataclass

from fastinfer.distill.settings import SELF
from fastinfer.distill.teacher import Teacher
from fastinfer.errors import RequestError
from fastinfer.evaluation.text_file import read_sections
from fastinfer.tokenizers.chat_template import before_user_message
from fastinfer.tokenizers.tokenizer import Tokenizer

# Sections in a shard of records.
SHARD_SECTIONS = 32
EVALUATION_SECTIONS = 16


@dataclass(frozen=True)
class Texts:
    """The texts of a run.

    Attributes:
        sections: sections of a file in random order, of equal length; ``None`` if the teacher writes the texts.
        given: number of tokens at the start of each text that are not predicted: of a section of a file those before
            the text, see :class:`fastinfer.evaluation.text_file.Sections`; of what the teacher writes the prompt, which
            it did not write. A student that learns it by heart has learnt nothing.
        evaluation: unseen sections of the same length.
        evaluation_given: the same number for these.
        length: tokens of a section.
        prompt: where the teacher starts to write, if it does.
    """

    sections: list[list[int]] | None
    given: int
    evaluation: list[list[int]]
    evaluation_given: int
    length: int
    prompt: list[int]

    @property
    def num_shards(self) -> int | None:
        """Number of shards; ``None`` for any number."""
        return None if self.sections is None else -(-len(self.sections) // SHARD_SECTIONS)

    @property
    def digest(self) -> str:
        """Hash of everything that decides which texts are in a shard."""
        return hashlib.sha256(repr((self.sections, self.length, self.prompt)).encode()).hexdigest()

    def shard(self, index: int) -> list[list[int]] | None:
        """Return the sections of a shard; ``None`` if the teacher writes them."""
        if self.sections is None:
            return None
        return self.sections[index * SHARD_SECTIONS : (index + 1) * SHARD_SECTIONS]


def read_texts(data: str, evaluation: str | None, teacher: Teacher, length: int) -> Texts:
    """Read the texts of a run.

    Args:
        data: path of a text file, or ``"self"`` for texts that the teacher writes.
        evaluation: path of another text, to judge by. By default sections at equal distances are taken out of the data,
            or the teacher writes them.
        teacher: the teacher.
        length: tokens of a section.

    Raises:
        RequestError: a text cannot be read or is too short.
    """
    prompt = user_prefix(teacher.tokenizer)
    if data == SELF and len(prompt) > length // 2:
        raise RequestError(
            f"context: expected at least {2 * len(prompt)} tokens for texts that begin with "
            f"{len(prompt)} of the chat template, got {length}"
        )
    sections, given = None, len(prompt)
    if data != SELF:
        found = read_sections(data, teacher.tokenizer, length)
        sections, given = found.ids, found.given
    evaluation_given = given
    if evaluation is not None:
        judged = read_sections(evaluation, teacher.tokenizer, length, EVALUATION_SECTIONS * length)
        held_out, evaluation_given = judged.ids, judged.given
    elif sections is None:
        held_out = teacher.write(prompt, EVALUATION_SECTIONS, length, first_seed=-EVALUATION_SECTIONS)
    else:
        if len(sections) < 2:
            raise RequestError(f"{data}: expected at least two sections of {length} tokens, got {len(sections)}")
        count = min(EVALUATION_SECTIONS, len(sections) // 2)
        chosen = {index * len(sections) // count for index in range(count)}
        held_out = [sections[index] for index in sorted(chosen)]
        sections = [section for index, section in enumerate(sections) if index not in chosen]
    if sections is not None:
        random.Random(0).shuffle(sections)
    return Texts(sections, given, held_out, evaluation_given, length, prompt)


def user_prefix(tokenizer: Tokenizer) -> list[int]:
    """Return what precedes a user's message in the chat template: the model then writes a message, and answers it.

    A model without a template begins with its first or last special token.
    """
    if tokenizer.chat_template is None:
        start = tokenizer.bos_id if tokenizer.bos_id is not None else min(tokenizer.eos_ids, default=0)
        return [start]
    text = before_user_message(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    return tokenizer.encode(text, add_special_tokens=False)
