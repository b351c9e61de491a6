"""Keys: every route is guarded, both headers are taken, and only hashes are kept."""

import asyncio
import hmac
from typing import Any

import pytest
from support.toy_server import toy_app, toy_client

from fastinfer.server import auth

BODY = {"prompt": [5], "max_tokens": 1}
ADMIN_ROUTES = [
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/reset_prefix_cache"),
]


def routes() -> list[tuple[str, str]]:
    """Method and path of every route of the application."""
    paths: dict[str, dict[str, Any]] = toy_app().openapi()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def test_every_route_but_the_probes_needs_a_key() -> None:
    async def main() -> None:
        async with toy_client(api_keys=("one", "two"), admin_keys=("boss",)) as client:
            assert len(routes()) >= 20
            for method, path in [*routes(), ("GET", "/openapi.json"), ("GET", "/nowhere")]:
                answer = await client.request(method, path.replace("{name}", "toy"))
                if path in ("/", "/health", "/ready", "/ping"):
                    assert answer.status_code == 200, path
                    continue
                assert answer.status_code == 401, path
                assert answer.json()["error"]["type" if "messages" in path else "code"] in (
                    "invalid_api_key",
                    "authentication_error",
                )
                assert answer.headers["www-authenticate"] == "Bearer"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "bearer two"}, 200),
        ({"X-Api-Key": "one"}, 200),
        ({"Authorization": "Bearer boss"}, 200),
        ({"Authorization": "Bearer on"}, 401),
        ({"Authorization": "Bearer one "}, 200),
        ({"Authorization": "Bearer onee"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "one"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"X-Api-Key": "' OR 1=1 --"}, 401),
    ],
)
def test_keys(headers: dict[str, str], status: int) -> None:
    async def main() -> None:
        async with toy_client(api_keys=("one", "two"), admin_keys=("boss",)) as client:
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == status

    asyncio.run(main())


@pytest.mark.parametrize("admin_keys", [(), ("boss",)])
@pytest.mark.parametrize("route", ADMIN_ROUTES)
@pytest.mark.parametrize("root_path", ["", "/proxy"])
def test_administrative_routes_need_an_administrator(
    admin_keys: tuple[str, ...], route: tuple[str, str], root_path: str
) -> None:
    """Without a key for them they are off, also where the others are open to all."""

    async def main() -> None:
        for api_keys in ((), ("one",)):
            async with toy_client(api_keys=api_keys, admin_keys=admin_keys, root_path=root_path) as client:
                for path in {route[1], root_path + route[1]}:
                    answer = await client.request(route[0], path, headers={"X-Api-Key": "one"})
                    assert answer.status_code == 403

    asyncio.run(main())


def test_only_administrators_may_overtake_everybody() -> None:
    async def main() -> None:
        async with toy_client(api_keys=("one",), admin_keys=("boss",)) as client:
            for key, status in (("one", 400), ("boss", 200)):
                for priority, expected in ((-1, status), (0, 200), (1, 200)):
                    body = {**BODY, "priority": priority}
                    answer = await client.post("/v1/completions", json=body, headers={"X-Api-Key": key})
                    assert answer.status_code == expected

    asyncio.run(main())


def test_keys_are_compared_in_constant_time_and_kept_as_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)

    async def main() -> None:
        async with toy_client(api_keys=("first", "second", "third"), admin_keys=("boss",)) as client:
            assert (await client.get("/load", headers={"X-Api-Key": "first"})).status_code == 200

    asyncio.run(main())
    assert len(compared) == 4, "the first match does not end the comparison"
    assert all(len(other) == 32 for other in compared)
    middleware = auth.Authentication(None, ["first"], ["boss"])  # type: ignore[arg-type]
    assert "first" not in repr(vars(middleware))
    assert "first" not in repr(toy_app(api_keys=("first",)).state.server.config)


def test_tenants_share_no_prefixes() -> None:
    """Otherwise the time of an answer tells what others have asked (CVE-2025-46570)."""

    async def main() -> None:
        async with toy_client(limits={"block_size": 4}, api_keys=("one", "two")) as client:

            async def num_cached(key: str, **fields: str) -> int:
                body = {"prompt": [7] * 20, "max_tokens": 1, **fields}
                answer = await client.post("/v1/completions", json=body, headers={"X-Api-Key": key})
                count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                return count

            assert await num_cached("one") == 0
            assert await num_cached("one") == 16
            assert await num_cached("two") == 0
            assert await num_cached("one", cache_salt="x") == 0

    asyncio.run(main())


def test_there_is_no_cors() -> None:
    async def main() -> None:
        async with toy_client() as client:
            headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
            asked = await client.options("/v1/completions", headers=headers)
            assert asked.status_code == 405
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            for response in (asked, answer):
                assert not [name for name in response.headers if name.startswith("access-control")]

    asyncio.run(main())
