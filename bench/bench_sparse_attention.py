"""Sparse attention against dense attention: how far the next token's distribution moves, and what it gains.

Generated tokens: the last tokens of one long text are computed as generated ones, each from the true tokens before it,
and their distributions are compared with those of dense attention. The pages with the largest estimates, with and
without the codes of the others, compete with a window (the first page and the last ones) and with random pages, of the
same number for each token, layer and KV head.

Prompts: all tokens but the last ones are computed as a prompt that chooses pages; compared are the last tokens of the
prompt, and those after it, which attend to everything.

Times: decode steps of one sequence are recorded and replayed in turns, dense and sparse, at the end of a longer text;
and the chunks of a prompt of that text are computed in turns. The clock is that of the process's CPU time by default.

    python bench/bench_sparse_attention.py --out bench/results
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastinfer import hub, ops
from fastinfer.benchmarks.report import median_ratio, write_json
from fastinfer.models import Model, load_model
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache, num_blocks_for
from fastinfer.models.sparse_attention import DENSE_PAGES, SparseRows
from fastinfer.utils.table import format_table
from fastinfer.utils.torch_threads import set_num_threads

ROOT = Path(__file__).parents[1]
TEXTS = [
    ROOT / f"tests/data/{name}.txt" for name in ("project_documents", "python_execution_model", "python_import_system")
]
LONG_TEXTS = [ROOT / f"docs/{name}.md" for name in ("serving", "architecture", "draft-heads", "distillation")]
CHUNK = 256  # tokens of a step
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
METHODS = ("estimates and codes", "estimates", "window", "random")


class PageCount:
    """Takes the place of :func:`fastinfer.ops.select_pages`, and counts the pages that are read of those that are seen.

    Args:
        method: the pages that are read, as many as the estimates choose: those, with or without the codes of the
            others, the last ones, or random ones.
    """

    def __init__(self, method: str = METHODS[0]) -> None:
        self.read = self.seen = 0
        self._method = method

    def __call__(
        self, q: Tensor, *, block_table: Tensor, seq_lens: Tensor, row_start: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        pages, lens = SELECT_PAGES(q, block_table=block_table, seq_lens=seq_lens, row_start=row_start, **options)
        block_size = options["block_size"]
        ends = torch.arange(1, len(q) + 1) if row_start is None else row_start[1:]
        positions = seq_lens[0] - options["query_start"][1] + ends - 1
        counts, last = -(-lens // block_size), (positions // block_size)[:, None, None]
        self.read += int(counts.sum())
        self.seen += int((last + 1).sum()) * lens.shape[1]
        if self._method != METHODS[0] and options.get("rest_lse") is not None:
            options["rest_lse"].fill_(-torch.inf)
        if self._method in METHODS[:2]:
            return pages, lens
        page = torch.arange(block_table.shape[1])
        scores = page.expand(pages.shape).float() if self._method == "window" else torch.rand(pages.shape)
        scores = scores.masked_fill((page == 0) | (page >= last - 1), torch.inf).masked_fill(page > last, -torch.inf)
        order = scores.argsort(dim=-1, descending=True)
        chosen = order.masked_fill(page >= counts[..., None], len(page)).sort().values.clamp(max=len(page) - 1)
        return block_table[0][chosen].contiguous(), lens

    @property
    def share(self) -> float:
        """Share of the pages that were read."""
        return self.read / max(self.seen, 1)

    @contextmanager
    def counting(self) -> Iterator["PageCount"]:
        with mock.patch.object(ops, "select_pages", self):
            yield self


SELECT_PAGES = ops.select_pages


@dataclass
class Sequence:
    """A text in a cache whose blocks are in order."""

    model: Model
    cache: KVCache
    block_size: int
    tokens: Tensor

    @classmethod
    def make(cls, model: Model, tokens: Tensor, block_size: int) -> "Sequence":
        blocks = num_blocks_for(len(tokens), block_size)
        dtype = torch.float16
        cache = KVCache.of_model(
            model.config, [blocks], block_size, dtype, "cpu", state_dtype=model.dtype, with_key_codes=True
        )
        return cls(model, cache, block_size, tokens)

    def batch(self, begin: int, end: int, share: float | None = None, *, is_prompt: bool = False) -> Batch:
        """The tokens begin..end - 1, generated ones or of a prompt; they attend to everything without a share."""
        count = end - begin
        batch = Batch(
            token_ids=self.tokens[begin:end],
            positions=torch.arange(begin, end),
            query_start=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=(torch.arange(num_blocks_for(len(self.tokens), self.block_size), dtype=torch.int32)[None],),
            slot_mappings=(torch.arange(begin, end),),
            logits_indices=torch.arange(count),
        )
        if share is None:
            return batch
        row_start = torch.arange(count + 1, dtype=torch.int32)
        if not is_prompt:
            return replace(batch, sparse=SparseRows(share, DENSE_PAGES, count, row_start, None))
        ends = [place - begin for place in range(begin + 1, end + 1) if place % self.block_size == 0 or place == end]
        tiles = torch.tensor([0, *ends], dtype=torch.int32)
        return replace(batch, sparse=SparseRows(share, DENSE_PAGES, 0, row_start[:1], batch.seq_lens, tiles))

    def log_probabilities(
        self, begin: int, end: int, share: float | None = None, *, is_prompt: bool = False
    ) -> Iterator[Tensor]:
        """The distributions after the tokens, [chunk, vocab], step by step."""
        for first in range(begin, end, CHUNK):
            batch = self.batch(first, min(first + CHUNK, end), share, is_prompt=is_prompt)
            hidden = self.model.forward(batch, self.cache)
            yield self.model.logits(hidden, batch.logits_indices).float().log_softmax(-1)


def read_text(paths: list[Path], model: str, length: int, dtype: str = "auto") -> tuple[Model, Tensor]:
    loaded, tokenizer = load_model(hub.resolve(model), dtype, "cpu", length)
    tokens = tokenizer.encode("\n\n".join(path.read_text() for path in paths))
    if len(tokens) < length:
        raise SystemExit(f"the text must have at least {length} tokens, got {len(tokens)}")
    return loaded, torch.tensor(tokens[:length])


def measure_quality(args: argparse.Namespace) -> list[dict[str, Any]]:
    """KL from dense attention in nats, and the share of tokens whose likeliest next token is the same."""
    begin, results = args.context - args.tokens, []
    texts = ((dtype, *read_text(args.text, args.model, args.context, dtype)) for dtype in args.dtype)
    for (dtype, model, tokens), block_size in product(texts, args.block_size):
        sequence = Sequence.make(model, tokens, block_size)
        for _ in sequence.log_probabilities(0, begin):
            pass
        dense = list(sequence.log_probabilities(begin, args.context))
        for share, method in ((share, method) for share in args.share for method in METHODS):
            with PageCount(method).counting() as count:
                kl, agreement = divergence(dense, sequence.log_probabilities(begin, args.context, share))
            result = {"dtype": dtype, "block_size": block_size, "share": share, "pages_read": count.share}
            results.append(result | {"method": method, "kl": kl, "agreement": agreement})
            print(results[-1], flush=True)
    return results


def measure_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same of the last tokens of a prompt, and of as many after it."""
    model, tokens = read_text(args.text, args.model, args.context)
    end, results = args.context - args.tokens, []
    dense: dict[int, list[Tensor]] = {}
    for block_size, share in ((block_size, share) for block_size in args.block_size for share in (None, *args.share)):
        sequence = Sequence.make(model, tokens, block_size)
        with PageCount().counting() as count:
            found = list(sequence.log_probabilities(0, end, share, is_prompt=True))[-args.tokens // CHUNK :]
        found += sequence.log_probabilities(end, args.context)
        if share is None:
            dense[block_size] = found
            continue
        result: dict[str, Any] = {"block_size": block_size, "share": share, "pages_read": count.share}
        half = len(found) // 2
        for name, part in (("prompt", slice(half)), ("after", slice(half, None))):
            kl, agreement = divergence(dense[block_size][part], iter(found[part]))
            result |= {f"kl_{name}": kl, f"agreement_{name}": agreement}
        results.append(result)
        print(results[-1], flush=True)
    return results


def divergence(dense: list[Tensor], found: Iterator[Tensor]) -> tuple[float, float]:
    """KL from the distributions ``dense`` in nats, and the share of tokens whose likeliest next token is the same."""
    kl, same, count = 0.0, 0, 0
    for expected, actual in zip(dense, found, strict=True):
        kl += float((expected.exp() * (expected - actual)).sum(dtype=torch.float64))
        same += int((expected.argmax(-1) == actual.argmax(-1)).sum())
        count += len(expected)
    return kl / count, same / count


def measure_time(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Seconds of chunks of a prompt and of decode steps at several contexts, dense and sparse in turns."""
    model, tokens = read_text(args.long_text, args.model, max(args.contexts))
    now, shares = CLOCKS[args.clock], [None, *args.share]
    chunks, steps = [], []
    for block_size in args.block_size:
        sequence = Sequence.make(model, tokens, block_size)
        for end in range(args.chunk, len(tokens) + 1, args.chunk):
            prompt_shares = shares if args.prompt_rounds else [None]
            batches = [sequence.batch(end - args.chunk, end, share, is_prompt=True) for share in prompt_shares]
            batches = [replace(batch, logits_indices=batch.logits_indices[-1:]) for batch in batches]
            # The last one to write the cache is dense attention.
            for case in time_batches(sequence, batches[::-1], args.prompt_rounds, now)[::-1]:
                share = prompt_shares[len(chunks) % len(prompt_shares)]
                chunks.append({"block_size": block_size, "end": end, "share": share} | case)
            if end not in args.contexts:
                continue
            ends = range(end - args.places + 1, end + 1)
            own = [
                time_batches(sequence, [sequence.batch(e - 1, e, s) for s in shares], args.rounds, now) for e in ends
            ]
            for share, cases in zip(shares, zip(*own, strict=True), strict=True):
                samples = [sample for case in cases for sample in case["samples_s"]]
                read = statistics.mean(case["pages_read"] for case in cases)
                result = {"block_size": block_size, "context": end, "share": share, "pages_read": read}
                steps.append(result | {"samples_s": samples})
            for case in steps[-len(shares) :]:
                case["speedup"] = median_ratio(steps[-len(shares)]["samples_s"], case["samples_s"])
                print({name: value for name, value in case.items() if name != "samples_s"}, flush=True)
    return {"steps": steps, "chunks": chunks}


def time_batches(
    sequence: Sequence, batches: list[Batch], rounds: int, now: Callable[[], float]
) -> list[dict[str, Any]]:
    """Seconds of steps in turns, and the share of the pages that each reads."""
    graphs, cases = [], []
    for batch in batches:
        graph = ops.CPUGraph()
        with torch.inference_mode(), PageCount().counting() as count:  # recorded operators have no results yet
            sequence.model.forward(batch, sequence.cache)
        with torch.inference_mode(), graph.capture():
            with ops.prompt_rows(0 if len(batch.token_ids) > 1 else 1):
                hidden = sequence.model.forward(batch, sequence.cache)
            sequence.model.logits(hidden, batch.logits_indices)
        graphs.append(graph)
        cases.append({"pages_read": count.share if count.seen else 1.0, "samples_s": []})
    for _ in range(rounds):
        for graph, case in zip(graphs, cases, strict=True):
            start = now()
            graph.replay()
            case["samples_s"].append(now() - start)
    return cases


def prompt_times(chunks: list[dict[str, Any]], contexts: list[int]) -> list[dict[str, Any]]:
    """Seconds of whole prompts: the sums of their chunks' medians."""
    results = []
    for block_size, context in {(case["block_size"], context): None for case in chunks for context in contexts}:
        own = [case for case in chunks if case["block_size"] == block_size and case["end"] <= context]
        seconds = {
            share: sum(statistics.median(case["samples_s"]) for case in own if case["share"] == share)
            for share in {case["share"]: None for case in own}
        }
        for share, time_s in seconds.items():
            result = {"block_size": block_size, "context": context, "share": share, "seconds": time_s}
            results.append(result | {"speedup": seconds[None] / time_s})
    return results


def report(results: dict[str, list[dict[str, Any]]]) -> str:
    parts = []
    if quality := results.get("quality"):
        rows = [["dtype", "block size", "share", "pages read", "method", "KL, nats", "same token"]]
        for case in quality:
            start = [case["dtype"], str(case["block_size"]), str(case["share"])]
            start += [f"{case['pages_read']:.1%}", case["method"]]
            rows.append([*start, f"{case['kl']:.4f}", f"{case['agreement']:.1%}"])
        parts.append(format_table(rows))
    if prompts := results.get("prompts"):
        rows = [["block size", "share", "pages read", "KL in the prompt", "same token", "KL after it", "same token"]]
        for case in prompts:
            row = [str(case["block_size"]), str(case["share"]), f"{case['pages_read']:.1%}"]
            for name in ("prompt", "after"):
                row += [f"{case[f'kl_{name}']:.4f}", f"{case[f'agreement_{name}']:.1%}"]
            rows.append(row)
        parts.append(format_table(rows))
    if steps := results.get("steps"):
        rows = [["block size", "context", "share", "pages read", "ms", "times as fast"]]
        for case in steps:
            start = [str(case["block_size"]), str(case["context"]), str(case["share"] or "all")]
            milliseconds = 1e3 * statistics.median(case["samples_s"])
            rows.append([*start, f"{case['pages_read']:.1%}", f"{milliseconds:.2f}", f"{case['speedup']:.2f}"])
        parts.append(format_table(rows))
    if whole := results.get("whole_prompts"):
        rows = [["block size", "tokens of the prompt", "share", "s", "times as fast"]]
        for case in whole:
            start = [str(case["block_size"]), str(case["context"]), str(case["share"] or "all")]
            rows.append([*start, f"{case['seconds']:.2f}", f"{case['speedup']:.2f}"])
        parts.append(format_table(rows))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the text")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of its end that are compared")
    parser.add_argument(
        "--dtype", nargs="+", default=["auto", "float32"], help="of the generated tokens; auto has 8-bit activations"
    )
    parser.add_argument("--block-size", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--share", type=float, nargs="+", default=[0.8, 0.9, 0.95, 0.98])
    parser.add_argument("--long-text", type=Path, nargs="+", default=LONG_TEXTS, help="for the times")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="of the times")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt that a step computes")
    parser.add_argument("--places", type=int, default=8, help="decode steps that are timed at the end of each context")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-rounds", type=int, default=3, help="0: prompts are not timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--only", choices=["quality", "prompts", "time"])
    parser.add_argument("--out", type=Path, help="folder for sparse_attention.json")
    args = parser.parse_args()
    set_num_threads(args.threads)
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    if args.only in (None, "time"):
        results = measure_time(args)
        if args.prompt_rounds:
            results["whole_prompts"] = prompt_times(results["chunks"], args.contexts)
    if args.only in (None, "quality"):
        results["quality"] = measure_quality(args)
    if args.only in (None, "prompts"):
        results["prompts"] = measure_prompts(args)
    print(report(results))
    if args.out is not None:
        options = {"model": args.model, "context": args.context, "tokens": args.tokens, "clock": args.clock}
        print(write_json(args.out / "sparse_attention.json", options | results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
