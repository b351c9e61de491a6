"""Attention over caches as transformers holds them, against masked attention in fp64."""

import pytest
import torch
from support.helpers import device_fixture
from torch import Tensor

from fastinfer.nn.dense_cache import dense_cache_attention

device = device_fixture("cpu", "cuda", "emulated")

BATCH, CACHED = 3, 90
# First positions and ends, one of which lies before the queries' first.
BOUNDS = [(0, 90), (37, 90), (86, 89)]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: list[tuple[int, int]],
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor,
) -> Tensor:
    length, heads = q.shape[1:3]
    k, v = (t.double().nan_to_num(0).repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    logits = torch.einsum("bqhd,bhkd->bhqk", q.double(), k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    key = torch.arange(k.shape[2])
    first, end = (torch.tensor(values)[:, None, None, None] for values in zip(*bounds, strict=True))
    query = end - length + torch.arange(length)[:, None]
    seen = (key <= query) & (key >= first)
    if window:
        seen &= key > query - window
    logits = torch.cat(
        [logits.masked_fill(~seen, -torch.inf), sinks.double()[:, None, None].expand(len(q), -1, length, 1)], -1
    )
    weights = logits.softmax(-1).nan_to_num(0.0)[..., :-1]  # NaN: a query that sees nothing
    return torch.einsum("bhqk,bhkd->bqhd", weights, v)


def assert_attention(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int, options: dict[str, float], bounds: str, length: int
) -> None:
    q = torch.randn(BATCH, heads, length, 64).to(dtype).transpose(1, 2)
    k, v = torch.randn(2, BATCH, kv_heads, CACHED, 64).to(dtype)
    at = {"none": [(0, CACHED)] * BATCH, "ends": [(0, 80), (0, 7), (0, 90)], "both": BOUNDS}[bounds]
    for sequence, (first, end) in enumerate(at):  # what no query may read
        for cache in (k, v):
            cache[sequence, :, :first] = torch.nan
            cache[sequence, :, end:] = torch.nan
    columns = {"none": None, "ends": torch.tensor(at)[:, 1:], "both": torch.tensor(at)}[bounds]
    visible = None if columns is None else columns.int()[:, None, None].to(device)
    sinks = torch.randn(heads) if options.get("sinks") else torch.full((heads,), -torch.inf)
    named = {"scale": 0.125, "window": int(options.get("window", 0)), "softcap": options.get("softcap", 0.0)}
    given = sinks.to(device) if options.get("sinks") else None
    out = dense_cache_attention(*(t.to(device) for t in (q, k, v)), visible, sinks=given, **named).cpu()
    expected = reference(q, k, v, at, **named, sinks=sinks)
    assert out.shape == q.shape
    rounding = {"rtol": 0, "atol": 5e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out.double(), expected, **rounding)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("bounds", ["none", "ends", "both"])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
def test_against_masked_attention(
    heads: int, kv_heads: int, options: dict[str, float], bounds: str, length: int
) -> None:
    torch.manual_seed(0)
    assert_attention("cpu", torch.float32, heads, kv_heads, options, bounds, length)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("bounds", ["none", "both"])
def test_in_16_bits(bounds: str, length: int, device: str) -> None:
    assert_attention(device, torch.bfloat16, 6, 2, {"window": 20, "sinks": True}, bounds, length)


def test_strided_caches(device: str) -> None:
    """A static cache's slice, and keys of a projection that were never in a cache."""
    q, cache = torch.randn(2, 1, 4, 64).bfloat16().to(device), torch.randn(2, 2, 64, 64).bfloat16().to(device)
    for k in (cache[:, :, 10:50], cache.transpose(1, 2).contiguous().transpose(1, 2)):
        assert torch.equal(dense_cache_attention(q, k, k), dense_cache_attention(q, k.contiguous(), k.contiguous()))


@pytest.mark.parametrize("wants", ["k", "v"])
def test_keys_and_values_that_require_grad_are_refused(wants: str) -> None:
    """Projections of keys and values may have adapters while that of the queries is frozen."""
    q, caches = torch.randn(1, 3, 2, 64), {name: torch.randn(1, 2, 3, 64) for name in ("k", "v")}
    caches[wants].requires_grad_()
    with pytest.raises(RuntimeError, match=f"paged_attention is an inference kernel .*{wants}_cache requires grad"):
        dense_cache_attention(q, **caches)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_queries_that_are_in_the_order_of_heads(kv_heads: int, batch: int, length: int) -> None:
    """The order of the queries is that after a rotation of a part of each head."""
    q, k = torch.randn(batch, 4, length, 64).transpose(1, 2), torch.randn(batch, kv_heads, 5, 64)
    assert torch.equal(dense_cache_attention(q, k, k), dense_cache_attention(q.contiguous(), k, k))


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0)])
def test_nothing_to_compute(batch: int, length: int) -> None:
    """Values may have another size than queries and keys."""
    q, k, v = torch.ones(batch, length, 4, 64), torch.ones(batch, 2, 5, 64), torch.ones(batch, 2, 5, 32)
    assert dense_cache_attention(q, k, v).shape == (batch, length, 4, 32)


@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (1, 1, 3, 1), (1, 2, 1, 1), (1, 2)])
def test_masks_of_other_forms_are_refused(shape: tuple[int, ...]) -> None:
    q, k = torch.ones(1, 3, 2, 64), torch.ones(1, 2, 3, 64)
    with pytest.raises(ValueError, match=r"attention_mask must be None, or the mask of .*, got torch\.int32 of \(1, "):
        dense_cache_attention(q, k, k, torch.ones(shape, dtype=torch.int32))
