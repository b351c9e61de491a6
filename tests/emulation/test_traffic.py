"""The counts of tests/emulation/traffic.py: right for known patterns, and as small as they are said to be."""

import ctypes
import re
from collections.abc import Callable

import pytest
import torch

from emulation import build, traffic

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.skipif(build.cuda_include() is None, reason="the CUDA toolkit's headers are missing"),
]

# Places whose accesses cost more than what the same bytes need: at most so many times, in any call. Others cost at most
# a tenth more, but for those that are less than a fiftieth of the kernel's costs.
KNOWN_COSTS = {
    # Gate and up lie 16 rows apart, so that eight lanes' rows meet the same banks.
    "shared gemm/gemm_epilogue_cuda.h load_shared": 2.0,
    "shared quant/w8a8_gemm_epilogue_cuda.h load_values": 2.0,
    # Every fourth chunk: 8 of 16 bytes, which four lanes read in each of four slots.
    "shared gemm/gemm_mins_cuda.h add": 4.0,
    # Eight fp32 to a lane, 32 bytes apart: what the first 16 bytes leave the second ones find in the L1.
    "global quant/w8a8_gemm_epilogue_cuda.h load_rows": 2.0,
    "global norm/layer_norm.cu layer_norm_kernel": 2.0,
    "global norm/rms_norm.cu rms_norm_kernel": 2.0,
    "global rotary/latent_rotary_store.cu store_row": 2.0,
    "global rotary/norm_rotary_store.cu prepare_head": 2.0,
    "global rotary/rotary_embedding.cu rotary_embedding_kernel": 2.0,
    # The same in shared memory: small heads.
    "shared attention/store_kv_cache_cuda.h convert_head": 2.0,
    "shared rotary/latent_rotary_store.cu store_row": 2.0,
    "shared rotary/norm_rotary_store.cu prepare_head": 2.0,
    "shared rotary/norm_rotary_store.cu store_query": 2.0,
    # Scales of one KV head: two heads lie side by side.
    "global attention/paged_attention_tile_cuda.h copy_chunk": 2.3,
    "global attention/paged_attention_tile_cuda.h copy_scales": 2.0,
    "global attention/store_kv_cache_cuda.h quantize_head": 2.0,
    # Rows of 80 elements are ten pieces: eight lanes take two rows.
    "shared attention/paged_attention_queries_cuda.h load_rows": 1.35,
    "shared attention/paged_attention_results_cuda.h merge": 1.55,
    "shared attention/paged_attention_decode_cuda.h store_values": 1.5,
    # Of four bits, which are two and a half chunks, and take the place of three.
    "shared attention/paged_attention_tile_cuda.h copy_chunk": 2.0,
    "shared attention/paged_attention_decode_cuda.h load_chunks": 1.4,
    "shared attention/paged_attention_prefill_shared_cuda.h widen_piece": 2.0,
    # Columns of Q in another order, once a row tile; and scales, eight bytes that eight lanes share.
    "shared attention/paged_attention_queries_cuda.h store_chunk": 4.0,
    "shared attention/paged_attention_softmax_cuda.h scale_positions": 2.0,
    "global attention/paged_attention_results_cuda.h merge": 1.2,
    "global attention/paged_attention_results_cuda.h write_results": 1.15,
    # One warp that writes a struct every so many bytes, and broadcasts of eight bytes.
    "global attention/paged_attention_plan.cu paged_attention_plan_kernel": 2.0,
    "shared attention/paged_attention_plan.cu inclusive_sum": 2.0,
    # Weights of index heads, eight bytes that eight lanes share.
    "shared attention/select_tokens.cu score": 2.0,
    # A lane's weights of eight channels, 64 bytes of bf16: what the first 16 bytes leave the others find in the L1.
    "global linear_attention/causal_conv1d.cu load_filter": 2.0,
    # Lanes share rows of keys, or columns of x; and eight fp32 to a lane, 32 bytes apart.
    "shared linear_attention/state_part_cuda.h load_rows": 2.0,
    "shared linear_attention/mamba2_scan.cu mamba2_scan_kernel": 4.0,
    "shared linear_attention/gated_delta_rule.cu prepare": 2.0,
    "shared linear_attention/mamba2_scan.cu prepare": 2.0,
    # Rows of experts, in the order of the routing.
    "global moe/route_experts.cu sort": 1.8,
    # Tables and lists whose places depend on the values.
    "shared attention/select_largest_cuda.h find_limit": 2.7,
    "global attention/select_tokens.cu choose_tokens_kernel": 1.15,
    "shared sampling/sample_select_cuda.h sort": 2.3,
    "global sampling/sample_part_cuda.h each_part": 2.0,
    "global sampling/sample_part_cuda.h list": 2.2,
    "global sampling/sample_part_cuda.h give": 1.3,
    # One counter, to which the compiler adds once a warp.
    "shared sampling/sample_part_cuda.h give": 23.8,
    "shared sampling/sample_part_cuda.h list": 10.6,
}

# Kernels that no call reaches: not of the usual step of a model, or of several GPUs, whose links bind them.
NOT_COUNTED = {"dequantize", "merge_attention_states", "pack", "permute_columns", "select_pages", "store_key_codes"}
NOT_COUNTED |= {"all_gather", "all_gather_rows", "all_reduce", "all_reduce_add_rms_norm", "local_ids"}


# ---- known patterns ----


@pytest.fixture(scope="module")
def patterns() -> traffic.Counter:
    return traffic.Counter(build.build("traffic", "access_patterns") / "libaccess_patterns.so")


@pytest.fixture
def count(patterns: traffic.Counter) -> Callable[..., list[tuple[str, int, float]]]:
    """Runs a pattern; its accesses' kinds, requests and units of each."""

    def run(name: str, *arguments: int) -> list[tuple[str, int, float]]:
        getattr(patterns.loaded, name)(*map(ctypes.c_int, arguments))
        return [(f"{a.space} {a.kind}", a.requests, a.units / a.requests) for a in patterns.accesses()]

    return run


Count = Callable[..., list[tuple[str, int, float]]]


SHARED_LOADS = [
    (2, 2, 1),
    (4, 4, 1),
    (4, 0, 1),
    (4, 8, 2),
    (4, 128, 32),
    (4, 132, 1),
    (8, 8, 2),
    (8, 16, 4),
    (8, 40, 2),
]
WIDE_SHARED_LOADS = [(16, 16, 4), (16, 32, 8), (16, 48, 4), (16, 128, 32)]


@pytest.mark.parametrize(("size", "stride", "passes"), [*SHARED_LOADS, *WIDE_SHARED_LOADS])
def test_shared_loads_take_the_passes_of_their_banks(count: Count, size: int, stride: int, passes: int) -> None:
    assert count("load", 1, size, stride) == [("shared load", 1, passes)]


@pytest.mark.parametrize(
    ("size", "stride", "sectors"),
    [(2, 2, 2), (4, 4, 4), (4, 0, 1), (4, 32, 32), (8, 16, 16), (16, 16, 16), (16, 32, 32)],
)
def test_global_loads_move_the_sectors_they_touch(count: Count, size: int, stride: int, sectors: int) -> None:
    assert count("load", 0, size, stride) == [("global load", 1, sectors)]


def test_each_time_through_a_loop_is_a_request(count: Count) -> None:
    assert count("store_twice", 8) == [("shared store", 2, 2)]


@pytest.mark.parametrize(("stride", "passes"), [(16, 4), (128, 32), (144, 4)])
def test_ptx_wrappers_are_counted_once(count: Count, stride: int, passes: int) -> None:
    assert count("matrix", stride) == [("shared load", 1, passes)]
    assert sorted(count("copy", stride)) == [("global load", 1, 16), ("shared store", 1, passes)]


@pytest.mark.parametrize(("size", "words", "passes"), [(12, 3, 1), (32, 2, 8)])
def test_structs_move_in_words_of_their_alignment(count: Count, size: int, words: int, passes: int) -> None:
    assert count("load", 1, size, size) == [("shared load", words, passes)]


def test_lanes_that_do_not_take_part_leave_their_quarter(count: Count) -> None:
    """Lanes 0 to 9 and 16 to 25, 16 bytes each: eight, two, eight and two in a pass."""
    assert count("load_some", 16) == [("shared load", 1, 4)]
    assert count("load_some", 32) == [("shared load", 1, 6)]


def test_atomics_on_one_word_take_turns(count: Count) -> None:
    assert count("add", 0) == [("shared atomic", 1, 32)]
    assert count("add", 4) == [("shared atomic", 1, 1)]


# ---- the kernels ----


@pytest.fixture(scope="module")
def calls() -> list[list[traffic.Access]]:
    """The accesses of each call."""
    counter = traffic.operators()
    torch.manual_seed(0)
    found = []
    for name, arguments in traffic.calls():
        traffic.run(name, arguments)
        found.append(counter.accesses())
    return found


def worst_places(calls: list[list[traffic.Access]]) -> dict[str, traffic.Access]:
    worst: dict[str, traffic.Access] = {}
    for accesses in calls:
        for access in accesses:
            costs = [a.units for a in accesses if (a.kernel, a.shared) == (access.kernel, access.shared)]
            place = f"{access.space} {access.file} {access.function}"
            if access.units * 50 >= sum(costs) and (place not in worst or access.ratio > worst[place].ratio):
                worst[place] = access
    return worst


def test_no_place_costs_more_than_is_known(calls: list[list[traffic.Access]]) -> None:
    worst = worst_places(calls)
    found = [f"{place}: {access}" for place, access in worst.items() if access.ratio > KNOWN_COSTS.get(place, 1.1)]
    assert not found, "\n".join([traffic.HEADER, *found])
    ratios = {place: worst[place].ratio if place in worst else 1.0 for place in KNOWN_COSTS}
    assert not {place: ratio for place, ratio in ratios.items() if ratio <= max(1.1, 0.8 * KNOWN_COSTS[place])}


def test_every_kernel_of_a_step_is_counted(calls: list[list[traffic.Access]]) -> None:
    launched = set()
    for path in (build.HERE.parent.parent / "csrc").rglob("*"):
        if path.suffix in (".cu", ".h"):
            launched |= set(re.findall(r'\blaunch(?:_gemm<\w+>)?\(\s*"(\w+)"', path.read_text()))
    assert {access.kernel for accesses in calls for access in accesses} == launched - NOT_COUNTED
