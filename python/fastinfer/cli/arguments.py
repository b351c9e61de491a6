"""Arguments of each command. Importing this module does not import torch, so that ``--help`` is fast."""

import argparse

from fastinfer.cli.options import (
    MAX_SPECULATIVE_TOKENS,
    add_adapter_option,
    add_engine_options,
    add_loading_options,
    add_model_option,
    add_sampling_options,
    add_server_options,
    add_text_options,
    add_threads_option,
    count,
    counts,
    device,
    integer,
    names,
    rate,
    share,
)
from fastinfer.distill.settings import DIVERGENCES, LOSSES, TOP_K
from fastinfer.hub import DEFAULT_MODEL
from fastinfer.quantize.methods import METHODS

DEFAULT_BENCHMARK = "end-to-end"
SECTION_TOKENS = 512
DRAFT_ROW = "draft"  # of the ablation, which needs a draft model
ABLATION_ROWS = (
    *("none", "kv", "batch", "kv+batch", "continuous", "int8", "int4", "prefix", "speculation"),
    *(DRAFT_ROW, "long", "modules", "sparse"),
)
THROUGHPUT_SECTIONS = ("batch", "policies", "arrival", "prefix", "ngram", "json")


def as_sentence(help: str) -> str:
    """Write a line of help as a sentence."""
    return f"{help[0].upper()}{help[1:]}."


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer generate``."""
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the text; - reads it from standard input, as does no text unless that is a terminal",
    )
    parser.add_argument("--raw", action="store_true", help="give the text as is, without the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="an image before the text; may be given repeatedly"
    )
    add_adapter_option(parser)
    add_engine_options(parser)
    add_sampling_options(parser)


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer chat``."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_server_options(
        parser,
        is_required=False,
        url_help="talk with an OpenAI-compatible server instead, such as http://127.0.0.1:8000; --model is then a name "
        "that it serves, by default the first that it lists; parameters that are not given are left to it",
    )
    add_adapter_option(parser)
    add_engine_options(parser)
    parser.set_defaults(model=None)  # a server has another default
    add_sampling_options(parser)


def add_pull(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer pull``."""
    parser.add_argument("name", metavar="NAME", help="a name from 'fastinfer models', org/repo or org/repo/file.gguf")


def add_models(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer models``."""
    parser.add_argument("--supported", action="store_true", help="list the supported families and formats instead")


def add_info(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer info``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--plan", nargs="+", metavar=("OP", "SIZE"), help="show how OP is launched on a GPU: --plan int4_gemm M N K"
    )
    subject.add_argument(
        "--memory", metavar="MODEL", help="show the memory of MODEL and its KV cache, and bounds on its speed"
    )
    parser.add_argument(
        "--context", type=count(1), metavar="N", help="with --memory: tokens; default: the model's limit"
    )
    parser.add_argument("--batch", type=count(1), metavar="B", help="with --memory: sequences; default: 1")
    parser.add_argument(
        "--device", type=device, metavar="LIST", help="with --memory: devices like cuda:0=24,cuda:1=8 or cuda+cpu"
    )
    parser.add_argument("--draft-model", metavar="MODEL", help="with --memory: a draft model or head beside it; or mtp")
    parser.add_argument(
        "--speculate",
        type=count(1, MAX_SPECULATIVE_TOKENS),
        metavar="N",
        help="with --draft-model: drafts per step, as many layers of mtp at most; default: 1",
    )
    parser.add_argument("--group", type=count(32), metavar="N", help="with --plan: inputs that share a scale")
    parser.add_argument(
        "--arch", type=count(80), metavar="N", help="with --plan: 80, 86, 89 or 90; default: this GPU, or 90"
    )


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer quantize``."""
    parser.add_argument(
        "model", metavar="MODEL", help="a folder of safetensors files, a GGUF file, or org/repo on the hub"
    )
    parser.add_argument("--method", required=True, choices=METHODS)
    parser.add_argument("--bits", type=count(2), metavar="N", help="bits of a weight; default: depends on the method")
    parser.add_argument(
        "--group-size", type=integer, metavar="N", help="inputs that share a scale, -1 for all; default: 64"
    )
    parser.add_argument(
        "--symmetric",
        action=argparse.BooleanOptionalAction,
        help="use no zero points; default: for int8, nf4 and w8a8",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="text for gptq, awq and w8a8; for other methods it changes the report alone",
    )
    parser.add_argument("--evaluation", metavar="FILE", help="another text, for the perplexity before and after")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--context",
        type=count(32),
        default=SECTION_TOKENS,
        metavar="N",
        help="tokens of each section of a text; default: %(default)s",
    )
    add_threads_option(parser)
    add_text_options(parser)


def add_train_head(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer train-head``."""
    add_model_option(parser)
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="a text with a user's message in each line, or 'self' for messages that the model writes",
    )
    parser.add_argument(
        "--minutes", type=rate, default=15.0, metavar="N", help="time of the whole run; default: %(default)s"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    add_threads_option(parser)


def add_distill(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer distill``."""
    parser.add_argument(
        "--teacher",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a model with dense or GGUF weights; default: %(default)s",
    )
    student = parser.add_mutually_exclusive_group(required=True)
    student.add_argument(
        "--student",
        metavar="layers:N,N|FOLDER",
        help="some of the teacher's layers, or a checkpoint with the same vocabulary",
    )
    student.add_argument(
        "--stages",
        type=counts,
        metavar="N,N",
        help="drop the least important of the teacher's layers: train with N of them, then with fewer",
    )
    parser.add_argument(
        "--data", required=True, metavar="FILE|self", help="a text to learn from, or texts that the teacher writes"
    )
    parser.add_argument("--evaluation", metavar="FILE", help="unseen text to judge by; default: a part of the data")
    parser.add_argument(
        "--loss",
        dest="losses",
        type=names(LOSSES),
        default=("logit",),
        metavar="NAME,NAME",
        help=f"what the student is trained for: the sum of some of {', '.join(LOSSES)}; default: logit",
    )
    parser.add_argument(
        "--divergence",
        choices=DIVERGENCES,
        default="fkl",
        help="of the logits: forward or reverse KL, Jensen-Shannon, or -log of the acceptance as a draft; default: fkl",
    )
    parser.add_argument(
        "--temperature", type=rate, default=1.0, metavar="T", help="divisor of the logits; default: %(default)s"
    )
    parser.add_argument(
        "--minutes", type=rate, default=10.0, metavar="N", help="for loading, recording and training; default: 10"
    )
    parser.add_argument(
        "--learning-rate", type=rate, default=4e-4, metavar="R", help="the largest one; default: %(default)s"
    )
    parser.add_argument(
        "--context", type=count(32), default=256, metavar="N", help="tokens of a text; default: %(default)s"
    )
    parser.add_argument(
        "--top-k",
        type=count(1),
        metavar="K",
        help=f"recorded tokens of each position; default: {TOP_K}, and all with the divergences rkl and lk",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write; its records are used again")
    add_threads_option(parser)


def add_eval(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands of ``fastinfer eval``."""
    parser.description = "Evaluate models on a text: perplexity, agreement, speed."
    kinds = parser.add_subparsers(metavar="WHAT", required=True)

    def add(name: str, help: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=help, description=as_sentence(help))
        kind.set_defaults(what=name)
        kind.add_argument("--text", required=True, metavar="FILE", help="the text, UTF-8")
        add_text_options(kind)
        add_loading_options(
            kind,
            context=f"tokens of each section of the text; default: {SECTION_TOKENS}",
            max_num_seqs="sections that are computed at once; default: 1",
            min_context=32,
            one_device=True,
        )
        return kind

    perplexity = add("perplexity", "how well a model predicts a text")
    perplexity.add_argument("models", nargs=1, metavar="MODEL")
    perplexity.add_argument("--json", action="store_true", help="print one JSON object")
    compare = add("compare", "models by size, perplexity, agreement with the first, and speed")
    compare.add_argument("models", nargs="+", metavar="MODEL")
    compare.add_argument("--no-speed", dest="speed", action="store_false", help="do not measure decoding")
    compare.add_argument("--out", metavar="DIR", help="write compare.json and compare.png there")


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks of ``fastinfer bench``."""
    parser.description = f"Measure speed and memory on a model. Default benchmark: {DEFAULT_BENCHMARK}."
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)

    def add(name: str, help: str) -> argparse.ArgumentParser:
        benchmark = benchmarks.add_parser(name, help=help, description=as_sentence(help))
        benchmark.set_defaults(module=f"fastinfer.benchmarks.{name.replace('-', '_')}")
        return benchmark

    _add_end_to_end(add(DEFAULT_BENCHMARK, "prompt processing, decoding, and requests at once"))
    _add_throughput(add("throughput", "gains and costs of batching, prefix reuse, speculation and JSON schemas"))
    _add_ablation(add("ablation", "one optimisation after another switched on, each in a process of its own"))
    _add_serve(add("serve", "latency and throughput of an OpenAI-compatible server"))
    _add_step_cost(add("step-cost", "time of a step by its work, for 'fastinfer simulate'"))


def _add_end_to_end(benchmark: argparse.ArgumentParser) -> None:
    add_engine_options(benchmark)
    benchmark.add_argument("--prompt-tokens", type=counts, default=[32, 512], metavar="N,N", help="default: 32,512")
    benchmark.add_argument("--requests", type=count(1), default=16, metavar="N", help="at once; default: %(default)s")
    _add_run_options(benchmark, 128, 5, "end_to_end.json and end_to_end.png")


def _add_throughput(benchmark: argparse.ArgumentParser) -> None:
    add_model_option(benchmark)
    add_loading_options(
        benchmark,
        context="of every engine, in tokens; default: what its requests need",
        max_num_seqs="of the mixed trace; default: 8",
        one_device=True,
    )
    benchmark.add_argument(
        "--only",
        type=names(THROUGHPUT_SECTIONS),
        default=THROUGHPUT_SECTIONS,
        metavar="NAME,NAME",
        help=f"some of {','.join(THROUGHPUT_SECTIONS)}; default: all",
    )
    benchmark.add_argument(
        "--batch-sizes", type=counts, default=[1, 2, 4, 8, 16, 32], metavar="N,N", help="default: 1,2,4,8,16,32"
    )
    benchmark.add_argument("--prompt-tokens", type=count(1), default=128, metavar="N", help="default: %(default)s")
    benchmark.add_argument(
        "--requests", type=count(1), default=128, metavar="N", help="of the mixed trace; default: %(default)s"
    )
    benchmark.add_argument(
        "--rate", type=rate, metavar="R", help="of the mixed trace, requests per second; default: all at once"
    )
    _add_speculative_tokens(benchmark)
    benchmark.add_argument(
        "--json-requests", type=count(1), default=200, metavar="N", help="over 20 schemas; default: %(default)s"
    )
    _add_run_options(benchmark, 64, 3, "throughput.json and throughput.png")


def _add_ablation(benchmark: argparse.ArgumentParser) -> None:
    add_model_option(benchmark)
    add_loading_options(
        benchmark,
        context="of every engine, in tokens; default: what its requests need",
        max_num_seqs="sequences that run at once, in rows that run several; default: 8",
        one_device=True,
        default_device="cpu, where all rows can be measured",
    )
    benchmark.add_argument(
        "--rows",
        type=names(ABLATION_ROWS),
        default=ABLATION_ROWS[: ABLATION_ROWS.index(DRAFT_ROW)],
        metavar="NAME,NAME",
        help=f"some of {', '.join(ABLATION_ROWS)}; default: those before {DRAFT_ROW}",
    )
    benchmark.add_argument("--draft-model", metavar="MODEL", help=f"draft model or draft head of the row {DRAFT_ROW}")
    benchmark.add_argument(
        "--document-tokens",
        type=count(64),
        default=1536,
        metavar="N",
        help="of the text that long prompts share; default: %(default)s",
    )
    benchmark.add_argument(
        "--sparse-attention",
        type=share,
        default=0.9,
        metavar="SHARE",
        help="part of its attention that the blocks hold which a token reads in the row sparse; default: %(default)s",
    )
    benchmark.add_argument("--requests", type=count(1), default=24, metavar="N", help="default: %(default)s")
    benchmark.add_argument(
        "--limit-seconds",
        type=count(1),
        default=60,
        metavar="N",
        help="time limit of each run without a KV cache; default: %(default)s",
    )
    _add_speculative_tokens(benchmark)
    _add_run_options(benchmark, 128, 3, "ablation.json and ablation.png")


def _add_serve(benchmark: argparse.ArgumentParser) -> None:
    add_server_options(benchmark, is_required=True, url_help="the server, such as http://127.0.0.1:8000")
    benchmark.add_argument("--model", metavar="NAME", help="a name that it serves; default: the first that it lists")
    benchmark.add_argument(
        "--completions", action="store_true", help="send plain prompts, for a model without a chat template"
    )
    benchmark.add_argument(
        "--streams", type=counts, default=[1, 8, 32, 64], metavar="N,N", help="at once; default: 1,8,32,64"
    )
    benchmark.add_argument(
        "--prompt-words", type=count(1), default=128, metavar="N", help="of each prompt; default: %(default)s"
    )
    benchmark.add_argument(
        "--requests", type=count(1), default=2, metavar="N", help="of each stream; default: %(default)s"
    )
    _add_run_options(benchmark, 64, 3, "serve.json and serve.png")


def _add_step_cost(benchmark: argparse.ArgumentParser) -> None:
    add_model_option(benchmark)
    add_loading_options(
        benchmark,
        context="longest sequence in tokens; default: the model's limit, or what fits into memory",
        max_num_seqs="sequences that run at once; default: 64, on a GPU 256",
    )
    benchmark.add_argument("--repeats", type=count(1), default=3, metavar="N", help="default: %(default)s")
    benchmark.add_argument("--out", metavar="DIR", help="write step_cost.json there")


def _add_run_options(benchmark: argparse.ArgumentParser, new_tokens: int, repeats: int, files: str) -> None:
    benchmark.add_argument(
        "--new-tokens", type=count(2), default=new_tokens, metavar="N", help="per request; default: %(default)s"
    )
    benchmark.add_argument("--repeats", type=count(1), default=repeats, metavar="N", help="default: %(default)s")
    benchmark.add_argument("--out", metavar="DIR", help=f"write {files} there")


def _add_speculative_tokens(benchmark: argparse.ArgumentParser) -> None:
    benchmark.add_argument(
        "--speculative-tokens",
        type=count(1, MAX_SPECULATIVE_TOKENS),
        default=7,
        metavar="N",
        help="drafted per step; default: %(default)s",
    )
