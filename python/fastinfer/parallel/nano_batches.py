"""Two halves of a step's batch (nano-batches), so that one half's arithmetic hides the other half's exchanges.

Weights are read once for each half. So halves pay only where a step has so many tokens that arithmetic takes longer
than reading weights, and exchanges take a large part of the time: prompts on GPUs with slow links. CPUs exchange by the
threads that compute, so that nothing is hidden there. Source: NanoFlow, https://arxiv.org/abs/2408.12757.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fastinfer.models.batch import Batch

# Largest part of the time of whole steps that halves may take by the model. Kernels that run at the same time slow each
# other down, which the model does not know; not measured.
MOST = 0.9


@dataclass(frozen=True)
class LayerCosts:
    """Seconds that a layer takes on one rank, without attention to long contexts: halves seem to pay less often.

    Attributes:
        weights: reading of the rank's weights.
        token: arithmetic of one token.
        exchange: exchanges, without what they send.
        exchanged_token: exchanges of one token.
    """

    weights: float
    token: float
    exchange: float
    exchanged_token: float

    @classmethod
    def of_times(
        cls, tokens: tuple[int, int], layers: tuple[float, float], exchanges: tuple[float, float]
    ) -> "LayerCosts":
        """Return the costs that explain two steps.

        Args:
            tokens: numbers of tokens, of which the first is so small that a layer takes as long as reading weights,
                and the second so large that it takes as long as arithmetic.
            layers: seconds of a layer in each step, exchanges included.
            exchanges: seconds of its exchanges alone.
        """
        few, many = tokens
        exchanged_token = max(0.0, (exchanges[1] - exchanges[0]) / (many - few))
        return cls(
            weights=max(0.0, layers[0] - exchanges[0]),
            token=max(0.0, layers[1] - exchanges[1]) / many,
            exchange=max(0.0, exchanges[0] - exchanged_token * few),
            exchanged_token=exchanged_token,
        )

    def compute(self, tokens: int) -> float:
        """Return the time of a layer's arithmetic."""
        return max(self.weights, self.token * tokens)

    def exchanges(self, tokens: int) -> float:
        """Return the time of a layer's exchanges."""
        return self.exchange + self.exchanged_token * tokens

    def of_halves(self, first: int, second: int) -> float:
        """Return the time of a layer for two halves of these numbers of tokens.

        Either arithmetic has no pause, or the exchanges have none, or a half waits for its own results alone.
        """
        sizes = first, second
        alone = max(self.compute(tokens) + self.exchanges(tokens) for tokens in sizes)
        return max(sum(map(self.compute, sizes)), sum(map(self.exchanges, sizes)), alone)


def split(lengths: Sequence[int], device: str, costs: LayerCosts) -> int | None:
    """Choose the halves of a step.

    Args:
        lengths: numbers of tokens of the batch's sequences, which stay whole.
        device: device that computes.
        costs: what a layer takes there.

    Returns:
        Number of sequences of the first half; ``None`` if the step should stay whole.
    """
    tokens = sum(lengths)
    firsts = dict(enumerate(accumulate(lengths[:-1]), 1))
    if device == "cpu" or not firsts:
        return None
    count = min(firsts, key=lambda number: abs(2 * firsts[number] - tokens))
    whole = costs.compute(tokens) + costs.exchanges(tokens)
    halves = costs.of_halves(firsts[count], tokens - firsts[count])
    return count if halves < MOST * whole else None


def can_be_halved(batch: Batch) -> bool:
    """Return whether :func:`halves_of` divides a batch of this kind.

    It divides no images, no sparse attention, no later stage of a pipeline, no rows that alone are wanted, and no
    batches of draft models.
    """
    others = batch.images, batch.sparse, batch.hidden, batch.last
    drafts = batch.features, batch.window_lens, batch.block_places
    return all(part is None for part in (*others, *drafts))


def halves_of(batch: Batch, count: int, tokens: int) -> tuple[Batch, Batch]:
    """Return the first ``count`` sequences of a batch and the others, as views where numbers need not change.

    Logits are computed for whole batches, so halves have no rows of them.

    Args:
        batch: a batch that :func:`can_be_halved`.
        count: number of sequences of the first half.
        tokens: number of their tokens.
    """
    assert can_be_halved(batch)
    first = _part(batch, slice(0, count), slice(0, tokens))
    return first, _part(batch, slice(count, len(batch.seq_lens)), slice(tokens, len(batch.token_ids)))


def _part(batch: Batch, seqs: slice, rows: slice) -> Batch:
    """Return some sequences of a batch, and with them their rows."""
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        query_start=batch.query_start[seqs.start : seqs.stop + 1] - rows.start,
        seq_lens=batch.seq_lens[seqs],
        block_tables=tuple(table[seqs] for table in batch.block_tables),
        slot_mappings=tuple(slots[rows] for slots in batch.slot_mappings),
        logits_indices=batch.logits_indices[:0],
        adapter_ids=None if batch.adapter_ids is None else batch.adapter_ids[rows],
        logits_adapter_ids=None,
        state_reads=None if batch.state_reads is None else batch.state_reads[seqs],
        state_writes=None if batch.state_writes is None else batch.state_writes[rows],
        row_start=None if batch.row_start is None else batch.row_start[: rows.stop - rows.start + 1],
    )
