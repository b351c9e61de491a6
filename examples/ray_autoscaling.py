"""A server in a Ray cluster, or in a Ray of this machine, that starts another engine while requests queue up.

    pip install 'fastinfer[ray]'
    python examples/ray_autoscaling.py --max-replicas 2 --tensor-parallel-size 2

Many clients stream stories, more than one engine should have, so Ray starts engines up to the largest number, for each
of which the cluster must have as many CPUs as an engine has threads. A request goes to the engine with most of its
prompt cached that is not too busy. Then the application is deleted while stories are told: they are complete all the
same.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastinfer.client.answer_stream import stream_deltas
from fastinfer.client.endpoint import Endpoint
from fastinfer.hub import DEFAULT_MODEL

NAME = "stories"
SYSTEM = {"role": "system", "content": "You are a storyteller. Every story has a hero, a journey and a happy end."}


def autoscaling(max_replicas: int) -> dict[str, Any]:
    """Return when Ray adds and removes engines."""
    return {
        "min_replicas": 1,
        "max_replicas": max_replicas,
        "target_ongoing_requests": 4,  # of an engine, running and waiting
        # Short, so that there is something to see; a server would rather wait for half a minute.
        "upscale_delay_s": 2,
        "look_back_period_s": 2,
        "metrics_interval_s": 1,
    }


async def tell_stories(server: Endpoint, number: int, max_tokens: int, enough: asyncio.Event) -> list[str]:
    """Stream the same story again and again until it is enough, and return all of them."""
    question = {"role": "user", "content": f"Tell me story number {number}."}
    request = {"messages": [SYSTEM, question], "max_tokens": max_tokens, "temperature": 0}
    stories = []
    while not enough.is_set():
        async with aclosing(stream_deltas(server, request)) as deltas:
            stories.append("".join([delta.get("content") or "" async for delta in deltas]))
    return stories


def num_engines() -> int:
    """Return how many engines are running."""
    from ray import serve

    engines = serve.status().applications[NAME].deployments["Engine"]
    return int(engines.replica_states.get("RUNNING", 0))


async def run(server: Endpoint, args: argparse.Namespace) -> None:
    """Start all clients, wait for the engines that they need, and delete the application."""
    from ray import serve

    enough = asyncio.Event()
    clients = [
        asyncio.create_task(tell_stories(server, number, args.max_tokens, enough)) for number in range(args.clients)
    ]
    engines = 0
    while engines < args.max_replicas and not any(client.done() for client in clients):
        if (now := await asyncio.to_thread(num_engines)) != engines:
            engines = now
            print(f"number of engines: {engines}")
        await asyncio.sleep(0.5)
    enough.set()
    print("deleting the application")
    await asyncio.to_thread(serve.delete, NAME)
    for number, stories in enumerate(await asyncio.gather(*clients)):
        print(f"client {number}: stories: {len(stories)}, different ones: {len(set(stories))}, {stories[-1][:50]!r}...")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Clients of a server whose engines Ray starts as they are needed.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=1, help="threads of an engine, for which Ray reserves CPUs")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="processes of an engine")
    parser.add_argument("--max-replicas", type=int, default=2, help="largest number of engines")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=100, help="tokens of a story")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)

    from ray import serve

    from fastinfer.ray_serve.app import application

    options = {
        "model": args.model,
        "threads": args.threads,
        "tensor-parallel-size": args.tensor_parallel_size,
        "context": 1024,
        "response-cache": "off",  # or else the second story would not need an engine
        "drain-timeout": 120,  # longer than a story takes
    }
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    serve.run(application(options, autoscaling_config=autoscaling(args.max_replicas)), name=NAME)
    try:
        asyncio.run(run(Endpoint.parse(f"http://127.0.0.1:{args.port}"), args))
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
