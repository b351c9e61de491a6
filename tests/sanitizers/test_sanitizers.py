"""The sanitizers report planted faults: in code like that of the kernels, and in the operators as Python calls them."""

import os
import subprocess
import sys

import pytest
from support.sanitizers import OPTIONS, SANITIZERS, environment, without_randomisation

from sanitizers import build

pytestmark = pytest.mark.slow

FAULTS = [
    ("address", "out_of_bounds_load", "AddressSanitizer"),
    ("address", "out_of_bounds_store", "AddressSanitizer"),
    ("address", "beyond_scratch", "use-after-poison"),
    ("address", "undefined_shift", "shift exponent 32 is too large"),
    ("address", "signed_overflow", "signed integer overflow"),
    ("address", "unaligned_access", "load of misaligned address"),
    ("thread", "shared_sum", "data race"),
    ("thread", "overlapping_ranges", "data race"),
    ("thread", "early_read", "data race"),
]


def run(sanitizer: str, command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    prefix = without_randomisation() if sanitizer == "thread" else []
    if prefix is None:
        pytest.skip("ThreadSanitizer needs less address randomisation than this machine has")
    return subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=120, env=variables)


@pytest.mark.parametrize(("sanitizer", "fault", "message"), FAULTS)
def test_fault_is_caught_and_its_sound_twin_is_not(sanitizer: str, fault: str, message: str) -> None:
    program = str(build.build(sanitizer, "faults") / "faults")
    caught = run(sanitizer, [program, fault], os.environ | OPTIONS)
    assert caught.returncode in (1, 66)
    assert message in caught.stderr
    assert "faults.cpp" in caught.stderr  # the line where it happened
    sound = run(sanitizer, [program, fault, "sound"], os.environ | OPTIONS)
    assert (sound.returncode, sound.stderr) == (0, "")


# A tensor of more elements than its memory has. Not torch's own memory: the C library's, to which the runtime adds
# forbidden zones.
BEYOND_A_TENSOR = """
import ctypes, sys, torch
from fastinfer import ops
width, missing = 67, int(sys.argv[1])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
memory = libc.malloc(ctypes.c_size_t(4 * (3 * width - missing)))
x = torch.frombuffer((ctypes.c_float * (3 * width)).from_address(memory), dtype=torch.float32).view(3, width)
ops.rms_norm(x, torch.ones(width))
"""

# Two callers write into the same result, or each into its own.
SHARED_RESULT = """
import sys, torch
from threading import Thread
from fastinfer import _C, ops
results = [torch.empty(400, 512) for _ in range(2)]
if sys.argv[1] == "1":
    results[1] = results[0]
x, weight = torch.randn(400, 512), torch.ones(512)
def call(out):
    for _ in range(100):
        ops.rms_norm(x, weight, out=out)
threads = [Thread(target=call, args=[out]) for out in results]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


IN_AN_OPERATOR = {
    "address": (BEYOND_A_TENSOR, "heap-buffer-overflow|unknown-crash"),
    "thread": (SHARED_RESULT, "data race"),
}


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_fault_is_caught_in_an_operator(sanitizer: str) -> None:
    """The module calls the kernels of the sanitized library, not its own."""
    program, message = IN_AN_OPERATOR[sanitizer]
    library = build.build(sanitizer, "fastinfer_sanitized") / "libfastinfer_sanitized.so"
    variables = environment(sanitizer, [library]) | {"FASTINFER_CPU_ISA": build.isa(), "OMP_NUM_THREADS": "2"}
    # The first report ends the process: a loop of races writes hundreds, and each takes a moment.
    variables["TSAN_OPTIONS"] += " halt_on_error=1"
    caught = run(sanitizer, [sys.executable, "-c", program, "1"], variables)
    assert caught.returncode in (1, 66)
    assert any(part in caught.stderr for part in message.split("|"))
    assert "rms_norm" in caught.stderr
    sound = run(sanitizer, [sys.executable, "-c", program, "0"], variables)
    assert (sound.returncode, sound.stderr) == (0, "")
