"""Draws recorded as CPU graphs.

Right after a step the CPU's caches are cold, and a normal call of the sampling operator takes longer than its kernel.
"""

import numpy as np
import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.engine.sampling_inputs import SamplingInputs


class RecordedDraws:
    """Replays ``ops.sample`` on the logits of a recorded step, which are always the same tensor.

    Args:
        logits: [rows, vocab] fp32 logits of the step.
        sampling: sampling parameters of the rows.
        memory: memory of the tokens, which the draws of all steps share.

    Attributes:
        graphs: the graph of draws without masks (``False``) and of those with masks (``True``), as far as there were
            any, and the array that receives the tokens.
    """

    def __init__(self, logits: Tensor, sampling: SamplingInputs, memory: ops.GraphMemory) -> None:
        self.graphs: dict[bool, tuple[ops.CPUGraph, np.ndarray]] = {}
        self._logits = logits
        self._sampling = sampling
        self._memory = memory

    def draw(self, masks: np.ndarray | None) -> list[int]:
        """Draw one token per row, and return the tokens; the first draw of a kind records a graph.

        Args:
            masks: [rows, ceil(vocab / 32)] int32, the allowed tokens, always in the same memory; ``None`` for all.
        """
        if (entry := self.graphs.get(masks is not None)) is not None:
            graph, tokens = entry
            graph.replay()
        else:
            graph = ops.CPUGraph(self._memory)
            with graph.capture():
                sampled = ops.sample(
                    self._logits,
                    **self._sampling.tensors(len(self._logits)),
                    mask=None if masks is None else torch.from_numpy(masks),
                    num_logprobs=None,
                )
            tokens = sampled.tokens.numpy()
            self.graphs[masks is not None] = graph, tokens
        drawn: list[int] = tokens.tolist()
        return drawn
