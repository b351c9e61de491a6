"""The gated delta rule of ragged batches, with its states in slots, against a loop over the tokens in fp64."""

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

EPS = 1e-6
# key_heads, value_heads, key_dim, value_dim; a block of columns is 32 wide (16 from 144 rows on), of one token 128.
SIZES = [
    (1, 1, 16, 16),
    (2, 4, 48, 32),
    (1, 3, 32, 80),
    (2, 2, 128, 128),
    (1, 1, 256, 48),
    (1, 1, 144, 16),
    (1, 2, 16, 256),
    (1, 1, 32, 176),
]


# Whether each channel of a key has a decay of its own, and the arguments after the slots.
DECAYS: dict[str, tuple[bool, tuple[Any, ...]]] = {
    "heads": (False, ()),
    "bounded heads": (False, (1.0, False, -3.0)),
    "channels": (True, (1.0, True)),
    "bounded channels": (True, (1.0, True, -5.0)),
}


def inputs(
    tokens: int, sizes: tuple[int, ...], dtype: torch.dtype, device: str, channels: bool = False
) -> tuple[Tensor, ...]:
    """qkv, z, a and b."""
    key_heads, heads, key_dim, value_dim = sizes
    decays = heads * key_dim if channels else heads
    widths = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim, decays, heads
    return tuple(torch.randn(tokens, width, device=device).to(dtype) for width in widths)


def model(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str, channels: bool = False
) -> tuple[Tensor, Tensor, Tensor, float]:
    """a_log, dt_bias, norm_weight and eps: decays of 0.01 to 0.999, as in trained models."""
    _, heads, key_dim, value_dim = sizes
    rates = torch.empty(heads, device=device).uniform_(0.01, 16).log()
    decays = heads * key_dim if channels else heads
    return rates, torch.randn(decays, device=device) - 3, torch.randn(value_dim, device=device).to(dtype), EPS


def states(count: int, sizes: tuple[int, ...], device: str) -> Tensor:
    _, heads, key_dim, value_dim = sizes
    return torch.randn(count, heads, key_dim, value_dim, device=device)


def run_on(tokens: int, sizes: tuple[int, ...], dtype: torch.dtype, device: str, decays: str = "heads") -> Run:
    channels, options = DECAYS[decays]
    per_token = inputs(tokens, sizes, dtype, device, channels)
    rest = model(sizes, torch.float32, device, channels)
    return lambda rows, state, *slots: ops.gated_delta_rule(
        *(t[rows] for t in per_token), *rest, state, *slots, *options
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("batch", BATCHES)
def test_gated_delta_rule(batch: str, decays: str, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    slots, (channels, options) = BATCHES[batch], DECAYS[decays]
    qkv, z, a, b = inputs(slots.tokens, sizes, dtype, device, channels)
    guarded = [Guarded(t) for t in (qkv, z, a, b)]
    before = poisoned(slots, states(slots.count, sizes, device), device)
    for weight_dtype in {dtype, torch.float32}:
        rest, state = model(sizes, weight_dtype, device, channels), before.clone()
        out = ops.gated_delta_rule(*(t.view for t in guarded), *rest, state, *slots.tensors(device), *options)
        expected, after = reference.gated_delta_rule(qkv, z, a, b, *rest, before, *slots.tensors("cpu"), *options)
        assert out.dtype == dtype
        assert_rounded(out, expected, slack=1e-5)
        written = sorted({slot for seq in slots.writes for slot in seq} - {-1})
        assert_rounded(state[written], after[written], slack=1e-5)
        assert_kept(slots, state, before)


def test_equal_decays_of_all_channels_are_that_of_a_head(device: str) -> None:
    sizes, slots = SIZES[1], BATCHES["mixed"]
    _, heads, key_dim, _ = sizes
    qkv, z, a, b = inputs(slots.tokens, sizes, torch.float32, device)
    a_log, dt_bias, *rest = model(sizes, torch.float32, device)
    before = states(slots.count, sizes, device)
    state, after = before.clone(), before.clone()
    expected = ops.gated_delta_rule(qkv, z, a, b, a_log, dt_bias, *rest, state, *slots.tensors(device))
    wide = (t.repeat_interleave(key_dim, -1) for t in (a, dt_bias))
    a, dt_bias = wide
    assert a.shape[1] == heads * key_dim
    out = ops.gated_delta_rule(qkv, z, a, b, a_log, dt_bias, *rest, after, *slots.tensors(device))
    assert_rounded(out, expected, slack=1e-5)
    assert_rounded(after, state, slack=1e-5)


@pytest.mark.parametrize("channels", [False, True])
def test_gates_may_be_fp32_beside_narrower_activations(channels: bool, device: str) -> None:
    sizes, slots = SIZES[1], BATCHES["mixed"]
    qkv, z, a, b = inputs(slots.tokens, sizes, torch.float32, device, channels)
    rest, before = model(sizes, torch.float32, device, channels), states(slots.count, sizes, device)
    for gates in ((a, b), (a, b.bfloat16()), (a.bfloat16(), b)):
        call = qkv.bfloat16(), z.bfloat16(), *gates, *rest
        expected, _ = reference.gated_delta_rule(*call, before, *slots.tensors("cpu"))
        assert_rounded(ops.gated_delta_rule(*call, before.clone(), *slots.tensors(device)), expected, slack=1e-5)


def test_states_with_negative_eigenvalues(device: str) -> None:
    sizes, slots = SIZES[2], BATCHES["mixed"]
    call = *inputs(slots.tokens, sizes, torch.float32, device), *model(sizes, torch.float32, device)
    before = states(slots.count, sizes, device)
    after = before.clone()
    out = ops.gated_delta_rule(*call, after, *slots.tensors(device), 2.0)
    expected, stored = reference.gated_delta_rule(*call, before, *slots.tensors("cpu"), 2.0)
    assert_rounded(out, expected, slack=1e-5)
    written = sorted({slot for seq in slots.writes for slot in seq} - {-1})
    assert_rounded(after[written], stored[written], slack=1e-5)
    plain, _ = reference.gated_delta_rule(*call, before, *slots.tensors("cpu"))
    assert (out - plain).abs().max() > 0.1


def test_slots_may_be_strided(device: str) -> None:
    sizes, slots = SIZES[1], BATCHES["mixed"]
    call = *inputs(slots.tokens, sizes, torch.float32, device), *model(sizes, torch.float32, device)
    memory = torch.stack([states(slots.count, sizes, device) for _ in range(2)], 1)
    before = memory.clone()
    plain = memory[:, 1].contiguous()
    expected = ops.gated_delta_rule(*call, plain, *slots.tensors(device))
    assert_bitwise(ops.gated_delta_rule(*call, memory[:, 1], *slots.tensors(device)), expected)
    assert_bitwise(memory[:, 1], plain)
    assert_bitwise(memory[:, 0], before[:, 0])


def test_unaligned_states_are_refused_on_a_gpu(request: pytest.FixtureRequest, device: str) -> None:
    sizes, slots = SIZES[1], BATCHES["mixed"]
    call = *inputs(slots.tokens, sizes, torch.float32, device), *model(sizes, torch.float32, device)
    state = states(slots.count, sizes, device)
    moved = torch.empty(state.numel() + 1, device=device)[1:].view(state.shape).copy_(state)
    if request.node.callspec.params["device"] in ("cuda", "emulated"):
        with pytest.raises(RuntimeError, match=r"^gated_delta_rule: recurrent_state must have slots"):
            ops.gated_delta_rule(*call, moved, *slots.tensors(device))
        return
    expected = ops.gated_delta_rule(*call, state, *slots.tensors(device))
    assert_bitwise(ops.gated_delta_rule(*call, moved, *slots.tensors(device)), expected)
    assert_bitwise(moved, state)


def test_slots_out_of_range(device: str) -> None:
    assert_no_other_slots(run_on(9, SIZES[0], torch.float32, device), states(6, SIZES[0], device), device)


@pytest.mark.parametrize("decays", ["heads", "channels"])
@pytest.mark.parametrize("sizes", [SIZES[2], SIZES[3]], ids=str)
@pytest.mark.parametrize("batch", ["snapshots", "every token"])
def test_a_stored_state_is_that_of_a_step_which_ends_there(
    batch: str, sizes: tuple[int, ...], decays: str, device: str
) -> None:
    slots = BATCHES[batch]
    run, state = run_on(slots.tokens, sizes, torch.bfloat16, device, decays), states(slots.count, sizes, device)
    assert_snapshots(slots, run, state, device)


@pytest.mark.repeats
@pytest.mark.parametrize("sizes", [SIZES[1], SIZES[2], SIZES[-1]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decays", ["heads", "channels"])
def test_steps_do_not_change_a_bit(decays: str, dtype: torch.dtype, sizes: tuple[int, ...], device: str) -> None:
    assert_cuts(37, run_on(37, sizes, dtype, device, decays), states(3, sizes, device), device)


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decays", ["heads", "channels"])
def test_batch_and_threads_do_not_change_a_bit(decays: str, dtype: torch.dtype, device: str) -> None:
    slots, sizes = BATCHES["mixed"], SIZES[2]
    run = run_on(slots.tokens, sizes, dtype, device, decays)
    assert_batch_and_threads(slots, run, states(slots.count, sizes, device), device)


@pytest.mark.parametrize("decays", DECAYS)
def test_gates_of_any_size(decays: str, device: str) -> None:
    """Nothing becomes NaN where softplus and the exponentials overflow or underflow."""
    sizes, slots, (channels, options) = (1, 2, 32, 32), Slots([40], [0], [last(40, 1)]), DECAYS[decays]
    qkv, z, a, b = inputs(40, sizes, torch.float32, device)
    extremes = torch.tensor([-6e4, -200.0, -88.8, -20.0, -0.0, 20.0, 88.8, 200.0, 6e4, 1.0], device=device)
    a, b = extremes.repeat(4)[:, None].expand(40, 2).contiguous(), extremes.repeat_interleave(4)[:, None].repeat(1, 2)
    rates = torch.tensor([-20.0, 5.0], device=device)
    if channels:  # another size in each, and the largest and smallest beside each other
        a = torch.stack([a[:, 0].roll(shift) for shift in range(64)], 1)
    call = qkv, z, a, b, rates, torch.zeros(a.shape[1], device=device), torch.ones(32, device=device), EPS
    state = states(2, sizes, device)
    expected, after = reference.gated_delta_rule(*call, state, *slots.tensors("cpu"), *options)
    assert_rounded(ops.gated_delta_rule(*call, state, *slots.tensors(device), *options), expected, slack=1e-5)
    assert_rounded(state, after, slack=1e-5)


def test_queries_and_keys_of_any_length(device: str) -> None:
    """Zeros stay zeros, and 1e-6 is added to the squared length, which matters where that is small."""
    sizes, slots = (1, 1, 16, 32), Slots([5], [0], [last(5, 1)])
    qkv, z, a, b = inputs(5, sizes, torch.float32, device)
    qkv[:, :32] *= torch.tensor([0.0, 1e-4, 1e-3, 1.0, 1e8], device=device)[:, None]
    call = qkv, z, a, b, *model(sizes, torch.float32, device)
    state = states(2, sizes, device)
    expected, after = reference.gated_delta_rule(*call, state, *slots.tensors("cpu"))
    out = ops.gated_delta_rule(*call, state, *slots.tensors(device))
    assert_rounded(out, expected, slack=1e-5)
    assert_rounded(state, after, slack=1e-5)
    assert (out[0] == 0).all()


def test_nan_stays_in_its_head_and_its_sequence(device: str) -> None:
    sizes, slots = (2, 4, 16, 32), BATCHES["mixed"]
    qkv, z, a, b = inputs(slots.tokens, sizes, torch.float32, device)
    a[5, 1] = torch.nan  # the second sequence has tokens 1 to 19
    rest = model(sizes, torch.float32, device)
    out = ops.gated_delta_rule(qkv, z, a, b, *rest, states(slots.count, sizes, device), *slots.tensors(device))
    nan = out.isnan().view(slots.tokens, 4, 32)
    assert nan[5:20, 1].all()
    assert nan.sum() == 15 * 32


GOOD: dict[str, Any] = {
    "qkv": torch.zeros(5, 4 * 16 + 4 * 32),
    "z": torch.zeros(5, 4 * 32),
    "a": torch.zeros(5, 4),
    "b": torch.zeros(5, 4),
    "a_log": torch.zeros(4),
    "dt_bias": torch.zeros(4),
    "norm_weight": torch.ones(32),
    "eps": EPS,
    "recurrent_state": torch.zeros(3, 4, 16, 32),
    "query_start": torch.tensor([0, 3, 5], dtype=torch.int32),
    "state_reads": torch.tensor([-1, 2], dtype=torch.int32),
    "state_writes": torch.tensor([-1, -1, 1, -1, 2], dtype=torch.int32),
}
BAD: dict[str, tuple[str, Any]] = {
    "qkv dtype": ("qkv", GOOD["qkv"].int()),
    "qkv 3-d": ("qkv", GOOD["qkv"][None]),
    "qkv columns apart": ("qkv", torch.zeros(5, 2 * 192)[:, ::2]),
    "qkv without keys": ("qkv", torch.zeros(5, 4 * 32)),
    "qkv half a head": ("qkv", torch.zeros(5, 3 * 16 + 4 * 32)),
    "qkv three key heads": ("qkv", torch.zeros(5, 6 * 16 + 4 * 32)),
    "z width": ("z", torch.zeros(5, 3 * 32)),
    "z tokens": ("z", torch.zeros(4, 4 * 32)),
    "z dtype": ("z", GOOD["z"].half()),
    "z columns apart": ("z", torch.zeros(5, 8 * 32)[:, ::2]),
    "a heads": ("a", torch.zeros(5, 3)),
    "a dtype": ("a", GOOD["a"].half()),
    "a channels of three heads": ("a", torch.zeros(5, 3 * 16)),
    "dt_bias of channels alone": ("dt_bias", torch.zeros(4 * 16)),
    "decay_bound": ("decay_bound", 1.0),
    "b heads": ("b", torch.zeros(5, 3)),
    "b dtype": ("b", GOOD["b"].int()),
    "a_log heads": ("a_log", torch.zeros(3)),
    "a_log dtype": ("a_log", torch.zeros(4).bfloat16()),
    "dt_bias heads": ("dt_bias", torch.zeros(3)),
    "dt_bias dtype": ("dt_bias", torch.zeros(4).bfloat16()),
    "norm_weight length": ("norm_weight", torch.ones(31)),
    "norm_weight dtype": ("norm_weight", torch.ones(32).half()),
    "norm_weight strided": ("norm_weight", torch.ones(64)[::2]),
    "state dtype": ("recurrent_state", GOOD["recurrent_state"].half()),
    "state 3-d": ("recurrent_state", GOOD["recurrent_state"][0]),
    "state key_dim": ("recurrent_state", torch.zeros(3, 4, 8, 32)),
    "state value_dim": ("recurrent_state", torch.zeros(3, 4, 16, 24)),
    "state large": ("recurrent_state", torch.zeros(3, 4, 272, 32)),
    "state rows apart": ("recurrent_state", torch.zeros(3, 4, 16, 64)[..., :32]),
    "state overlaps": ("recurrent_state", torch.zeros(1, 4, 16, 32).expand(3, 4, 16, 32)),
    "query_start end": ("query_start", torch.tensor([0, 3, 6], dtype=torch.int32)),
    "state_reads high": ("state_reads", torch.tensor([-1, 3], dtype=torch.int32)),
    "state_writes low": ("state_writes", torch.tensor([-1, -1, -1, -1, -2], dtype=torch.int32)),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, bad = BAD[case]
    with pytest.raises(RuntimeError, match=rf"^gated_delta_rule: {argument}\b"):
        ops.gated_delta_rule(**(GOOD | {argument: bad}))
    ops.gated_delta_rule(**GOOD)
