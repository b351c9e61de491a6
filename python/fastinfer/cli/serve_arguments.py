"""Arguments of ``fastinfer serve``, and their checks. Importing this module does not import torch."""

import argparse
import importlib.util
import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from fastinfer import hub
from fastinfer.cli.checks import ADAPTER_CONFIG
from fastinfer.cli.options import API_KEY_VARIABLE, EngineOption, add_engine_options, count, rate
from fastinfer.errors import AdapterError, RequestError
from fastinfer.utils.checks import show, show_path

# Keys on a command line can be seen by every user of the machine; here they are separated by commas.
ADMIN_KEY_VARIABLE = "FASTINFER_ADMIN_KEY"
SSL_PASSWORD_VARIABLE = "FASTINFER_SSL_PASSWORD"
CACHE_VARIABLE = "FASTINFER_RESPONSE_CACHE"  # for a URL with a password
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
    _add_listening(parser.add_argument_group("server"))
    _add_parsers(parser.add_argument_group("tools and reasoning"))
    _add_limits(parser.add_argument_group("limits"))
    _add_cache(parser.add_argument_group("response cache"))
    _add_reports(parser.add_argument_group("logs and metrics"))


def _add_listening(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    group.add_argument("--port", type=count(0, 65535), default=8000, metavar="N", help="default: %(default)s")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model for clients; may be repeated; default: that of --model",
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that requests must have; may be repeated; ${API_KEY_VARIABLE} keeps it from other users",
    )
    group.add_argument(
        "--admin-key",
        action="append",
        metavar="KEY",
        help=f"key for the administrative routes, which are off without one; may be repeated; ${ADMIN_KEY_VARIABLE}",
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate for TLS")
    group.add_argument(
        "--ssl-keyfile",
        metavar="FILE",
        help=f"its private key; if that is encrypted, its password is expected in ${SSL_PASSWORD_VARIABLE}",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name to accept besides addresses and localhost, if the server has no key and only this machine "
        "reaches it; may be repeated",
    )
    group.add_argument("--root-path", default="", metavar="PATH", help="prefix of the paths that a proxy removes")


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
    group.add_argument(
        "--drain-timeout",
        type=rate,
        default=45.0,
        metavar="S",
        help="seconds that running requests get after SIGTERM; default: %(default)g",
    )
    group.add_argument(
        "--spot-notice",
        choices=("aws", "gcp", "azure"),
        help="drain when this cloud provider says that it takes back the machine; default: do not ask",
    )
    group.add_argument("--metadata-url", metavar="URL", help="address of its metadata service")
    group.add_argument(
        "--max-body-size",
        type=count(1),
        default=32,
        metavar="MIB",
        help="largest body of a request; default: %(default)s",
    )
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
    group.add_argument("--log-format", choices=["text", "json"], default="text", help="default: %(default)s")
    group.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="'info' has a line per request; default: %(default)s",
    )
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
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise RequestError("serve needs further packages: pip install 'fastinfer[server]'")
    _check_parsers(args)
    if args.metadata_url is not None and not args.metadata_url.startswith("http://"):
        raise RequestError(f"--metadata-url: expected an address that begins with http://, got {args.metadata_url!r}")
    args.api_key = (args.api_key or []) + _keys(API_KEY_VARIABLE)
    args.admin_key = (args.admin_key or []) + _keys(ADMIN_KEY_VARIABLE)
    for option, keys in (("--api-key", args.api_key), ("--admin-key", args.admin_key)):
        if not all(key and key.isascii() and key.isprintable() for key in keys):
            raise RequestError(f"{option}: expected printable ASCII characters")
    args.ssl_keyfile_password = os.environ.get(SSL_PASSWORD_VARIABLE)
    _check_tls(args.ssl_certfile, args.ssl_keyfile, args.ssl_keyfile_password)
    args.response_cache = args.response_cache or os.environ.get(CACHE_VARIABLE) or "memory"
    _check_cache(args.response_cache, args.semantic_cache)
    _check_traces(args)
    for _, folder in args.lora:
        if not os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)):
            raise AdapterError(f"--lora: expected a folder with {ADAPTER_CONFIG}, got {show_path(folder)}")
    hub.resolve(args.model)


def _check_tls(certificate: str | None, key: str | None, password: str | None) -> None:
    if (certificate is None) != (key is None):
        raise RequestError("--ssl-certfile and --ssl-keyfile: expected both or none")
    if certificate is None or key is None:
        return
    for option, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if not Path(path).is_file():
            raise RequestError(f"{option}: expected a file, got {path}")
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password or "")
    except OSError as error:  # of the file system or of OpenSSL
        raise RequestError(
            f"--ssl-certfile and --ssl-keyfile: expected a certificate and its key in PEM, encrypted with "
            f"${SSL_PASSWORD_VARIABLE} or not at all, got: {error.strerror or error}"
        ) from None


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
    # The exporter needs the SDK, and is named after it.
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None:
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


def _keys(variable: str) -> list[str]:
    return [key for key in os.environ.get(variable, "").split(",") if key]


def _adapter(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"expected NAME=DIR, got {show(text)}")
    return name, folder
