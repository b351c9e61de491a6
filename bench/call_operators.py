"""Calls every operator on the GPU once with small arguments, for compute-sanitizer.

``--large`` instead calls int4_gemm and paged_attention (decode) at a realistic size, for a profile by ncu.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def call_all(limit_s: float) -> int:
    from support.op_calls import op_calls

    from fastinfer import ops  # noqa: F401  (registers the operators)

    called: dict[str, int] = {}
    refused: dict[str, str] = {}
    end = time.monotonic() + limit_s
    for name, args in op_calls(cpu_alone=False):
        if time.monotonic() > end:  # so that the tool can still sum up
            print(f"stopped before {name}: no time left")
            break
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
            print(f"called {name}", flush=True)
    print("calls:", ", ".join(f"{name} x{count}" for name, count in called.items()))
    for name, reason in refused.items():
        print(f"refused: {name}: {reason}"[:200])
    missing = sorted(refused.keys() - called.keys())
    print("never called:", ", ".join(missing) or "none")
    return 0 if called else 1


def call_large(rehearsal: bool) -> int:
    from bench_int4_gemm import PRODUCTS, fastinfer_weight
    from bench_paged_attention import BLOCK_SIZE, HEADS, make_batch
    from harness import Setting

    setting = Setting("cuda", repeats=1, rehearsal=rehearsal)
    width, seqs, context = setting.size(8192, 256), setting.size(64, 2), setting.size(4096, 40)
    weight = fastinfer_weight(width, width, setting)
    batch = make_batch([1] * seqs, [context] * seqs, HEADS, BLOCK_SIZE, setting)
    x = torch.randn(1, width, device="cuda").bfloat16()
    for _ in range(2):
        PRODUCTS["fastinfer"](x, width, *weight)
        batch.attend()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--limit-s", type=float, default=1e9, help="start no call after this time")
    parser.add_argument("--rehearse", action="store_true", help="--large with small sizes")
    args = parser.parse_args()
    sys.exit(call_large(args.rehearse) if args.large else call_all(args.limit_s))
