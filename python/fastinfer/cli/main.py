"""The program ``fastinfer``: arguments, and how errors and signals end it. Each command is a module with ``run``.

Exit codes: 0 for success, 1 when ``info`` finds the installation broken, 2 for a mistake in what the user gave,
130 after Ctrl-C, 141 when the reader of the output has gone.
"""

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import fastinfer
from fastinfer.cli.options import (
    add_dtype_option,
    add_engine_options,
    add_model_option,
    add_model_options,
    add_sampling_options,
    count,
    counts,
    names,
    rate,
)
from fastinfer.errors import FastinferError

DEFAULT_BENCHMARK = "end-to-end"
ABLATION_ROWS = ("none", "kv", "batch", "kv+batch", "continuous", "int8", "int4", "prefix", "speculation")
THROUGHPUT_SECTIONS = ("batch", "policies", "arrival", "prefix", "ngram", "json")
QUANTIZATION_METHODS = ("rtn", "gptq", "awq", "nf4", "int8", "w8a8")


class _UsageError(FastinferError):
    """The arguments do not parse."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the whole usage before it; one line is easier to read and the same for all errors.
        raise _UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    try:
        args = _parser().parse_args(_with_benchmark(sys.argv[1:] if argv is None else argv))
        # Commands are imported only when they run: torch alone takes 1.5 s, and --help needs none of it.
        code = importlib.import_module(args.module).run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_stdout()
        return 141
    except (FastinferError, ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _discard_stdout()
        print(f"fastinfer: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _discard_stdout() -> None:
    """Python flushes stdout once more at exit; into nothing, or that would print a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastinfer", description="Run large language models on this machine.")
    parser.add_argument("--version", action="version", version=f"fastinfer {fastinfer.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, module: str, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.set_defaults(module=f"fastinfer.{module}")
        return command

    generate = add("generate", "cli.generate", "continue or answer one prompt")
    generate.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from standard input")
    generate.add_argument("--raw", action="store_true", help="give the text as is, without the model's chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    add_model_options(generate)
    add_engine_options(generate)
    add_sampling_options(generate)

    chat = add("chat", "cli.chat", "talk with a model; Ctrl-C stops an answer, Ctrl-D ends")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    add_model_options(chat)
    add_engine_options(chat)
    add_sampling_options(chat)

    pull = add("pull", "cli.pull", "download a model and print where it is")
    pull.add_argument("name", metavar="NAME", help="a name from 'fastinfer models', org/repo or org/repo/file.gguf")

    add("models", "cli.models", "list the models known by name")

    info = add("info", "cli.info", "describe this installation: versions, CPU, GPUs")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    about = info.add_mutually_exclusive_group()
    about.add_argument("--plan", nargs="+", metavar=("OP", "SIZE"), help="how OP is launched: --plan int4_gemm M N K")
    about.add_argument("--memory", metavar="MODEL", help="what MODEL and its KV cache take, and bounds on its speed")
    info.add_argument("--context", type=count(1), metavar="N", help="with --memory: tokens; default: the model's limit")
    info.add_argument("--batch", type=count(1), default=1, metavar="B", help="with --memory: sequences; default: 1")
    info.add_argument("--group", type=count(32), metavar="N", help="with --plan: inputs that share a scale")
    info.add_argument(
        "--arch", type=count(80), metavar="N", help="with --plan: 80, 86, 89 or 90; default: this GPU, or 90"
    )

    bench = commands.add_parser(
        "bench",
        help="measure speed and memory on a model",
        description=f"Measure speed and memory on a model. Without a benchmark's name: {DEFAULT_BENCHMARK}.",
    )
    _add_benchmarks(bench)
    _add_quantize(add("quantize", "cli.quantize", "write a quantised copy of a model"))
    evaluate = commands.add_parser(
        "eval", help="judge models on a text", description="Judge models on a text: perplexity, agreement, speed."
    )
    _add_evaluations(evaluate)
    return parser


def _add_quantize(quantize: argparse.ArgumentParser) -> None:
    quantize.add_argument("model", metavar="MODEL", help="a folder of safetensors files, or org/repo on the hub")
    quantize.add_argument("--method", required=True, choices=QUANTIZATION_METHODS)
    quantize.add_argument("--bits", type=count(2), metavar="N", help="of a weight; default: the method's usual number")
    quantize.add_argument(
        "--group-size", type=int, default=64, metavar="N", help="inputs that share a scale, -1 for all; default: 64"
    )
    quantize.add_argument(
        "--symmetric",
        action=argparse.BooleanOptionalAction,
        help="without zero points; default: for int8, nf4 and w8a8",
    )
    quantize.add_argument("--calibration", metavar="FILE", help="text whose inputs the method looks at")
    quantize.add_argument("--evaluation", metavar="FILE", help="another text, for the perplexity before and after")
    quantize.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    _add_text_sizes(quantize)


def _add_evaluations(evaluate: argparse.ArgumentParser) -> None:
    kinds = evaluate.add_subparsers(metavar="WHAT", required=True)

    def add(name: str, help: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        kind.set_defaults(module="fastinfer.cli.eval", what=name)
        kind.add_argument("--text", required=True, metavar="FILE", help="the text, UTF-8")
        add_dtype_option(kind)
        _add_text_sizes(kind)
        return kind

    perplexity = add("perplexity", "how well a model predicts a text")
    perplexity.add_argument("models", nargs=1, metavar="MODEL")
    perplexity.add_argument("--json", action="store_true", help="print one JSON object")
    compare = add("compare", "models by size, perplexity, agreement with the first, and speed")
    compare.add_argument("models", nargs="+", metavar="MODEL")
    compare.add_argument("--no-speed", dest="speed", action="store_false", help="do not measure decoding")
    compare.add_argument("--out", metavar="DIR", help="write compare.json and compare.png there")


def _add_text_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=count(32), default=16384, metavar="N", help="of the text, at most; default: %(default)s"
    )
    parser.add_argument(
        "--length", type=count(32), default=512, metavar="N", help="of each stretch of it; default: %(default)s"
    )


def _add_benchmarks(bench: argparse.ArgumentParser) -> None:
    benchmarks = bench.add_subparsers(metavar="BENCHMARK", required=True)

    def add(name: str, help: str) -> argparse.ArgumentParser:
        benchmark = benchmarks.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        benchmark.set_defaults(module=f"fastinfer.benchmarks.{name.replace('-', '_')}")
        add_model_option(benchmark)
        if name != "ablation":  # whose rows say what they compute in
            add_dtype_option(benchmark)
        return benchmark

    def add_sizes(benchmark: argparse.ArgumentParser, new_tokens: int, repeats: int, files: str) -> None:
        for name, low, default, help in (("new-tokens", 2, new_tokens, "per request"), ("repeats", 1, repeats, "")):
            help = f"{help}; default: %(default)s".lstrip("; ")
            benchmark.add_argument(f"--{name}", type=count(low), default=default, metavar="N", help=help)
        benchmark.add_argument("--out", metavar="DIR", help=f"write {files} there")

    end_to_end = add(DEFAULT_BENCHMARK, "prompt processing, decoding, and requests at once")
    end_to_end.add_argument("--prompt-tokens", type=counts, default=[32, 512], metavar="N,N", help="default: 32,512")
    end_to_end.add_argument("--requests", type=count(1), default=16, metavar="N", help="at once; default: %(default)s")
    add_sizes(end_to_end, 128, 5, "end_to_end.json and end_to_end.png")

    throughput = add("throughput", "what batching, prefix reuse, speculation and JSON schemas bring and cost")
    throughput.add_argument(
        "--only",
        type=names(THROUGHPUT_SECTIONS),
        default=THROUGHPUT_SECTIONS,
        metavar="NAME,NAME",
        help=f"some of {','.join(THROUGHPUT_SECTIONS)}; default: all",
    )
    throughput.add_argument(
        "--batch-sizes", type=counts, default=[1, 2, 4, 8, 16, 32], metavar="N,N", help="default: 1,2,4,8,16,32"
    )
    throughput.add_argument("--prompt-tokens", type=count(1), default=128, metavar="N", help="default: %(default)s")
    throughput.add_argument(
        "--requests", type=count(1), default=128, metavar="N", help="of the mixed trace; default: %(default)s"
    )
    throughput.add_argument(
        "--rate", type=rate, metavar="R", help="of the mixed trace, requests per second; default: all at once"
    )
    throughput.add_argument(
        "--max-num-seqs", type=count(1), default=8, metavar="N", help="of the mixed trace; default: %(default)s"
    )
    _add_speculative_tokens(throughput)
    throughput.add_argument(
        "--json-requests", type=count(1), default=200, metavar="N", help="default: %(default)s, over 20 schemas"
    )
    add_sizes(throughput, 64, 3, "throughput.json and throughput.png")

    ablation = add("ablation", "one optimisation after another switched on, each in a process of its own")
    ablation.add_argument(
        "--rows",
        type=names(ABLATION_ROWS),
        default=ABLATION_ROWS,
        metavar="NAME,NAME",
        help=f"some of {','.join(ABLATION_ROWS)}; default: all",
    )
    ablation.add_argument("--requests", type=count(1), default=24, metavar="N", help="default: %(default)s")
    ablation.add_argument("--batch-size", type=count(1), default=8, metavar="N", help="default: %(default)s")
    ablation.add_argument(
        "--limit-seconds",
        type=count(1),
        default=60,
        metavar="N",
        help="of each run without a KV cache; default: %(default)s",
    )
    _add_speculative_tokens(ablation)
    add_sizes(ablation, 128, 3, "ablation.json and ablation.png")


def _add_speculative_tokens(benchmark: argparse.ArgumentParser) -> None:
    benchmark.add_argument(
        "--speculative-tokens", type=count(1), default=7, metavar="N", help="guessed at most; default: %(default)s"
    )


def _with_benchmark(argv: Sequence[str]) -> Sequence[str]:
    """``bench`` followed by options, or by nothing, is the default benchmark."""
    if argv[:1] == ["bench"] and (len(argv) == 1 or (argv[1].startswith("-") and argv[1] not in ("-h", "--help"))):
        return ["bench", DEFAULT_BENCHMARK, *argv[1:]]
    return argv
