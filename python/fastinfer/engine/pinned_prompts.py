"""Pinned prompts: named beginnings of prompts whose blocks stay in the cache."""

from collections.abc import Iterable
from dataclasses import dataclass

from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.prompt_layout import PromptLayout
from fastinfer.engine.sequence import Sequence, SequenceOptions, SequenceState
from fastinfer.errors import RequestError
from fastinfer.utils.checks import check_text


@dataclass(frozen=True, slots=True)
class PinnedPrompt:
    """A prompt whose blocks stay in the cache.

    Attributes:
        sequence: sequence that holds the blocks.
        options: arguments of the sequence, which requests must have too to share the blocks.
    """

    sequence: Sequence
    options: SequenceOptions

    @property
    def cache_salt(self) -> str:
        """Salt that requests must have to share the blocks."""
        return self.options["cache_salt"]

    @property
    def layout(self) -> PromptLayout | None:
        """Layout of a prompt with modules; ``None`` for one without."""
        return self.options["layout"]

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens by slot, as a new list."""
        return list(self.sequence.token_ids)


class PinnedPrompts:
    """The pinned prompts by name.

    The sequence of a prompt holds its blocks like a running sequence; other requests find them in the prefix cache.

    Args:
        block_manager: manager of the blocks.
        max_model_len: length in tokens of the longest sequence, for which there must always be room beside the prompts.
    """

    def __init__(self, block_manager: BlockManager, max_model_len: int) -> None:
        self._block_manager = block_manager
        self._max_model_len = max_model_len
        self._prompts: dict[str, PinnedPrompt] = {}

    def add(self, name: str, prompt: PinnedPrompt) -> None:
        """Add a prompt before it is computed.

        Raises:
            RequestError: prefix caching is off, the name is in use, or the cache is too small for the prompt.
        """
        cache = self._block_manager
        if not cache.enable_prefix_caching:
            raise RequestError("pinned prompts need enable_prefix_caching=True, got False")
        check_text("name", name)
        if name in self._prompts:
            raise RequestError(f"name must be new, got {name!r}, which is a pinned prompt already")
        lengths = [self._max_model_len, *map(len, self.sequences)]
        taken = zip(*map(cache.blocks_of, lengths), strict=True)
        for pool, counts, needed in zip(cache.pools, taken, cache.blocks_of(len(prompt.sequence)), strict=True):
            room = pool.num_blocks - sum(counts)
            if needed > room:
                raise RequestError(
                    f"pinned prompt must fit into {room} more blocks of the KV cache, got {needed} blocks"
                )
        if cache.states is not None and 2 * (len(self._prompts) + 1) >= cache.states.pool.num_blocks:
            raise RequestError(
                f"pinned prompts must leave a slot for states, got {len(self._prompts) + 1} prompts, each of which "
                f"may hold two of {cache.states.pool.num_blocks}"
            )
        self._prompts[name] = prompt

    def get(self, name: str) -> PinnedPrompt:
        """Return the prompt of this name.

        Raises:
            RequestError: there is no prompt of this name.
        """
        check_text("pinned prompt", name)
        if name not in self._prompts:
            raise RequestError(f"pinned prompt must be one of {sorted(self._prompts)}, got {name!r}")
        return self._prompts[name]

    def replace(self, name: str, prompt: PinnedPrompt) -> None:
        """Replace a prompt by one with the same tokens that is not computed yet; the caller frees the old blocks."""
        self._prompts[name] = prompt

    @property
    def computed(self) -> dict[str, PinnedPrompt]:
        """The prompts that are computed, by name, as a new dictionary."""
        return {
            name: prompt for name, prompt in self._prompts.items() if prompt.sequence.state is SequenceState.FINISHED
        }

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences of all prompts."""
        return [prompt.sequence for prompt in self._prompts.values()]

    def holds(self, sequence: Sequence) -> bool:
        """Return whether a sequence is that of a prompt."""
        return sequence in self.sequences

    def forget(self, sequences: Iterable[Sequence]) -> list[str]:
        """Remove the prompts of these sequences, if there are any, and return their names; the caller frees blocks."""
        gone = set(sequences)
        names = [name for name, prompt in self._prompts.items() if prompt.sequence in gone]
        for name in names:
            del self._prompts[name]
        return names
