"""Counts that stay in place: always those of a fresh start, and written only where they change."""

import random

import torch

from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.penalty_tensors import PenaltyTensors
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.token_counts import TokenCounts
from fastinfer.sampling_params import SamplingParams

VOCAB_SIZE = 77
CPU = torch.device("cpu")
PENALISED = SamplingParams(presence_penalty=0.5, repetition_penalty=1.25)


def sequence(number: int, params: SamplingParams = PENALISED) -> Sequence:
    prompt = [(number * 11 + 5 * i) % VOCAB_SIZE for i in range(9)]
    made = Sequence(str(number), prompt, params, 0)
    made.counts = TokenCounts(prompt, VOCAB_SIZE) if params.has_penalties else None
    return made


def check(tensors: PenaltyTensors, rows: list[LogitsRow]) -> None:
    update = tensors.update(rows, CPU)
    for index, row in enumerate(rows):
        owner, drafts = row.sequence, row.drafts
        p = owner.params
        expected = [p.repetition_penalty, p.presence_penalty, p.frequency_penalty]
        assert update["penalties"][index].tolist() == expected
        if owner.counts is not None:
            generated = torch.tensor([*owner.token_ids[owner.num_prompt_tokens :], *drafts], dtype=torch.long)
            assert torch.equal(update["output_counts"][index], generated.bincount(minlength=VOCAB_SIZE).int())
            words = update["prompt_mask"][index].tolist()
            marked = {t for t in range(VOCAB_SIZE) if words[t // 32] >> t % 32 & 1}
            assert marked == set(owner.token_ids[: owner.num_prompt_tokens])


def test_random_batches_have_the_counts_of_a_fresh_start() -> None:
    rng = random.Random(0)
    tensors = PenaltyTensors(VOCAB_SIZE)
    sequences = [sequence(n, SamplingParams() if n % 4 == 3 else PENALISED) for n in range(9)]
    for _ in range(400):
        if rng.random() < 0.2:
            rng.shuffle(sequences)
        rows = []
        for owner in sequences[: rng.randint(1, 9)]:
            for _ in range(rng.randint(0, 2)):
                owner.append(rng.randrange(VOCAB_SIZE))
            drafts = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 0, 3]))]
            rows += [LogitsRow(owner, drafts[:count]) for count in range(len(drafts) + 1)]
        if any(row.sequence.counts is not None for row in rows):
            check(tensors, rows)
        else:
            assert tensors.update(rows, CPU) == {}


def test_only_what_changes_is_written() -> None:
    tensors = PenaltyTensors(VOCAB_SIZE)
    first, second, third = sequences = [sequence(n) for n in range(3)]
    for owner in sequences:
        owner.append(3)
    tensors.update([LogitsRow(first, []), LogitsRow(second, [])], CPU)["output_counts"].fill_(100)
    first.append(4)
    counts = tensors.update([LogitsRow(first, [5]), LogitsRow(third, [])], CPU)["output_counts"]
    assert counts[0, :7].tolist() == [100, 100, 100, 100, 101, 101, 100]
    assert counts[1].tolist() == [int(token == 3) for token in range(VOCAB_SIZE)], "another sequence"
    counts = tensors.update([LogitsRow(first, []), LogitsRow(third, [])], CPU)["output_counts"]
    assert counts[0, 3:7].tolist() == [100, 101, 100, 100], "the draft is taken back"
