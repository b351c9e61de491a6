"""Continues a long text with dense and with sparse attention, and shows both texts and their times.

python examples/sparse_attention.py README.md
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
    parser.add_argument("--share", type=float, default=0.9, help="of the attention that is read; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens to write; default: %(default)s")
    args = parser.parse_args(argv)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    for share in (None, args.share):
        llm = LLM(args.model, max_model_len=args.context + args.max_tokens, sparse_attention=share)
        ids = llm.tokenizer.encode(args.file.read_text(), parse_special=False)[: args.context]
        start, arrivals, text = time.perf_counter(), [], ""
        for piece in llm.stream({"prompt_token_ids": ids}, params):
            arrivals.append(time.perf_counter())
            text += piece
        per_token = 1e3 * (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)
        name = "dense" if share is None else f"sparse, {share} of the attention"
        print(f"[{name}: prompt {arrivals[0] - start:.2f} s, {per_token:.1f} ms per token]\n{text.strip()}\n")


if __name__ == "__main__":
    main()
