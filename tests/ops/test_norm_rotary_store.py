"""The prologue of attention in one pass: against fp64, and against the operators that it joins."""

from typing import Any

import pytest
import torch
from support import reference
from support.helpers import DTYPES, Guarded, assert_bitwise, assert_rounded, device_fixture, num_threads
from support.quantized_rows import assert_quantized_rows
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "cuda", "emulated")

MAX_POSITION, NUM_BLOCKS, BLOCK_SIZE = 50, 5, 16
QUANTIZED = (torch.int8, torch.float8_e4m3fn)


def random_case(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: str,
    rotary_dim: int | None = None,
    norm: torch.dtype | None = None,
) -> dict[str, Any]:
    """Arguments of the operator: positions and slots in no order; every third slot is -1; caches of 5, scales of -7."""
    q, k, v = (
        (2 * torch.randn(tokens, heads, head_dim, device=device)).to(dtype) for heads in (q_heads, kv_heads, kv_heads)
    )
    positions = torch.randint(0, MAX_POSITION, (tokens,), device=device)
    positions[-1:] = MAX_POSITION - 1
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:tokens].to(device)
    slots[2::3] = -1
    caches = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim), 5.0, device=device).to(cache_dtype)
    scales = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, kv_heads), -7.0, device=device)
    weights = [None if norm is None else (torch.randn(head_dim, device=device) + 1).to(norm) for _ in range(2)]
    return {
        "q": q,
        "k": k,
        "v": v,
        "q_norm_weight": weights[0],
        "k_norm_weight": weights[1],
        "eps": 1e-5,
        "positions": positions,
        "cos_sin_cache": ops.cos_sin_cache(rotary_dim or head_dim, MAX_POSITION).to(device),
        "interleaved": False,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "k_scale": scales[0] if cache_dtype in QUANTIZED else None,
        "v_scale": scales[1] if cache_dtype in QUANTIZED else None,
        "slot_mapping": slots,
        "query_scales": None,
    }


def copy_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in case.items()}


def run_and_check(case: dict[str, Any]) -> None:
    before = copy_of(case)
    ops.norm_rotary_store(**case)
    rotary = [before[name] for name in ("eps", "positions", "cos_sin_cache", "interleaved")]
    query = reference.norm_rotary(before["q"], before["q_norm_weight"], *rotary)
    if before["query_scales"] is not None:
        query = query * before["query_scales"][before["positions"], None, None]
    # Two rounded products and a norm: a little more than one fp32 rounding, relative to the head's mean magnitude.
    assert_rounded(case["q"], query, slack=5e-6)
    assert_bitwise(case["k"], before["k"])
    assert_bitwise(case["v"], before["v"])
    key = reference.norm_rotary(before["k"], before["k_norm_weight"], *rotary)
    slots = before["slot_mapping"]
    stored = slots[slots >= 0]
    untouched = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool, device=slots.device)
    untouched[stored] = False
    for name, x in (("k", key), ("v", before["v"].double())):
        cache, expected = case[f"{name}_cache"].flatten(0, 1), x[slots >= 0]
        assert cache[untouched].float().eq(5).all()
        if case[f"{name}_scale"] is None:
            assert_rounded(cache[stored], expected, slack=5e-6)
        else:
            scale = case[f"{name}_scale"].flatten(0, 1)
            assert_quantized_rows(cache[stored], scale[stored], expected, slack=1e-5)
            assert scale[untouched].eq(-7).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (0, 9, 3, 64, 64),
        (1, 9, 3, 64, 64),
        (2, 1, 1, 2, 2),
        (7, 3, 1, 80, 32),
        (3, 8, 2, 128, 126),
        (2, 4, 1, 256, 256),
        (5, 2, 2, 33, 10),
        (3, 2, 1, 64, 0),
        (5, 0, 2, 64, 64),
    ],
)
def test_shapes(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    interleaved: bool,
    device: str,
) -> None:
    case = random_case(tokens, q_heads, kv_heads, head_dim, dtype, dtype, device, rotary_dim, norm=dtype)
    case["cos_sin_cache"] = case["cos_sin_cache"][:, :rotary_dim].contiguous()
    run_and_check(case | {"interleaved": interleaved})


@pytest.mark.parametrize("norm", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [*DTYPES, *QUANTIZED])
def test_caches_and_norms(cache_dtype: torch.dtype, norm: torch.dtype | None, device: str) -> None:
    run_and_check(random_case(7, 6, 3, 64, torch.bfloat16, cache_dtype, device, norm=norm))


@pytest.mark.parametrize("missing", ["q_norm_weight", "k_norm_weight"])
def test_one_norm_alone(missing: str, device: str) -> None:
    case = random_case(4, 4, 2, 64, torch.bfloat16, torch.bfloat16, device, norm=torch.bfloat16)
    run_and_check(case | {missing: None})


@pytest.mark.parametrize("norm", [None, torch.float32])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (33, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_of_queries(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, norm: torch.dtype | None, device: str
) -> None:
    case = random_case(7, 6, 3, head_dim, dtype, dtype, device, rotary_dim, norm=norm)
    run_and_check(case | {"query_scales": torch.rand(MAX_POSITION, device=device) + 0.5})


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("head_dim", [34, 512])
def test_norm_of_values(head_dim: int, cache_dtype: torch.dtype, device: str) -> None:
    """The values may be the keys."""
    fused = random_case(9, 6, 2, head_dim, torch.float32, cache_dtype, device, norm=torch.float32)
    case = copy_of(fused)
    ops.norm_rotary_store(**fused | {"v": fused["k"]}, norm_v=True)
    v = ops.rms_norm(case["k"], torch.ones(head_dim, device=device), case["eps"])
    ops.norm_rotary_store(**case | {"v": v})
    for name in ("q", "k_cache"):
        assert_bitwise(fused[name], case[name])
    step = 1.01 if cache_dtype == torch.int8 else 0.008 if cache_dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(fused["v_cache"].double(), case["v_cache"].double(), rtol=step, atol=step)


@pytest.mark.parametrize("norm", [None, torch.float32])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_equals_the_separate_operators(cache_dtype: torch.dtype, norm: torch.dtype | None, device: str) -> None:
    """In fp32 there is no rounding between them to avoid."""
    fused = random_case(9, 6, 2, 64, torch.float32, cache_dtype, device, norm=norm)
    case = copy_of(fused)
    ops.norm_rotary_store(**fused)
    q, k = case["q"], case["k"]
    if norm is not None:
        q = ops.rms_norm(q, case["q_norm_weight"], case["eps"])
        k = ops.rms_norm(k, case["k_norm_weight"], case["eps"])
    ops.rotary_embedding(q, k, case["positions"], case["cos_sin_cache"])
    caches = [case[name] for name in ("k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale")]
    ops.store_kv_cache(k, case["v"], *caches)
    torch.testing.assert_close(fused["q"], q, rtol=2e-6, atol=2e-6)
    step = 1.01 if cache_dtype == torch.int8 else 2e-6
    torch.testing.assert_close(fused["k_cache"].double(), case["k_cache"].double(), rtol=2e-6, atol=step)
    assert_bitwise(fused["v_cache"], case["v_cache"])
    if cache_dtype == torch.int8:
        torch.testing.assert_close(fused["k_scale"], case["k_scale"], rtol=2e-6, atol=0)
        assert_bitwise(fused["v_scale"], case["v_scale"])


@pytest.mark.parametrize("norm", [None, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 34])
def test_int4_cache(head_dim: int, norm: torch.dtype | None, device: str) -> None:
    case = random_case(7, 6, 3, head_dim, torch.bfloat16, torch.float32, device, norm=norm)
    before = copy_of(case)
    pages = (NUM_BLOCKS, BLOCK_SIZE, 3)
    caches = torch.full((2, *pages, head_dim // 2), 5, dtype=torch.uint8, device=device)
    k_size, v_size = reference.INT4_GROUPS
    scales = [torch.full((*pages, -(-head_dim // n), 2), -7.0, device=device).half() for n in (k_size, v_size)]
    given = {"k_cache": caches[0], "v_cache": caches[1], "k_scale": scales[0], "v_scale": scales[1]}
    ops.norm_rotary_store(**case | given)
    slots = before["slot_mapping"]
    stored = slots[slots >= 0]
    codes, pairs = reference.quantize_int4(before["v"][slots >= 0], v_size)
    assert_bitwise(caches[1].flatten(0, 1)[stored], codes)
    assert_bitwise(scales[1].flatten(0, 1)[stored], pairs)
    rotary = [before[name] for name in ("eps", "positions", "cos_sin_cache", "interleaved")]
    key = reference.norm_rotary(before["k"], before["k_norm_weight"], *rotary)[slots >= 0]
    pairs = scales[0].flatten(0, 1)[stored]
    error = reference.dequantize_int4(caches[0].flatten(0, 1)[stored], pairs, k_size) - key
    step = pairs[..., 0].double().repeat_interleave(k_size, -1)[..., :head_dim]
    assert (error.abs() <= 0.51 * step + 2**-11 * key.abs().amax(-1, keepdim=True)).all()
    skipped = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool, device=slots.device)
    skipped[stored] = False
    assert caches.flatten(1, 2)[:, skipped].eq(5).all()
    assert all(scale.flatten(0, 1)[skipped].eq(-7).all() for scale in scales)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
def test_strided_views_of_a_fused_projection(cache_dtype: torch.dtype, device: str) -> None:
    case = random_case(9, 6, 2, 64, torch.bfloat16, cache_dtype, device, norm=torch.float32)
    strided = copy_of(case)
    views = {name: Guarded(case[name]) for name in ("q", "k", "v")}
    ops.norm_rotary_store(**strided | {name: guarded.view for name, guarded in views.items()})
    ops.norm_rotary_store(**case)
    for name, guarded in views.items():
        guarded.assert_intact()
        assert_bitwise(guarded.view, case[name])
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if case[name] is not None:
            assert_bitwise(strided[name], case[name])


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_without_rotation_changes_nothing(dtype: torch.dtype, head_dim: int, device: str) -> None:
    """For models without rotary embedding: rows of (cos, sin) = (1, 0), which rotate a pair by nothing, bit for bit."""
    case = random_case(7, 4, 2, head_dim, dtype, dtype, device)
    case["q"][:, :, 0], case["k"][:, :, 1] = 6e4, -6e4
    case["cos_sin_cache"] = torch.tensor([[1.0, 0.0]], device=device).expand(MAX_POSITION, 2).contiguous()
    before = copy_of(case)
    for interleaved in (False, True):
        ops.norm_rotary_store(**case | {"interleaved": interleaved})
        assert_bitwise(case["q"], before["q"])
        stored = case["slot_mapping"] >= 0
        for name in ("k", "v"):
            cache = case[f"{name}_cache"].flatten(0, 1)
            assert_bitwise(cache[case["slot_mapping"][stored]], before[name][stored])
            cache[:] = 5


def test_a_token_does_not_depend_on_its_batch_or_the_threads(device: str) -> None:
    case = random_case(33, 3, 1, 64, torch.bfloat16, torch.int8, device, norm=torch.float32)
    per_token = ["q", "k", "v", "positions", "slot_mapping"]
    results = []
    for threads, size in [(1, 33), (2, 33), (2, 1)]:
        trial = copy_of(case)
        with num_threads(threads):
            for chunk in zip(*(trial[name].split(size) for name in per_token), strict=True):
                ops.norm_rotary_store(**trial | dict(zip(per_token, chunk, strict=True)))
        results.append(trial)
    for name in ("q", "k_cache", "v_cache", "k_scale", "v_scale"):
        assert_bitwise(results[1][name], results[0][name])
        assert_bitwise(results[2][name], results[0][name])


def test_outside_table_and_cache(device: str, request: pytest.FixtureRequest) -> None:
    """Refused where the host can look; else such a token is not rotated, or not stored, and its neighbours are."""
    case = random_case(4, 2, 1, 64, torch.float32, torch.float32, device)
    case["positions"][1], case["positions"][2] = MAX_POSITION, -1
    case["slot_mapping"] = torch.tensor([0, 1, 2, NUM_BLOCKS * BLOCK_SIZE], device=device)
    case["query_scales"] = torch.full((MAX_POSITION,), 2.0, device=device)
    if request.node.callspec.params["device"] == "cpu":
        with pytest.raises(RuntimeError, match=r"positions\[1\]"):
            ops.norm_rotary_store(**case)
        return
    before = copy_of(case)
    ops.norm_rotary_store(**case)
    assert_bitwise(case["q"][1:3], before["q"][1:3])
    assert_bitwise(case["k_cache"].flatten(0, 1)[1:3], before["k"][1:3])
    assert case["k_cache"].flatten(0, 1)[3:].eq(5).all()
    assert case["v_cache"].flatten(0, 1)[3:].eq(5).all()


BAD: dict[str, tuple[str, Tensor]] = {
    "q dtype": ("q", torch.zeros(3, 4, 64).double()),
    "q 2-d": ("q", torch.zeros(3, 256)),
    "q overlapping": ("q", torch.zeros(1, 4, 64).expand(3, 4, 64)),
    "k dtype": ("k", torch.zeros(3, 2, 64).half()),
    "k tokens": ("k", torch.zeros(2, 2, 64)),
    "v heads": ("v", torch.zeros(3, 1, 64)),
    "v heads strided": ("v", torch.zeros(3, 64, 2).transpose(1, 2)),
    "q_norm_weight length": ("q_norm_weight", torch.zeros(32)),
    "k_norm_weight dtype": ("k_norm_weight", torch.zeros(64).half()),
    "positions int32": ("positions", torch.arange(3).int()),
    "position past the table": ("positions", torch.tensor([0, MAX_POSITION, 1])),
    "table wider than the head": ("cos_sin_cache", torch.zeros(MAX_POSITION, 66)),
    "k_cache heads": ("k_cache", torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 64)),
    "v_cache dtype": ("v_cache", torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 64).half()),
    "k_scale not wanted": ("k_scale", torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2)),
    "query_scales length": ("query_scales", torch.zeros(MAX_POSITION - 1)),
    "query_scales dtype": ("query_scales", torch.zeros(MAX_POSITION).double()),
    "slot past the cache": ("slot_mapping", torch.tensor([0, NUM_BLOCKS * BLOCK_SIZE, 1])),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, value = BAD[case]
    good = random_case(3, 4, 2, 64, torch.float32, torch.float32, "cpu", norm=torch.float32)
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{argument}\b"):
        ops.norm_rotary_store(**(good | {argument: value}))


def test_norm_weights_of_two_dtypes_are_refused() -> None:
    good = random_case(3, 4, 2, 64, torch.bfloat16, torch.float32, "cpu", norm=torch.float32)
    with pytest.raises(RuntimeError, match="k_norm_weight must have the dtype of q_norm_weight, got bfloat16"):
        ops.norm_rotary_store(**(good | {"k_norm_weight": torch.ones(64).bfloat16()}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_norm_weights(dtype: torch.dtype, device: str) -> None:
    case = random_case(7, 4, 2, 64, dtype, torch.float32, device, norm=dtype)
    for name in ("q_norm_weight", "k_norm_weight"):
        case[name] = torch.cat([case[name].new_full((1,), torch.nan), case[name]])[1:]
    run_and_check(case)
