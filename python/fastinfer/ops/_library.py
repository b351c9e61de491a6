"""Loads the compiled library once; everything else in ``fastinfer.ops`` goes through ``ops``."""

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

# torch first: the extension resolves its symbols against the libtorch that torch has loaded.
from fastinfer import _C  # noqa: F401

ops = torch.ops.fastinfer


def inference_only(op: str, names: str, x: Tensor, other: Tensor | None = None) -> None:
    """Refuse activations, called ``names``, whose gradient somebody will ask for. Weights may be Parameters.

    0.2 us of a call's 5: a decorator, or a loop over more arguments, costs twice that.
    """
    if (x.requires_grad or (other is not None and other.requires_grad)) and is_grad_enabled():
        name = names.split()[0 if x.requires_grad else 1]
        raise RuntimeError(
            f"fastinfer.ops.{op} is an inference kernel without a gradient, and {name} requires grad: "
            f"call it under torch.inference_mode() or torch.no_grad(), or detach {name}"
        )


def into(out: Tensor, op: Any, *args: Any) -> Tensor:
    """Call ``op.out``, which writes its result into ``out``."""
    inference_only(op.__name__, "out", out)
    op.out(*args, out=out)
    return out
