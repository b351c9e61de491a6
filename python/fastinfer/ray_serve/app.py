"""The application: its deployments and their defaults."""

import os
from collections.abc import Mapping
from typing import Any

from ray import serve

from fastinfer.cli.http_options import http_settings
from fastinfer.ray_serve.engine import Engine
from fastinfer.ray_serve.gateway import Gateway
from fastinfer.ray_serve.options import num_gpus, parse_options
from fastinfer.server.router.config import RouterConfig

# Requests that an engine has at once. It computes as many as fit (--max-num-seqs), and queues the others fairly.
MAX_ONGOING_REQUESTS = 256
# Requests that wait in the gateway for a replica; further ones get 503.
MAX_QUEUED_REQUESTS = 1024
# The gateway waits more than it computes.
MAX_GATEWAY_REQUESTS = 8192
# Seconds for the end of a replica once the drain is over.
FAREWELL_S = 10.0
# The gateway has a line per request.
QUIET = {"enable_access_log": False}


def app(args: Mapping[str, Any]) -> serve.Application:
    """Return the application for ``serve run`` or for a configuration file of Ray Serve, see :func:`application`."""
    return application(args)


def application(args: Mapping[str, Any], **deployment_options: Any) -> serve.Application:
    """Return the application for ``serve.run``.

    Args:
        args: options of ``fastinfer serve`` without the dashes, such as ``{"model": "smollm2-135m-instruct",
            "threads": 4}``. A replica reserves as many CPUs as it has threads, and the GPUs of :func:`num_gpus`.
        deployment_options: options of Ray for the deployment ``Engine``, such as ``autoscaling_config``.

    Raises:
        FastinferError: an option is wrong, or belongs to Ray.
    """
    options = parse_options(args)
    options.threads = options.threads or len(os.sched_getaffinity(0))
    drain_s = options.drain_timeout + FAREWELL_S
    defaults = {
        # Ranks of tensor parallelism are processes of the replica: they share its threads, and are on its node.
        "ray_actor_options": {"num_cpus": options.threads, "num_gpus": num_gpus(options.engine_options)},
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "max_queued_requests": MAX_QUEUED_REQUESTS,
        "graceful_shutdown_timeout_s": drain_s,
        "logging_config": QUIET,
        "request_router_config": {
            "request_router_class": "fastinfer.ray_serve.prefix_router.PrefixRouter",
            "request_router_kwargs": {"beta": options.beta},
        },
    }
    engine = serve.deployment(Engine, name="Engine", **(defaults | deployment_options))
    gateway = serve.deployment(
        serve.ingress()(Gateway),
        name="Gateway",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_GATEWAY_REQUESTS,
        graceful_shutdown_timeout_s=drain_s,
        logging_config=QUIET,
    )
    config = RouterConfig(beta=options.beta, **http_settings(options))
    return gateway.bind(engine.bind(options), config, options.log_format, options.log_level)
