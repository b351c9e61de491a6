"""The causal convolution of ragged batches, with its state in slots, against fp64."""

from typing import Any

import pytest
import torch
from support import reference
from support.helpers import DTYPES, Guarded, assert_bitwise, assert_rounded, device_fixture
from support.state_slots import (
    BATCHES,
    Run,
    assert_batch_and_threads,
    assert_cuts,
    assert_kept,
    assert_no_other_slots,
    assert_snapshots,
    poisoned,
)
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")


def weights(dim: int, kernel: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(dim, kernel, device=device).to(dtype), torch.randn(dim, device=device).to(dtype)


def run_on(tokens: int, dim: int, dtype: torch.dtype, device: str) -> Run:
    x, (weight, bias) = torch.randn(tokens, dim, device=device).to(dtype), weights(dim, 4, torch.float32, device)
    return lambda rows, state, *slots: ops.causal_conv1d(x[rows], weight, bias, state, *slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "kernel"), [(1, 2), (7, 4), (128, 4), (333, 3), (1024, 4), (129, 7), (512, 7)])
@pytest.mark.parametrize("batch", BATCHES)
def test_causal_conv1d(batch: str, dim: int, kernel: int, dtype: torch.dtype, device: str) -> None:
    slots = BATCHES[batch]
    x = Guarded(torch.randn(slots.tokens, dim, device=device).to(dtype))
    before = poisoned(slots, torch.randn(slots.count, kernel - 1, dim, device=device).to(dtype), device)
    for weight_dtype in {dtype, torch.float32}:
        weight, bias = weights(dim, kernel, weight_dtype, device)
        for offset in (bias, None):
            state = before.clone()
            out = ops.causal_conv1d(x.view, weight, offset, state, *slots.tensors(device))
            expected, states = reference.causal_conv1d(x.view, weight, offset, before, *slots.tensors("cpu"))
            assert out.dtype == dtype
            assert_rounded(out, expected)
            assert_bitwise(state, states)
            assert_kept(slots, state, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "kernel"), [(1, 2), (7, 4), (333, 3), (1024, 3), (129, 7), (512, 7)])
@pytest.mark.parametrize("batch", BATCHES)
def test_gates(batch: str, dim: int, kernel: int, dtype: torch.dtype, device: str) -> None:
    slots = BATCHES[batch]
    # As one projection computes them: both gates, then x.
    rows = torch.randn(slots.tokens, 3 * dim + 8, device=device).to(dtype)
    gates, x = Guarded(rows[:, : 2 * dim]), Guarded(rows[:, 2 * dim : 3 * dim])
    before = poisoned(slots, torch.randn(slots.count, kernel - 1, dim, device=device).to(dtype), device)
    for weight, bias in (weights(dim, kernel, torch.float32, device), (weights(dim, kernel, dtype, device)[0], None)):
        state = before.clone()
        out = ops.causal_conv1d(x.view, weight, bias, state, *slots.tensors(device), gates=gates.view)
        expected, states = reference.causal_conv1d(x.view, weight, bias, before, *slots.tensors("cpu"), gates.view)
        assert out.dtype == dtype
        assert_rounded(out, expected)
        assert_bitwise(state, states)
        assert_kept(slots, state, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [3, 7])
def test_steps_and_batch_do_not_change_a_bit_with_gates(kernel: int, dtype: torch.dtype, device: str) -> None:
    slots, dim = BATCHES["mixed"], 200
    rows = torch.randn(slots.tokens, 3 * dim, device=device).to(dtype)
    weight, bias = weights(dim, kernel, torch.float32, device)

    def run(tokens: Tensor, state: Tensor, *step: Tensor) -> Tensor:
        own = rows[tokens]
        return ops.causal_conv1d(own[:, 2 * dim :], weight, bias, state, *step, gates=own[:, : 2 * dim])

    assert_batch_and_threads(slots, run, torch.randn(slots.count, kernel - 1, dim, device=device).to(dtype), device)
    assert_cuts(37, run, torch.randn(3, kernel - 1, dim, device=device).to(dtype), device)


def test_slots_may_be_strided(device: str) -> None:
    slots = BATCHES["mixed"]
    memory = torch.randn(slots.count, 2, 3, 40, device=device)
    before, x = memory.clone(), torch.randn(slots.tokens, 40, device=device)
    weight, bias = weights(40, 4, torch.float32, device)
    out = ops.causal_conv1d(x, weight, bias, memory[:, 1], *slots.tensors(device))
    expected, states = reference.causal_conv1d(x, weight, bias, before[:, 1], *slots.tensors("cpu"))
    assert_rounded(out, expected)
    assert_bitwise(memory[:, 1], states)
    assert_bitwise(memory[:, 0], before[:, 0])


def test_slots_out_of_range(device: str) -> None:
    assert_no_other_slots(run_on(9, 40, torch.float32, device), torch.randn(6, 3, 40, device=device), device)


@pytest.mark.parametrize("batch", ["snapshots", "every token"])
def test_a_stored_state_is_that_of_a_step_which_ends_there(batch: str, device: str) -> None:
    slots = BATCHES[batch]
    state = torch.randn(slots.count, 3, 70, device=device).bfloat16()
    assert_snapshots(slots, run_on(slots.tokens, 70, torch.bfloat16, device), state, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_do_not_change_a_bit(dtype: torch.dtype, device: str) -> None:
    assert_cuts(37, run_on(37, 133, dtype, device), torch.randn(3, 3, 133, device=device).to(dtype), device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_and_threads_do_not_change_a_bit(dtype: torch.dtype, device: str) -> None:
    slots = BATCHES["mixed"]
    state = torch.randn(slots.count, 3, 777, device=device).to(dtype)
    assert_batch_and_threads(slots, run_on(slots.tokens, 777, dtype, device), state, device)


def test_nan_stays_in_its_sequence_and_window(device: str) -> None:
    slots = BATCHES["mixed"]
    x, state = torch.randn(slots.tokens, 20, device=device), torch.randn(slots.count, 3, 20, device=device)
    x[5, 7] = torch.nan
    weight, bias = weights(20, 4, torch.float32, device)
    out = ops.causal_conv1d(x, weight, bias, state, *slots.tensors(device))
    assert out.isnan().nonzero().tolist() == [[token, 7] for token in range(5, 9)]


X, WEIGHT, STATE = torch.zeros(5, 8), torch.zeros(8, 4), torch.zeros(3, 3, 8)
GOOD: dict[str, Any] = {
    "x": X,
    "weight": WEIGHT,
    "bias": torch.zeros(8),
    "conv_state": STATE,
    "query_start": torch.tensor([0, 3, 5], dtype=torch.int32),
    "state_reads": torch.tensor([-1, 2], dtype=torch.int32),
    "state_writes": torch.tensor([-1, -1, 1, -1, 2], dtype=torch.int32),
}
BAD_SLOTS: dict[str, tuple[str, Tensor]] = {
    "query_start dtype": ("query_start", GOOD["query_start"].long()),
    "query_start length": ("query_start", GOOD["query_start"][1:]),
    "query_start begin": ("query_start", torch.tensor([1, 3, 5], dtype=torch.int32)),
    "query_start end": ("query_start", torch.tensor([0, 3, 6], dtype=torch.int32)),
    "query_start order": ("query_start", torch.tensor([0, 7, 5], dtype=torch.int32)),
    "state_reads dtype": ("state_reads", GOOD["state_reads"].long()),
    "state_reads shape": ("state_reads", GOOD["state_reads"][None]),
    "state_reads high": ("state_reads", torch.tensor([-1, 3], dtype=torch.int32)),
    "state_reads low": ("state_reads", torch.tensor([-2, 0], dtype=torch.int32)),
    "state_writes dtype": ("state_writes", GOOD["state_writes"].long()),
    "state_writes length": ("state_writes", GOOD["state_writes"][:4]),
    "state_writes strided": ("state_writes", torch.zeros(10, dtype=torch.int32)[::2]),
    "state_writes high": ("state_writes", torch.tensor([-1, 3, -1, -1, -1], dtype=torch.int32)),
    "state_writes low": ("state_writes", torch.tensor([-1, -1, -1, -1, -2], dtype=torch.int32)),
}
BAD = BAD_SLOTS | {
    "x dtype": ("x", X.int()),
    "x 3-d": ("x", X[None]),
    "x columns apart": ("x", torch.zeros(5, 16)[:, ::2]),
    "weight channels": ("weight", torch.zeros(7, 4)),
    "weight short": ("weight", torch.zeros(8, 1)),
    "weight 5": ("weight", torch.zeros(8, 5)),
    "weight 6": ("weight", torch.zeros(8, 6)),
    "weight long": ("weight", torch.zeros(8, 8)),
    "weight dtype": ("weight", WEIGHT.half()),
    "weight strided": ("weight", torch.zeros(4, 8).T),
    "bias length": ("bias", torch.zeros(7)),
    "bias dtype": ("bias", torch.zeros(8).half()),
    "bias strided": ("bias", torch.zeros(16)[::2]),
    "gates width": ("gates", torch.zeros(5, 8)),
    "gates tokens": ("gates", torch.zeros(4, 16)),
    "gates dtype": ("gates", torch.zeros(5, 16).half()),
    "gates columns apart": ("gates", torch.zeros(5, 32)[:, ::2]),
    "conv_state rows": ("conv_state", torch.zeros(3, 4, 8)),
    "conv_state dim": ("conv_state", torch.zeros(3, 3, 7)),
    "conv_state dtype": ("conv_state", STATE.half()),
    "conv_state rows apart": ("conv_state", torch.zeros(3, 3, 16)[..., :8]),
    "conv_state overlaps": ("conv_state", torch.zeros(1, 3, 8).expand(3, 3, 8)),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, bad = BAD[case]
    with pytest.raises(RuntimeError, match=rf"^causal_conv1d: {argument}\b"):
        ops.causal_conv1d(**(GOOD | {argument: bad}))
    ops.causal_conv1d(**GOOD)
