"""Choice of the layers that a student keeps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fastinfer.distill.student import Student

# Number of layers that are left out on trial, those that change their input least.
CANDIDATES = 4


def drop_layers(
    student: Student, count: int, ids: Tensor, given: int, on_measured: Callable[[], None] = lambda: None
) -> None:
    """Drop layers of a student, one after the other, until it has ``count``.

    Of the layers that turn their input least, the one is dropped without which the text's loss is smallest. (Dropping
    10 of SmolLM2's 30 layers by the angle alone gives a loss of 4.6 instead of 4.35; the teacher's is 2.9.)

    Args:
        student: the student.
        count: number of layers to keep.
        ids: [texts, tokens] int64 token ids to measure with.
        given: number of tokens at the start of each text that are not predicted.
        on_measured: function that is called after each pass through the student; an error that it raises ends all.
    """
    while (number := len(student.layers)) > count:
        changes = layer_changes(student, ids)
        on_measured()
        losses = {}
        for index in sorted(range(number), key=changes.__getitem__)[:CANDIDATES]:
            losses[index] = _loss_without(student, index, ids, given)
            on_measured()
        dropped = min(losses, key=losses.__getitem__)
        student.keep([index for index in range(number) if index != dropped])


@torch.no_grad()
def layer_changes(student: Student, ids: Tensor) -> list[float]:
    """Return how much each layer turns its input: 1 minus the mean cosine of input and output.

    The measure is ShortGPT's (arXiv 2403.03853).
    """
    changes: dict[int, float] = {}

    def measure(index: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            after = output[0] if isinstance(output, tuple) else output
            changes[index] = 1 - float(torch.cosine_similarity(inputs[0].float(), after.float(), dim=-1).mean())

        return hook

    handles = [layer.register_forward_hook(measure(index)) for index, layer in enumerate(student.layers)]
    try:
        student.logits(ids)
    finally:
        for handle in handles:
            handle.remove()
    return [changes[index] for index in range(len(changes))]


@torch.no_grad()
def _loss_without(student: Student, layer: int, ids: Tensor, given: int) -> float:
    """Return the loss of texts if a layer passes on its input."""

    def skip(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> Any:
        return (inputs[0], *output[1:]) if isinstance(output, tuple) else inputs[0]

    handle = student.layers[layer].register_forward_hook(skip)
    try:
        logits = student.logits(ids[:, :-1])[:, given - 1 :]
    finally:
        handle.remove()
    return float(cross_entropy(logits.flatten(0, 1).float(), ids[:, given:].flatten()))
