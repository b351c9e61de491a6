"""``fastinfer simulate``: latencies and throughput of a trace on engines whose steps have known costs."""

import argparse
import json
from dataclasses import asdict

from fastinfer.simulation.fleet import simulate
from fastinfer.simulation.routing import make_routing
from fastinfer.simulation.summary import Summary
from fastinfer.utils.table import format_table


def run(args: argparse.Namespace) -> int:
    """Simulate the trace and print its summary."""
    simulation = simulate(args.trace, args.costs, make_routing(args.routing, args.replicas, args.beta))
    summary = Summary.of(simulation, args.price)
    if args.json:
        given = {name: getattr(args, name) for name in ("routing", "beta", "rate", "seed", "price")}
        print(json.dumps({"costs": args.costs.as_dict(), **given, **asdict(summary)}, allow_nan=False))
        return 0
    print(f"{args.costs.model}, costs of steps: {args.costs.source}")
    print("\n".join(summary.lines()))
    print(format_table(summary.rows()))
    return 0
