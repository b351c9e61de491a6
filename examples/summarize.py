"""Summarises texts of any length by map and reduce: every part by itself, then the summaries, until one is left.

    python examples/summarize.py LICENSE README.md

All parts of a round run in one batch. They begin with the same instruction, which is a pinned prompt: it is computed
once and stays in the cache.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastinfer import LLM, SamplingParams
from fastinfer.hub import DEFAULT_MODEL
from fastinfer.tokenizers.chat_template import render
from fastinfer.tokenizers.tokenizer import Tokenizer

INSTRUCTION = "Summarize the following text in a few plain sentences. Keep names and numbers, and add nothing.\n\n"
MARK = "\0"


def cut(tokenizer: Tokenizer, text: str, size: int) -> Iterator[list[int]]:
    """Cut a text into parts of at most ``size`` tokens; a part ends with a line if one ends in its second half."""
    # The text may contain the names of special tokens; they are read as plain text.
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    while len(ids) > size:
        line_ends = [i + 1 for i in range(size // 2, size) if b"\n" in tokenizer.token_bytes(ids[i])]
        end = line_ends[-1] if line_ends else size
        yield ids[:end]
        ids = ids[end:]
    yield ids


def summarize(llm: LLM, text: str, size: int) -> str:
    """Return one summary of at most ``size / 8`` tokens, so that every round has fewer parts, down to one."""
    tokenizer = llm.tokenizer
    template = render(tokenizer.chat_template, [{"role": "user", "content": INSTRUCTION + MARK}])
    before, after = template.split(MARK)
    llm.pin_prompt("instruction", before)
    end = tokenizer.encode(after, add_special_tokens=False)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.1, max_tokens=size // 8)
    while True:
        parts = list(cut(tokenizer, text, size))
        prompts = [{"prompt_token_ids": part + end, "pinned_prompt": "instruction"} for part in parts]
        outputs = llm.generate(prompts, params, use_tqdm=True)
        text = "\n".join(output.outputs[0].text.strip() for output in outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        total = sum(len(output.prompt_token_ids) for output in outputs)
        print(f"{len(parts)} part(s), {cached} of {total} prompt tokens were in the cache", file=sys.stderr)
        if len(parts) == 1:
            llm.unpin_prompt("instruction")
            return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Summarize text files.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--part-tokens", type=int, default=1024, help="length of a part; default: %(default)s")
    args = parser.parse_args(argv)
    if args.part_tokens < 64:
        parser.error(f"--part-tokens must be at least 64, got {args.part_tokens}")

    llm = LLM(args.model)
    for file in args.files:
        print(f"{file}:\n{summarize(llm, file.read_text(errors='replace'), args.part_tokens)}\n")


if __name__ == "__main__":
    main()
