"""Running the router."""

from fastinfer.server.draining_server import DrainingServer
from fastinfer.server.router.app import create_app
from fastinfer.server.router.config import RouterConfig
from fastinfer.server.router.host import RouterHost


def run(config: RouterConfig, host: RouterHost) -> int:
    """Route requests until a signal comes, which begins the drain; returns the exit code.

    Args:
        config: the router's settings.
        host: the replicas.

    Raises:
        RequestError: the address cannot be listened on.
    """
    server = DrainingServer(create_app(config, host), config)
    server.run()
    return 0 if server.started else 1
