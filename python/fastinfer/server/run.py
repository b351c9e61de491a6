"""Running the server of an engine."""

import logging
import os
import socket
import sys
from collections.abc import Callable

from fastinfer.async_engine import AsyncEngine
from fastinfer.server.app import create_app
from fastinfer.server.config import ServerConfig
from fastinfer.server.draining_server import DrainingServer
from fastinfer.server.state import ServerState


def run(config: ServerConfig, load: Callable[[], AsyncEngine], sockets: list[socket.socket] | None = None) -> int:
    """Serve until a signal comes; returns the exit code, or ends the process if the model is still being loaded.

    The first SIGTERM or SIGINT begins the drain: the server goes on to listen, ``/ready`` and new requests get 503, and
    running requests end. After ``drain_timeout_s`` they are aborted, and streams end with an error. A second signal
    ends everything at once. The provider's notice that it takes the machine back (``spot_notice``) begins the drain,
    too, but the process stays until a signal comes: it would only be started again on the same machine.

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
    server.run(sockets)
    if state.host.is_loading:
        # The interpreter would kill the thread inside C++ code, which aborts the process.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if state.host.failure is not None:
        raise state.host.failure
    return 0 if server.started else 1
