"""Arguments of ``fastinfer serve``, and their checks. Importing this module does not import torch."""

import argparse
import importlib.util
import os
from pathlib import Path

from fastinfer import hub
from fastinfer.cli.checks import ADAPTER_CONFIG
from fastinfer.cli.options import API_KEY_VARIABLE, EngineOption, add_engine_options, count, rate
from fastinfer.errors import AdapterError, RequestError

# Keys on a command line can be seen by every user of the machine; here they are separated by commas.
ADMIN_KEY_VARIABLE = "FASTINFER_ADMIN_KEY"


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
    _add_limits(parser.add_argument_group("limits"))


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
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its private key")
    group.add_argument("--root-path", default="", metavar="PATH", help="prefix of the paths that a proxy removes")
    group.add_argument(
        "--metrics-prefix", default="vllm", metavar="NAME", help="prefix of the metrics' names; default: %(default)s"
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


def check_serve(args: argparse.Namespace) -> None:
    """Check the arguments of ``serve``, and add the keys from the environment."""
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise RequestError("serve needs further packages: pip install 'fastinfer[server]'")
    args.api_key = (args.api_key or []) + _keys(API_KEY_VARIABLE)
    args.admin_key = (args.admin_key or []) + _keys(ADMIN_KEY_VARIABLE)
    for option, keys in (("--api-key", args.api_key), ("--admin-key", args.admin_key)):
        if not all(key and key.isascii() and key.isprintable() for key in keys):
            raise RequestError(f"{option}: expected printable ASCII characters")
    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        raise RequestError("--ssl-certfile and --ssl-keyfile: expected both or none")
    for option, path in (("--ssl-certfile", args.ssl_certfile), ("--ssl-keyfile", args.ssl_keyfile)):
        if path is not None and not Path(path).is_file():
            raise RequestError(f"{option}: expected a file, got {path}")
    for _, folder in args.lora:
        if not Path(folder, ADAPTER_CONFIG).is_file():
            raise AdapterError(f"--lora: expected a folder with {ADAPTER_CONFIG}, got {folder}")
    hub.resolve(args.model)


def _keys(variable: str) -> list[str]:
    return [key for key in os.environ.get(variable, "").split(",") if key]


def _adapter(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"expected NAME=DIR, got {text!r}")
    return name, folder
