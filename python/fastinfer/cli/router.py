"""``fastinfer router``: one address in front of several servers."""

import argparse

from fastinfer.cli.http_options import http_settings
from fastinfer.server.logs import logging_to
from fastinfer.server.router.config import RouterConfig
from fastinfer.server.router.host import RouterHost
from fastinfer.server.router.run import run as run_router


def run(args: argparse.Namespace) -> int:
    """Route requests until a signal comes."""
    config = RouterConfig(beta=args.beta, probe_interval_s=args.probe_interval, **http_settings(args))
    with logging_to(None, args.log_format, args.log_level):
        return run_router(config, RouterHost(config, args.endpoints, args.prefill_endpoints))
