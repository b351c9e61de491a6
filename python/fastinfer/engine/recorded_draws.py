"""Draws recorded as CPU graphs: after a step the caches are cold, and the call alone takes longer than its kernel."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from fastinfer import ops

# One for each recorded step, or two where grammars come and go.
MAX_RECORDED_DRAWS = 256


class RecordedDraws:
    """Replays ``ops.sample`` on the logits of recorded steps, which are the same tensors whenever a step comes again.

    Attributes:
        graphs: by the logits' identity, the number of rows and whether there is a mask: the graph, the logits, which it
            keeps alive, and the array that gets the tokens. The least recently used one comes first.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[int, int, bool], tuple[ops.CPUGraph, Tensor, np.ndarray]] = {}
        self._memory = ops.GraphMemory()

    def draw(
        self, logits: Tensor, num_rows: int, has_mask: bool, parameters: Callable[[], dict[str, Tensor]]
    ) -> list[int]:
        """Draw one token per row; the first draw from these logits records the call.

        Args:
            logits: [rows, vocab] fp32 of a recorded step.
            num_rows: rows of the logits.
            has_mask: whether there is a mask among the parameters.
            parameters: makes the arguments of ``ops.sample``, at the same addresses in every call.
        """
        key = id(logits), num_rows, has_mask
        if key in self.graphs:
            graph, _, tokens = self.graphs[key] = self.graphs.pop(key)
            graph.replay()
        else:
            graph = ops.CPUGraph(self._memory)
            with graph.capture():
                sampled = ops.sample(logits, num_logprobs=None, **parameters())
            tokens = sampled.tokens.numpy()
            if len(self.graphs) == MAX_RECORDED_DRAWS:
                del self.graphs[next(iter(self.graphs))]
            self.graphs[key] = graph, logits, tokens
        drawn: list[int] = tokens.tolist()
        return drawn
