"""Continues a long text with dense and with sparse attention, and shows both texts and their times per token.

    python examples/sparse_attention.py README.md

Most of the time goes into the prompt, which is dense either way.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from fastinfer import LLM, SamplingParams
from fastinfer.hub import DEFAULT_MODEL


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Continue a text with dense and with sparse attention.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the text; default: %(default)s")
    parser.add_argument("--budget", type=int, default=1024, help="tokens to attend to; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens to write; default: %(default)s")
    args = parser.parse_args(argv)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    for budget in (None, args.budget):
        llm = LLM(args.model, max_model_len=args.context + args.max_tokens, sparse_attention=budget)
        ids = llm.tokenizer.encode(args.file.read_text(), parse_special=False)[: args.context]
        arrivals, text = [], ""
        for piece in llm.stream({"prompt_token_ids": ids}, params):
            arrivals.append(time.perf_counter())
            text += piece
        per_token = 1e3 * (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)
        name = "dense" if budget is None else f"sparse, {budget} of {len(ids)} tokens"
        print(f"[{name}: {per_token:.1f} ms per token]\n{text.strip()}\n")


if __name__ == "__main__":
    main()
