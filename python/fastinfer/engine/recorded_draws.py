"""Draws recorded as CPU graphs.

Right after a step the CPU's caches are cold, and a normal call of the sampling operator takes longer than its kernel.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from fastinfer import ops

# One for each recorded step, or two if some draws have masks and others do not.
MAX_RECORDED_DRAWS = 256


class RecordedDraws:
    """Replays ``ops.sample`` on the logits of recorded steps, which are always the same tensors.

    Attributes:
        graphs: for each (id of the logits, number of rows, whether there is a mask): the graph, the logits, to keep
            them alive, and the array that receives the tokens. The least recently used entry comes first.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[int, int, bool], tuple[ops.CPUGraph, Tensor, np.ndarray]] = {}
        self._memory = ops.GraphMemory()

    def draw(
        self, logits: Tensor, num_rows: int, has_mask: bool, parameters: Callable[[], dict[str, Tensor]]
    ) -> list[int]:
        """Draw one token per row, and return the tokens; the first draw from these logits records a graph.

        Args:
            logits: [rows, vocab] fp32 logits of a recorded step.
            num_rows: number of rows of the logits.
            has_mask: whether the parameters include a mask.
            parameters: function that returns the arguments of ``ops.sample``, at the same addresses in every call.
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
