"""Requests to several replicas at once, and their answers as one."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from fastinfer.client.endpoint import Headers
from fastinfer.errors import ServerError
from fastinfer.server.disconnect import unless_gone
from fastinfer.server.errors import RETRY_FULL_S, unavailable
from fastinfer.server.json_bytes import dumps
from fastinfer.server.router.host import RouterHost
from fastinfer.server.router.prompts import parse_object
from fastinfer.server.router.replica import Replica
from fastinfer.server.router.routed_request import RoutedRequest
from fastinfer.server.router.whole_answer import WholeAnswer

LOG = logging.getLogger("fastinfer.server")

# Names of the servers that have not done what all were to do.
LEFT_OUT_HEADER = "X-Left-Out"
# A server that sleeps already would refuse it as a mistake.
FOR_READY = frozenset({"/sleep"})


async def broadcast(request: Request, routed: RoutedRequest, host: RouterHost) -> Response:
    """Let all servers do something that can be reached, and return what they answer.

    Servers that are lost, loading or about to end are left out, and named in a header. Otherwise the answer is an error
    if there is one, or else that of a server that sleeps, or else the first. Numbers of what was dropped are added up.
    Servers are asked whether they are ready before the answer comes, so that the next request finds them as they are.

    Args:
        request: the client's request.
        routed: the same as servers get it.
        host: the servers.

    Raises:
        APIError: no server has taken the request.
        ClientGoneError: the client has gone.
    """
    is_for_ready = request.scope["route"].path in FOR_READY
    asked = [server for server in host.servers if server.is_ready or (server.is_reachable and not is_for_ready)]
    asking = ask_all(asked, routed.method, routed.path, routed.headers(), routed.body)
    answers = await unless_gone(request, asking)
    await host.ask_again(answers)
    done = {server: answer for server, answer in answers.items() if not answer.is_refusal}
    left_out = names(server for server in host.servers if server not in done)
    if not done:
        raise unavailable(f"no server has taken the request: {left_out}", RETRY_FULL_S, "no_replica")
    bodies = {answer: parse_object(answer.body) for answer in done.values()}
    worst = max(bodies, key=lambda answer: (answer.status, bodies[answer].get("is_sleeping") is True))
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in worst.headers}
    if worst.status != 200:
        return Response(worst.body, worst.status, headers)
    if left_out:
        LOG.warning("%s has left out %s", routed.path, left_out)
        headers[LEFT_OUT_HEADER] = left_out
    counts = [body["num_dropped"] for body in bodies.values() if "num_dropped" in body]
    return Response(dumps({"num_dropped": sum(counts)}) if counts else worst.body, 200, headers)


async def ask_all(
    replicas: Sequence[Replica], method: str, path: str, headers: Headers, body: bytes, timeout: float | None = None
) -> dict[Replica, WholeAnswer]:
    """Return the answers of replicas; those that do not answer are left out.

    A replica whose connection fails is lost. One that is late may be busy, so it is asked whether it is ready.

    Args:
        replicas: the replicas.
        method, path, headers, body: the request.
        timeout: seconds in which a replica must answer; ``None`` for no limit.
    """

    async def read(replica: Replica) -> WholeAnswer:
        async with replica.ask(method, path, headers, body) as answer:
            return await WholeAnswer.read(answer)

    async def ask(replica: Replica) -> WholeAnswer | None:
        try:
            return await asyncio.wait_for(read(replica), timeout)
        except ServerError as error:
            replica.lose(str(error))
            LOG.warning("replica %s has lost a request: %s", replica.name, error)
        except asyncio.TimeoutError:
            replica.wake_probe.set()
            LOG.warning("replica %s has not answered %s within %g s", replica.name, path, timeout)
        return None

    answers = await asyncio.gather(*map(ask, replicas))
    return {replica: answer for replica, answer in zip(replicas, answers, strict=True) if answer is not None}


def names(replicas: Iterable[Replica]) -> str:
    """Return the names of replicas as one text."""
    return ", ".join(replica.name for replica in replicas)
