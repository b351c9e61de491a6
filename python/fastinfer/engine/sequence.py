"""One running text as the scheduler, the cache and the sampler see it: token ids and how far they are computed."""

from enum import Enum, auto

from fastinfer.sampling_params import SamplingParams


class SequenceState(Enum):
    WAITING = auto()  # holds no KV blocks: new, or preempted
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Prompt and generated tokens of one request, with its place in the KV cache.

    Attributes:
        request_id: of the request it belongs to.
        token_ids: prompt, then generated tokens.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many have their keys and values in the cache.
        blocks: cache blocks in the order of the tokens, owned by ``KVCache``: the list grows at its end, and is
            replaced by a new one when the blocks are freed.
        seed: of its random numbers; with a token's position it decides that token's draw.
    """

    __slots__ = (
        "blocks",
        "num_computed_tokens",
        "num_prompt_tokens",
        "params",
        "request_id",
        "seed",
        "state",
        "token_ids",
    )

    def __init__(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, seed: int) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.blocks: list[int] = []
        self.params = params
        self.seed = seed
        self.state = SequenceState.WAITING

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """1 for a sequence that decodes; more while its prompt (or, after a preemption, all of it) is processed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]
