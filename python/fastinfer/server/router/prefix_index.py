"""The router's memory of the prefixes that a replica has computed."""

from collections import OrderedDict

from fastinfer.server.router.prompts import BLOCK_BYTES, Prompt


class PrefixIndex:
    """A set of hashes of prefixes; the least recently used ones go first.

    Args:
        max_blocks: largest number of hashes.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def matched(self, prompt: Prompt) -> int:
        """Return how many bytes of a prompt's beginning are known."""
        num_blocks = 0
        for value in prompt.hashes:
            if value not in self._hashes:
                break
            num_blocks += 1
        return num_blocks * BLOCK_BYTES

    def add(self, prompt: Prompt) -> None:
        """Remember all prefixes of a prompt."""
        # The end first: a block is of no use without those before it, so the end is to be forgotten first.
        for value in reversed(prompt.hashes):
            self._hashes[value] = None
            self._hashes.move_to_end(value)
        while len(self._hashes) > self._max_blocks:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._hashes.clear()
