"""Under ``batch_invariant`` a token's results are the same to the last bit, whatever is computed beside it."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from support import reference
from support.attention_batches import BATCHES, Batch, assert_attention, make_batch, quantized
from support.expert_stack import FORMATS as STACK_FORMATS
from support.expert_stack import ExpertStack, random_ids
from support.helpers import assert_bitwise, assert_rounded, device_fixture, gemm_options
from support.linear_formats import FORMATS, Linear
from torch import Tensor

from fastinfer import ops

device = device_fixture("cuda", "emulated")

PARTS = [slice(0, 1), slice(1, 9), slice(9, 25), slice(25, 58), slice(58, 70)]


@pytest.fixture
def invariant(device: str) -> Iterator[None]:
    with ops.batch_invariant():
        yield


def differing(run: Callable[[slice], Tensor]) -> list[slice]:
    """Which parts of 70 tokens come out otherwise alone than together."""
    together = run(slice(0, 70))
    return [part for part in PARTS if not torch.equal(run(part), together[part])]


def product(form: str, fusion: str, device: str) -> Callable[[slice], Tensor]:
    """Of two units, deep enough to be cut into pieces: some of 70 tokens' rows."""
    linear, x = Linear(form, 160, 416, torch.bfloat16, device), torch.randn(70, 416, device=device).bfloat16()
    options = gemm_options(fusion, x, 160, torch.float32)

    def run(rows: slice) -> Tensor:
        own = {name: value[rows] if name == "residual" else value for name, value in options.items()}
        return linear.run(x[rows], **own)

    return run


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("fusion", ["plain", "norm", "bias+residual", "norm+silu"])
@pytest.mark.parametrize("form", FORMATS)
def test_products(form: str, fusion: str, device: str) -> None:
    assert differing(product(form, fusion, device)) == []


@pytest.mark.usefixtures("invariant")
def test_a_product_of_more_token_tiles_than_a_band(device: str) -> None:
    """Ten tiles of 32 by two row units: every unit is computed, wherever it is numbered."""
    linear, x = Linear("dense", 140, 64, torch.bfloat16, device), torch.randn(300, 64, device=device).bfloat16()
    assert_rounded(linear.run(x), reference.gemm(x, linear.dense), slack=1e-5)


@pytest.mark.repeats
@pytest.mark.parametrize("form", [form for form in FORMATS if form != "dense"])
def test_otherwise_products_differ(form: str, device: str) -> None:
    """Without the context products differ, so that the test above can fail; and leaving the context restores this.

    Sums of dense weights may be the same bits in all kernels.
    """
    with ops.batch_invariant(), ops.batch_invariant():
        pass
    assert differing(product(form, "norm", device)) != []


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("form", STACK_FORMATS)
def test_experts(form: str, device: str) -> None:
    stack, x = ExpertStack(form, 3, 48, 224, torch.bfloat16, device), torch.randn(70, 224, device=device).bfloat16()
    ids = random_ids(70, 2, 3, device)
    assert differing(lambda rows: stack.run(x[rows], ids[rows]).view(-1, 2, 48)) == []


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((20, 1), 80), ((2, 2), 256)])
def test_attention_is_right(name: str, heads: tuple[int, int], head_dim: int, device: str) -> None:
    for window in (0, 70):
        assert_attention(
            make_batch(BATCHES[name], *heads, head_dim, dtype=torch.bfloat16, device=device), window=window
        )


@pytest.mark.repeats
@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize(("q_heads", "head_dim"), [(3, 64), (5, 128)])
def test_attention_whole_chunked_and_decoded(
    q_heads: int, head_dim: int, window: int, cache_dtype: torch.dtype, device: str
) -> None:
    length = 530
    whole = make_batch([(length, length)], q_heads, 1, head_dim, dtype=torch.float16, device=device)
    if cache_dtype == torch.int8:
        whole = quantized(whole, cache_dtype)
    expected = whole.run(window=window)
    for cuts in [[0, 1, 17, 300, 512, 513, 530], [0, 400, 529, 530]]:
        for begin, end in pairwise(cuts):
            rows = {
                "q": whole.q[begin:end],
                "seq_lens": torch.tensor([end], dtype=torch.int32, device=device),
                "query_start": torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            }
            assert_bitwise(ops.paged_attention(**(vars(whole) | rows), window=window), expected[begin:end])


@pytest.mark.repeats
@pytest.mark.usefixtures("invariant")
def test_attention_beside_other_sequences(device: str) -> None:
    batch = make_batch(BATCHES["mixed"] + BATCHES["decode"] + BATCHES["chunk"], dtype=torch.float16, device=device)
    together = batch.run()
    for sequence, (begin, end) in enumerate(pairwise(batch.query_start.tolist())):
        alone = Batch(
            batch.q[begin:end],
            batch.k_cache,
            batch.v_cache,
            batch.block_table[sequence : sequence + 1],
            batch.seq_lens[sequence : sequence + 1],
            torch.tensor([0, end - begin], dtype=torch.int32, device=device),
        )
        assert_bitwise(alone.run(), together[begin:end])


@pytest.mark.repeats
@pytest.mark.usefixtures("invariant")
def test_a_plan_keeps_what_it_was_made_for(device: str) -> None:
    """A plan from within serves outside, and for calls after each other."""
    batch = make_batch(BATCHES["chunk"], dtype=torch.float16, device=device)
    expected, plan = batch.run(), ops.paged_attention_plan(batch.seq_lens, batch.query_start, 9, 3, 64)
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.extend(batch.run(plan=plan) for _ in range(2)))
    thread.start()
    thread.join()
    assert len(results) == 2
    for result in results:
        assert_bitwise(result, expected)


@pytest.mark.repeats
def test_it_holds_for_the_calling_thread(device: str) -> None:
    run = product("int4 min", "norm", device)
    others: list[list[slice]] = []
    with ops.batch_invariant():
        thread = threading.Thread(target=lambda: others.append(differing(run)))
        thread.start()
        thread.join()
        assert differing(run) == []
    assert others[0] != []


@pytest.mark.repeats
def test_compiled_code_leaves_it_as_it_was(device: str) -> None:
    """A trace must not set it for good."""
    run = product("int4", "norm", device)

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        with ops.batch_invariant():
            return x + 1

    for _ in range(2):
        compiled(torch.zeros(2))
    assert differing(run) != []
