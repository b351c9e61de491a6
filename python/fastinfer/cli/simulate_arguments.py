"""Arguments of ``fastinfer simulate`` and their checks, which need no torch."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastinfer.cli.options import count, number, rate
from fastinfer.cli.router_arguments import BETA
from fastinfer.errors import RequestError
from fastinfer.simulation.cost_file import CostFile
from fastinfer.simulation.generator import Lengths, generate_trace
from fastinfer.simulation.trace import TraceRequest, read_trace
from fastinfer.utils.checks import check_float

MAX_REPLICAS = 100_000
# Of all replicas. The simulation takes 56 bytes for a block, and about 620 once it has had a content.
MAX_BLOCKS = 50_000_000
ROUTINGS = ("round-robin", "least-loaded", "prefix-affinity")  # of a module that imports numpy; a test compares them
# Arguments of the generator, which a trace file replaces, and their defaults.
GENERATOR: dict[str, Any] = {
    "requests": 1000,
    "rate": None,
    "prompt_tokens": Lengths(32, 1024),
    "output_tokens": Lengths(16, 256),
    "prefixes": 0,
    "prefix_tokens": 0,
    "seed": 0,
}
LIMITS = ("max_num_seqs", "max_num_batched_tokens")


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fastinfer simulate``."""
    parser.add_argument(
        "costs", metavar="COSTS", help="the time of a step: step_cost.json of 'fastinfer bench step-cost', or assumed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--price", type=rate, metavar="P", help="price of a replica per hour, in any currency")
    _add_requests(parser.add_argument_group("requests"))
    replicas = parser.add_argument_group("replicas")
    replicas.add_argument("--replicas", type=count(1, MAX_REPLICAS), default=1, metavar="N", help="default: 1")
    replicas.add_argument(
        "--routing", choices=ROUTINGS, default="prefix-affinity", help="rule of the router; default: %(default)s"
    )
    replicas.add_argument(
        "--beta",
        type=number,
        metavar="B",
        help="of prefix-affinity: the score is matched / prompt - B * (load - mean load) / max(1, mean load); "
        "default: 1",
    )
    replicas.add_argument("--max-num-seqs", type=count(1), metavar="N", help="instead of the file's")
    replicas.add_argument("--max-num-batched-tokens", type=count(1), metavar="N", help="instead of the file's")
    replicas.add_argument("--num-kv-blocks", type=count(1), metavar="N", help="instead of the file's")
    replicas.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt as a whole")


def _add_requests(group: argparse._ArgumentGroup) -> None:
    distribution = "N, LOW:HIGH (uniform logarithms) or LOW:HIGH:MEDIAN:SIGMA (log-normal)"
    group.add_argument("--trace", metavar="FILE", help="requests as JSON lines; otherwise they are generated")
    group.add_argument("--requests", type=count(1), metavar="N", help="default: 1000")
    group.add_argument("--rate", type=rate, metavar="R", help="arrivals per second (Poisson); default: all at once")
    group.add_argument(
        "--prompt-tokens", type=_lengths, metavar="D", help=f"without the prefix: {distribution}; default: 32:1024"
    )
    group.add_argument("--output-tokens", type=_lengths, metavar="D", help="likewise; default: 16:256")
    group.add_argument("--prefixes", type=count(0), metavar="N", help="number of shared prefixes; default: 0")
    group.add_argument("--prefix-tokens", type=count(1), metavar="N", help="length of each prefix")
    group.add_argument("--seed", type=count(0), metavar="N", help="the same seed gives the same trace; default: 0")


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_simulate(args: argparse.Namespace) -> None:
    """Check the arguments; read or generate the trace, and read the file of costs."""
    if args.beta is not None and args.routing != "prefix-affinity":
        raise RequestError(f"--beta: expected --routing prefix-affinity with it, got {args.routing}")
    if args.routing == "prefix-affinity":
        args.beta = BETA if args.beta is None else args.beta
        check_float("--beta", args.beta, 0.0, 1e6)
    if args.price is not None:
        check_float("--price", args.price, 0.0, 1e9)
    args.costs = _costs(args)
    per_replica = sum(args.costs.limits.num_blocks)
    if args.replicas * per_replica > MAX_BLOCKS:
        raise RequestError(
            f"--replicas and --num-kv-blocks: expected at most {MAX_BLOCKS} blocks in all, "
            f"got {args.replicas} replicas with {per_replica} each"
        )
    args.trace = _trace(args, args.costs.limits.max_model_len)


def _costs(args: argparse.Namespace) -> CostFile:
    """Read the file of costs, with the limits that are given instead of its own."""
    costs = CostFile.read(Path(args.costs))
    changes: dict[str, Any] = {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
    if args.num_kv_blocks is not None:
        num_groups = len(costs.limits.num_blocks)
        if num_groups > 1:
            raise RequestError(f"--num-kv-blocks: expected a model with one group of layers, got one with {num_groups}")
        changes["num_blocks"] = (args.num_kv_blocks,)
    if args.no_prefix_caching:
        changes["enable_prefix_caching"] = False
    return replace(costs, limits=replace(costs.limits, **changes))


def _trace(args: argparse.Namespace, max_model_len: int) -> list[TraceRequest]:
    given = {name: value for name in GENERATOR if (value := getattr(args, name)) is not None}
    if args.trace is not None:
        if given:
            option = next(iter(given)).replace("_", "-")
            raise RequestError(f"--trace: the file has the requests, so --{option} has no effect")
        return read_trace(Path(args.trace), max_model_len)
    options = GENERATOR | given
    args.seed = options["seed"]  # which the output records
    if bool(options["prefixes"]) != bool(options["prefix_tokens"]):
        raise RequestError("--prefixes and --prefix-tokens: expected both or neither, got one of them")
    return generate_trace(
        options["requests"],
        options["rate"],
        options["prompt_tokens"],
        options["output_tokens"],
        num_prefixes=options["prefixes"],
        prefix_tokens=options["prefix_tokens"],
        seed=options["seed"],
    )
