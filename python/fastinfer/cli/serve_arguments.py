"""Arguments of ``fastinfer serve``, and their checks. Importing this module does not import torch."""

import argparse
import importlib.util
import os
from pathlib import Path
from urllib.parse import urlsplit

from fastinfer.cli.checks import ADAPTER_CONFIG, check_models
from fastinfer.cli.http_options import add_limits, add_listening, add_logs, check_http
from fastinfer.cli.options import EngineOption, add_engine_options, count, rate
from fastinfer.cli.router_arguments import BETA, add_beta
from fastinfer.errors import AdapterError, RequestError
from fastinfer.utils.checks import show, show_path

CACHE_VARIABLE = "FASTINFER_RESPONSE_CACHE"  # for a URL with a password
MAX_REPLICAS = 256
MIN_THRESHOLD = 0.8  # the semantic cache's, whose module imports numpy; a test compares them


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer serve``."""
    engine = add_engine_options(parser)
    engine.add_argument(
        "--max-waiting",
        dest="max_num_waiting",
        action=EngineOption,
        type=count(1),
        metavar="N",
        help="requests that may wait; further ones get 503; default: 1024",
    )
    engine.add_argument(
        "--max-waiting-tokens",
        dest="max_num_waiting_tokens",
        action=EngineOption,
        type=count(1),
        metavar="N",
        help="tokens that these may have in all; bounds the time to the first token; default: no limit",
    )
    engine.add_argument(
        "--lora",
        action="append",
        default=[],
        type=_adapter,
        metavar="NAME=DIR",
        help="serve a LoRA adapter, a folder that PEFT has saved, as the model NAME; may be repeated",
    )
    engine.add_argument(
        "--max-loras",
        action=EngineOption,
        type=count(1, 1024),
        metavar="N",
        help="LoRA adapters that run at once; default: the number of --lora",
    )
    engine.add_argument(
        "--max-lora-rank", action=EngineOption, type=count(1, 4096), metavar="N", help="largest rank; default: 64"
    )
    replicas = parser.add_argument_group("replicas")
    replicas.add_argument(
        "--data-parallel-size",
        type=count(1, MAX_REPLICAS),
        default=1,
        metavar="N",
        help="processes that serve the model, behind one address; each has its own KV cache and its share of the "
        "threads. On a CPU they share one copy of the weights, on GPUs each has a GPU of its own; default: %(default)s",
    )
    add_beta(replicas, default=None)
    server = parser.add_argument_group("server")
    add_listening(server)
    server.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model for clients; may be repeated; default: that of --model",
    )
    _add_parsers(parser.add_argument_group("tools and reasoning"))
    _add_limits(parser.add_argument_group("limits"))
    _add_cache(parser.add_argument_group("response cache"))
    _add_reports(parser.add_argument_group("logs and metrics"))


def _add_parsers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="format of the model's tool calls, or none; default: that of the chat template",
    )
    group.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="format of the model's reasoning, or none; default: that of the chat template",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-timeout", type=rate, metavar="S", help="seconds in which a request must end; default: no limit"
    )
    group.add_argument(
        "--queue-timeout", type=rate, metavar="S", help="seconds in which it must begin; default: no limit"
    )
    add_limits(group)
    group.add_argument(
        "--ping-interval",
        type=rate,
        default=15.0,
        metavar="S",
        help="seconds without output after which a stream gets a comment; default: %(default)g",
    )
    group.add_argument(
        "--stall-timeout",
        type=rate,
        default=120.0,
        metavar="S",
        help="seconds of one step after which the engine counts as hanging; default: %(default)g",
    )


def _add_cache(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--response-cache",
        metavar="PLACE",
        help="where answers to deterministic requests are kept: 'memory', 'off', or redis://HOST:PORT/DB; "
        f"${CACHE_VARIABLE} hides a password in the URL from other users; default: memory",
    )
    group.add_argument(
        "--response-cache-size",
        type=count(1),
        default=64,
        metavar="MIB",
        help="size in memory; Redis has a limit of its own; default: %(default)s",
    )
    group.add_argument(
        "--response-cache-ttl",
        type=rate,
        default=3600.0,
        metavar="S",
        help="seconds for which an answer is found; default: %(default)g",
    )
    group.add_argument(
        "--semantic-cache",
        type=rate,
        metavar="SIMILARITY",
        help="also answer with the answer to a similar last user text, from this cosine similarity on, 0.8 to 1; "
        "measure its mistakes first; default: off",
    )


def _add_reports(group: argparse._ArgumentGroup) -> None:
    add_logs(group)
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span per request by OTLP over HTTP, such as http://HOST:4318/v1/traces; default: none",
    )
    group.add_argument(
        "--metrics-prefix", default="vllm", metavar="NAME", help="prefix of the metrics' names; default: %(default)s"
    )


def check_serve(args: argparse.Namespace) -> None:
    """Check the arguments of ``serve``, and add the keys from the environment."""
    check_http(args, "serve")
    args.module = "fastinfer.cli.serve"
    if args.data_parallel_size > 1:
        args.module = "fastinfer.cli.serve_replicas"
        args.replica_threads, args.threads = args.threads, None  # the router itself needs none
        args.beta = BETA if args.beta is None else args.beta
    elif args.beta is not None:
        raise RequestError("--beta: expected --data-parallel-size of at least 2 with it, got 1")
    _check_parsers(args)
    args.response_cache = args.response_cache or os.environ.get(CACHE_VARIABLE) or "memory"
    _check_cache(args.response_cache, args.semantic_cache)
    _check_traces(args)
    for name, folder in args.lora:
        if name in served_names(args):
            raise RequestError(f"--lora: expected a name that is not the model's, got {show(name)}")
        if not os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)):
            raise AdapterError(f"--lora: expected a folder with {ADAPTER_CONFIG}, got {show_path(folder)}")
    check_models(args)


def served_names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the model for clients, whom the server's paths do not concern."""
    if args.served_model_name:
        return tuple(args.served_model_name)
    return (Path(args.model).name if Path(args.model).exists() else args.model,)


def _check_cache(place: str, threshold: float | None) -> None:
    if threshold is not None:
        if place == "off":
            raise RequestError("--semantic-cache: expected a --response-cache with it, got 'off'")
        if not MIN_THRESHOLD <= threshold <= 1:
            raise RequestError(f"--semantic-cache: expected {MIN_THRESHOLD} to 1, got {threshold:g}")
    if place in ("off", "memory"):
        return
    if "://" not in place:
        raise RequestError(f"--response-cache: expected 'off', 'memory' or the URL of a Redis, got {place!r}")
    if importlib.util.find_spec("redis") is None:
        raise RequestError("--response-cache: Redis needs a further package: pip install 'fastinfer[redis]'")
    from redis.connection import parse_url

    try:
        parse_url(place)
    except ValueError as error:  # which does not repeat the URL, in which there may be a password
        raise RequestError(f"--response-cache: {error}") from None


# An installation may have the first one without the second.
TRACING_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def _check_traces(args: argparse.Namespace) -> None:
    """Check the address for traces, and add the usual path to one that has none."""
    if args.otlp_traces_endpoint is None:
        return
    try:
        url = urlsplit(args.otlp_traces_endpoint)
        is_valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise RequestError(f"--otlp-traces-endpoint: expected http://HOST:PORT, got {args.otlp_traces_endpoint}")
    try:
        is_installed = all(importlib.util.find_spec(package) is not None for package in TRACING_PACKAGES)
    except ModuleNotFoundError:  # a parent package is missing
        is_installed = False
    if not is_installed:
        raise RequestError("--otlp-traces-endpoint needs further packages: pip install 'fastinfer[otel]'")
    if url.path in ("", "/"):
        args.otlp_traces_endpoint = url._replace(path="/v1/traces").geturl()


def _check_parsers(args: argparse.Namespace) -> None:
    # Other commands do without this import.
    from fastinfer.server.parsing.specs import AUTO, OFF, REASONING, SPECS

    for option, name, known in (
        ("--tool-call-parser", args.tool_call_parser, SPECS),
        ("--reasoning-parser", args.reasoning_parser, REASONING),
    ):
        if name not in (AUTO, OFF, *known):
            raise RequestError(f"{option}: expected one of {', '.join((AUTO, OFF, *known))}, got {name}")


def _adapter(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"expected NAME=DIR, got {show(text)}")
    return name, folder
