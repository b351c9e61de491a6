"""Connections of the router to its replicas."""

import asyncio

import pytest
from support.fake_openai_server import FakeOpenAIServer

from fastinfer.client.endpoint import Endpoint
from fastinfer.errors import ServerError
from fastinfer.server.router.replica_connection import ReplicaConnection


async def get_models(server: FakeOpenAIServer) -> bytes:
    connection = await ReplicaConnection.open(Endpoint.parse(server.url))
    assert await connection.send("GET", "/models", (), b"") == 200
    body = b""
    while piece := await connection.read():
        body += piece
    connection.close()
    return body


def test_an_answer_has_an_end_of_its_own() -> None:
    """The end of a connection may be the end of the replica's process."""
    with FakeOpenAIServer() as server:
        assert b"fake-model" in asyncio.run(get_models(server))
    with (
        FakeOpenAIServer(states_length=False) as server,
        pytest.raises(ServerError, match="the connection ended before the answer did"),
    ):
        asyncio.run(get_models(server))
