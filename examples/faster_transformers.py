"""A transformers model on fastinfer's kernels, in 4 bits: `python examples/faster_transformers.py [MODEL]`.

On two Zen 3 cores SmolLM2-135M decoded 21 tokens/s before and 47 after (docs/performance.md).
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastinfer.integrations.transformers import replace

path = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
prompt = AutoTokenizer.from_pretrained(path)("Once upon a time", return_tensors="pt")


def tokens_per_second(count: int = 64) -> float:
    model.generate(**prompt, max_new_tokens=4, do_sample=False)  # warms up
    start = time.perf_counter()
    model.generate(**prompt, min_new_tokens=count, max_new_tokens=count, do_sample=False)
    return count / (time.perf_counter() - start)


before = tokens_per_second()
print(replace(model, quantize="int4"))
torch.set_num_threads(1)  # the kernels have their own threads, and torch's would take the cores from them
print(f"{before:.1f} tokens/s before, {tokens_per_second():.1f} after")
