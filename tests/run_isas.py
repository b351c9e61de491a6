"""Runs the CPU's tests once per instruction set that this machine has: ``make test-isas``.

Every run sees a CPU without the better sets: fastinfer's kernels by FASTINFER_CPU_ISA, torch's and oneDNN's, which are
references, by variables of their own. Inductor's cache does not know of them: each run has an empty one. Emulated
kernels do not depend on the machine and are left out. Arguments are passed on to pytest.
"""

import os
import subprocess
import sys
import tempfile
import time

import torch  # noqa: F401  (fastinfer._C links against it)

from fastinfer import _C

# ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS of each set.
LIMITS = {
    "portable": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512_vnni": ("avx512", "AVX512_CORE_VNNI", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
    "amx": ("avx512", "AVX512_CORE_AMX", "AVX512"),
}
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def main(arguments: list[str]) -> int:
    failed = []
    for isa in _C.cpu_info()["isas_usable"]:
        environment = os.environ | {"FASTINFER_CPU_ISA": isa} | dict(zip(VARIABLES, LIMITS[isa], strict=True))
        command = [sys.executable, "-m", "pytest", "-m", "not emulated and not avx512", *arguments]
        print(f"---- {isa}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as cache:
            code = subprocess.run(command, env=environment | {"TORCHINDUCTOR_CACHE_DIR": cache}).returncode
        print(f"---- {isa}: exit code {code} after {time.monotonic() - start:.0f} s", flush=True)
        if code:
            failed.append(isa)
    print(f"failed: {', '.join(failed)}" if failed else "every instruction set passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
