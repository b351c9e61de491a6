"""The middleware that every server has, in its order."""

from collections.abc import Callable, Sequence

from fastapi import FastAPI

from fastinfer.server.auth import Authentication
from fastinfer.server.config import HttpConfig
from fastinfer.server.host_check import HostCheck, needs_host_check
from fastinfer.server.host_state import Host, HostState
from fastinfer.server.limits import Limits
from fastinfer.server.observation import Observation
from fastinfer.server.record import RequestRecord


def add_middleware(
    app: FastAPI, config: HttpConfig, host: Host, observers: Sequence[Callable[[RequestRecord], None]]
) -> None:
    """Add limits, authentication and observation to an application.

    Args:
        app: the application.
        config: its settings.
        host: what answers its requests.
        observers: functions that take the record of a request that has ended.
    """
    # The last one is the outermost one.
    if needs_host_check(config):
        app.add_middleware(HostCheck, allowed_hosts=config.allowed_hosts)
    app.add_middleware(Authentication, api_keys=config.api_keys, admin_keys=config.admin_keys)
    app.add_middleware(
        Limits,
        max_body_bytes=config.max_body_bytes,
        max_header_bytes=config.max_header_bytes,
        is_closing=lambda: host.state is HostState.DRAINING,
    )
    app.add_middleware(Observation, observers=observers)
