"""What the tests of grouped products share: stacked weights of every form, and ways to spread rows over experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastinfer import ops
from support.quantized_gemm import random_weight

FORMATS = ["dense", "int8", "int8 min", "int4", "int4 min", "table"]


def routing_of(expert_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """row_ids and expert_start for [tokens, top_k] ids, without the operator."""
    ids = expert_ids.flatten().long()
    start = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    start[1:] = torch.bincount(ids, minlength=experts).cumsum(0)
    return ids.argsort(stable=True).int(), start


def random_ids(tokens: int, top_k: int, experts: int, device: str = "cpu") -> Tensor:
    return torch.rand(tokens, experts, device=device).argsort(-1)[:, :top_k]


class ExpertStack:
    """Random weights of one form: ``run`` is the operator, ``dense`` [experts, n, k] what it must compute with."""

    def __init__(
        self,
        form: str,
        experts: int,
        n: int,
        k: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        group: int = 32,
    ) -> None:
        self.experts = experts
        self.operator: Callable[..., Tensor] = ops.grouped_gemm
        self.single: Callable[..., Tensor] = ops.gemm
        if form == "dense":
            weight = (torch.randn(experts, n, k, device=device) * k**-0.5).to(dtype)
            self.dense = weight.double()
            self.arguments: dict[str, Any] = {"weight": weight}
            return
        bits = {"int8": 8, "int6": 6, "int5": 5}.get(form[:4], 4)
        weights = [random_weight(bits, n, k, group, mins=form.endswith("min"), device=device) for _ in range(experts)]
        packed = [weight.packed for weight in weights]
        self.dense = torch.stack([weight.dense for weight in weights]).double()
        self.arguments = {
            name: torch.stack([weight[name] for weight in packed]) if isinstance(value, Tensor) else value
            for name, value in packed[0].items()
        }
        integers = form[:4] if form.startswith("int") else "lut"
        self.operator, self.single = getattr(ops, f"grouped_{integers}_gemm"), getattr(ops, f"{integers}_gemm")
        if form.startswith("table"):
            table = torch.randn(16, device=device) * 4
            if form == "table of integers":
                table = (table * 16).round().clamp(-128, 127)
            scales = torch.stack([weight.scales.double().repeat_interleave(group, 1) for weight in weights])
            levels = table.to(dtype).double()[torch.stack([weight.q for weight in weights]).long()]
            self.dense = scales * levels
            del self.arguments["mins"]
            self.arguments["table"] = table

    def run(self, x: Tensor, expert_ids: Tensor, **options: Any) -> Tensor:
        row_ids, expert_start = routing_of(expert_ids, self.experts)
        return self.operator(x, **self.arguments, row_ids=row_ids, expert_start=expert_start, **options)

    def run_expert(self, expert: int, x: Tensor, **options: Any) -> Tensor:
        """The dense operators' product with one expert's slice."""
        shared = {"table", "out_features"}
        slices = {
            name: value[expert] if isinstance(value, Tensor) and name not in shared else value
            for name, value in self.arguments.items()
        }
        return self.single(x, **slices, **options)

    def poison(self, unused: Tensor) -> None:
        """NaN in all weights of these experts."""
        for name in ("weight", "scales", "mins"):
            if isinstance(self.arguments.get(name), Tensor):
                self.arguments[name][unused] = torch.nan
