"""A checkpoint of random numbers, from which the loader builds a decoder of any family."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Dense, Int4, Int8, Unpacked
from fastinfer.models.config import ModelConfig

GROUP = 32


class Apart(Dense):
    """Fits no other matrix, so that what shares an input with it becomes a weight in several parts."""


class RandomCheckpoint:
    """Always the same numbers under the same name.

    Args:
        config: sizes of the model.
        form: from a matrix's name and its fp32 values [out_features, in_features], of standard deviation
            ``in_features ** -0.5`` (8 for the embedding, times that), to how it is stored.
        tied: the embedding is the last product, too.
    """

    path = Path("random")

    def __init__(
        self,
        config: ModelConfig,
        form: Callable[[str, Tensor], Unpacked] = lambda _, values: Dense(values),
        *,
        tied: bool = True,
    ) -> None:
        self.config = config
        self._form = form
        self._tied = tied

    def __contains__(self, name: str) -> bool:
        return name == "lm_head" and not self._tied

    def linear(self, name: str, out_features: int, in_features: int) -> Unpacked:
        values = _random(name, out_features, in_features) / in_features**0.5
        if name.endswith(".conv1d"):
            return Dense(values)  # no method quantises it
        return self._form(name, 8 * values if name == "embedding" else values)

    def parts(self, name: str, out_features: int, in_features: int) -> Iterator[Unpacked]:
        yield self.linear(name, out_features, in_features)

    def vector(self, name: str, size: int) -> Tensor:
        values = _random(name, size) / 10
        if name.endswith(".A_log"):
            return 10 * values - 2  # states that last for some tens of tokens
        if name.endswith(".xielu_eps"):
            return torch.full((size,), -1e-6)
        return values if name.endswith(".bias") else 1 + values

    def draft_tokens(self) -> None:
        return None

    def layout(self, layer: int) -> str:
        return "all the same"

    def unread(self) -> list[str]:
        return []

    def release(self) -> None:
        pass


def int4(values: Tensor) -> Int4:
    """Rounded to 4 bits, with a minimum."""
    groups = values.view(len(values), -1, GROUP)
    mins = groups.amin(-1).half()
    scales = ((groups.amax(-1) - mins.float()) / 15).half()
    q = ((groups - mins.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15).byte()
    return Int4(q.view_as(values), scales, mins)


def int8(values: Tensor, scale_dtype: torch.dtype = torch.float16) -> Int8:
    """Rounded to 8 bits; weights whose scales have different dtypes do not fit each other."""
    groups = values.view(len(values), -1, GROUP)
    scales = (groups.abs().amax(-1) / 127).to(scale_dtype)
    q = (groups / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
    return Int8(q.view_as(values), scales)


def _random(name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)
