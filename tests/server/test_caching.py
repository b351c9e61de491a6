"""The response cache behind the routes: what is answered from it, and what is not."""

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.redis_server import is_installed, redis_server
from support.toy import ToyModel, ToyTokenizer, greedy
from support.toy_server import GatedModel, toy_client, toy_server
from support.waiting import until

from fastinfer import AsyncEngine
from fastinfer.server import caching
from fastinfer.server.cache.key import ModelIdentity
from fastinfer.server.cache.single_flight import SingleFlight

ADMIN = {"X-Api-Key": "boss"}
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], **GREEDY}
PROMPT = {"prompt": [5, 6, 7], **GREEDY}
TEXT = ToyTokenizer().decode(greedy([5, 6, 7], 12, stop_at_eos=False))
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": PROMPT,
    "/v1/responses": {"input": "hello", "temperature": 0, "max_output_tokens": 12},
    "/v1/messages": {
        "model": "toy",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 12,
    },
}


needs_redis = pytest.mark.skipif(
    importlib.util.find_spec("redis") is None or not is_installed(),
    reason="needs redis-server (Debian: apt-get install redis-server) and the package redis",
)


def cached_client(model: ToyModel | None = None, **settings: Any) -> Any:
    return toy_client(model, response_cache="memory", **settings)


def without_names(body: Any) -> Any:
    """An answer without what every answer has of its own."""
    if isinstance(body, dict):
        own = ("id", "item_id", "created", "created_at", "completed_at", "sequence_number")
        return {name: without_names(value) for name, value in body.items() if name not in own}
    return [without_names(item) for item in body] if isinstance(body, list) else body


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize("path", BODIES)
def test_a_hit_is_the_same_answer_with_a_new_id(path: str) -> None:
    async def main() -> None:
        model = ToyModel()
        async with cached_client(model) as client:
            first = await client.post(path, json=BODIES[path])
            assert first.status_code == 200, first.text
            num_steps = len(model.batch_sizes)
            second = await client.post(path, json=BODIES[path])
            assert [answer.headers["x-cache"] for answer in (first, second)] == ["miss", "hit"]
            assert len(model.batch_sizes) == num_steps, "the engine was not asked"
            assert without_names(first.json()) == without_names(second.json())
            assert first.json()["id"] != second.json()["id"]

    asyncio.run(main())


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("path", BODIES)
def test_a_hit_is_replayed_as_a_stream(path: str, recorded: bool) -> None:
    """Whether a plain answer or a stream was stored: the frames are those of a stream, with the whole text."""

    async def main() -> None:
        options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
        body = {**BODIES[path], "stream": True, **options}
        async with toy_client() as client:
            computed = events((await client.post(path, json=body)).text)
        async with cached_client() as client:
            await client.post(path, json=body if recorded else BODIES[path])
            answer = await client.post(path, json=body)
        assert answer.headers["x-cache"] == "hit"
        assert answer.headers["content-type"].startswith("text/event-stream")
        replayed = events(answer.text)
        assert kinds(replayed) == kinds(computed)
        assert without_names(replayed[-2:]) == without_names(computed[-2:])

    asyncio.run(main())


def kinds(frames: list[Any]) -> list[Any]:
    """The kinds of a stream's frames; runs of text count once."""
    found: list[Any] = []
    for frame in frames:
        kind = frame
        if frame != "[DONE]":
            choices = frame.get("choices")
            choice = choices[0] if choices else {}
            delta = choice.get("delta", {})
            kind = (frame.get("type"), choices is not None and len(choices), delta.get("role"), *sorted(delta))
            kind = (*kind, choice.get("finish_reason"), frame.get("usage") and frame["usage"].get("completion_tokens"))
        if kind != (found[-1] if found else None):
            found.append(kind)
    # The last frame of a completion may have the end of its text.
    return [kind for kind in found if kind != (None, 1, None, None, None)]


def test_several_prompts_and_completions() -> None:
    async def main() -> None:
        body = {"prompt": [[5, 6], [7]], "n": 2, "seed": 3, "max_tokens": 6, "echo": True, "return_token_ids": True}
        async with cached_client() as client:
            for stream in (False, True):
                first = await client.post("/v1/completions", json={**body, "stream": stream, "seed": 3 + stream})
                second = await client.post("/v1/completions", json={**body, "stream": stream, "seed": 3 + stream})
                assert (first.headers["x-cache"], second.headers["x-cache"]) == ("miss", "hit")
                if stream:
                    assert texts(events(second.text)) == texts(events(first.text))
                else:
                    assert without_names(first.json()) == without_names(second.json())

    asyncio.run(main())


def texts(frames: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for frame in frames:
        for choice in frame["choices"] if frame != "[DONE]" else ():
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def test_a_truncated_prompt() -> None:
    async def main() -> None:
        body = {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2, "return_token_ids": True, **GREEDY}
        async with cached_client() as client:
            for result in ("miss", "hit"):
                answer = await client.post("/v1/completions", json=body)
                assert answer.headers["x-cache"] == result
                assert answer.json()["choices"][0]["prompt_token_ids"] == [7, 8]
                assert answer.json()["usage"]["prompt_tokens"] == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.5}, {"logprobs": 1}, {"prompt_logprobs": 0}],
    ids=str,
)
def test_what_is_not_cached(change: dict[str, Any]) -> None:
    async def main() -> None:
        async with cached_client() as client:
            for _ in range(2):
                answer = await client.post("/v1/completions", json={**PROMPT, **change})
                assert answer.headers["x-cache"] == "bypass"

    asyncio.run(main())


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": 11}, {"prompt": [5, 6]}, {"cache_salt": "x"}, {"stop": ["z"]}, {"temperature": 1, "seed": 1}],
    ids=str,
)
def test_another_request_is_another_entry(change: dict[str, Any]) -> None:
    async def main() -> None:
        async with cached_client() as client:
            await client.post("/v1/completions", json=PROMPT)
            answer = await client.post("/v1/completions", json={**PROMPT, **change})
            assert answer.headers["x-cache"] == "miss"

    asyncio.run(main())


def test_cache_control() -> None:
    async def main() -> None:
        async with cached_client() as client:

            async def ask(body: dict[str, Any] = PROMPT, **headers: str) -> str:
                given = {name.replace("_", "-"): value for name, value in headers.items()}
                answer = await client.post("/v1/completions", json=body, headers=given)
                result: str = answer.headers["x-cache"]
                return result

            assert await ask(cache_control="no-store") == "miss"
            assert await ask(cache_control="no-store, no-cache") == "bypass"
            assert await ask(cache_control="no-cache") == "bypass"
            assert await ask(cache_control="no-store") == "hit"
            assert await ask(cache_control="max-age=0") == "bypass"
            sampled = {**PROMPT, "temperature": 1}
            assert await ask(sampled, x_cache_sampled="1") == "miss"
            assert await ask(sampled, x_cache_sampled="1") == "hit"
            assert await ask(sampled, x_cache_sampled="True") == "hit"
            for value in ("0", "false"):
                assert await ask(sampled, x_cache_sampled=value) == "bypass"
            assert await ask(sampled) == "bypass"

    asyncio.run(main())


@pytest.mark.parametrize("cache", ["memory", "off"])
def test_a_header_is_honoured_or_refused(cache: str) -> None:
    async def main() -> None:
        async with toy_client(response_cache=cache) as client:
            for value in ("yes", "", "2"):
                answer = await client.post("/v1/completions", json=PROMPT, headers={"X-Cache-Sampled": value})
                assert answer.status_code == 400
                assert answer.json()["error"]["message"] == f"X-Cache-Sampled must be 1 or 0, got {value!r}"

    asyncio.run(main())


def test_tenants_share_nothing() -> None:
    async def main() -> None:
        async with cached_client(api_keys=("a", "b")) as client:
            for key, result in (("a", "miss"), ("b", "miss"), ("a", "hit"), ("b", "hit")):
                answer = await client.post("/v1/completions", json=PROMPT, headers={"X-Api-Key": key})
                assert answer.headers["x-cache"] == result

    asyncio.run(main())


def test_without_a_cache_there_is_no_header() -> None:
    async def main() -> None:
        async with toy_client(admin_keys=("boss",)) as client:
            assert "x-cache" not in (await client.post("/v1/completions", json=PROMPT)).headers
            refused = await client.post("/reset_response_cache", json={}, headers=ADMIN)
            assert refused.status_code == 400
        async with cached_client() as client:
            assert "x-cache" not in (await client.post("/v1/embeddings", json={"input": "abc"})).headers

    asyncio.run(main())


def test_failed_and_expired_requests_are_not_stored() -> None:
    async def main() -> None:
        model = ToyModel()
        async with cached_client(model) as client:
            model.fail = True
            for stream in (False, True):
                await client.post("/v1/completions", json={**PROMPT, "stream": stream})
            model.fail = False
            answer = await client.post("/v1/completions", json=PROMPT)
            assert (answer.headers["x-cache"], answer.json()["choices"][0]["text"]) == ("miss", TEXT)

    asyncio.run(main())


def test_flush_by_model_and_tenant() -> None:
    async def main() -> None:
        async with cached_client(api_keys=("a", "b"), admin_keys=("boss",)) as client:

            async def ask(key: str) -> str:
                answer = await client.post("/v1/completions", json=PROMPT, headers={"X-Api-Key": key})
                result: str = answer.headers["x-cache"]
                return result

            async def flush(**body: str) -> Any:
                return (await client.post("/reset_response_cache", json=body, headers=ADMIN)).json()

            tenant = hashlib.sha256(b"a").hexdigest()[:16]
            await ask("a"), await ask("b")
            assert await flush(model="toy", tenant=tenant) == {"num_dropped": 1}
            assert [await ask("a"), await ask("b")] == ["miss", "hit"]
            assert await flush(model="toy") == {"num_dropped": 2}
            assert [await ask("a"), await ask("b")] == ["miss", "miss"]
            assert await flush() == {"num_dropped": 2}
            assert (await flush(model="none"))["error"]["code"] == "model_not_found"
            assert (await flush(tenant=tenant))["error"]["param"] == "model"
            assert (await flush(model="toy", tenant="a"))["error"]["param"] == "tenant"
            forbidden = await client.post("/reset_response_cache", json={}, headers={"X-Api-Key": "a"})
            assert forbidden.status_code == 403

    asyncio.run(main())


def test_counted_in_metrics() -> None:
    async def main() -> None:
        async with cached_client() as client:
            for body in (PROMPT, PROMPT, PROMPT, {**PROMPT, "temperature": 1}):
                await client.post("/v1/completions", json=body)
            text = (await client.get("/metrics")).text
            for result, count in (("hit", 2), ("miss", 1), ("bypass", 1)):
                labels = f'engine="0",model_name="org/toy",result="{result}"'
                assert f"vllm:response_cache_requests_total{{{labels}}} {count}.0" in text
            assert 'vllm:response_cache_errors_total{engine="0",model_name="org/toy"} 0.0' in text
            # The engine's metrics are about what it has computed.
            assert 'request_success_total{engine="0",finished_reason="length",model_name="org/toy"} 2.0' in text

    asyncio.run(main())


@pytest.fixture
def gated() -> Iterator[tuple[GatedModel, Any, str]]:
    model = GatedModel()
    with toy_server(model, response_cache="memory") as (server, address):
        try:
            yield model, server, address
        finally:
            model.allow(2000)


class Client(threading.Thread):
    """A request in a thread of its own."""

    def __init__(
        self, address: str, body: dict[str, Any], timeout: float = 30, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__()
        self.answer: httpx.Response | None = None
        self._post = lambda: httpx.post(f"{address}/v1/completions", json=body, timeout=timeout, headers=headers)
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            self.answer = self._post()

    def result(self) -> tuple[str, str]:
        self.join(30)
        assert self.answer is not None
        assert self.answer.status_code == 200, self.answer.text
        return self.answer.headers["x-cache"], self.answer.json()["choices"][0]["text"]


def waiting(server: Any) -> int:
    """Requests that wait for an equal one."""
    cache = server.config.app.state.server.cache
    return sum(len(turns) for turns in cache._flight._waiting.values())


def test_of_equal_requests_at_the_same_time_one_is_computed(gated: tuple[GatedModel, Any, str]) -> None:
    model, server, address = gated
    clients = [Client(address, PROMPT) for _ in range(4)]
    until(lambda: waiting(server) == 3)
    model.allow(100)
    results = sorted(client.result() for client in clients)
    assert results == [*[("hit", TEXT)] * 3, ("miss", TEXT)]
    assert len(model.batch_sizes) == 12


@needs_redis
def test_followers_get_an_answer_that_cannot_be_stored(tmp_path: Path) -> None:
    """Redis has gone: the answer of the leader still serves those who wait for it."""
    model = GatedModel()
    with redis_server(tmp_path) as redis, toy_server(model, response_cache=redis.url) as (server, address):
        redis.kill()
        clients = [Client(address, PROMPT) for _ in range(3)]
        until(lambda: waiting(server) == 2)
        model.allow(100)
        assert sorted(client.result() for client in clients) == [*[("hit", TEXT)] * 2, ("miss", TEXT)]


def test_followers_outlive_a_leader_whose_client_goes(gated: tuple[GatedModel, Any, str]) -> None:
    model, server, address = gated
    leader = Client(address, PROMPT, timeout=0.5)
    until(lambda: server.host.loaded._mailboxes)
    followers = [Client(address, PROMPT) for _ in range(2)]
    until(lambda: waiting(server) == 2)
    leader.join(20)
    assert leader.answer is None
    until(lambda: waiting(server) == 1)
    model.allow(100)
    assert sorted(client.result() for client in followers) == [("hit", TEXT), ("miss", TEXT)]


def test_followers_outlive_a_leader_that_fails(gated: tuple[GatedModel, Any, str]) -> None:
    model, server, address = gated
    leader = Client(address, PROMPT)
    until(lambda: server.host.loaded.stats().num_running or server.host.loaded._mailboxes)
    followers = [Client(address, PROMPT) for _ in range(2)]
    until(lambda: waiting(server) == 2)
    server.host.loaded._thread.submit(server.host.loaded._end_all, RuntimeError("broken"))
    model.allow(100)
    leader.join(20)
    assert leader.answer is not None
    assert leader.answer.status_code == 500
    assert sorted(client.result() for client in followers) == [("hit", TEXT), ("miss", TEXT)]


def test_an_abandoned_stream_is_not_stored(gated: tuple[GatedModel, Any, str]) -> None:
    model, server, address = gated
    model.allow(3)
    with httpx.stream("POST", f"{address}/v1/completions", json={**PROMPT, "stream": True}) as answer:
        next(answer.iter_bytes())
    model.allow(100)
    until(lambda: not server.host.loaded._mailboxes)
    assert Client(address, PROMPT).result() == ("miss", TEXT)
    assert waiting(server) == 0


def test_nobody_waits_forever_for_a_slow_leader(gated: tuple[GatedModel, Any, str]) -> None:
    """A leader that takes too long does not hold up the others: they compute for themselves."""
    model, server, address = gated
    server.config.app.state.server.cache._flight = SingleFlight(max_wait_s=0.01)
    clients = [Client(address, PROMPT) for _ in range(2)]
    until(lambda: len(server.host.loaded._mailboxes) == 2)
    model.allow(100)
    assert [client.result() for client in clients] == [("miss", TEXT)] * 2


def test_a_deadline_runs_while_a_request_waits_for_another(
    gated: tuple[GatedModel, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "MAX_WAIT_S", 300.0)
    model, server, address = gated
    leader = Client(address, PROMPT)
    until(lambda: server.host.loaded._mailboxes)
    follower = Client(address, PROMPT, headers={"X-Request-Timeout": "0.05"})
    follower.join(30)  # less than the longest wait
    assert follower.answer is not None
    assert follower.answer.status_code == 504
    assert waiting(server) == 0
    model.allow(100)
    assert leader.result() == ("miss", TEXT)


def test_a_stream_does_not_wait_for_an_equal_request(gated: tuple[GatedModel, Any, str]) -> None:
    model, server, address = gated
    clients = [Client(address, PROMPT), Client(address, {**PROMPT, "stream": True})]
    until(lambda: len(server.host.loaded._mailboxes) == 2)
    model.allow(100)
    assert clients[0].result() == ("miss", TEXT)
    clients[1].join(30)
    assert clients[1].answer is not None
    assert clients[1].answer.headers["x-cache"] == "miss"


def test_a_refused_request_leaves_the_flight() -> None:
    async def main() -> None:
        async with cached_client() as client:
            body = {**PROMPT, "structured_outputs": {"regex": "("}}
            for _ in range(2):  # the second one would wait for the first
                answer = await asyncio.wait_for(client.post("/v1/completions", json=body), 4)
                assert answer.status_code == 400

    asyncio.run(main())


def test_identities_differ() -> None:
    """Another template, other weights or another limit on the length: another entry."""

    class Engine:
        class tokenizer:
            chat_template: str | None = "a"

        max_model_len = 96
        fingerprint = "toy"

        def adapter_digest(self, name: str) -> str:
            return {"read": "d1", "other": "d2"}.get(name, "")

    def identity(adapter: str | None = None, **changes: Any) -> ModelIdentity | None:
        engine = Engine()
        for name, value in changes.items():
            setattr(engine, name, value)
        return caching.model_identity(engine, adapter)  # type: ignore[arg-type]

    class Template:
        chat_template = None

    found = [
        identity(),
        identity("read"),
        identity("other"),
        identity(max_model_len=95),
        identity(fingerprint="x"),
        identity(tokenizer=Template),
        identity(fingerprint=""),
    ]
    assert all(isinstance(item, ModelIdentity) and dataclasses.is_dataclass(item) for item in found)
    assert len(set(found)) == len(found)
    assert identity("registered, but not read") is None
    assert identity() == identity()


def test_an_adapter_that_changes_under_its_name_meanwhile_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key has been made with the old one, and the new one has computed the answer."""
    generate = AsyncEngine.generate

    def without_adapter(*args: Any, **options: Any) -> Any:
        return generate(*args, **{**options, "adapter": None})

    # Of each request: before the lookup, for the key, and after the request is queued.
    digests = iter(["old", "old", "new", *["old"] * 5])
    monkeypatch.setattr(AsyncEngine, "adapters", property(lambda engine: ["mine"]))
    monkeypatch.setattr(AsyncEngine, "adapter_digest", lambda engine, name: next(digests))
    monkeypatch.setattr(
        AsyncEngine, "generate", lambda *args, **options: generate(*args, **options | {"adapter": None})
    )

    async def main() -> None:
        async with cached_client() as client:
            for result in ("miss", "miss", "hit"):
                answer = await client.post("/v1/completions", json={**PROMPT, "model": "mine"}, timeout=4)
                assert answer.headers["x-cache"] == result

    asyncio.run(main())


@needs_redis
def test_redis_is_shared_and_its_end_is_a_miss(tmp_path: Path) -> None:
    async def main() -> None:
        with redis_server(tmp_path) as redis:
            async with (
                toy_client(response_cache=redis.url, admin_keys=("boss",)) as one,
                toy_client(response_cache=redis.url) as other,
            ):

                async def ask(client: httpx.AsyncClient, body: dict[str, Any] = PROMPT) -> str:
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["choices"][0]["text"] == TEXT
                    result: str = answer.headers["x-cache"]
                    return result

                # On a busy machine a call may take longer than its time-out, which is a miss.
                while "hit" not in [await ask(one), await ask(other)]:
                    pass
                redis.kill()
                for _ in range(5):
                    assert await ask(one) == "miss"
                flush = await one.post("/reset_response_cache", json={}, headers=ADMIN)
                assert (flush.status_code, flush.json()["error"]["code"]) == (503, "cache_unavailable")
                text = (await one.get("/metrics")).text
                errors = next(line for line in text.splitlines() if line.startswith("vllm:response_cache_errors_total"))
                assert float(errors.rpartition(" ")[2]) >= 3

    asyncio.run(main())


@needs_redis
def test_a_damaged_value_is_a_miss(tmp_path: Path) -> None:
    import redis as redis_package

    async def main() -> None:
        with redis_server(tmp_path) as redis:
            async with toy_client(response_cache=redis.url) as client:
                direct = redis_package.Redis.from_url(redis.url)
                while not direct.keys():
                    await client.post("/v1/completions", json=PROMPT)
                [key] = direct.keys()
                for value in (b"", b"{", b"[]", b"[1]", b'[{"prompt_tokens": 3}]', b'[{"completions": 1}]'):
                    direct.set(key, value)
                    answer = await client.post("/v1/completions", json=PROMPT)
                    assert answer.json()["choices"][0]["text"] == TEXT

    asyncio.run(main())


def test_semantic_hits_are_similar_texts_of_equal_conversations() -> None:
    """The toy's vectors are hashes, so that only equal texts are similar; the conversation before must be equal too."""

    def body(text: Any, system: str = "be", **options: Any) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return {"messages": messages, **GREEDY, **options}

    async def main() -> None:
        async with cached_client(semantic_threshold=0.95) as client:

            async def ask(body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[str, Any]:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                while client._transport.app.state.server.cache._tasks:  # type: ignore[attr-defined]
                    await asyncio.sleep(0.001)
                return answer.headers["x-cache"], answer.json()

            result, first = await ask(body("hello"))
            assert result == "miss"
            # The toy knows no capital letters: another text for the exact cache's key, the same vector.
            part = [{"type": "text", "text": "helloX"}]
            result, second = await ask(body("helloX"))
            assert (result, second["choices"]) == ("hit", first["choices"]), "the toy's tokens are the same"
            server = client._transport.app.state.server  # type: ignore[attr-defined]
            await server.cache.store.flush("fastinfer:")
            result, third = await ask(body(part))
            assert (result, third["choices"]) == ("semantic", first["choices"])
            assert (await ask(body("world")))[0] == "miss"
            for other in (body("hello", system="was"), body("hello", max_tokens=11), body("hello", cache_salt="x")):
                assert (await ask(other))[0] == "miss"
            assert (await ask(body("hello", temperature=0.5)))[0] == "bypass"
            assert 'result="semantic"} 1.0' in (await client.get("/metrics")).text

            async def no_embedding(*_: object, **__: object) -> None:
                raise RuntimeError("no embedding")

            server.host.loaded.embed = no_embedding
            assert (await ask(body("hello", system="is")))[0] == "miss"
            errors = 'vllm:response_cache_errors_total{engine="0",model_name="org/toy"} 1.0'
            assert errors in (await client.get("/metrics")).text

    asyncio.run(main())
