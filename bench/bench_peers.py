"""Comparison of fastinfer with other engines: the same file and the same prompts, in turns.

    python bench/bench_peers.py --threads 2 --llama-q4_0 \\
        --peer llama_cpp=/path/to/venv/bin/python --peer openvino=/path/to/another/venv/bin/python

Every engine runs in its own process, under the interpreter that has it installed (by default this one). Engines that
are not installed are reported and skipped. All engines are loaded and warmed up first. In every round each engine runs
each workload once, one engine at a time, so that changes of the machine's speed affect all of them. Prompts are random
sections of English text as token ids, new ones in every round, which no cache has. All engines decode greedily and
ignore the end of text. The tables show medians over the rounds; ratios are medians of the ratios of each round.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.plot import plot
from peers.process import Peer, PeerError

from fastinfer import hub
from fastinfer.benchmarks.report import write_json
from fastinfer.formats.gguf import GGUFFile
from fastinfer.tokenizers.tokenizer import Tokenizer
from fastinfer.utils.table import format_table

ROOT = Path(__file__).resolve().parents[1]
# Engine in worker.py to its name in tables.
ENGINES = {
    "fastinfer": "fastinfer",
    "llama_cpp": "llama.cpp",
    "llama_cpp_q4_0": "llama.cpp, Q4_0",
    "openvino": "OpenVINO GenAI",
    "transformers_bf16": "transformers bf16",
    "transformers_fp32": "transformers fp32",
}
# Engine to the package whose interpreter it uses, if that has another name.
PACKAGES = {
    "llama_cpp_q4_0": "llama_cpp",
    "transformers_bf16": "transformers",
    "transformers_fp32": "transformers",
}
TEXT = [ROOT / "tests/data" / name for name in ("license.txt", "project_documents.txt")]
PAUSE_S = 0.05  # between turns, until the threads of the previous engine no longer spin


@dataclass(frozen=True)
class Workload:
    """Number and lengths of requests at once, and the part of their time that counts.

    ``counts`` is "prefill" (the prompt, up to the first token), "decode" (the tokens after the first one) or "all" (all
    new tokens, from the start to the last one).
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    counts: str

    def tokens_per_s(self, sample: dict[str, Any]) -> float:
        if self.counts == "prefill":
            return self.prompt_tokens / sample["first_token_s"]
        if self.counts == "decode":
            return (self.new_tokens - 1) / (sample["total_s"] - sample["first_token_s"])
        return self.requests * self.new_tokens / sample["total_s"]


WORKLOADS = {
    "decode": Workload(1, 32, 129, "decode"),
    "prefill": Workload(1, 512, 1, "prefill"),
    "long_prefill": Workload(1, 1024, 1, "prefill"),
    "batch": Workload(16, 64, 64, "all"),
}
SMALL_WORKLOADS = {
    "decode": Workload(1, 4, 5, "decode"),
    "prefill": Workload(1, 16, 1, "prefill"),
    "long_prefill": Workload(1, 32, 1, "prefill"),
    "batch": Workload(2, 8, 4, "all"),
}

# Engine to workload to the answers of worker.py, one per round.
Samples = dict[str, dict[str, list[dict[str, Any]]]]


@dataclass
class Comparison:
    """Engines that are ready, and the reasons why others were skipped."""

    peers: dict[str, Peer]
    skipped: dict[str, str]

    def turn(self, name: str, prompts: list[list[int]], new_tokens: int) -> dict[str, Any] | None:
        """Run a workload on one engine; returns None if the engine was skipped before or fails now."""
        if name not in self.peers:
            return None
        time.sleep(PAUSE_S)
        try:
            return self.peers[name].turn(prompts, new_tokens)
        except PeerError as error:
            self.skip(name, str(error))
            del self.peers[name]
            return None

    def skip(self, name: str, reason: str) -> None:
        self.skipped[name] = reason
        print(f"skipped: {ENGINES[name]}: {reason}", flush=True)


def measure(
    comparison: Comparison, text: list[int], workloads: dict[str, Workload], rounds: int, end: float
) -> Samples:
    """Warm up, then run the rounds, except those that would probably not end before ``end`` (perf_counter)."""
    rng = random.Random(0)

    def prompts(workload: Workload) -> list[list[int]]:
        starts = [rng.randrange(len(text) - workload.prompt_tokens) for _ in range(workload.requests)]
        return [text[start : start + workload.prompt_tokens] for start in starts]

    for name in list(comparison.peers):
        start = time.perf_counter()
        for workload in workloads.values():
            comparison.turn(name, prompts(workload), min(workload.new_tokens, 8))
        print(f"warm-up of {ENGINES[name]}: {time.perf_counter() - start:.0f} s", flush=True)
    samples: Samples = {name: {key: [] for key in workloads} for name in comparison.peers}
    longest = 0.0
    for number in range(rounds):
        if not comparison.peers:
            break
        start = time.perf_counter()
        if number > 0 and start + longest > end:
            print(f"stopped after {number} of {rounds} rounds because of --limit-s")
            break
        for key, workload in workloads.items():
            round_prompts = prompts(workload)
            for name in [*samples][number % len(samples) :] + [*samples][: number % len(samples)]:
                answer = comparison.turn(name, round_prompts, workload.new_tokens)
                if answer is not None:
                    samples[name][key].append(answer)
        longest = max(longest, time.perf_counter() - start)
        print(f"round {number + 1}: {time.perf_counter() - start:.0f} s", flush=True)
    return {name: samples[name] for name in comparison.peers}


def summary(samples: Samples, workloads: dict[str, Workload], facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of each engine and the ratios of fastinfer's speed to them, by the names in tables."""
    engines: dict[str, Any] = {}
    for name, answers in samples.items():
        rates = {key: [workloads[key].tokens_per_s(a) for a in answers[key]] for key in workloads}
        engine: dict[str, Any] = {
            **facts[name],
            "tokens_per_s": {key: statistics.median(values) for key, values in rates.items()},
            "first_token_s": statistics.median(a["first_token_s"] for a in answers["prefill"]),
            "peak_memory": max(a["peak_memory"] for every in answers.values() for a in every),
        }
        if "fastinfer" in samples:
            ours = samples["fastinfer"]
            engine["fastinfer_is_times"] = {
                key: statistics.median(
                    workloads[key].tokens_per_s(a) / rate for a, rate in zip(ours[key], rates[key], strict=True)
                )
                for key in workloads
            }
            engine["same_tokens"] = statistics.median(
                _common_prefix_length(a["tokens"][0], b["tokens"][0])
                for a, b in zip(ours["decode"], answers["decode"], strict=True)
            )
        keep = ("first_token_s", "total_s")
        engine["samples"] = {key: [{k: a[k] for k in keep} for a in every] for key, every in answers.items()}
        engines[ENGINES[name]] = engine
    return engines


def _common_prefix_length(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def report(engines: dict[str, Any], workloads: dict[str, Workload]) -> str:
    """Return two tables: speeds, and how many times as fast fastinfer is."""
    heads = ["decode tokens/s"]
    heads += [f"prefill of {workloads[key].prompt_tokens:,}" for key in ("prefill", "long_prefill")]
    heads += [f"{workloads['batch'].requests} at once"]
    speeds = [["engine", *heads, "first token ms", "peak MiB", "load s", "same tokens"]]
    ratios = [["fastinfer is ... times as fast", *heads]]
    for name, engine in engines.items():
        row = [name, *(f"{rate:.1f}" for rate in engine["tokens_per_s"].values())]
        row += [f"{engine['first_token_s'] * 1e3:.0f}", f"{engine['peak_memory'] / 2**20:.0f}"]
        speeds.append([*row, f"{engine['load_s']:.2f}", f"{engine.get('same_tokens', 0):.0f}"])
        if name != "fastinfer" and "fastinfer_is_times" in engine:
            ratios.append([name, *(f"{ratio:.2f}" for ratio in engine["fastinfer_is_times"].values())])
    return format_table(speeds) + ("\n\n" + format_table(ratios) if len(ratios) > 1 else "")


@contextmanager
def start_engines(args: argparse.Namespace, workloads: dict[str, Workload]) -> Iterator[Comparison]:
    """Start and load all available engines; their processes end with the ``with`` block."""
    pythons = dict(args.peer)
    model = str(hub.resolve(args.model))
    comparison = Comparison({}, {})
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in args.engines:
                package = PACKAGES.get(name, name)
                python = pythons.get(package, sys.executable)
                settings = {"model": model, "threads": args.threads}
                settings["max_tokens"] = max(w.prompt_tokens + w.new_tokens for w in workloads.values())
                settings["max_requests"] = max(w.requests for w in workloads.values())
                try:
                    if name == "llama_cpp_q4_0":
                        target = Path(folder) / (Path(model).name.split(".")[0] + ".Q4_0.gguf")
                        quantize(Path(model), target, "q4_0", python)
                        settings["model"] = str(target)
                    print(f"loading {ENGINES[name]}", flush=True)
                    comparison.peers[name] = Peer(name, python, settings, args.turn_limit_s)
                except PeerError as error:
                    comparison.skip(name, str(error))
            yield comparison
        finally:
            for peer in comparison.peers.values():
                peer.close()


def quantize(source: Path, target: Path, file_type: str, python: str) -> None:
    """Write a GGUF file quantised by llama.cpp.

    Args:
        source, target: GGUF files.
        file_type: llama.cpp's name of the mixture of types, such as "q4_k_m".
        python: interpreter that has llama-cpp-python installed.

    Raises:
        PeerError: it is not installed, or llama.cpp does not quantise the file.
    """
    command = [python, str(ROOT / "bench/peers/llama_cpp_engine.py"), str(source), str(target), file_type]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise PeerError(f"{python}: {error.strerror}") from None
    if done.returncode != 0:
        raise PeerError((done.stderr.strip().splitlines() or ["the quantiser failed"])[-1][:300])


def commit() -> str | None:
    """Return the commit under test, with "+" if files have changed since; None outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _peer(text: str) -> tuple[str, str]:
    package, equals, python = text.partition("=")
    known = sorted({PACKAGES.get(name, name) for name in ENGINES})
    if not equals or package not in known:
        raise argparse.ArgumentTypeError(f"expected PACKAGE=PYTHON with one of {', '.join(known)}, got {text!r}")
    return package, python


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL, help="name or path; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="PACKAGE=PYTHON", help="interpreter")
    parser.add_argument("--only", help="engines, separated by commas: " + ", ".join(ENGINES))
    parser.add_argument("--llama-q4_0", action="store_true", help="llama.cpp also on a Q4_0 file, made for the run")
    parser.add_argument(
        "--limit-s", type=float, default=480, help="start no round that would end later; default: %(default)s"
    )
    parser.add_argument(
        "--turn-limit-s", type=float, default=180, help="skip an engine that takes longer; default: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/peers.json", help="default: %(default)s")
    parser.add_argument("--plot", type=Path, help="a bar chart, such as docs/peers.png; needs matplotlib")
    parser.add_argument("--rehearse", action="store_true", help="small sizes: tests the code, measures nothing")
    args = parser.parse_args(argv)
    if args.threads < 1 or args.rounds < 1:
        parser.error("--threads and --rounds must be at least 1")
    args.engines = args.only.split(",") if args.only else [*ENGINES]
    if unknown := set(args.engines) - set(ENGINES):
        parser.error(f"--only knows {', '.join(ENGINES)}, got {', '.join(sorted(unknown))}")
    if not args.llama_q4_0 and not args.only:
        args.engines.remove("llama_cpp_q4_0")
    return args


def main(argv: list[str] | None = None) -> int:
    begin = time.perf_counter()
    args = parse(argv)
    workloads = SMALL_WORKLOADS if args.rehearse else WORKLOADS
    tokenizer = Tokenizer.from_gguf(GGUFFile(hub.resolve(args.model)))
    text = tokenizer.encode("\n".join(path.read_text() for path in TEXT), add_special_tokens=False)
    with start_engines(args, workloads) as comparison:
        samples = measure(comparison, text, workloads, args.rounds, begin + args.limit_s)
        facts = {name: peer.facts for name, peer in comparison.peers.items()}
    engines = summary(samples, workloads, facts)
    if not engines:
        print("no engine could be measured", file=sys.stderr)
        return 1
    print(report(engines, workloads))
    settings = {"model": args.model, "threads": args.threads, "rounds": args.rounds}
    settings["workloads"] = {key: asdict(workload) for key, workload in workloads.items()}
    skipped = {ENGINES[name]: reason for name, reason in comparison.skipped.items()}
    results = {"commit": commit(), "settings": settings, "engines": engines, "skipped": skipped}
    written = write_json(args.out, results)
    print(written)
    if args.plot is not None:
        print(plot(json.loads(written.read_text()), args.plot))
    return 0


if __name__ == "__main__":
    sys.exit(main())
