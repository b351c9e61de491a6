"""Metrics: the names, labels and buckets that vLLM's dashboards, gateways and autoscalers expect."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.peft_adapter import write_adapter
from support.tiny_folder import write_tiny_folder
from support.toy import Forgetful, ToyModel, always_speculate, toy_engine
from support.toy_server import NAME, GatedModel, toy_client, toy_server

from fastinfer import LLM, AsyncEngine, SamplingParams
from fastinfer.models import open_checkpoint
from fastinfer.server.metrics import Metrics, one_two_five

LABELS = {"model_name": NAME, "engine": "0"}
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
COUNTERS = {
    **dict.fromkeys(["prompt_tokens", "generation_tokens", "prompt_tokens_cached"], ()),
    **dict.fromkeys(["prefix_cache_queries", "prefix_cache_hits", "num_preemptions"], ()),
    **dict.fromkeys(["spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"], ()),
    "request_success": ("finished_reason",),
    "response_cache_requests": ("result",),
    **dict.fromkeys(["response_cache_errors", "response_cache_evictions"], ()),
}
FIRST_TOKEN = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
BETWEEN = ".001 .0025 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
LATENCY = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": BETWEEN,
    "request_time_per_output_token_seconds": BETWEEN,
    **dict.fromkeys(["e2e_request_latency_seconds", "request_queue_time_seconds"], LATENCY),
    **dict.fromkeys(["request_prefill_time_seconds", "request_decode_time_seconds"], LATENCY),
    "request_inference_time_seconds": LATENCY,
    "request_prompt_tokens": None,
    "request_generation_tokens": None,
    "request_params_n": None,
    "request_params_max_tokens": None,
    "iteration_tokens_total": None,
}
PROMPT: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def families(text: str) -> dict[str, Any]:
    """The metrics of an exposition by name, as a strict reader understands them."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_names_labels_and_buckets() -> None:
    model = GatedModel()
    with (
        toy_server(model, response_cache="memory") as (_, address),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        model.allow(PROMPT["max_tokens"])
        client.post("/v1/completions", json=PROMPT)
        model.allow(1)
        with client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True, "seed": 1}) as stream:
            lines = stream.iter_lines()
            next(lines)  # the first token's frame is there before the second one is computed
            model.allow(PROMPT["max_tokens"] - 1)
            assert list(lines)
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = families(answer.text)
    for name in GAUGES:
        [sample] = found[f"vllm:{name}"].samples
        assert sample.labels == LABELS
    for name, labels in COUNTERS.items():
        family = found[f"vllm:{name}"]
        assert family.type == "counter"
        samples = [sample for sample in family.samples if sample.name == f"vllm:{name}_total"]
        assert all(sample.labels.keys() == LABELS.keys() | set(labels) for sample in samples), name
        assert samples, name
    for name, expected in HISTOGRAMS.items():
        family = found[f"vllm:{name}"]
        assert family.type == "histogram", name
        buckets = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
        assert buckets[-1] == "+Inf"
        if expected is not None:
            assert [float(bucket) for bucket in buckets[:-1]] == [float(bucket) for bucket in expected.split()], name
        [count] = [sample.value for sample in family.samples if sample.name.endswith("_count")]
        assert count > 0, name
    [info] = found["vllm:cache_config_info"].samples
    assert info.value == 1
    assert info.labels.keys() >= {"block_size", "num_gpu_blocks", *LABELS}
    assert found["http_requests"].samples[0].labels == {
        "method": "POST",
        "handler": "/v1/completions",
        "status": "200",
    }
    assert "http_request_duration_seconds" in found
    assert "vllm:lora_requests_info" not in found, "the server has no adapters"


def test_token_buckets() -> None:
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]


def test_requests_that_end_otherwise_are_counted() -> None:
    async def main() -> None:
        model = ToyModel()
        async with toy_client(model) as client:
            model.fail = True
            for stream in (False, True):
                await client.post("/v1/completions", json={**PROMPT, "stream": stream})
            samples = families((await client.get("/metrics")).text)["vllm:request_success"].samples
            assert [s.value for s in samples if s.labels.get("finished_reason") == "error" and "total" in s.name] == [2]

    asyncio.run(main())


def test_rejections() -> None:
    async def main() -> None:
        async with toy_client() as client:
            client._transport.app.state.server.host.begin_drain()  # type: ignore[attr-defined]
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 503
            samples = families((await client.get("/metrics")).text)["vllm:admission_rejections"].samples
            found = [(sample.labels["reason"], sample.value) for sample in samples if "total" in sample.name]
            assert found == [("draining", 1)]

    asyncio.run(main())


def test_rounds_of_drafts() -> None:
    engine = always_speculate(toy_engine(Forgetful(), num_speculative_tokens=3))
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    stats = engine.stats()
    assert 0 < stats.num_draft_rounds < stats.num_drafted_tokens <= 3 * stats.num_draft_rounds


@pytest.mark.slow
def test_adapters_in_use(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    write_adapter(tmp_path / "adapter", open_checkpoint(folder).config, size=2.0)

    async def main() -> None:
        llm = LLM(str(folder), max_loras=1, dtype="float32")
        for name in ("one", "two"):
            llm.load_adapter(name, tmp_path / "adapter")
        async with AsyncEngine(llm.engine) as engine:
            metrics = Metrics("vllm", NAME)
            metrics.watch(engine)

            def info() -> Any:
                [sample] = families(metrics.text().decode())["vllm:lora_requests_info"].samples
                assert sample.value > 1e9  # a time
                return sample.labels

            expected = {"max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}
            assert info() == expected
            params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
            one = engine.generate([1, 2, 3], params, adapter="one")
            await anext(one)
            two = engine.generate([1, 2, 3], params, adapter="two")
            await two.accepted()
            assert info() == {**expected, "running_lora_adapters": "one", "waiting_lora_adapters": "two"}
            await one.aclose()
            await two.aclose()
            assert info() == expected

    asyncio.run(main())
