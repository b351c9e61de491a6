"""The prologue of latent attention: against fp64, poisoned memory, invariances, errors."""

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
    heads: int,
    rank: int,
    rotary_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: str,
    norm: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Arguments of the operator: positions and slots in no order; every third slot is -1; a cache of 5, scales of -7.

    The elements to rotate lie behind others, which are NaN.
    """
    q_rope = torch.full((tokens, heads, 24 + rotary_dim), torch.nan, device=device)
    q_rope[..., 24:] = torch.randn(tokens, heads, rotary_dim, device=device)
    positions = torch.randint(0, MAX_POSITION, (tokens,), device=device)
    positions[-1:] = MAX_POSITION - 1
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:tokens].to(device)
    slots[2::3] = -1
    pages = NUM_BLOCKS, BLOCK_SIZE, 1
    return {
        "q_latent": torch.randn(tokens, heads, rank, device=device).to(dtype),
        "q_rope": q_rope.to(dtype)[..., 24:],
        "kv": (2 * torch.randn(tokens, rank + rotary_dim, device=device)).to(dtype),
        "norm_weight": (torch.randn(rank, device=device) + 1).to(norm),
        "eps": 1e-5,
        "positions": positions,
        "cos_sin_cache": ops.cos_sin_cache(rotary_dim, MAX_POSITION).to(device),
        "interleaved": True,
        "query_scales": None,
        "cache": torch.full((*pages, rank + rotary_dim), 5.0, device=device).to(cache_dtype),
        "scale": torch.full(pages, -7.0, device=device) if cache_dtype in QUANTIZED else None,
        "slot_mapping": slots,
    }


def copy_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in case.items()}


def run_and_check(case: dict[str, Any]) -> None:
    before = copy_of(case)
    q = ops.latent_rotary_store(**case)
    rank, rotary = case["q_latent"].shape[2], [case[name] for name in ("positions", "cos_sin_cache", "interleaved")]
    scales = case["query_scales"]
    factors = 1.0 if scales is None else scales.double()[case["positions"]][:, None, None]
    parts = case["q_latent"].double(), reference.rotary_embedding(case["q_rope"].double(), *rotary)
    assert_rounded(q, torch.cat(parts, -1) * factors, slack=5e-6)
    for name in ("q_latent", "kv"):
        assert_bitwise(case[name], before[name])
    latent = reference.rms_norm(case["kv"][:, :rank], case["norm_weight"], case["eps"])
    rope = reference.rotary_embedding(case["kv"][:, None, rank:].double(), *rotary)[:, 0]
    row = torch.cat([latent, rope], -1)
    slots = case["slot_mapping"]
    stored = slots[slots >= 0]
    untouched = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool, device=slots.device)
    untouched[stored] = False
    cache, expected = case["cache"].flatten(0, 2), row[slots >= 0]
    assert cache[untouched].float().eq(5).all()
    if case["scale"] is None:
        assert_rounded(cache[stored], expected, slack=5e-6)
    else:
        scale = case["scale"].flatten()
        assert_quantized_rows(cache[stored], scale[stored], expected, slack=1e-5)
        assert scale[untouched].eq(-7).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "rank", "rotary_dim"),
    [(0, 4, 32, 16), (1, 20, 512, 64), (3, 128, 256, 64), (7, 1, 24, 8), (5, 3, 33, 10), (2, 5, 8, 2)],
)
def test_shapes(
    tokens: int, heads: int, rank: int, rotary_dim: int, dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    case = random_case(tokens, heads, rank, rotary_dim, dtype, dtype, device, norm=dtype)
    run_and_check(case | {"interleaved": interleaved})


@pytest.mark.parametrize("norm", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [*DTYPES, *QUANTIZED])
def test_caches_and_norms(cache_dtype: torch.dtype, norm: torch.dtype, device: str) -> None:
    run_and_check(random_case(7, 6, 64, 16, torch.bfloat16, cache_dtype, device, norm))


def test_factors_of_queries(device: str) -> None:
    """They do not change what is stored."""
    case = random_case(7, 6, 64, 16, torch.float32, torch.float32, device)
    run_and_check(case | {"query_scales": torch.rand(MAX_POSITION, device=device) + 0.5})


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned(dtype: torch.dtype, device: str) -> None:
    case = random_case(9, 6, 64, 16, dtype, dtype, device)
    expected = ops.latent_rotary_store(**case)
    strided = copy_of(case)
    guarded = Guarded(case["kv"])
    unaligned = torch.cat([case["norm_weight"].new_full((1,), torch.nan), case["norm_weight"]])[1:]
    changed = {"kv": guarded.view, "norm_weight": unaligned, "q_rope": case["q_rope"].clone()}
    # Aligned rows sum the squares in another order.
    torch.testing.assert_close(ops.latent_rotary_store(**strided | changed), expected, rtol=0, atol=0)
    guarded.assert_intact()
    torch.testing.assert_close(strided["cache"], case["cache"], rtol=2**-7, atol=1e-6)


def test_a_token_does_not_depend_on_its_batch_or_the_threads(device: str) -> None:
    case = random_case(33, 3, 64, 16, torch.bfloat16, torch.int8, device)
    per_token = ["q_latent", "q_rope", "kv", "positions", "slot_mapping"]
    results = []
    for threads, size in [(1, 33), (2, 33), (2, 1)]:
        trial, queries = copy_of(case), []
        with num_threads(threads):
            for chunk in zip(*(trial[name].split(size) for name in per_token), strict=True):
                queries.append(ops.latent_rotary_store(**trial | dict(zip(per_token, chunk, strict=True))))
        results.append((torch.cat(queries), trial["cache"], trial["scale"]))
    for other in results[1:]:
        for part, first in zip(other, results[0], strict=True):
            assert_bitwise(part, first)


def test_outside_table_and_cache(device: str, request: pytest.FixtureRequest) -> None:
    """Refused where the host can look; else such a token is not rotated, or not stored, and its neighbours are."""
    case = random_case(4, 2, 64, 16, torch.float32, torch.float32, device)
    case["query_scales"] = torch.full((MAX_POSITION,), 2.0, device=device)
    case["positions"][1], case["positions"][2] = MAX_POSITION, -1
    case["slot_mapping"] = torch.tensor([0, 1, 2, NUM_BLOCKS * BLOCK_SIZE], device=device)
    if request.node.callspec.params["device"] == "cpu":
        with pytest.raises(RuntimeError, match=r"positions\[1\]"):
            ops.latent_rotary_store(**case)
        return
    q = ops.latent_rotary_store(**case)
    assert_bitwise(q[1:3], torch.cat([case["q_latent"], case["q_rope"]], -1)[1:3])
    assert_bitwise(case["cache"].flatten(0, 2)[1:3, 64:], case["kv"][1:3, 64:])
    assert case["cache"].flatten(0, 2)[3:].eq(5).all()


BAD: dict[str, tuple[str, Tensor]] = {
    "q_latent dtype": ("q_latent", torch.zeros(3, 4, 32).double()),
    "q_latent strided": ("q_latent", torch.zeros(3, 4, 64)[..., :32]),
    "q_rope heads": ("q_rope", torch.zeros(3, 2, 8)),
    "q_rope dtype": ("q_rope", torch.zeros(3, 4, 8).half()),
    "q_rope columns strided": ("q_rope", torch.zeros(3, 4, 16)[..., ::2]),
    "kv columns": ("kv", torch.zeros(3, 39)),
    "norm_weight length": ("norm_weight", torch.zeros(31)),
    "norm_weight dtype": ("norm_weight", torch.zeros(32).half()),
    "positions int32": ("positions", torch.arange(3).int()),
    "position past the table": ("positions", torch.tensor([0, MAX_POSITION, 1])),
    "table of another width": ("cos_sin_cache", torch.zeros(MAX_POSITION, 6)),
    "query_scales length": ("query_scales", torch.zeros(MAX_POSITION - 1)),
    "cache columns": ("cache", torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 32)),
    "cache heads": ("cache", torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 40)),
    "cache of int4": ("cache", torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 20).byte()),
    "scale not wanted": ("scale", torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1)),
    "slot past the cache": ("slot_mapping", torch.tensor([0, NUM_BLOCKS * BLOCK_SIZE, 1])),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, value = BAD[case]
    good = random_case(3, 4, 32, 8, torch.float32, torch.float32, "cpu")
    with pytest.raises((RuntimeError, ValueError), match=rf"latent_rotary_store: {argument}\b"):
        ops.latent_rotary_store(**(good | {argument: value}))
