"""A transformers model on fastinfer's kernels, in 4 bits: `python examples/faster_transformers.py [MODEL]`.

On two Zen 3 cores SmolLM2-135M decoded 21 tokens/s before and 47 after (docs/performance.md).
"""

import argparse
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, PreTrainedModel

from fastinfer.integrations.transformers import replace


def tokens_per_second(model: PreTrainedModel, prompt: BatchEncoding, count: int = 64) -> float:
    model.generate(**prompt, max_new_tokens=4, do_sample=False)  # warms up
    start = time.perf_counter()
    model.generate(**prompt, min_new_tokens=count, max_new_tokens=count, do_sample=False)
    return count / (time.perf_counter() - start)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare the speed of a model before and after replace().")
    parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="default: %(default)s")
    args = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    prompt = AutoTokenizer.from_pretrained(args.model)("Once upon a time", return_tensors="pt")
    before = tokens_per_second(model, prompt)
    print(replace(model, quantize="int4"))
    torch.set_num_threads(1)  # the kernels have their own threads, and torch's would take the cores from them
    print(f"{before:.1f} tokens/s before, {tokens_per_second(model, prompt):.1f} after")


if __name__ == "__main__":
    main()
