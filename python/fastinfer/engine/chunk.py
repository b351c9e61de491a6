"""The part of one sequence that a step computes."""

from fastinfer.engine.sequence import Sequence


class Chunk:
    """The tokens of one sequence that a step computes.

    Args:
        sequence: the sequence that the tokens belong to.
        num_tokens: number of uncomputed tokens to compute: usually one during decoding, more during prefill.
        num_drafts: maximum number of drafts after the sequence's last token; their slots are allocated.
        drafts: draft tokens, which the step verifies.

    Attributes:
        sequence, num_tokens, num_drafts, drafts: see above.
        start: position of the first token.
        is_last: whether the chunk reaches the end of the sequence, so that the next token can be sampled.
        num_receivers: number of sequences that get a token drawn after the chunk's last one: none if it is not the
            last chunk, otherwise the sequence and its siblings.
        hidden_rows: the chunk's rows of the step's hidden states, set by
            :meth:`fastinfer.engine.batch_inputs.BatchInputs.fill`.
        num_restarts: the sequence's ``num_restarts``; once that has grown, the chunk's results are of no use.
        state_read: slot with the states before the first token, -1 for states of zeros; of a model that has states.
        state_writes: for each token, drafts included, the slot for the states after it, -1 for none; likewise.
    """

    __slots__ = (
        "drafts",
        "hidden_rows",
        "is_last",
        "num_drafts",
        "num_receivers",
        "num_restarts",
        "num_tokens",
        "sequence",
        "start",
        "state_read",
        "state_writes",
    )

    def __init__(
        self, sequence: Sequence, num_tokens: int, num_drafts: int = 0, drafts: list[int] | None = None
    ) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.num_drafts = num_drafts
        self.drafts = drafts or []
        self.start = sequence.num_computed_tokens
        self.is_last = num_tokens == sequence.num_uncomputed_tokens
        self.num_receivers = sequence.num_slots if self.is_last and sequence.samples else 0
        self.hidden_rows = slice(0)
        self.num_restarts = sequence.num_restarts
        self.state_read = -1
        self.state_writes: list[int] = []

    @property
    def place(self) -> int:
        """Place of the token in the block of which it is the only one in the chunk; 0 for a chunk of another kind."""
        return 0

    @property
    def is_prompt(self) -> bool:
        """Whether the first token belongs to the prompt; the others do too if the scheduler separates roles."""
        return self.start < self.sequence.num_prompt_tokens

    @property
    def num_seen(self) -> int:
        """Number of tokens before the first one that it sees."""
        layout = self.sequence.layout
        return self.start if layout is None else layout.num_seen(self.start)

    @property
    def num_wanted_rows(self) -> int:
        """Number of the last tokens, drafts included, whose hidden states are wanted for anything."""
        sequence = self.sequence
        if sequence.pooling == "mean" or sequence.scores_prompt:
            return self.num_tokens + len(self.drafts)
        wants_last = self.num_receivers or (sequence.pooling == "last" and self.is_last)
        return 1 + len(self.drafts) if wants_last else 0

    @property
    def num_rows(self) -> int:
        """Number of rows of logits that the chunk needs: one for each receiver, and one for each draft."""
        return self.num_receivers + len(self.drafts)
