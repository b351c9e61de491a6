"""The choice of experts, their weights and the order of the rows, against fp64."""

from typing import Any

import pytest
import torch
from support import reference
from support.expert_stack import routing_of
from support.helpers import DTYPES, Guarded, assert_bitwise, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "cuda", "emulated")


def assert_routing(logits: Tensor, top_k: int, renormalize: bool, **options: Any) -> ops.Routing:
    routing = ops.route_experts(logits, top_k, renormalize, **options)
    weights, ids = reference.route_experts(logits, top_k, renormalize, **options)
    assert [t.dtype for t in routing] == [torch.float32, torch.int32, torch.int32, torch.int32]
    assert_bitwise(routing.expert_ids.long(), ids)
    torch.testing.assert_close(routing.expert_weights.double(), weights, rtol=3e-6, atol=1e-30)
    row_ids, expert_start = routing_of(ids, logits.shape[1])
    assert_bitwise(routing.row_ids, row_ids)
    assert_bitwise(routing.expert_start, expert_start)
    return routing


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(0, 2, 4), (1, 1, 1), (1, 2, 8), (3, 8, 128), (17, 1, 4), (64, 8, 60), (70, 32, 129), (5, 3, 1024), (300, 2, 8)],
)
def test_routing(tokens: int, top_k: int, experts: int, dtype: torch.dtype, renormalize: bool, device: str) -> None:
    """In 16 bits ties are common."""
    assert_routing((torch.randn(tokens, experts, device=device) * 3).to(dtype), top_k, renormalize)


@pytest.mark.parametrize("experts", [5, 128, 1024])
@pytest.mark.parametrize("renormalize", [False, True])
def test_a_scale_for_each_expert(experts: int, renormalize: bool, device: str) -> None:
    logits, own = torch.randn(7, experts, device=device), torch.randn(experts, device=device)
    assert_routing(logits, 4, renormalize, scale=0.5, expert_scale=own)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "num_groups", "top_groups"),
    [
        (5, 2, 8, 1, 1),
        (3, 8, 256, 8, 4),
        (17, 3, 60, 30, 2),
        (4, 6, 160, 8, 3),
        (2, 32, 1024, 32, 1),
        (3, 4, 258, 2, 1),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_scores_bias_and_groups(
    tokens: int,
    top_k: int,
    experts: int,
    num_groups: int,
    top_groups: int,
    has_bias: bool,
    scoring: str,
    renormalize: bool,
    device: str,
) -> None:
    """Logits are distinct and not close to each other, so that rounding changes no order."""
    logits = torch.stack([torch.randperm(experts) for _ in range(tokens)]).to(device) * (6 / experts) - 2.7
    bias = None
    if has_bias:  # so many steps that other experts are the best ones
        bias = torch.randint(-8, 9, (experts,), device=device) * (0.5 if scoring == "sigmoid" else 0.5 / experts)
    options = {"scoring": scoring, "bias": bias, "num_groups": num_groups, "top_groups": top_groups, "scale": 2.5}
    assert_routing(logits, top_k, renormalize, **options)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 4), (1, 1, 5), (19, 6, 384), (3, 4, 1024)])
def test_biased_logits(
    tokens: int, top_k: int, experts: int, dtype: torch.dtype, scoring: str, renormalize: bool, device: str
) -> None:
    """The bias is added to the logits, which is another choice than that by scores; the logits are steps apart."""
    logits = torch.stack([torch.randperm(experts) for _ in range(max(tokens, 1))])[:tokens]
    logits = (logits.to(device) * 0.03125 - 4.0).to(dtype)
    bias = torch.randint(-8, 9, (experts,), device=device) * 2.0 + 0.001 * torch.rand(experts, device=device)
    options = {"scoring": scoring, "bias": bias, "scale": 1.5}
    routing = assert_routing(logits, top_k, renormalize, **options, biased_logits=True)
    if tokens > 1:
        assert not torch.equal(routing.expert_ids, ops.route_experts(logits, top_k, renormalize, **options).expert_ids)


@pytest.mark.parametrize("options", [{}, {"bias": torch.zeros(4), "num_groups": 2}])
def test_biased_logits_need_a_bias_and_no_groups(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"^route_experts: biased_logits must not be set without bias"):
        ops.route_experts(torch.zeros(3, 4), 2, True, biased_logits=True, **options)


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 2, 4), (1, 2, 2), (19, 2, 16), (70, 3, 129), (5, 1, 1024)]
)
def test_sparse_mixer(tokens: int, top_k: int, experts: int, dtype: torch.dtype, jitter: float, device: str) -> None:
    """Of both signs, with neighbours that take part and others that do not; in 16 bits with ties."""
    logits = torch.randn(tokens, experts, device=device) - torch.arange(tokens, device=device)[:, None] / 10
    assert_routing(logits.to(dtype), top_k, False, scoring="sparsemixer", jitter=jitter, scale=1.5)


def test_sparse_mixer_of_zeros(device: str) -> None:
    """0 / 0 is no reason to leave an expert out."""
    logits = torch.tensor([[0.0, -0.0, -3.0, 0.0], [-5.0, -5.0, -5.0, -5.05]], device=device)
    routing = ops.route_experts(logits, 2, False, scoring="sparsemixer")
    torch.testing.assert_close(routing.expert_weights[0].cpu(), torch.tensor([1 / 3, 1 / 2]))
    tail = torch.tensor(-0.05).exp()
    torch.testing.assert_close(routing.expert_weights[1].cpu(), torch.stack([1 / (3 + tail), 1 / (2 + tail)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "sparse"}, "scoring must be softmax, sigmoid or sparsemixer, got sparse"),
        (
            {"scoring": "sparsemixer", "renormalize": True},
            "scoring must not be sparsemixer with bias, groups or renorm",
        ),
        ({"scoring": "sparsemixer", "bias": torch.zeros(4)}, "scoring must not be sparsemixer with bias"),
        ({"scoring": "sparsemixer", "num_groups": 2}, "scoring must not be sparsemixer with bias"),
        ({"jitter": -0.1}, "jitter must be in 0 .. 1, got -0.1"),
        ({"jitter": float("nan")}, "jitter must be in 0 .. 1, got nan"),
    ],
)
def test_errors_of_sparse_mixer(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^route_experts: {message}"):
        ops.route_experts(torch.zeros(3, 4), **{"top_k": 2, "renormalize": False, **options})


def test_scores_of_zero_give_weights_of_zero(device: str) -> None:
    logits = torch.full((2, 4), -200.0, device=device)
    assert ops.route_experts(logits, 2, True, scoring="sigmoid").expert_weights.eq(0).all()


def test_a_group_is_as_good_as_its_two_best_experts(device: str) -> None:
    logits = torch.tensor([[9.0, -9.0, -9.0, 1.0, 1.0, -9.0, 0.0, 0.0, 0.0]], device=device)
    routing = ops.route_experts(logits, 2, True, scoring="sigmoid", num_groups=3, top_groups=1)
    assert routing.expert_ids.tolist() == [[3, 4]]


def test_the_rows_of_many_tokens_keep_their_order(device: str) -> None:
    """Sorted in parts of which the last ones are short or empty; and again, with the same counter."""
    for tokens in (700, 33, 129):
        assert_routing(torch.randn(tokens, 5, device=device).half(), 3, True)


def test_equal_logits_choose_the_smaller_index(device: str) -> None:
    routing = assert_routing(torch.zeros(3, 40, device=device), 4, True)
    assert routing.expert_ids.tolist() == [[0, 1, 2, 3]] * 3
    zeros = torch.tensor([[-1.0, 0.0, -0.0, 0.0]], device=device)
    assert ops.route_experts(zeros, 3, False).expert_ids.tolist() == [[1, 2, 3]]


def test_all_tokens_to_one_expert(device: str) -> None:
    logits = torch.zeros(300, 8, device=device)
    logits[:, 5] = 3.0
    routing = assert_routing(logits, 1, True)
    assert routing.expert_weights.eq(1).all()
    assert routing.expert_start.tolist() == [0] * 6 + [300] * 3


def test_large_and_infinite_logits(device: str) -> None:
    logits = torch.tensor([[1e30, -1e30, 3e4, -torch.inf], [-torch.inf, -90.0, -200.0, -torch.inf]], device=device)
    assert_routing(logits, 3, True)
    assert_routing(logits, 4, False)


def test_renormalised_weights_are_the_softmax_of_the_chosen(device: str) -> None:
    logits = torch.randn(19, 8, device=device)
    routing = ops.route_experts(logits, 2, True)
    expected = logits.topk(2).values.softmax(-1)
    torch.testing.assert_close(routing.expert_weights, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("renormalize", [False, True])
def test_nan_shows_in_its_token_and_chooses_experts_that_exist(renormalize: bool, device: str) -> None:
    logits = torch.randn(7, 33, device=device)
    clean = ops.route_experts(logits, 2, renormalize)
    logits[2, 17], logits[4] = torch.nan, torch.nan
    routing = ops.route_experts(logits, 2, renormalize)
    assert routing.expert_weights[[2, 4]].isnan().all()
    others = [0, 1, 3, 5, 6]
    assert_bitwise(routing.expert_weights[others], clean.expert_weights[others])
    assert routing.expert_ids.min() >= 0
    assert routing.expert_ids.max() < 33
    assert routing.row_ids.sort().values.tolist() == list(range(14))


def test_strided_rows(device: str) -> None:
    logits = torch.randn(9, 33, device=device)
    for strided, plain in zip(
        ops.route_experts(Guarded(logits).view, 4, True), ops.route_experts(logits, 4, True), strict=True
    ):
        assert_bitwise(strided, plain)


def test_a_token_does_not_depend_on_its_batch_or_the_threads(device: str) -> None:
    logits = torch.randn(33, 64, device=device)
    one, two = per_thread_count(lambda: ops.route_experts(logits, 6, True).expert_weights)
    assert_bitwise(one, two)
    parts = [ops.route_experts(rows, 6, True).expert_weights for rows in logits.split(5)]
    assert_bitwise(torch.cat(parts), one)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "logits 1-d": ("logits", {"logits": torch.zeros(4)}),
    "logits dtype": ("logits", {"logits": torch.zeros(3, 4).double()}),
    "logits columns strided": ("logits", {"logits": torch.zeros(4, 3).T}),
    "no experts": ("logits", {"logits": torch.zeros(3, 0)}),
    "too many experts": ("logits", {"logits": torch.zeros(3, 1025)}),
    "top_k 0": ("top_k", {"top_k": 0}),
    "top_k past the experts": ("top_k must be 1 to 4, got 5", {"top_k": 5}),
    "scoring": ("scoring must be softmax, sigmoid or sparsemixer, got relu", {"scoring": "relu"}),
    "bias shape": ("bias", {"bias": torch.zeros(3)}),
    "bias dtype": ("bias", {"bias": torch.zeros(4).half()}),
    "bias strided": ("bias", {"bias": torch.zeros(8)[::2]}),
    "no groups": ("num_groups must be 1, or .* got 0", {"num_groups": 0}),
    "groups that do not divide": ("num_groups .* got 3", {"num_groups": 3}),
    "groups of one": ("num_groups .* got 4", {"num_groups": 4}),
    "too many groups": ("num_groups .* at most 32", {"logits": torch.zeros(3, 128), "num_groups": 64}),
    "top_groups 0": ("top_groups must be 1 to 2", {"num_groups": 2, "top_groups": 0}),
    "top_groups past the groups": ("top_groups must be 1 to 2 .* got 3", {"num_groups": 2, "top_groups": 3}),
    "top_k past the chosen groups": ("top_groups .* top_k = 3 experts", {"num_groups": 2, "top_k": 3}),
    "top_k past 32": ("top_k must be 1 to 32, got 33", {"logits": torch.zeros(3, 64), "top_k": 33}),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, change = BAD[case]
    with pytest.raises(RuntimeError, match=argument):
        ops.route_experts(**({"logits": torch.zeros(3, 4), "top_k": 2, "renormalize": True} | change))
