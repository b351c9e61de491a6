"""Running the server of an engine."""

import logging
import socket
from collections.abc import Callable

from fastinfer.async_engine import AsyncEngine
from fastinfer.errors import FastinferError
from fastinfer.server.app import create_app
from fastinfer.server.config import ServerConfig
from fastinfer.server.draining_server import DrainingServer, end_process
from fastinfer.server.state import ServerState

LOG = logging.getLogger("fastinfer.server")


def run(config: ServerConfig, load: Callable[[], AsyncEngine], sockets: list[socket.socket] | None = None) -> int:
    """Serve until a signal comes; returns the exit code, or ends the process if the model is still being loaded.

    The first SIGTERM or SIGINT begins the drain: the server goes on to listen, ``/ready`` and new requests get 503, and
    running requests end. After ``drain_timeout_s`` they are aborted, and streams end with an error. A second signal
    ends the process at once, even if a step hangs. The provider's notice that it takes the machine back
    (``spot_notice``) begins the drain, too, but the process stays until a signal comes: it would only be started again
    on the same machine.

    Args:
        config: the server's settings.
        load: function that loads the engine, while the server listens already.
        sockets: bound sockets to listen on instead of the address in the settings.

    Raises:
        RequestError: the address cannot be listened on.
        Exception: the error with which loading failed.
    """
    app = create_app(config, load)
    state: ServerState = app.state.server
    server = DrainingServer(app, config)
    code = 0
    try:
        server.run(sockets)
    except BaseException as error:
        if not state.host.is_loading:
            raise
        is_mistake = isinstance(error, (FastinferError, OSError))
        LOG.error("the server could not start: %s", error, exc_info=not is_mistake)
        code = 2
    if state.host.is_loading:
        # The interpreter would kill the thread inside C++ code, which aborts the process.
        end_process(code)
    if state.host.failure is not None:
        raise state.host.failure
    return 0 if server.started else 1
