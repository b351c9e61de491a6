"""A page of the web whose name points to this machine must not reach a server without keys."""

import asyncio
import socket
from typing import Any

import pytest
from support.toy_server import toy_client

from fastinfer.server.config import HttpConfig
from fastinfer.server.host_check import needs_host_check


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("192.168.1.7", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("a.localhost", 200),
        ("fastinfer:8000", 200),
        ("", 200),
        ("proxy.example.org", 200),
        ("Proxy.example.org.:443", 200),
        ("evil.example.org", 403),
        ("evil.example.org.:8000", 403),
        ("127.0.0.1.evil.org", 403),
        ("localhost.evil.org", 403),
        ("1.2.3.4.5", 403),
    ],
)
def test_names(host: str, status: int) -> None:
    async def main() -> None:
        async with toy_client(allowed_hosts=("proxy.example.org",)) as client:
            for path in ("/", "/v1/models"):
                answer = await client.get(path, headers={"Host": host})
                assert answer.status_code == status
                if status == 403:
                    error = answer.json()["error"]
                    assert error["code"] == "host_not_allowed"
                    assert "--allowed-host" in error["message"]

    asyncio.run(main())


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.1", "::1", "::ffff:127.0.0.1"])
def test_other_spellings_of_this_machine(host: str) -> None:
    async def main() -> None:
        async with toy_client(host=host, allowed_hosts=("Proxy.example.org.:8080",)) as client:
            for name, status in (("evil.example.org", 403), ("proxy.example.org", 200)):
                assert (await client.get("/v1/models", headers={"Host": name})).status_code == status

    asyncio.run(main())


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [(["127.0.0.1", "::1"], True), (["127.0.0.1", "10.0.0.1"], False), (["fe80::1%eth0", "::1"], False)],
)
def test_a_name_with_one_public_address_is_public(
    addresses: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: found)
    assert needs_host_check(HttpConfig(host="machine")) is expected


@pytest.mark.parametrize(
    "settings", [{"api_keys": ("one",)}, {"host": "0.0.0.0"}, {"host": "::"}, {"uds": "/tmp/never-listened-on"}]
)
def test_servers_with_keys_and_public_ones_have_any_name(settings: dict[str, Any]) -> None:
    async def main() -> None:
        async with toy_client(**settings) as client:
            headers = {"Host": "models.example.org", "Authorization": "Bearer one"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200

    asyncio.run(main())
