"""Decoding and prompt processing of a transformers model before and after ``replace``, in turns.

    python bench/bench_transformers.py [--model FOLDER] [--rounds N] [--out DIR]

All variants are loaded first and then measured round by round. The table shows medians, and ratios to transformers in
the same dtype. The default model is read from its GGUF file by transformers, in fp32 and bf16. torch uses all cores in
the variants in which it computes the products, and one thread in those in which our kernels do, which have their own
threads.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from fastinfer import hub
from fastinfer.benchmarks.report import write_json
from fastinfer.integrations.transformers import register, replace
from fastinfer.utils.table import format_table

PROMPT, NEW, LONG = 32, 64, 512  # tokens: prompt before decoding, decoded, prompt that is timed alone
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Arguments of replace() for each variant; None if it is not called.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "transformers": None,
    "attention": None,
    "modules": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "nf4": {"quantize": "nf4"},
}


def load(path: Path, dtype: str, variant: str) -> PreTrainedModel:
    folder, file = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], **file).eval()
    options = VARIANTS[variant]
    if variant == "attention":
        register()
        model.set_attn_implementation("fastinfer")
    elif options is not None:
        replace(model, **options)
    return model


@torch.inference_mode()
def measure(model: PreTrainedModel) -> dict[str, float]:
    ids = torch.randint(1000, (1, LONG), generator=torch.Generator().manual_seed(0))
    times = []
    for new in (1, NEW + 1):  # the difference is what decoding costs
        start = time.perf_counter()
        model.generate(ids[:, :PROMPT], min_new_tokens=new, max_new_tokens=new, do_sample=False)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    model(ids, logits_to_keep=1)
    return {"decode": NEW / (times[1] - times[0]), "prefill": LONG / (time.perf_counter() - start)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder as Hugging Face saves it, or a GGUF file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--out", type=Path, help="a folder for transformers.json")
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    path = args.model or hub.resolve(hub.DEFAULT_MODEL)
    models = {(dtype, variant): load(path, dtype, variant) for dtype in args.dtypes for variant in VARIANTS}
    samples: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in models}
    cores = torch.get_num_threads()
    for round_number in range(args.rounds + 1):
        for key, model in models.items():
            torch.set_num_threads(cores if key[1] in ("transformers", "attention") else 1)
            result = measure(model)
            if round_number:  # the first round is the warm-up
                samples[key].append(result)
    medians = {
        key: {name: statistics.median(sample[name] for sample in results) for name in ("decode", "prefill")}
        for key, results in samples.items()
    }
    rows = [["dtype", "variant", "decode tokens/s", f"prompt of {LONG} tokens/s"]]
    for (dtype, variant), result in medians.items():
        base = medians[dtype, "transformers"]
        rows.append([dtype, variant, *(f"{result[name]:.1f} ({result[name] / base[name]:.2f}x)" for name in base)])
    print(format_table(rows))
    if args.out:
        found = {f"{dtype} {variant}": results for (dtype, variant), results in samples.items()}
        write_json(args.out / "transformers.json", {"model": path.name, "samples": found})


if __name__ == "__main__":
    main()
