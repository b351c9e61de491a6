"""``fastinfer serve --data-parallel-size N``: a router, and the processes of its replicas."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastinfer.cli.http_options import http_settings
from fastinfer.engine.replica_share import ReplicaShare
from fastinfer.errors import RequestError
from fastinfer.server.logs import logging_to
from fastinfer.server.router.config import RouterConfig
from fastinfer.server.router.local_replicas import LocalReplicas
from fastinfer.server.router.run import run as run_router
from fastinfer.utils.host_memory import host_memory
from fastinfer.utils.places import is_list_of_places
from fastinfer.utils.programs import python_module
from fastinfer.utils.sealed_memory import SealedMemory

MODULE = "fastinfer.cli.replica"
GPUS = Path("/proc/driver/nvidia/gpus")
# Options that are the router's alone. Replicas listen on 127.0.0.1, and have the keys of the router.
OF_THE_ROUTER = {"uds": None, "root_path": "", "ssl_certfile": None, "ssl_keyfile": None, "spot_notice": None}


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes, which ends all processes."""
    size = args.data_parallel_size
    num_threads = args.replica_threads or len(os.sched_getaffinity(0))
    threads = max(1, num_threads // size)
    num_gpus = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    device = args.engine_options.get("device", "auto")
    environments = replica_environments(size, device, num_gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), threads)
    share = replica_share(size, args.engine_options) if device == "cpu" or not num_gpus else None
    settings = {
        **vars(args),
        **OF_THE_ROUTER,
        "host": "127.0.0.1",
        "threads": threads,
        "share": share and asdict(share),
    }
    if args.log_level == "info":  # the router has a line per request
        settings["log_level"] = "warning"
    config = RouterConfig(beta=args.beta, **http_settings(args))
    host = LocalReplicas(config, python_module(MODULE), settings, environments, share.weights if share else ())
    with logging_to(None, args.log_format, args.log_level):
        code = run_router(config, host)
    if host.failure is not None:
        raise host.failure
    return code


def replica_share(size: int, options: Mapping[str, Any]) -> ReplicaShare:
    """Return what replicas on a CPU share: the free memory of now, and one copy of the weights of each model.

    Args:
        size: number of replicas.
        options: options of the engine. If ranks divide the model, each process has its own part of the weights.
    """
    is_divided = any(options.get(name, 1) > 1 for name in ("tensor_parallel_size", "pipeline_parallel_size"))
    num_models = 0 if is_divided else 1 if options.get("draft_model") is None else 2
    weights = tuple(SealedMemory.create().descriptor for _ in range(num_models))
    return ReplicaShare(size, host_memory().available, weights)


def replica_environments(
    size: int, device: str, num_gpus: int, visible: str | None, threads: int
) -> list[Mapping[str, str]]:
    """Return the changes of each replica's environment: the number of threads, and one GPU for each.

    Args:
        size: number of replicas.
        device: the device that was asked for.
        num_gpus: number of NVIDIA's GPUs in this machine.
        visible: value of ``CUDA_VISIBLE_DEVICES``; ``None`` for none.
        threads: threads of one replica.

    Raises:
        RequestError: the device is a list, there are fewer GPUs than replicas, or all replicas would be on the same
            one.
    """
    if is_list_of_places(device):
        raise RequestError(f"--device: expected one device with several replicas, got {device}")
    common = {"OMP_NUM_THREADS": str(threads)}
    if device == "cpu" or not num_gpus:
        return [common] * size
    if device not in ("auto", "cuda"):
        raise RequestError(f"--device: expected auto, cuda or cpu with several replicas, got {device}")
    gpus = (
        [str(number) for number in range(num_gpus)] if visible is None else [gpu for gpu in visible.split(",") if gpu]
    )
    if len(gpus) < size:
        raise RequestError(f"--data-parallel-size: expected at most one replica per GPU, {len(gpus)}, got {size}")
    return [{**common, "CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:size]]
