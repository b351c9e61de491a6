"""Computing long prompts on servers of their own, from which the answering servers get the keys and values.

A request with a long prompt is first sent to such a server with a limit of one token. Both servers have the same
``--kv-offloading-dir``: the first one writes the blocks of the prompt there, and the one that answers loads them. The
blocks are all that passes from one to the other, so the text is what it would be without the first one.
"""

import asyncio
import logging

from fastinfer.errors import ServerError
from fastinfer.server.router.replica import Replica
from fastinfer.server.router.routed_request import RoutedRequest
from fastinfer.server.router.state import RouterState

LOG = logging.getLogger("fastinfer.server")

# What limits the answer to one token, by interface. Of a field that is there twice, the last one counts.
LIMITS = {
    "/v1/chat/completions": b'"max_tokens":1,"max_completion_tokens":1,"min_tokens":0,"n":1',
    "/v1/completions": b'"max_tokens":1,"min_tokens":0,"n":1',
    "/v1/responses": b'"max_output_tokens":1',
    "/v1/messages": b'"max_tokens":1',
}
# Answers from the response cache compute nothing, and nobody will ask for these ones.
NOT_CACHED = (b"cache-control", b"no-cache, no-store")


async def prefill(router: RouterState, request: RoutedRequest, replica: Replica) -> None:
    """Let a prefill server compute a request's prompt, unless there is none or it does not pay.

    Whatever goes wrong costs time alone, and no more than ``prefill_timeout_s``: the replica that answers computes what
    it does not find.

    Args:
        router: the router.
        request: the request.
        replica: the replica that would answer it, which may have a part of the prompt cached.
    """
    prompt, config = request.prompt, router.config
    limit = LIMITS.get(request.path.partition("?")[0])
    if limit is None or prompt.num_bytes - replica.prefixes.matched(prompt) < config.min_prefill_bytes:
        return
    server = router.host.choose_prefill(prompt)
    if server is None:
        return
    status = "error"
    try:
        with server.running(prompt):
            status = await asyncio.wait_for(_ask(server, request, limit), config.prefill_timeout_s)
    except asyncio.TimeoutError:
        status = "timeout"
        LOG.warning("prefill server %s has taken more than %g s", server.name, config.prefill_timeout_s)
    except ServerError as error:
        server.lose(str(error))
        LOG.warning("prefill server %s has lost a request: %s", server.name, error)
    router.metrics.prefilled(server, status)


async def _ask(server: Replica, request: RoutedRequest, limit: bytes) -> str:
    """Send a request with a limit, and return the status of the answer after its end.

    Raises:
        ServerError: the server has lost it.
    """
    body = b"%b,%b}" % (request.body.rstrip()[:-1], limit)
    headers = [*(header for header in request.headers() if header[0] != NOT_CACHED[0]), NOT_CACHED]
    async with server.ask(request.method, request.path, headers, body) as answer:
        while await answer.read():
            pass
        return str(answer.status)
