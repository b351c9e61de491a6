"""Sparse attention against dense attention: how far the next token's distribution moves, and the time of a decode step.

Quality: of one long text the last tokens are computed as generated ones, each from the true tokens before it, and their
distributions are compared with those of dense attention. The pages with the largest estimates compete with a window
(the first page and the last ones) and with random pages, of the same number.

Time: decode steps of one sequence are recorded and replayed in turns, dense and sparse, on a cache of random numbers,
which takes no prefill. The clock is that of the process's CPU time by default.

Settings: both, for several sizes of pages, shares of them, and numbers of first layers that attend to everything.

    python bench/bench_sparse_attention.py --out bench/results
    python bench/bench_sparse_attention.py --only settings --tokens 256 --out bench/results
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastinfer import hub, ops
from fastinfer.benchmarks.report import median_ratio, write_json
from fastinfer.models import Model, load_model
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache, LayerCache, num_blocks_for
from fastinfer.models.sparse_attention import SparseRows
from fastinfer.utils.table import format_table
from fastinfer.utils.torch_threads import set_num_threads

DATA = Path(__file__).parents[1] / "tests/data"
TEXTS = [DATA / f"{name}.txt" for name in ("project_documents", "python_execution_model", "python_import_system")]
CHUNK = 256  # tokens of a step
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def window_pages(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The first page and the last ones, in the place of :func:`fastinfer.ops.select_pages`."""
    return pages_by(lambda shape: torch.arange(shape[-1]).expand(shape).float(), *arguments)


def random_pages(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The first page, the last two, and random ones, in the place of :func:`fastinfer.ops.select_pages`."""
    return pages_by(torch.rand, *arguments)


def pages_by(
    scores_of: Callable[[tuple[int, int, int]], Tensor],
    q: Tensor,
    codes: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    block_size: int,
    num_pages: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """The first page, the last two, and those with the highest scores, [tokens, kv_heads, pages], in one sequence."""
    positions = seq_lens[0] - query_start[1] + torch.arange(len(q))
    page, last = torch.arange(block_table.shape[1]), (positions // block_size)[:, None, None]
    scores = scores_of((len(q), codes.shape[1], len(page)))
    scores = scores.masked_fill((page == 0) | (page >= last - 1), torch.inf).masked_fill(page > last, -torch.inf)
    chosen = scores.topk(num_pages).indices.sort().values
    lens = (num_pages - 1) * block_size + positions % block_size + 1
    return block_table[0][chosen].contiguous(), lens.int()


# Tokens a page, share of the pages that are read, and number of first layers that attend to everything.
SETTINGS = [(block_size, share, 2) for block_size in (8, 16, 32) for share in (1 / 2, 1 / 4, 1 / 8, 1 / 16)]
SETTINGS += [(16, 1 / 8, dense_layers) for dense_layers in (12, 20)]

METHODS = {"estimates": ops.select_pages, "window": window_pages, "random": random_pages}


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

    def with_pages_of(self, block_size: int) -> "Sequence":
        """The same keys and values in other pages."""
        other = Sequence.make(self.model, self.tokens, block_size)
        for own, layer in zip(other.cache.layers, self.cache.layers, strict=True):
            assert isinstance(own, LayerCache)
            assert isinstance(layer, LayerCache)
            slots = len(self.tokens)
            for target, source in ((own.k, layer.k), (own.v, layer.v)):
                target.flatten(0, 1)[:slots] = source.flatten(0, 1)[:slots]
            if own.key_codes is not None:
                ops.store_key_codes(own.key_codes, own.k, None, torch.arange(slots))
        return other

    def attend_to_all_in(self, first_layers: int) -> "Sequence":
        """Let the first layers attend to everything."""
        for index, layer in enumerate(self.cache.layers[:first_layers]):
            assert isinstance(layer, LayerCache)
            self.cache.layers[index] = replace(layer, key_codes=None)
        return self

    def batch(self, begin: int, end: int, num_pages: int | None = None) -> Batch:
        """The tokens begin..end - 1; with ``num_pages`` as generated tokens, which attend to so many pages."""
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
        if num_pages is None:
            return batch
        rows = SparseRows(count, num_pages, torch.arange(count + 1, dtype=torch.int32), None)
        return replace(batch, sparse=rows)

    def log_probabilities(self, begin: int, end: int, num_pages: int | None = None) -> Iterator[Tensor]:
        """The distributions after the tokens, [chunk, vocab], step by step."""
        for first in range(begin, end, CHUNK):
            batch = self.batch(first, min(first + CHUNK, end), num_pages)
            hidden = self.model.forward(batch, self.cache)
            yield self.model.logits(hidden, batch.logits_indices).float().log_softmax(-1)


def read_text(paths: list[Path], model: str, length: int) -> tuple[Model, Tensor]:
    loaded, tokenizer = load_model(hub.resolve(model), "auto", "cpu", length)
    tokens = tokenizer.encode("\n\n".join(path.read_text() for path in paths))
    if len(tokens) < length:
        raise SystemExit(f"the text must have at least {length} tokens, got {len(tokens)}")
    return loaded, torch.tensor(tokens[:length])


def measure_quality(args: argparse.Namespace) -> list[dict[str, Any]]:
    """KL from dense attention in nats, and the share of tokens whose likeliest next token is the same."""
    model, tokens = read_text(args.text, args.model, args.context)
    begin, results = args.context - args.tokens, []
    for block_size in args.block_size:
        sequence = Sequence.make(model, tokens, block_size)
        for _ in sequence.log_probabilities(0, begin):
            pass
        dense = list(sequence.log_probabilities(begin, args.context))
        for share, (name, select) in ((share, method) for share in args.share for method in METHODS.items()):
            num_pages = max(4, round(args.context / block_size * share))
            with mock.patch.object(ops, "select_pages", select):
                kl, agreement = divergence(dense, sequence.log_probabilities(begin, args.context, num_pages))
            result = {"block_size": block_size, "share": share, "pages": num_pages, "method": name}
            results.append(result | {"kl": kl, "agreement": agreement})
            print(f"block size {block_size}, 1/{1 / share:.0f}, {name}: KL {kl:.4f}, {agreement:.1%}", flush=True)
    return results


def divergence(dense: list[Tensor], found: Iterator[Tensor]) -> tuple[float, float]:
    """KL from the distributions ``dense`` in nats, and the share of tokens whose likeliest next token is the same."""
    kl, same, count = 0.0, 0, 0
    for expected, actual in zip(dense, found, strict=True):
        kl += float((expected.exp() * (expected - actual)).sum(dtype=torch.float64))
        same += int((expected.argmax(-1) == actual.argmax(-1)).sum())
        count += len(expected)
    return kl / count, same / count


def measure_time(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a decode step, dense and sparse in turns."""
    model, _ = load_model(hub.resolve(args.model), "auto", "cpu", max(args.contexts))
    now, block_size, results = CLOCKS[args.clock], args.block_size[0], []
    for context in args.contexts:
        sequence = Sequence.make(model, torch.zeros(context, dtype=torch.int64), block_size)
        fill(sequence.cache)
        shares = [None, *args.share]
        for share, own, ratio in zip(shares, *time_steps(sequence, shares, args.rounds, now), strict=True):
            results.append(
                {"context": context, "block_size": block_size, "share": share, "samples_s": own, "speedup": ratio}
            )
    return results


def time_steps(
    sequence: Sequence, shares: list[float | None], rounds: int, now: Callable[[], float]
) -> tuple[list[list[float]], list[float]]:
    """Seconds of decode steps in turns, and medians of the first one's time divided by each one's."""
    context, graphs = len(sequence.tokens), []
    for share in shares:
        num_pages = None if share is None else max(4, round(context / sequence.block_size * share))
        batch, graph = sequence.batch(context - 1, context, num_pages), ops.CPUGraph()
        with torch.inference_mode(), graph.capture():
            sequence.model.logits(sequence.model.forward(batch, sequence.cache), batch.logits_indices)
        graphs.append((graph, batch))
    samples: list[list[float]] = [[] for _ in shares]
    for _ in range(rounds):
        for (graph, _), own in zip(graphs, samples, strict=True):
            start = now()
            graph.replay()
            own.append(now() - start)
    return samples, [median_ratio(samples[0], own) for own in samples]


def measure_settings(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Divergence and speed of :data:`SETTINGS`, the latter with the longest context of the times."""
    model, tokens = read_text(args.text, args.model, args.context)
    timed_model, _ = load_model(hub.resolve(args.model), "auto", "cpu", max(args.contexts))
    begin, results = args.context - args.tokens, []
    text = Sequence.make(model, tokens, SETTINGS[0][0])
    for _ in text.log_probabilities(0, begin):
        pass
    dense = list(text.log_probabilities(begin, args.context))
    for block_size, share, dense_layers in SETTINGS:
        sequence = text.with_pages_of(block_size).attend_to_all_in(dense_layers)
        num_pages = max(4, round(args.context / block_size * share))
        kl, agreement = divergence(dense, sequence.log_probabilities(begin, args.context, num_pages))
        timed = Sequence.make(timed_model, torch.zeros(max(args.contexts), dtype=torch.int64), block_size)
        fill(timed.cache)
        _, ratios = time_steps(timed.attend_to_all_in(dense_layers), [None, share], args.rounds, CLOCKS[args.clock])
        result = {"block_size": block_size, "share": share, "dense_layers": dense_layers, "speedup": ratios[1]}
        results.append(result | {"kl": kl, "agreement": agreement})
        print(results[-1], flush=True)
    return results


def fill(cache: KVCache) -> None:
    """Fill a cache with random keys and values, and make the codes of the keys."""
    for layer in cache:
        assert isinstance(layer, LayerCache)
        layer.k.normal_()
        layer.v.normal_()
        if layer.key_codes is not None:
            ops.store_key_codes(layer.key_codes, layer.k, None, torch.arange(layer.k.shape[0] * layer.k.shape[1]))


def report(results: dict[str, list[dict[str, Any]]]) -> str:
    parts = []
    if quality := results.get("quality"):
        rows = [["block size", "pages read", "method", "KL, nats", "same token"]]
        for case in quality:
            share = f"1/{1 / case['share']:.0f}"
            rows.append(
                [str(case["block_size"]), share, case["method"], f"{case['kl']:.4f}", f"{case['agreement']:.1%}"]
            )
        parts.append(format_table(rows))
    if times := results.get("time"):
        rows = [["context", "pages read", "ms", "times as fast"]]
        for case in times:
            share = "all" if case["share"] is None else f"1/{1 / case['share']:.0f}"
            milliseconds = 1e3 * statistics.median(case["samples_s"])
            rows.append([str(case["context"]), share, f"{milliseconds:.2f}", f"{case['speedup']:.2f}"])
        parts.append(format_table(rows))
    if settings := results.get("settings"):
        rows = [["block size", "pages read", "dense layers", "KL, nats", "same token", "times as fast"]]
        for case in settings:
            sizes = [str(case["block_size"]), f"1/{1 / case['share']:.0f}", str(case["dense_layers"])]
            rows.append([*sizes, f"{case['kl']:.4f}", f"{case['agreement']:.1%}", f"{case['speedup']:.2f}"])
        parts.append(format_table(rows))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the text")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of its end that are compared")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 8, 32], help="the first is that of the times")
    parser.add_argument("--share", type=float, nargs="+", default=[1 / 4, 1 / 8, 1 / 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="of the times")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--only", choices=["quality", "time", "settings"])
    parser.add_argument("--out", type=Path, help="folder for sparse_attention.json, or sparse_attention_settings.json")
    args = parser.parse_args()
    set_num_threads(args.threads)
    torch.manual_seed(0)
    measures = {"time": measure_time, "quality": measure_quality, "settings": measure_settings}
    chosen = ["time", "quality"] if args.only is None else [args.only]
    results = {name: measures[name](args) for name in chosen}
    print(report(results))
    if args.out is not None:
        options = {"model": args.model, "context": args.context, "tokens": args.tokens, "clock": args.clock}
        name = "sparse_attention_settings" if args.only == "settings" else "sparse_attention"
        print(write_json(args.out / f"{name}.json", options | results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
