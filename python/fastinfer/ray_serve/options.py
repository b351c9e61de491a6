"""Options of the application: those of ``fastinfer serve``. Importing this module imports neither Ray nor torch."""

import argparse
from collections.abc import Mapping
from typing import Any

from fastinfer.cli.commands import parse
from fastinfer.cli.options import rate
from fastinfer.cli.router_arguments import BETA
from fastinfer.cli.serve_arguments import add_serve
from fastinfer.errors import RequestError
from fastinfer.utils.places import Place, is_list_of_places, parse_places

# Options that belong to Ray here.
OF_RAY = frozenset(
    {"host", "port", "uds", "root-path", "ssl-certfile", "ssl-keyfile"}
    | {"data-parallel-size", "spot-notice", "metadata-url"}
)
# Values of an option without a value, as Ray's command line or a file in YAML has them.
FLAGS = {"true": True, "false": False}


def num_gpus(engine_options: Mapping[str, Any]) -> int:
    """Return how many GPUs a replica needs.

    The GPUs that Ray gives to a replica have the numbers from 0 on, and ``cuda:N`` is one of these. Without a device a
    replica needs none: Ray hides all GPUs that are not reserved, so ``auto`` is the CPU.

    Args:
        engine_options: arguments of :class:`fastinfer.LLM`.
    """
    name = engine_options.get("device", "auto")
    places = parse_places(name) if is_list_of_places(name) else (Place(name),)
    devices = [device for place in places for device in place.devices if device.startswith("cuda")]
    last = max((int(device.partition(":")[2] or 0) for device in devices), default=-1)
    # Ranks of tensor parallelism are on consecutive GPUs.
    return last + engine_options.get("tensor_parallel_size", 1) if devices else 0


def parse_options(args: Mapping[str, Any]) -> argparse.Namespace:
    """Return the options of ``fastinfer serve``.

    Args:
        args: values by whole names, without the dashes. ``True`` stands for an option without a value, ``False`` for
            none; a list for one that is repeated.

    Raises:
        FastinferError: an option is wrong, or belongs to Ray.
    """
    try:
        beta = rate(str(args.get("beta", BETA)))
    except argparse.ArgumentTypeError as error:
        raise RequestError(f"beta: {error}") from None
    known = argparse.ArgumentParser(add_help=False)
    add_serve(known)
    argv = ["serve"]
    for key, value in args.items():
        if not isinstance(key, str):
            raise RequestError(f"args: expected names of options as texts, got {key!r}")
        if key == "beta":  # which one process would refuse: its router is Ray's
            continue
        name = key.replace("_", "-")
        if name in OF_RAY:
            raise RequestError(f"{key}: expected an option of the engine, got one that belongs to Ray Serve")
        action = known._option_string_actions.get(f"--{name}")  # argparse itself would complete the name
        if action is None:
            raise RequestError(f"{key}: expected an option of 'fastinfer serve', got an unknown one")
        for item in value if isinstance(value, list) else [value]:
            if action.nargs != 0:
                argv.append(f"--{name}={item}")
            elif str(item).lower() not in FLAGS:
                raise RequestError(f"{key}: expected true or false, got {item!r}")
            elif FLAGS[str(item).lower()]:
                argv.append(f"--{name}")
    options = parse(argv)
    options.beta = beta
    return options
