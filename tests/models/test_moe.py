"""A mixture's MLP as one, against an fp32 loop over experts; its stacked weights from every unpacked form."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.families import load, save_model
from support.helpers import assert_bitwise
from support.reference import TILE_ROWS
from torch import Tensor
from torch.nn import functional as F

from fastinfer import ops
from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked
from fastinfer.models.config import RouterConfig
from fastinfer.models.moe import MixtureOfExperts
from fastinfer.models.norm import RMSNorm
from fastinfer.utils.huge_pages import HugePages
from fastinfer.weights.expert_weights import DenseExperts, LutExperts, QuantizedExperts, make_expert_weights
from fastinfer.weights.weight import DenseWeight

HIDDEN, INTERMEDIATE = 96, 64


def dense(rows: int, columns: int) -> Dense:
    return Dense(torch.randn(rows, columns) * columns**-0.5)


def int4(rows: int, columns: int) -> Int4:
    return Int4(torch.randint(0, 16, (rows, columns)).to(torch.uint8), _scales(rows, columns), -_scales(rows, columns))


def symmetric_int4(rows: int, columns: int) -> Int4:
    return Int4(torch.randint(0, 16, (rows, columns)).to(torch.uint8), _scales(rows, columns).half())


def int8(rows: int, columns: int) -> Int8:
    return Int8(torch.randint(-127, 128, (rows, columns)).to(torch.int8), _scales(rows, columns) / 16)


def w8a8(rows: int, columns: int) -> Int8:
    return Int8(
        torch.randint(-127, 128, (rows, columns)).to(torch.int8),
        _scales(rows, columns)[:, :1] / 16,
        int8_activations=True,
    )


def table(rows: int, columns: int) -> Lut:
    return Lut(torch.randint(0, 16, (rows, columns)).to(torch.uint8), _scales(rows, columns), table=TABLE)


def table_of_integers(rows: int, columns: int) -> Lut:
    return replace(table(rows, columns), scales=_scales(rows, columns) / 16, table=torch.arange(-7.0, 9) ** 3 // 5)


TABLE = torch.linspace(-4, 4, 16)
FORMS: list[Callable[[int, int], Unpacked]] = [dense, int4, symmetric_int4, int8, w8a8, table, table_of_integers]


def _scales(rows: int, columns: int) -> Tensor:
    return (torch.rand(rows, columns // 32) + 0.5) / 4 * columns**-0.5


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """And torch on one thread, which is what small tensors need."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Mixture:
    """A random one: the fast module, and the loop over its dequantised experts."""

    def __init__(
        self,
        form: Callable[[int, int], Unpacked] = dense,
        experts: int = 8,
        top_k: int = 2,
        renormalize: bool = True,
        activation_bits: int = 32,
    ) -> None:
        gate_up = [form(2 * INTERMEDIATE, HIDDEN) for _ in range(experts)]
        down = [form(HIDDEN, INTERMEDIATE) for _ in range(experts)]
        router = torch.randn(experts, HIDDEN)
        self.experts = [(a.dequantize(), b.dequantize()) for a, b in zip(gate_up, down, strict=True)]
        self.module = MixtureOfExperts(
            norm=RMSNorm(torch.rand(HIDDEN) + 0.5, 1e-5),
            router=DenseWeight(router),
            gate_up=make_expert_weights(gate_up, activation_bits),
            down=make_expert_weights(down, activation_bits),
            top_k=top_k,
            routing=RouterConfig(renormalize=renormalize),
            activation="silu",
        )

    def loop(self, residual: Tensor) -> Tensor:
        x = F.rms_norm(residual, (HIDDEN,), self.module.norm.weight, self.module.norm.eps)
        assert isinstance(self.module.router, DenseWeight)
        weights, chosen = (x @ self.module.router.values.T).softmax(-1).topk(self.module.top_k)
        if self.module.routing.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = residual.clone()
        for expert, (gate_up, down) in enumerate(self.experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ gate_up.T).unflatten(1, (-1, 2, TILE_ROWS)).unbind(2)
            out[token] += weights[token, place, None] * ((F.silu(gate) * up).flatten(1) @ down.T)
        return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "renormalize"),
    [(1, 4, 1, False), (3, 8, 2, True), (17, 128, 8, True), (64, 60, 4, False)],
)
def test_against_a_loop_over_experts(
    tokens: int, experts: int, top_k: int, renormalize: bool, form: Callable[[int, int], Unpacked]
) -> None:
    mixture = Mixture(form, experts, top_k, renormalize)
    residual = torch.randn(tokens, HIDDEN)
    torch.testing.assert_close(mixture.module(residual, residual, None), mixture.loop(residual), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [int4, table_of_integers])
@pytest.mark.parametrize(("activation_bits", "most"), [(8, 3e-2), (16, 5e-4)])
def test_integer_products_stay_near(activation_bits: int, most: float, form: Callable[[int, int], Unpacked]) -> None:
    mixture = Mixture(form, activation_bits=activation_bits)
    residual = torch.randn(17, HIDDEN)
    expected = mixture.loop(residual) - residual
    assert (mixture.module(residual, residual, None) - residual - expected).abs().mean() < most * expected.abs().mean()


@pytest.mark.parametrize("activation_bits", [8, 32])
def test_a_token_does_not_depend_on_its_batch(activation_bits: int) -> None:
    module = Mixture(int4, activation_bits=activation_bits).module
    residual = torch.randn(17, HIDDEN).bfloat16()
    out = module(residual, residual, None)
    for size in (1, 5):
        assert_bitwise(torch.cat([module(part, part, None) for part in residual.split(size)]), out)


def test_a_recorded_step_routes_anew() -> None:
    module = Mixture(int4, activation_bits=8).module
    residual, graph = torch.randn(3, HIDDEN), ops.CPUGraph()
    with graph.capture():
        out = module(residual, residual, None)
    assert len(graph) == 6
    for _ in range(3):
        residual.copy_(torch.randn(3, HIDDEN))
        graph.replay()
        assert_bitwise(out, module(residual, residual, None))


def test_forms() -> None:
    stacks = [make_expert_weights([form(33, 64) for _ in range(3)], 8) for form in FORMS]
    assert [type(stack) for stack in stacks] == [DenseExperts, *[QuantizedExperts] * 4, *[LutExperts] * 2]
    assert [stack.activation_bits for stack in stacks[1:]] == [8, 8, 8, 8, 32, 8]
    assert [stack.bits for stack in stacks[1:5]] == [4, 4, 8, 8]
    assert make_expert_weights([dense(33, 64)] * 2, 8, dense_dtype=torch.bfloat16).values.dtype == torch.bfloat16


@pytest.mark.parametrize("form", FORMS)
def test_experts_in_huge_pages_are_the_same(form: Callable[[int, int], Unpacked]) -> None:
    experts = [form(33, 64) for _ in range(3)]
    for tensor, expected in zip(tensors_of(experts, HugePages()), tensors_of(experts, None), strict=True):
        assert_bitwise(tensor, expected)
        assert tensor.is_contiguous()


def tensors_of(experts: list[Unpacked], memory: HugePages | None) -> list[Tensor]:
    stack = make_expert_weights(experts, 8, memory=memory)
    return [value for value in vars(stack).values() if isinstance(value, Tensor)]


def test_experts_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"got Int4 \[16, 64\] for expert 0 and Int8 \[16, 64\] for expert 2"
    ):
        make_expert_weights([int4(16, 64), int4(16, 64), int8(16, 64)], 8)
    with pytest.raises(UnsupportedModelError, match=r"Dense \[16, 64\] for expert 0 and Dense \[32, 64\] for expert 1"):
        make_expert_weights([dense(16, 64), dense(32, 64)], 8)
    permuted = Int4(torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 2), permutation=torch.arange(64))
    with pytest.raises(UnsupportedModelError, match="permuted"):
        make_expert_weights([permuted, permuted], 8)


@pytest.mark.parametrize(
    ("groups", "top_groups", "error"),
    [
        (3, 1, "groups that divide the 8 experts into two or more each, got 3"),
        (8, 4, "into two or more each, got 8"),
        (4, 1, "at most 2 experts per token, which the chosen groups have, got 3"),
    ],
)
def test_groups_that_cannot_be_chosen_from_are_refused(
    groups: int, top_groups: int, error: str, tmp_path: Path
) -> None:
    save_model(tmp_path, "glm4-moe")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_group": groups, "topk_group": top_groups}))
    with pytest.raises(UnsupportedModelError, match=error):
        load(tmp_path)
