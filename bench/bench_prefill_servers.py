"""Chats beside long prompts on two servers: both answer, or one computes the long prompts for the other.

Each server has one thread, and a router is in front of them. A few clients chat without a pause; another one sends one
long prompt after the other. The two arrangements run in turns. Printed are the time to the first token of long prompts
and of chats, and the time between two tokens of a chat.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx

from fastinfer.benchmarks.report import percentile, write_json
from fastinfer.utils.table import format_table

KINDS = ("two servers answer", "one computes prompts")
Samples = dict[str, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--chats", type=int, default=2, help="clients that chat")
    parser.add_argument("--prompt-words", type=int, default=2000, help="length of a long prompt")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two long prompts")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for prefill_servers.json")
    args = parser.parse_args()
    samples: dict[str, Samples] = {kind: defaultdict(list) for kind in KINDS}
    with contextlib.ExitStack() as stack:
        urls = {kind: stack.enter_context(servers(args.model, kind)) for kind in KINDS}
        for number in range(args.rounds + 1):
            for kind, url in urls.items():
                found = asyncio.run(load(url, args, random.Random(number)))
                if number:  # the first round warms up
                    for name, seconds in found.items():
                        samples[kind][name] += seconds
    rows = [["arrangement", "", "count", "p50 ms", "p99 ms"]]
    for kind, found in samples.items():
        for name, seconds in found.items():
            p50, p99 = (f"{percentile(seconds, q) * 1e3:.1f}" for q in (50, 99))
            rows.append([kind, name, str(len(seconds)), p50, p99])
    print(format_table(rows))
    if args.out is not None:
        print(write_json(args.out / "prefill_servers.json", vars(args) | {"out": str(args.out), "samples": samples}))
    return 0


@contextlib.contextmanager
def servers(model: str, kind: str) -> Iterator[str]:
    """Two servers and a router, whose address it gives."""
    with contextlib.ExitStack() as stack:
        options = ["--model", model, "--context", "8192", "--response-cache", "off"]
        if kind == KINDS[1]:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            options += ["--kv-offloading-dir", folder]
        commands = [["serve", "--port", "0", "--threads", "1", *options]] * 2
        first, second = (stack.enter_context(process(command)) for command in commands)
        option = ["--prefill-url", second] if kind == KINDS[1] else [second]
        router = stack.enter_context(process(["router", "--port", "0", first, *option]))
        with httpx.Client() as client:
            ready = "fastinfer_router_replica_ready{"
            while sum(line.endswith(" 1.0") for line in _lines(client, router) if line.startswith(ready)) < 2:
                time.sleep(0.1)
        yield router


def _lines(client: httpx.Client, url: str) -> list[str]:
    return client.get(f"{url}/metrics").text.splitlines()


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[str]:
    """A process of fastinfer that listens on the address that it gives."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fastinfer", *command, "--log-level", "info"]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, env=environment, stderr=log) as child:
        try:
            while True:
                log.seek(0)
                lines = [line for line in log if "listening on" in line]
                if lines:
                    break
                assert child.poll() is None
                time.sleep(0.1)
            yield lines[0].split()[-1]
        finally:
            child.terminate()


async def load(url: str, args: argparse.Namespace, rng: random.Random) -> Samples:
    """Send requests for some seconds, and return the times in seconds by their meaning."""
    samples: Samples = defaultdict(list)
    end = time.perf_counter() + args.seconds
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def chats() -> None:
            while time.perf_counter() < end:
                first, between = await times(client, words(rng, 20), 60)
                samples["first token of a chat"].append(first)
                samples["between tokens of a chat"] += between

        async def long_prompts() -> None:
            while time.perf_counter() < end:
                first, _ = await times(client, words(rng, args.prompt_words), 4)
                samples["first token of a long prompt"].append(first)
                await asyncio.sleep(args.pause)

        await asyncio.gather(long_prompts(), *(chats() for _ in range(args.chats)))
    return samples


async def times(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> tuple[float, list[float]]:
    """Return the time to the first token of a stream, and those between two tokens, in seconds."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    start = time.perf_counter()
    arrivals = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:]), line
                arrivals.append(time.perf_counter())
    return arrivals[0] - start, [b - a for a, b in itertools.pairwise(arrivals)]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("river", "stone", "light", "house", "winter", "green")) for _ in range(count))


if __name__ == "__main__":
    sys.exit(main())
