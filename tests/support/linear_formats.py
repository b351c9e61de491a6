"""Matrix products of every weight format, behind one interface."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastinfer import ops
from support.quantized_gemm import random_weight

FORMATS = ["dense", "int8", "int8 min", "int4", "int4 min", "table"]


class Linear:
    """A random weight of one format: ``run`` is the operator, ``dense`` what it must compute with.

    ``rounded`` is what more than 64 tokens on a GPU are multiplied with: scales, minimums and their result in 16 bits.
    """

    def __init__(
        self, form: str, n: int, k: int, dtype: torch.dtype, device: str, group: int = 32, **options: Any
    ) -> None:
        self.out_features = n
        self.arguments: dict[str, Any]
        if form == "dense":
            self.dense = self.rounded = (torch.randn(n, k, device=device) * k**-0.5).to(dtype)
            self.operator: Callable[..., Tensor] = ops.gemm
            self.arguments = {"weight": self.dense}
            return
        bits = 8 if form.startswith("int8") else 4
        weight = random_weight(bits, n, k, group, mins=form.endswith("min"), device=device, **options)
        self.dense = weight.dense
        self.operator = {"int8": ops.int8_gemm, "int4": ops.int4_gemm, "tabl": ops.lut_gemm}[form[:4]]
        self.arguments = weight.packed
        levels = weight.q.double() - (8 if bits == 4 and weight.mins is None else 0)
        if form == "table":
            table = torch.randn(16, device=device) * 4
            levels = table.to(dtype).double()[weight.q.long()]
            self.dense = weight.scales.double().repeat_interleave(group, 1) * levels
            del self.arguments["mins"]
            self.arguments["table"] = table
        self.rounded = weight.scales.to(dtype).double().repeat_interleave(group, 1) * levels
        if weight.mins is not None:
            self.rounded += weight.mins.to(dtype).double().repeat_interleave(group, 1)
        self.rounded = self.rounded.to(dtype)

    def run(self, x: Tensor, **options: Any) -> Tensor:
        return self.operator(x, **self.arguments, **options)
