"""The CPU operators' threads: their number, callers that compete, errors inside a job, fork."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.helpers import assert_bitwise, num_threads
from support.quantized_gemm import random_weight
from torch import Tensor

from fastinfer import _C, ops


def test_number_of_threads() -> None:
    before = _C.get_num_threads()
    assert before >= 1
    with num_threads(3):
        assert _C.get_num_threads() == _C.cpu_info()["num_threads"] == 3
    assert _C.get_num_threads() == before


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_number_of_threads_out_of_range(count: int) -> None:
    before = _C.get_num_threads()
    with pytest.raises(ValueError, match=f"1 and 1024, got {count}"):
        _C.set_num_threads(count)
    assert _C.get_num_threads() == before


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_more_threads_than_items(tokens: int, count: int) -> None:
    x, weight = torch.randn(tokens, 64), torch.randn(17, 64)
    with num_threads(1):
        expected = ops.gemm(x, weight), ops.rms_norm(x, torch.ones(64))
    with num_threads(count):
        assert_bitwise(ops.gemm(x, weight), expected[0])
        assert_bitwise(ops.rms_norm(x, torch.ones(64)), expected[1])


@pytest.mark.parametrize("out_features", [16, 112])
def test_units_that_are_cut_into_ranges_of_rows(out_features: int) -> None:
    """Five threads share one unit, or seven; what they compute with is another kernel for each weight."""
    x = torch.randn(307, 96)
    weight = torch.randn(out_features, 96)
    int4, (q, scales) = random_weight(4, out_features, 96), ops.quantize_int8(weight)
    x_int8, x_scales = ops.quantize_int8(x)
    int8 = {"qweight": ops.int8_pack(q), "scales": ops.pack_scales(scales[:, None]), "out_features": out_features}

    def run() -> list[Tensor]:
        packed = [ops.int4_gemm(x, **int4.packed, activation_bits=bits) for bits in (8, 32)]
        return [*packed, ops.gemm(x, weight), ops.w8a8_gemm(x_int8, x_scales, **int8)]

    with num_threads(1):
        expected = run()
    with num_threads(5):
        for out, whole in zip(run(), expected, strict=True):
            assert_bitwise(out, whole)


def test_competing_callers() -> None:
    """Two engines in one process call operators at the same time: neither sees the other's scratch memory."""
    inputs = [(torch.randn(9, 256), torch.randn(96, 256)) for _ in range(4)]
    expected = [ops.gemm(x, weight, norm_weight=torch.ones(256)) for x, weight in inputs]

    def call(index: int) -> None:
        x, weight = inputs[index % 4]
        for _ in range(100):
            assert_bitwise(ops.gemm(x, weight, norm_weight=torch.ones(256)), expected[index % 4])

    with num_threads(2), ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(8)))


def test_threads_change_while_others_run() -> None:
    x, weight = torch.randn(9, 256), torch.randn(96, 256)
    expected = ops.gemm(x, weight)
    with num_threads(2), ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [assert_bitwise(ops.gemm(x, weight), expected) for _ in range(50)])
        while not running.done():
            for count in (1, 3, 2):
                _C.set_num_threads(count)
        running.result()


def test_an_error_inside_a_job_leaves_the_threads_usable() -> None:
    logits = torch.zeros(8, 100)
    logits[7] = torch.nan  # the last row, on the second thread
    zeros, keys = torch.zeros(8), torch.zeros(8, dtype=torch.int64)
    parameters = [zeros, zeros.int(), torch.ones(8), zeros, keys, keys]
    with num_threads(2):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="logits row 7"):
                ops.sample(logits, *parameters)
            assert ops.sample(logits[:7], *(p[:7] for p in parameters))[0].eq(0).all()


FORK = """
import os, torch
from fastinfer import _C, ops
_C.set_num_threads(2)
x, weight = torch.randn(9, 256), torch.randn(96, 256)
expected = ops.gemm(x, weight)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(ops.gemm(x, weight), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(ops.gemm(x, weight), expected)
"""


def test_a_forked_child_gets_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


NO_MEMORY = """
import resource, torch
from fastinfer import _C, ops
x, weight = torch.randn(64, 64), torch.ones(64)
expected = ops.rms_norm(x, weight)
_C.set_num_threads(1024)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 200 * 2**20,) * 2)  # stacks for some of them
try:
    ops.rms_norm(x, weight)
except RuntimeError as error:
    assert "1024 threads" in str(error), error
else:
    raise SystemExit("the limit did not bite")
_C.set_num_threads(2)
assert torch.equal(ops.rms_norm(x, weight), expected)
"""


def test_too_many_threads_are_an_error_not_a_hang() -> None:
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
