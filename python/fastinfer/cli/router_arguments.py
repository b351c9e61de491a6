"""Arguments of ``fastinfer router``, and their checks. Importing this module does not import torch."""

import argparse

from fastinfer.cli.http_options import add_limits, add_listening, add_logs, check_http
from fastinfer.cli.options import rate
from fastinfer.client.endpoint import Endpoint
from fastinfer.errors import RequestError


def add_router(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer router``."""
    parser.add_argument("urls", nargs="+", metavar="URL", help="address of a server, such as http://127.0.0.1:8001")
    routing = parser.add_argument_group("routing")
    add_beta(routing)
    routing.add_argument(
        "--probe-interval",
        type=rate,
        default=1.0,
        metavar="S",
        help="seconds between two questions whether a server is ready; default: %(default)g",
    )
    add_listening(parser.add_argument_group("server"))
    add_limits(parser.add_argument_group("limits"))
    add_logs(parser.add_argument_group("logs"))


def add_beta(group: argparse._ArgumentGroup) -> None:
    """Add the weight of load."""
    group.add_argument(
        "--beta",
        type=rate,
        default=1.0,
        metavar="X",
        help="a server's score is the part of the prompt that it has cached minus X times its relative load; "
        "default: %(default)g",
    )


def check_router(args: argparse.Namespace) -> None:
    """Check the arguments of ``router``, and parse the addresses.

    Raises:
        RequestError: one is wrong.
    """
    check_http(args, "router")
    args.endpoints = [Endpoint.parse(url, default_path="") for url in args.urls]
    for number, endpoint in enumerate(args.endpoints):
        if endpoint in args.endpoints[:number]:
            raise RequestError(f"url: expected each server once, got {args.urls[number]} twice")
