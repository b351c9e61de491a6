"""Recorder of what a model computes in the engine's own steps.

The engine runs operator by operator, so that Python sees each result. Layers and a projection that are recorded also
pass on their output; the decoder is the same.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastinfer.engine.batch_inputs import StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.errors import RequestError
from fastinfer.models.attention import Attention
from fastinfer.models.decoder import Decoder, Tap
from fastinfer.weights.weight import LinearOptions, NormOptions, Weight

# Rows whose logits are computed at a time.
LOGITS_ROWS = 64
Record = Callable[[str, Tensor], None]


@dataclass(frozen=True, eq=False)
class RecordedProjection(Weight):
    """Projection of queries, keys and values that are recorded, before they are normalised or rotated in place."""

    weight: Weight
    names: tuple[str, ...]
    record: Record

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.weight.out_features

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        return self.weight.linear(x, **options)

    def split_linear(self, x: Tensor, sizes: list[int], **options: Unpack[NormOptions]) -> tuple[Tensor, ...]:
        parts = self.weight.split_linear(x, sizes, **options)
        for name, part in zip(self.names, parts, strict=False):
            self.record(name, part)
        return parts

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self.weight.rows(ids, dtype)


def record_bytes(top_k: int) -> int:
    """Return the size of a token's record of its likeliest next tokens, with the token itself."""
    return torch.int32.itemsize + top_k * (torch.int32.itemsize + torch.float16.itemsize) + torch.float16.itemsize


def recorded(model: Decoder, hidden_layers: Iterable[int], attention_layer: int | None, record: Record) -> Decoder:
    """Return a model with the same weights that records.

    Args:
        model: the model.
        hidden_layers: layers whose output is recorded, as ``hidden.3``.
        attention_layer: layer whose queries, keys and values are recorded, as ``q``, ``k``, ``v``; ``None`` for none.
        record: function that gets a name and a tensor, which has a row for each token and may be overwritten later.

    Raises:
        RequestError: that layer's attention has no keys and values of its own.
    """
    layers = list(model.layers)
    if attention_layer is not None:
        layer = layers[attention_layer]
        attention = layer.attention
        if not isinstance(attention, Attention) or not attention.has_kv or attention.tied_kv:
            raise RequestError(
                f"the attention loss needs queries, keys and values in layer {attention_layer} of the teacher, got "
                f"{type(attention).__name__} without"
            )
        qkv = RecordedProjection(attention.qkv, ("q", "k", "v"), record)
        layers[attention_layer] = replace(layer, attention=replace(attention, qkv=qkv))

    scale = model.config.stream_scale  # the student's residual stream is the checkpoint's

    def tap(name: str) -> Tap:
        return lambda x, batch: record(name, x if scale == 1.0 else x * scale)

    taps = {index: tap(f"hidden.{index}") for index in hidden_layers}
    return replace(model, layers=tuple(layers)).with_taps(taps)


class Recorder:
    """Collects the log-probabilities and the recorded tensors of requests.

    Args:
        model: model that computes the logits.
        top_k: number of likeliest tokens of each position.
        temperature: divisor of the logits.
        whole: whether the last layer's outputs are recorded instead, from which whole distributions follow.
    """

    def __init__(self, model: Decoder, top_k: int, temperature: float, whole: bool) -> None:
        self._model = model
        self._top_k = top_k
        self._temperature = temperature
        self._whole = whole
        self._step: dict[str, Tensor] = {}
        self._requests: defaultdict[str, list[dict[str, Tensor]]] = defaultdict(list)

    def record(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of a step's tensor."""
        self._step[name] = tensor.to(torch.bfloat16, copy=True)

    def end_step(self, chunks: list[Chunk], result: StepResult) -> None:
        """Divide what a step has computed among its requests; see :attr:`fastinfer.engine.worker.Worker.on_result`."""
        if self._whole:
            self.record("output", result.hidden)
        else:
            self._step |= self._distributions(result)
        for chunk in chunks:
            pieces = self._requests[chunk.sequence.request_id]
            if chunk.start == 0:
                pieces.clear()  # after a preemption the sequence is computed again
            pieces.append({name: tensor[chunk.hidden_rows] for name, tensor in self._step.items()})
        self._step = {}

    def take(self, request_id: str) -> dict[str, Tensor]:
        """Return and forget what was recorded of a request.

        Returns:
            By name, with a row for each computed token: ``tokens`` [n, top_k] int32 and ``log_probs`` [n, top_k] fp16,
            the likeliest tokens; ``tail`` [n] fp16, the logarithm of the probability of all other tokens together;
            instead of these ``output`` [n, hidden] bf16, the last layer's, if whole distributions are recorded; and the
            recorded tensors, [n, size] bf16.
        """
        pieces = self._requests.pop(request_id)
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def log_probs(self, output: Tensor) -> Tensor:
        """Compute the log-probabilities of all tokens, [n, vocab] fp32, from recorded outputs."""
        rows = torch.arange(len(output)).split(LOGITS_ROWS)
        hidden = output.to(self._model.dtype)
        logits = torch.cat([self._model.logits(hidden, part) for part in rows])
        return (logits.float() / self._temperature).log_softmax(-1)

    def _distributions(self, result: StepResult) -> dict[str, Tensor]:
        rows = torch.arange(len(result.hidden))
        if len(result.logits) == len(rows):  # each token is the last of its sequence
            parts = [self._top(part) for part in result.logits.split(LOGITS_ROWS)]
        else:
            parts = [self._top(self._model.logits(result.hidden, part)) for part in rows.split(LOGITS_ROWS)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _top(self, logits: Tensor) -> dict[str, Tensor]:
        log_probs, tokens = (logits.float() / self._temperature).log_softmax(-1).topk(self._top_k)
        tail = torch.log1p(-log_probs.exp().sum(-1).clamp(max=1 - 1e-7))
        return {"tokens": tokens.int(), "log_probs": log_probs.half(), "tail": tail.half()}
