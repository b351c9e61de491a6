"""Calls every operator on the GPU once with small arguments, for compute-sanitizer.

``--large`` instead calls int4_gemm and paged_attention (decode) at a realistic size, for a profile by ncu.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def call_all() -> int:
    from support.op_calls import op_calls

    from fastinfer import ops  # noqa: F401  (registers the operators)

    called: dict[str, int] = {}
    refused: dict[str, str] = {}
    for name, args in op_calls():
        on_gpu = [value.cuda() if isinstance(value, torch.Tensor) else value for value in args]
        try:
            getattr(torch.ops.fastinfer, name).default(*on_gpu)
            torch.cuda.synchronize()
        except (RuntimeError, NotImplementedError) as error:
            if "CUDA error" in str(error):
                raise
            refused[name] = str(error).splitlines()[0]  # some options are supported by the CPU only
        else:
            called[name] = called.get(name, 0) + 1
    print("called:", ", ".join(f"{name} x{count}" for name, count in called.items()))
    for name, reason in refused.items():
        print(f"refused: {name}: {reason}"[:200])
    missing = sorted(refused.keys() - called.keys())
    print("never called:", ", ".join(missing) or "none")
    return 0 if called else 1


def call_large() -> int:
    from bench_int4_gemm import PRODUCTS, fastinfer_weight
    from bench_paged_attention import BLOCK_SIZE, HEADS, make_batch
    from harness import Setting

    setting = Setting("cuda", repeats=1)
    weight = fastinfer_weight(8192, 8192, setting)
    batch = make_batch([1] * 64, [4096] * 64, HEADS, BLOCK_SIZE, setting)
    x = torch.randn(1, 8192, device="cuda").bfloat16()
    for _ in range(2):
        PRODUCTS["fastinfer"](x, 8192, *weight)
        batch.attend()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    sys.exit(call_large() if parser.parse_args().large else call_all())
