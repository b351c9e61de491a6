"""Mamba-2's scan of ragged batches, with its states in slots, against a loop over the tokens in fp64."""

from typing import Any

import pytest
import torch
from support import reference
from support.helpers import DTYPES, Guarded, assert_bitwise, assert_rounded, device_fixture
from support.state_slots import (
    BATCHES,
    Run,
    Slots,
    assert_batch_and_threads,
    assert_cuts,
    assert_kept,
    assert_no_other_slots,
    assert_snapshots,
    last,
    poisoned,
)
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")

EPS = 1e-5
NO_LIMITS = 0.0, float("inf")
# groups, heads, state_dim, head_dim; a block of columns is 32 wide (16 from 144 rows on), of one token 64.
SIZES = [
    (1, 1, 16, 16),
    (2, 4, 48, 32),
    (1, 3, 32, 80),
    (2, 2, 128, 64),
    (1, 1, 256, 48),
    (1, 1, 144, 16),
    (1, 2, 16, 256),
]


def inputs(tokens: int, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """xbc, z and dt."""
    groups, heads, state_dim, head_dim = sizes
    widths = heads * head_dim + 2 * groups * state_dim, heads * head_dim, heads
    return tuple(torch.randn(tokens, width, device=device).to(dtype) for width in widths)


def model(sizes: tuple[int, ...], dtype: torch.dtype, device: str, limits: tuple[float, float] = NO_LIMITS) -> Any:
    """a_log, dt_bias, d, norm_weight, eps, dt_min and dt_max: decays of 0.2 to 0.999, as in trained models."""
    _, heads, _, head_dim = sizes
    rates = torch.empty(heads, device=device).uniform_(0.5, 16).log()
    bias, d = torch.randn(heads, device=device) - 3, torch.randn(heads, device=device)
    return rates, bias, d, torch.randn(heads * head_dim, device=device).to(dtype), EPS, *limits


def states(count: int, sizes: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(count, *sizes[1:], device=device)


def run_on(tokens: int, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> Run:
    per_token, rest = inputs(tokens, sizes, dtype, device), model(sizes, torch.float32, device)
    return lambda rows, state, *slots: ops.mamba2_scan(*(t[rows] for t in per_token), *rest, state, *slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_mamba2_scan(batch: str, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    slots = BATCHES[batch]
    per_token = inputs(slots.tokens, sizes, dtype, device)
    guarded = [Guarded(t).view for t in per_token]
    before = poisoned(slots, states(slots.count, sizes, device), device)
    for weight_dtype in (dtype, torch.float32, None):
        *rest, weight, eps, dt_min, dt_max = model(sizes, weight_dtype or torch.float32, device)
        args, state = (*rest, None if weight_dtype is None else weight, eps, dt_min, dt_max), before.clone()
        out = ops.mamba2_scan(*guarded, *args, state, *slots.tensors(device))
        expected, after = reference.mamba2_scan(*per_token, *args, before, *slots.tensors("cpu"))
        assert out.dtype == dtype
        assert_rounded(out, expected, slack=3e-5)
        written = sorted({slot for seq in slots.writes for slot in seq} - {-1})
        assert_rounded(state[written], after[written], slack=3e-5)
        assert_kept(slots, state, before)


@pytest.mark.parametrize("limits", [(0.03, 0.1), (0.0, 0.05), (0.08, float("inf"))])
def test_limits_of_the_time_step(limits: tuple[float, float], device: str) -> None:
    sizes, slots = SIZES[1], BATCHES["mixed"]
    call = *inputs(slots.tokens, sizes, torch.float32, device), *model(sizes, torch.float32, device, limits)
    before = states(slots.count, sizes, device)
    expected, _ = reference.mamba2_scan(*call, before, *slots.tensors("cpu"))
    without, _ = reference.mamba2_scan(*call[:-2], *NO_LIMITS, before, *slots.tensors("cpu"))
    out = ops.mamba2_scan(*call, before.clone(), *slots.tensors(device))
    assert_rounded(out, expected, slack=3e-5)
    assert (expected - without).abs().max() > 0.1


def test_the_time_step_may_be_fp32_beside_narrower_activations(device: str) -> None:
    sizes, slots = SIZES[1], BATCHES["mixed"]
    xbc, z, dt = inputs(slots.tokens, sizes, torch.float32, device)
    call = xbc.bfloat16(), z.bfloat16(), dt, *model(sizes, torch.float32, device)
    before = states(slots.count, sizes, device)
    expected, _ = reference.mamba2_scan(*call, before, *slots.tensors("cpu"))
    assert_rounded(ops.mamba2_scan(*call, before.clone(), *slots.tensors(device)), expected, slack=3e-5)


def test_slots_may_be_strided(device: str) -> None:
    sizes, slots = SIZES[1], BATCHES["mixed"]
    call = *inputs(slots.tokens, sizes, torch.float32, device), *model(sizes, torch.float32, device)
    memory = torch.stack([states(slots.count, sizes, device) for _ in range(2)], 1)
    before = memory.clone()
    plain = memory[:, 1].contiguous()
    expected = ops.mamba2_scan(*call, plain, *slots.tensors(device))
    assert_bitwise(ops.mamba2_scan(*call, memory[:, 1], *slots.tensors(device)), expected)
    assert_bitwise(memory[:, 1], plain)
    assert_bitwise(memory[:, 0], before[:, 0])


def test_unaligned_states_are_refused_on_a_gpu(request: pytest.FixtureRequest, device: str) -> None:
    sizes, slots = SIZES[1], BATCHES["mixed"]
    call = *inputs(slots.tokens, sizes, torch.float32, device), *model(sizes, torch.float32, device)
    state = states(slots.count, sizes, device)
    moved = torch.empty(state.numel() + 1, device=device)[1:].view(state.shape).copy_(state)
    if request.node.callspec.params["device"] in ("cuda", "emulated"):
        with pytest.raises(RuntimeError, match=r"^mamba2_scan: ssm_state must have slots"):
            ops.mamba2_scan(*call, moved, *slots.tensors(device))
        return
    expected = ops.mamba2_scan(*call, state, *slots.tensors(device))
    assert_bitwise(ops.mamba2_scan(*call, moved, *slots.tensors(device)), expected)
    assert_bitwise(moved, state)


def test_slots_out_of_range(device: str) -> None:
    assert_no_other_slots(run_on(9, SIZES[0], torch.float32, device), states(6, SIZES[0], device), device)


@pytest.mark.parametrize("sizes", [SIZES[2], SIZES[3]], ids=str)
@pytest.mark.parametrize("batch", ["snapshots", "every token"])
def test_a_stored_state_is_that_of_a_step_which_ends_there(batch: str, sizes: tuple[int, ...], device: str) -> None:
    slots = BATCHES[batch]
    run, state = run_on(slots.tokens, sizes, torch.bfloat16, device), states(slots.count, sizes, device)
    assert_snapshots(slots, run, state, device)


@pytest.mark.repeats
@pytest.mark.parametrize("sizes", [SIZES[1], SIZES[2]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_do_not_change_a_bit(dtype: torch.dtype, sizes: tuple[int, ...], device: str) -> None:
    assert_cuts(37, run_on(37, sizes, dtype, device), states(3, sizes, device), device)


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_and_threads_do_not_change_a_bit(dtype: torch.dtype, device: str) -> None:
    slots, sizes = BATCHES["mixed"], SIZES[2]
    run = run_on(slots.tokens, sizes, dtype, device)
    assert_batch_and_threads(slots, run, states(slots.count, sizes, device), device)


def test_time_steps_of_any_size(device: str) -> None:
    """Nothing becomes NaN where softplus and the exponentials overflow or underflow."""
    sizes, slots = (1, 2, 32, 32), Slots([40], [0], [last(40, 1)])
    xbc, z, dt = inputs(40, sizes, torch.float32, device)
    extremes = torch.tensor([-6e4, -200.0, -88.8, -20.0, -0.0, 20.0, 88.8, 200.0, 6e4, 1.0], device=device)
    dt = extremes.repeat(4)[:, None].expand(40, 2).contiguous()
    rates, zeros = torch.tensor([-3.0, 5.0], device=device), torch.zeros(2, device=device)
    call = xbc, z, dt, rates, zeros, zeros, torch.ones(64, device=device), EPS, *NO_LIMITS
    state = states(2, sizes, device)
    expected, after = reference.mamba2_scan(*call, state, *slots.tensors("cpu"))
    assert_rounded(ops.mamba2_scan(*call, state, *slots.tensors(device)), expected, slack=3e-5)
    assert_rounded(state, after, slack=3e-5)


def test_nan_stays_in_its_head_and_its_sequence(device: str) -> None:
    sizes, slots = (2, 4, 16, 32), BATCHES["mixed"]
    xbc, z, dt = inputs(slots.tokens, sizes, torch.float32, device)
    dt[5, 1] = torch.nan  # the second sequence has tokens 1 to 19
    rest, limits = model(sizes, torch.float32, device)[:3], (EPS, *NO_LIMITS)
    state = states(slots.count, sizes, device)
    out = ops.mamba2_scan(xbc, z, dt, *rest, None, *limits, state, *slots.tensors(device))
    nan = out.isnan().view(slots.tokens, 4, 32)
    assert nan[5:20, 1].all()
    assert nan.sum() == 15 * 32


GOOD: dict[str, Any] = {
    "xbc": torch.zeros(5, 4 * 32 + 4 * 16),
    "z": torch.zeros(5, 4 * 32),
    "dt": torch.zeros(5, 4),
    "a_log": torch.zeros(4),
    "dt_bias": torch.zeros(4),
    "d": torch.zeros(4),
    "norm_weight": torch.ones(128),
    "eps": EPS,
    "dt_min": 0.0,
    "dt_max": 1.0,
    "ssm_state": torch.zeros(3, 4, 16, 32),
    "query_start": torch.tensor([0, 3, 5], dtype=torch.int32),
    "state_reads": torch.tensor([-1, 2], dtype=torch.int32),
    "state_writes": torch.tensor([-1, -1, 1, -1, 2], dtype=torch.int32),
}
BAD: dict[str, tuple[str, Any]] = {
    "xbc dtype": ("xbc", GOOD["xbc"].int()),
    "xbc 3-d": ("xbc", GOOD["xbc"][None]),
    "xbc columns apart": ("xbc", torch.zeros(5, 2 * 192)[:, ::2]),
    "xbc without b and c": ("xbc", torch.zeros(5, 4 * 32)),
    "xbc half a group": ("xbc", torch.zeros(5, 4 * 32 + 3 * 16)),
    "xbc three groups": ("xbc", torch.zeros(5, 4 * 32 + 6 * 16)),
    "z width": ("z", torch.zeros(5, 3 * 32)),
    "z tokens": ("z", torch.zeros(4, 4 * 32)),
    "z dtype": ("z", GOOD["z"].half()),
    "z columns apart": ("z", torch.zeros(5, 8 * 32)[:, ::2]),
    "dt heads": ("dt", torch.zeros(5, 3)),
    "dt dtype": ("dt", GOOD["dt"].half()),
    "a_log heads": ("a_log", torch.zeros(3)),
    "a_log dtype": ("a_log", torch.zeros(4).bfloat16()),
    "dt_bias heads": ("dt_bias", torch.zeros(3)),
    "d dtype": ("d", torch.zeros(4).bfloat16()),
    "norm_weight length": ("norm_weight", torch.ones(32)),
    "norm_weight dtype": ("norm_weight", torch.ones(128).half()),
    "norm_weight strided": ("norm_weight", torch.ones(256)[::2]),
    "state dtype": ("ssm_state", GOOD["ssm_state"].half()),
    "state 3-d": ("ssm_state", GOOD["ssm_state"][0]),
    "state state_dim": ("ssm_state", torch.zeros(3, 4, 8, 32)),
    "state head_dim": ("ssm_state", torch.zeros(3, 4, 16, 24)),
    "state large": ("ssm_state", torch.zeros(3, 4, 272, 32)),
    "state rows apart": ("ssm_state", torch.zeros(3, 4, 16, 64)[..., :32]),
    "state overlaps": ("ssm_state", torch.zeros(1, 4, 16, 32).expand(3, 4, 16, 32)),
    "query_start end": ("query_start", torch.tensor([0, 3, 6], dtype=torch.int32)),
    "state_reads high": ("state_reads", torch.tensor([-1, 3], dtype=torch.int32)),
    "state_writes low": ("state_writes", torch.tensor([-1, -1, -1, -1, -2], dtype=torch.int32)),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, bad = BAD[case]
    with pytest.raises(RuntimeError, match=rf"^mamba2_scan: {argument}\b"):
        ops.mamba2_scan(**(GOOD | {argument: bad}))
    ops.mamba2_scan(**GOOD)


@pytest.mark.parametrize("limits", [(-0.1, 1.0), (1.0, 0.5), (float("nan"), 1.0)])
def test_limits_in_order(limits: tuple[float, float]) -> None:
    with pytest.raises(RuntimeError, match=r"^mamba2_scan: dt_min must be from 0 to dt_max"):
        ops.mamba2_scan(**(GOOD | {"dt_min": limits[0], "dt_max": limits[1]}))
