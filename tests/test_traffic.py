"""The counts of tests/emulation/traffic.py: right for known patterns, and as small as they are said to be."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from emulation import build, traffic

pytestmark = pytest.mark.skipif(build.cuda_include() is None, reason="the CUDA toolkit's headers are missing")

# Kernels whose dearest access costs more than what the same bytes need: the ratios in shared and in global memory.
# Accesses of a few lanes, or of less than one in fifty of the kernel's costs, are not counted.
KNOWN_COSTS = {
    "gemm": (1.0, 1.3),  # gate and up of a cut unit are gathered 16 rows apart
    "int4_gemm": (1.0, 1.3),
    "int8_gemm": (1.0, 1.3),
    "table_gemm": (1.0, 1.3),
    "w8a8_gemm": (2.0, 2.0),  # gate and up 16 rows apart; its scales are fp32, eight to a lane
    "paged_attention": (1.0, 4.0),  # scales of one KV head lie heads apart
    "paged_attention_plan": (2.0, 4.0),  # one small block
    "norm_rotary_store": (2.0, 2.0),  # eight fp32 to a lane
    "rotary_embedding": (1.0, 2.0),
    "rms_norm": (1.0, 2.0),
    "sample": (3.0, 1.0),  # tables whose places depend on the values
}


# ---- known patterns ----


@pytest.fixture(scope="module")
def patterns() -> traffic.Counter:
    return traffic.Counter(build.build("traffic", "access_patterns") / "libaccess_patterns.so")


@pytest.fixture
def count(patterns: traffic.Counter) -> Callable[..., list[tuple[str, int, float]]]:
    """Runs a pattern; its accesses' kinds, requests and units of each."""

    def run(name: str, *arguments: int) -> list[tuple[str, int, float]]:
        getattr(patterns.loaded, name)(*map(ctypes.c_int, arguments))
        kinds = {(True, True): "shared store", (True, False): "shared load", (False, False): "global load"}
        return [(kinds[a.shared, a.store], a.requests, a.units / a.requests) for a in patterns.accesses()]

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


# ---- the kernels ----


@pytest.fixture(scope="module")
def accesses() -> list[traffic.Access]:
    counter = traffic.operators()
    torch.manual_seed(0)
    for name, arguments in traffic.calls():
        getattr(torch.ops.fastinfer_traffic, name).default(*arguments)
    return counter.accesses()


def test_no_kernel_costs_more_than_is_known(accesses: list[traffic.Access]) -> None:
    worst: dict[tuple[str, bool], traffic.Access] = {}
    totals: dict[tuple[str, bool], int] = {}
    for access in accesses:
        key = access.kernel, access.shared
        totals[key] = totals.get(key, 0) + access.units
    for access in accesses:
        key = access.kernel, access.shared
        if access.units * 50 >= totals[key] and (key not in worst or access.ratio > worst[key].ratio):
            worst[key] = access
    assert {kernel for kernel, _ in worst} >= KNOWN_COSTS.keys()
    for (kernel, shared), access in worst.items():
        assert access.ratio <= KNOWN_COSTS.get(kernel, (1.0, 1.0))[not shared] + 0.1, f"{traffic.HEADER}\n{access}"
