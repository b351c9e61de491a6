"""First token of a long prompt in a new process, with the KV cache of an earlier process on disk and without it.

Each sample is a process of its own that loads the model and then times its first request. The kinds of processes run in
turns:

- cold: there is no folder.
- cold, stores: the folder is empty, and the blocks are written to it. The following kinds read them.
- restart: the folder holds the prompt, and the files are still in the page cache.
- restart, dropped: as restart, but the files are read from the device.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fastinfer.benchmarks.report import median_ratio, write_json
from fastinfer.utils.table import format_table

KINDS = ("cold", "cold, stores", "restart", "restart, dropped")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for kv_offloading.json")
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(first_token(args.model, args.prompt_tokens, args.child or None)))
        return 0
    samples = measure(args.model, args.prompt_tokens, args.repeats)
    print(report(samples))
    if args.out is not None:
        print(write_json(args.out / "kv_offloading.json", vars(args) | {"out": str(args.out), "samples": samples}))
    return 0


def first_token(model: str, num_tokens: int, folder: str | None) -> dict[str, float]:
    """Load the model and time its first request; ``folder`` is that of the KV cache on disk."""
    from fastinfer import LLM, SamplingParams

    llm = LLM(model, kv_offloading_dir=folder)
    rng = random.Random(0)
    prompt = [rng.randrange(100, 1000) for _ in range(num_tokens)]
    start = time.perf_counter()
    [output] = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "token": output.outputs[0].token_ids[0], "num_cached_tokens": output.num_cached_tokens}


def measure(model: str, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Return the samples of each kind in seconds."""
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tokens = set()
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory(prefix="kv-", dir=Path.cwd()) as folder:
            for kind in KINDS:
                print(f"{repeat + 1} of {repeats}: {kind}", file=sys.stderr)
                if kind == "restart, dropped":
                    drop_from_page_cache(Path(folder))
                command = [sys.executable, __file__, "--model", model, "--prompt-tokens", str(num_tokens), "--child"]
                done = subprocess.run([*command, "" if kind == "cold" else folder], stdout=subprocess.PIPE, check=True)
                result = json.loads(done.stdout)
                if (result["num_cached_tokens"] > 0) != kind.startswith("restart"):
                    raise RuntimeError(f"{kind}: got {result['num_cached_tokens']} tokens from the cache")
                tokens.add(result["token"])
                samples[kind].append(result["seconds"])
    if len(tokens) != 1:
        raise RuntimeError(f"expected the same token in all processes, got {tokens}")
    return samples


def drop_from_page_cache(folder: Path) -> None:
    """Write the files to the device and drop them from memory."""
    for path in folder.glob("*/*.kv"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(samples: dict[str, list[float]]) -> str:
    """Return medians, and ratios to the cold time of the same turn."""
    rows = [["process", "first token ms", "of cold"]]
    for kind, seconds in samples.items():
        ratio = median_ratio(seconds, samples["cold"])
        rows.append([kind, f"{statistics.median(seconds) * 1e3:.1f}", f"{ratio:.3f}"])
    return format_table(rows)


if __name__ == "__main__":
    sys.exit(main())
