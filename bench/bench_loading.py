"""Time from the start of a process to a loaded model, and to the first token of the command line.

Three kinds of processes run in turns, each several times:

- import torch: nothing else, which every program with torch pays.
- first token: ``fastinfer generate --max-tokens 1`` with the default model.
- load: ``LLM(...)`` without the imports; also the processor time, and the memory that it keeps. The file has the sizes
  of Qwen2-1.5B, and random Q4_K and Q6_K blocks in the proportions of Q4_K_M; ``--model`` names another one.

With ``--checkout`` other versions of fastinfer, built in place, run in the same turns.

    python bench/bench_loading.py --checkout ../earlier --out bench/results
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fastinfer.benchmarks.report import write_json
from fastinfer.utils.table import format_table

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 1536, 8960, 28, 12, 2, 151_936
BLOCK_BYTES = {"Q4_K": 144, "Q6_K": 210}  # per 256 weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="file or folder to load instead of the random one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkout", type=Path, action="append", default=[], help="folder of another version")
    parser.add_argument("--out", type=Path, help="folder for loading.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(load(args.model, args.threads)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(write_model(Path(folder) / "random-1.5B-Q4_K_M.gguf"))
        size = Path(model).stat().st_size if Path(model).is_file() else None
        samples = measure(model, args)
    print(report(samples, size))
    if args.out is not None:
        print(write_json(args.out / "loading.json", {"model": args.model, "file_bytes": size, "samples": samples}))
    return 0


def load(model: str, threads: int) -> dict[str, float]:
    """Load a model in this process; returns its seconds, wall and processor, and the memory in bytes that it keeps."""
    import torch

    import fastinfer.llm
    from fastinfer import _C

    torch.set_num_threads(threads)
    _C.set_num_threads(threads)
    memory, usage, start = _anonymous_memory(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    llm = fastinfer.llm.LLM(model, max_model_len=256, max_num_seqs=1)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    memory = _anonymous_memory() - memory
    del llm
    return {
        "seconds": seconds,
        "user_seconds": after.ru_utime - usage.ru_utime,
        "system_seconds": after.ru_stime - usage.ru_stime,
        "memory_bytes": memory,
    }


def _anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def measure(model: str, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the samples of each kind of process and version."""
    python = [sys.executable]
    main = "import sys; from fastinfer.cli.main import main; sys.exit(main())"
    generate = ["-c", main, "generate", "--max-tokens", "1", "--temperature", "0", "Hello"]
    child = [__file__, "--child", "--model", model, "--threads", str(args.threads)]
    versions: dict[str, Path | None] = {"": None} | {f", {path}": path for path in args.checkout}
    samples: dict[str, list[dict[str, float]]] = {}
    for number in range(args.rounds + 1):  # the first one fills the page cache
        runs = {"import torch": _timed([*python, "-c", "import torch"], None)[0]}
        for name, path in versions.items():
            runs[f"first token{name}"] = _timed([*python, *generate], path)[0]
            runs[f"load{name}"] = json.loads(_timed([*python, *child], path)[1])
        if number > 0:
            for kind, sample in runs.items():
                samples.setdefault(kind, []).append(sample)
    return samples


def _timed(command: list[str], checkout: Path | None) -> tuple[dict[str, float], str]:
    """Run a process with this version of fastinfer or another one; returns its time and its output."""
    env = os.environ if checkout is None else os.environ | {"PYTHONPATH": str(checkout.resolve() / "python")}
    start = time.perf_counter()
    output = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {"seconds": time.perf_counter() - start}, output


def report(samples: dict[str, list[dict[str, float]]], file_bytes: int | None) -> str:
    """Return the medians, and the ratio of each time to that of importing torch in the same round."""
    rows = [["process", "s", "smallest", "of import torch", "user s", "system s", "memory, of the file"]]
    base = [sample["seconds"] for sample in samples["import torch"]]
    for kind, runs in samples.items():
        seconds = [run["seconds"] for run in runs]
        ratio = statistics.median(own / other for own, other in zip(seconds, base, strict=True))
        row = [kind, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}", f"{ratio:.2f}"]
        for key in ("user_seconds", "system_seconds"):
            row.append(f"{statistics.median(run[key] for run in runs):.2f}" if key in runs[0] else "")
        memory = statistics.median(run.get("memory_bytes", 0) for run in runs)
        row.append(f"{memory / file_bytes:.3f}" if memory and file_bytes else "")
        rows.append(row)
    return format_table(rows)


def write_model(path: Path) -> Path:
    """Write a file with the sizes of Qwen2-1.5B and random blocks: what is read and packed depends on no values."""
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(32_768)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    _add_tokenizer(writer)

    def add_matrix(name: str, rows: int, columns: int, kind: str) -> None:
        blocks = rng.integers(0, 256, (rows, columns // 256, BLOCK_BYTES[kind]), np.uint8)
        # The scales of a block are fp16 numbers, which must be finite.
        start = 0 if kind == "Q4_K" else BLOCK_BYTES[kind] - 2
        scales = rng.uniform(1e-5, 1e-4, (rows, columns // 256, 2 if kind == "Q4_K" else 1)).astype(np.float16)
        blocks[..., start : start + 2 * scales.shape[-1]] = scales.view(np.uint8)
        quantization = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=quantization)

    def add_vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    kv_size = HIDDEN // HEADS * KV_HEADS
    add_matrix("token_embd.weight", VOCABULARY, HIDDEN, "Q6_K")
    for layer in range(LAYERS):
        # Q4_K_M keeps the values and the down projections of half of the layers in 6 bits.
        mixed = "Q6_K" if layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2 else "Q4_K"
        matrices = {
            "attn_q": (HIDDEN, HIDDEN, "Q4_K"),
            "attn_k": (kv_size, HIDDEN, "Q4_K"),
            "attn_v": (kv_size, HIDDEN, mixed),
            "attn_output": (HIDDEN, HIDDEN, "Q4_K"),
            "ffn_gate": (INTERMEDIATE, HIDDEN, "Q4_K"),
            "ffn_up": (INTERMEDIATE, HIDDEN, "Q4_K"),
            "ffn_down": (HIDDEN, INTERMEDIATE, mixed),
        }
        for name, (rows, columns, kind) in matrices.items():
            add_matrix(f"blk.{layer}.{name}.weight", rows, columns, kind)
        for name, size in {"attn_q": HIDDEN, "attn_k": kv_size, "attn_v": kv_size}.items():
            add_vector(f"blk.{layer}.{name}.bias", size, 0.0)
        add_vector(f"blk.{layer}.attn_norm.weight", HIDDEN, 1.0)
        add_vector(f"blk.{layer}.ffn_norm.weight", HIDDEN, 1.0)
    add_vector("output_norm.weight", HIDDEN, 1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any) -> None:
    """Add a byte-level tokenizer of random merges, as large as the model's own."""
    from tokenizers.pre_tokenizers import ByteLevel

    rng = random.Random(0)
    tokens = sorted(ByteLevel.alphabet())
    known, merges = set(tokens), []
    while len(tokens) < VOCABULARY:
        left, right = rng.choice(tokens[:20_000]), rng.choice(tokens[:2_000])
        joined = left + right
        if joined not in known and len(joined) <= 12:
            known.add(joined)
            tokens.append(joined)
            merges.append(f"{left} {right}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)


if __name__ == "__main__":
    sys.exit(main())
