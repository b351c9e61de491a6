"""Embeddings, scores, tokens, statistics, and the administrative routes."""

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.peft_adapter import write_adapter
from support.tiny_folder import write_tiny_folder
from support.toy import ToyTokenizer, greedy
from support.toy_server import NAME, GatedModel, toy_client, toy_server

ADMIN = {"X-Api-Key": "boss"}


def test_scores_are_cosines() -> None:
    async def main() -> None:
        async with toy_client() as client:
            vectors = {}
            for text in ("abc", "de", "xyz"):
                answer = await client.post("/v1/embeddings", json={"input": text})
                vectors[text] = answer.json()["data"][0]["embedding"]

            def cosine(one: str, other: str) -> float:
                return sum(a * b for a, b in zip(vectors[one], vectors[other], strict=True))

            answer = await client.post("/v1/score", json={"text_1": "abc", "text_2": ["de", "xyz", "abc"]})
            scores = [item["score"] for item in answer.json()["data"]]
            expected = [cosine("abc", "de"), cosine("abc", "xyz"), 1.0]
            assert all(math.isclose(*pair, abs_tol=1e-5) for pair in zip(scores, expected, strict=True))
            pairs = await client.post("/v1/score", json={"text_1": ["de", "abc"], "text_2": ["xyz", "abc"]})
            assert math.isclose(pairs.json()["data"][0]["score"], cosine("de", "xyz"), abs_tol=1e-5)
            wrong = await client.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text_1")

    asyncio.run(main())


def test_many_embeddings_do_not_fill_the_queue() -> None:
    async def main() -> None:
        async with toy_client(limits={"max_num_waiting": 70}) as client:
            answer = await client.post("/v1/embeddings", json={"input": [[1 + i % 60] for i in range(300)]})
            assert [item["index"] for item in answer.json()["data"]] == list(range(300))

    asyncio.run(main())


def test_tokens() -> None:
    async def main() -> None:
        async with toy_client() as client:

            async def post(path: str, **body: Any) -> Any:
                return (await client.post(path, json=body)).json()

            ids = ToyTokenizer().encode("hello")
            answer = await post("/tokenize", prompt="hello", return_token_strs=True)
            assert answer == {"count": 5, "max_model_len": 96, "tokens": ids, "token_strs": list("hello")}
            assert await post("/detokenize", tokens=[0, *ids]) == {"prompt": "</s>hello"}
            chat = await post("/tokenize", messages=[{"role": "user", "content": "hello"}])
            assert chat["tokens"] == ToyTokenizer().encode("hello,")
            begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}]
            rest = await post("/tokenize", messages=begun, continue_final_message=True)
            assert rest["tokens"] == ToyTokenizer().encode("hello,well")
            assert (await post("/tokenize"))["error"]["param"] == "prompt"
            described = (await client.get("/tokenizer_info")).json()
            assert (described["bos_token"], described["eos_token"]) == (None, "</s>")
            assert described["chat_template"] == ToyTokenizer.chat_template
            assert (await post("/detokenize", tokens=[64]))["error"]["message"].startswith("tokens must be")

    asyncio.run(main())


def test_an_answer_continues_the_last_message() -> None:
    async def main() -> None:
        async with toy_client() as client:
            messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "we"}]
            body = {"messages": messages, "continue_final_message": True, "temperature": 0, "max_tokens": 8}
            answer = await client.post("/v1/chat/completions", json={**body, "ignore_eos": True})
            expected = greedy(ToyTokenizer().encode("hello,we"), 8, stop_at_eos=False)
            assert answer.json()["choices"][0]["message"]["content"] == ToyTokenizer().decode(expected)
            both = await client.post("/v1/chat/completions", json={**body, "add_generation_prompt": True})
            assert both.json()["error"]["param"] == "continue_final_message"

    asyncio.run(main())


def test_monitors_may_ask_without_wanting_a_body() -> None:
    async def main() -> None:
        async with toy_client() as client:
            for path in ("/health", "/ready"):
                assert (await client.head(path)).status_code == 200

    asyncio.run(main())


def test_sleep_and_the_prefix_cache() -> None:
    async def main() -> None:
        async with toy_client(admin_keys=("boss",), limits={"block_size": 4}) as client:

            async def num_cached() -> int:
                body = {"prompt": [7] * 20, "max_tokens": 1}
                answer = await client.post("/v1/completions", json=body)
                count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                return count

            async def post(path: str) -> httpx.Response:
                return await client.post(path, headers=ADMIN)

            assert [await num_cached(), await num_cached()] == [0, 16]
            assert (await post("/reset_prefix_cache")).json() == {"success": True}
            assert [await num_cached(), await num_cached()] == [0, 16]
            assert (await post("/sleep?level=3")).status_code == 400
            for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
                refused = await client.post(path, json={"level": 2}, headers=ADMIN)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")
                assert "/sleep?level=2" in refused.json()["error"]["message"]
                refused = await post(path + "?mode=abort")
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mode")
            assert (await client.get("/is_sleeping", headers=ADMIN)).json() == {"is_sleeping": False}
            assert (await post("/sleep?level=1")).json() == {"is_sleeping": True}
            assert (await client.get("/is_sleeping", headers=ADMIN)).json() == {"is_sleeping": True}
            assert (await client.get("/ready")).status_code == 503
            refused = await client.post("/v1/completions", json={"prompt": [1]})
            assert refused.status_code == 503
            assert (await post("/wake_up")).json() == {"is_sleeping": False}
            assert await num_cached() == 0

    asyncio.run(main())


@pytest.mark.slow
def test_adapters_are_models(tmp_path: Path) -> None:
    """Loaded and unloaded while the server runs; an unknown one is a model that does not exist."""
    from fastinfer import LLM, AsyncEngine
    from fastinfer.models import open_checkpoint
    from fastinfer.server.app import create_app
    from fastinfer.server.config import ServerConfig

    folder = write_tiny_folder(tmp_path / "model")
    adapter = tmp_path / "adapter"
    write_adapter(adapter, open_checkpoint(folder).config, size=2.0)

    async def main() -> None:
        config = ServerConfig(("tiny",), admin_keys=("boss",))
        app = create_app(config, lambda: AsyncEngine(LLM(str(folder), max_loras=1, dtype="float32").engine))
        async with app.router.lifespan_context(app):
            while app.state.server.host.loaded is None:
                await asyncio.sleep(0.01)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=ADMIN) as client:
                body = {"prompt": "abc", "temperature": 0, "max_tokens": 8, "return_token_ids": True}

                async def tokens(model: str) -> Any:
                    answer = await client.post("/v1/completions", json={**body, "model": model})
                    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.status_code

                loading = {"lora_name": "mine", "lora_path": str(adapter)}
                assert await tokens("mine") == 404
                assert (await client.post("/v1/load_lora_adapter", json=loading)).status_code == 200
                models = (await client.get("/v1/models")).json()["data"]
                assert [(model["id"], model["parent"]) for model in models] == [("tiny", None), ("mine", "tiny")]
                assert await tokens("mine") != await tokens("tiny")
                assert (await client.post("/v1/load_lora_adapter", json=loading)).status_code == 400
                again = await client.post("/v1/load_lora_adapter", json={**loading, "load_inplace": True})
                assert again.status_code == 200
                nowhere = {"lora_name": "mine", "lora_path": str(tmp_path / "nowhere"), "load_inplace": True}
                assert (await client.post("/v1/load_lora_adapter", json=nowhere)).status_code == 400
                assert await tokens("mine") != await tokens("tiny")  # the old one is still there
                wrong = {"lora_name": "other", "lora_path": str(tmp_path / "nowhere")}
                assert (await client.post("/v1/load_lora_adapter", json=wrong)).status_code == 400
                assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})).status_code == 200
                assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})).status_code == 404
                assert await tokens("mine") == 404

    asyncio.run(main())


def test_metrics_have_the_names_that_dashboards_expect() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    model = GatedModel()
    with toy_server(model, metrics_prefix="vllm") as (_, address):
        body = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        model.allow(2)
        with httpx.stream("POST", f"{address}/v1/completions", json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            model.allow(100)  # what follows is another output than the first one
            assert "data: [DONE]" in lines
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
        assert httpx.get(f"{address}/nowhere/{'x' * 50}").status_code == 404
        text = httpx.get(f"{address}/metrics").text
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert (sample.labels["model_name"], sample.labels["engine"]) == (NAME, "0")
            samples[(sample.name, sample.labels.get("le"))] = sample.value
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:cache_config_info": 1,
        "vllm:prompt_tokens_total": 6,
        "vllm:generation_tokens_total": 24,
        "vllm:request_success_total": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_prefill_time_seconds_count": 2,
        "vllm:request_decode_time_seconds_count": 2,
        "vllm:request_inference_time_seconds_count": 2,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:request_prompt_tokens_sum": 6,
        "vllm:request_generation_tokens_sum": 24,
        "vllm:request_params_n_sum": 2,
        "vllm:request_params_max_tokens_sum": 24,
        "vllm:num_preemptions_total": 0,
        "vllm:prefix_cache_queries_total": 6,
        "vllm:prefix_cache_hits_total": 0,
    }
    for name, value in expected.items():
        assert samples[(name, None)] == value, name
    assert samples[("vllm:inter_token_latency_seconds_count", None)] > 0
    assert samples[("vllm:iteration_tokens_total_sum", None)] >= 28
    assert ("vllm:inter_token_latency_seconds_bucket", "0.0025") in samples
    assert ("vllm:time_to_first_token_seconds_bucket", "2560.0") in samples
    assert 'handler="none",method="GET",status="404"' in text, "a client cannot make names"
