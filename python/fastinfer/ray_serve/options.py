"""Options of the application: those of ``fastinfer serve``. Importing this module imports neither Ray nor torch."""

import argparse
from collections.abc import Mapping
from typing import Any

from fastinfer.cli.commands import parse
from fastinfer.cli.options import rate
from fastinfer.cli.router_arguments import BETA
from fastinfer.errors import RequestError

# Options that belong to Ray here.
OF_RAY = frozenset(
    {"host", "port", "uds", "root-path", "ssl-certfile", "ssl-keyfile"}
    | {"data-parallel-size", "spot-notice", "metadata-url"}
)


def parse_options(args: Mapping[str, Any]) -> argparse.Namespace:
    """Return the options of ``fastinfer serve``.

    Args:
        args: values by name, without the dashes. ``True`` stands for an option without a value; a list for one that is
            repeated.

    Raises:
        FastinferError: an option is wrong, or belongs to Ray.
    """
    try:
        beta = rate(str(args.get("beta", BETA)))
    except argparse.ArgumentTypeError as error:
        raise RequestError(f"beta: {error}") from None
    argv = ["serve"]
    for key, value in args.items():
        if key == "beta":  # which one process would refuse: its router is Ray's
            continue
        name = key.replace("_", "-")
        if name in OF_RAY:
            raise RequestError(f"{key}: expected an option of the engine, got one that belongs to Ray Serve")
        for item in value if isinstance(value, list) else [value]:
            argv.append(f"--{name}" if item is True or item == "true" else f"--{name}={item}")
    options = parse(argv)
    options.beta = beta
    return options
