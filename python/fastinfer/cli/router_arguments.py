"""Arguments of ``fastinfer router``, and their checks. Importing this module does not import torch."""

import argparse

from fastinfer.cli.http_options import add_limits, add_listening, add_logs, check_http
from fastinfer.cli.options import rate
from fastinfer.client.endpoint import Endpoint
from fastinfer.errors import RequestError

BETA = 1.0


def add_router(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer router``."""
    parser.add_argument("urls", nargs="+", metavar="URL", help="address of a server, such as http://127.0.0.1:8001")
    parser.add_argument(
        "--prefill-url",
        dest="prefill_urls",
        action="append",
        default=[],
        metavar="URL",
        help="address of a server that computes long prompts first, and answers no requests; all servers need the same "
        "--kv-offloading-dir; may be repeated",
    )
    routing = parser.add_argument_group("routing")
    add_beta(routing, default=BETA)
    routing.add_argument(
        "--probe-interval",
        type=rate,
        default=1.0,
        metavar="S",
        help="seconds between two requests for a server's /ready; default: %(default)g",
    )
    add_listening(parser.add_argument_group("server"))
    add_limits(parser.add_argument_group("limits"))
    add_logs(parser.add_argument_group("logs"))


def add_beta(group: argparse._ArgumentGroup, default: float | None) -> None:
    """Add the weight of load, which is ``BETA`` unless it is given."""
    group.add_argument(
        "--beta",
        type=rate,
        default=default,
        metavar="X",
        help="a server's score is the part of the prompt that it has cached minus X times its relative load; "
        f"default: {BETA:g}",
    )


def check_router(args: argparse.Namespace) -> None:
    """Check the arguments of ``router``, and parse the addresses.

    Raises:
        RequestError: one is wrong.
    """
    check_http(args, "router")
    urls = args.urls + args.prefill_urls
    endpoints = [Endpoint.parse(url, default_path="") for url in urls]
    for number, endpoint in enumerate(endpoints):
        if endpoint in endpoints[:number]:
            raise RequestError(f"url: expected each server once, got {urls[number]} twice")
    args.endpoints, args.prefill_endpoints = endpoints[: len(args.urls)], endpoints[len(args.urls) :]
