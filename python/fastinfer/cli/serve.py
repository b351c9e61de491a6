"""``fastinfer serve``: the OpenAI-compatible server."""

import argparse
import socket
from typing import Any

from fastinfer.async_engine import AsyncEngine
from fastinfer.cli.http_options import http_settings
from fastinfer.cli.serve_arguments import served_names
from fastinfer.llm import LLM
from fastinfer.server.config import ServerConfig
from fastinfer.server.logs import logging_to
from fastinfer.server.run import run as run_server

# The engine's own default suits programs that queue a whole data set.
MAX_NUM_WAITING = 1024


def run(args: argparse.Namespace, sockets: list[socket.socket] | None = None) -> int:
    """Serve until a signal comes, on the address in the arguments or on sockets that are bound already."""
    config = server_config(args)
    with logging_to(None, args.log_format, args.log_level):
        return run_server(config, lambda: load(args), sockets)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Return the server's settings."""
    return ServerConfig(
        model_names=served_names(args),
        request_timeout_s=args.request_timeout,
        queue_timeout_s=args.queue_timeout,
        ping_interval_s=args.ping_interval,
        stall_s=args.stall_timeout,
        response_cache=args.response_cache,
        response_cache_bytes=args.response_cache_size << 20,
        response_cache_ttl_s=args.response_cache_ttl,
        semantic_threshold=args.semantic_cache,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        metrics_prefix=args.metrics_prefix,
        **http_settings(args),
    )


def load(args: argparse.Namespace) -> AsyncEngine:
    """Load the model, and register the LoRA adapters."""
    options: dict[str, Any] = {"max_num_waiting": MAX_NUM_WAITING} | args.engine_options
    if args.lora:
        options.setdefault("max_loras", len(args.lora))
    llm = LLM(args.model, **options)
    for name, folder in args.lora:
        llm.load_adapter(name, folder)
    return AsyncEngine(llm.engine)
