"""Shows what each kernel brings: modules are swapped into a model one kind at a time, timed and profiled.

    python examples/swap_kernels.py [MODEL] [TOKENS]

Prints, for decoding one sequence, tokens per second and the operators with the largest share of the time.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fastinfer.integrations.transformers import replace

ATTENTION, MLP, ROTARY = "*.self_attn", "*.mlp", "*rotary_emb"
# The modules that replace() must skip, fewer in each step; then weights of 8 and 4 bits, in a model loaded again.
STEPS = {
    "attention function and norms": {"skip": [ATTENTION, MLP, ROTARY]},
    "fused MLP": {"skip": [ATTENTION, ROTARY]},
    "fused attention and rotary": {},
    "int8 weights": {"quantize": "int8"},
    "int4 weights": {"quantize": "int4"},
}


def load(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def measure(name: str, model: PreTrainedModel, prompt: dict[str, torch.Tensor], count: int) -> None:
    def generate() -> float:
        start = time.perf_counter()
        model.generate(**prompt, min_new_tokens=count, max_new_tokens=count, do_sample=False)
        return time.perf_counter() - start

    generate()  # warms up
    seconds = min(generate() for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        generate()
    costs = {event.key.split("::")[-1]: event.self_cpu_time_total for event in profiler.key_averages()}
    total = sum(costs.values())
    largest = sorted(costs, key=lambda key: -costs[key])[:4]
    shares = ", ".join(f"{key} {costs[key] / total:.0%}" for key in largest)
    print(f"{name:30} {count / seconds:6.1f} tokens/s   {shares}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Swap kernels into a model one kind at a time, and time each step.")
    parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="default: %(default)s")
    parser.add_argument("tokens", nargs="?", type=int, default=64, help="tokens of each run; default: %(default)s")
    args = parser.parse_args(argv)
    prompt = AutoTokenizer.from_pretrained(args.model)("Once upon a time", return_tensors="pt")
    model = load(args.model)
    measure("transformers", model, prompt, args.tokens)
    for name, options in STEPS.items():
        if "quantize" in options:
            model = load(args.model)
        replace(model, **options)
        measure(name, model, prompt, args.tokens)


if __name__ == "__main__":
    main()
