"""Methods of LLM beside completing and chatting, on the default model: vectors, scores, pinned prompts, salts,
several completions, structured output, speculation."""

import asyncio
import dataclasses
import gc
import json
import math
import re
import sys
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from support.json_schemas import SCHEMAS
from support.teacher_forcing import log_probabilities

from fastinfer import (
    LLM,
    AsyncEngine,
    BeamSearchParams,
    PrefillOutput,
    PromptModule,
    PromptParameter,
    PromptSchema,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    UnavailableError,
)
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.generation_request import GenerationRequest
from fastinfer.models.offload import tensors_of

PROMPTS = ["The capital of France is", "A", "In the beginning God created the heaven and the earth. " * 4]


def greedy(max_tokens: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


@pytest.fixture(scope="module")
def llm(model_path: Path) -> LLM:
    return LLM(str(model_path), max_model_len=256, max_num_seqs=8)


def hidden_states(llm: LLM, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """After the last norm, [tokens, hidden], computed without the engine."""
    seen = []
    model = llm.engine.model

    def logits(self: object, hidden: torch.Tensor, indices: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(hidden)
        return torch.zeros(len(indices), 1)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "logits", logits)
        log_probabilities(model, ids, "auto")  # type: ignore[arg-type]
    return model.normalize(seen[0])


def vectors(outputs: Iterable[PrefillOutput]) -> list[list[float]]:
    assert all(output.finish_reason == "stop" for output in outputs)
    return [output.embedding for output in outputs]  # type: ignore[misc]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_embeddings(llm: LLM, pooling: str, normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batched = llm.embed(PROMPTS, pooling=pooling, normalize=normalize)
    alone = [llm.embed(prompt, pooling=pooling, normalize=normalize)[0] for prompt in PROMPTS]
    assert vectors(batched) == vectors(alone)  # bitwise
    for prompt, output in zip(PROMPTS, batched, strict=True):
        ids = llm.tokenizer.encode(prompt)
        assert output.prompt_token_ids == ids
        hidden = hidden_states(llm, ids, monkeypatch).double()
        expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
        if normalize:
            expected = expected / expected.norm()
        torch.testing.assert_close(torch.tensor(output.embedding, dtype=torch.float64), expected, rtol=1e-5, atol=1e-6)


def test_an_embedding_takes_a_prompt_of_the_whole_length(llm: LLM) -> None:
    longest = [5] * llm.engine.max_model_len
    [output] = llm.embed({"prompt_token_ids": longest}, pooling="last")
    assert output.embedding is not None
    with pytest.raises(RequestError, match="prompt must be at most max_model_len=256 tokens, got 257"):
        llm.embed({"prompt_token_ids": [*longest, 5]})


def test_embeddings_say_what_is_alike(llm: LLM) -> None:
    words = ["The cat sat on the mat.", "A cat was sitting on a mat.", "Interest rates rose by half a percent."]
    cat, other_cat, rates = torch.tensor(vectors(llm.embed(words)))
    assert cat @ other_cat > cat @ rates


def test_scores_are_those_of_teacher_forcing(llm: LLM) -> None:
    text = PROMPTS[2]
    context, continuation = "The capital of France is", " Paris, on the Seine."
    ids = llm.tokenizer.encode(text)
    before, after = llm.tokenizer.encode(context), llm.tokenizer.encode(continuation, add_special_tokens=False)
    whole, pair, same_as_ids = llm.score(
        [text, (context, continuation), ({"prompt_token_ids": before}, {"prompt_token_ids": after})]
    )
    for output, tokens, start in ((whole, ids, 1), (pair, before + after, len(before))):
        log_probs = log_probabilities(llm.engine.model, tokens, "auto")  # type: ignore[arg-type]
        expected = sum(log_probs[i - 1, tokens[i]].item() for i in range(start, len(tokens)))
        assert output.logprob == pytest.approx(expected, abs=1e-4)
        assert (output.num_tokens, output.prompt_token_ids) == (len(tokens) - start, tokens)
    assert pair == same_as_ids == llm.score((context, continuation))[0]
    assert llm.score("A")[0].num_tokens == 0
    assert llm.score("A")[0].logprob == 0.0


def test_the_border_of_a_pair_is_where_the_user_has_it(llm: LLM) -> None:
    """Although the joined text would be cut otherwise."""
    encode = llm.tokenizer.encode
    assert encode("unbelievable") != encode("unbel") + encode("ievable")
    [output] = llm.score(("unbel", "ievable"))
    assert output.prompt_token_ids == encode("unbel") + encode("ievable")
    assert output.num_tokens == len(encode("ievable"))


def test_scores_prefer_the_truth(llm: LLM) -> None:
    right, wrong = llm.score([("The capital of France is", f" {city}") for city in ("Paris", "Kingston")])
    assert right.logprob > wrong.logprob + 3
    assert math.isfinite(wrong.logprob)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (("a", ""), "continuation must have at least 1 token, got 0"),
        (("", "a"), "context must have at least 1 token, got 0"),
        (("a", "b", "c"), "prompts must be prompts or pairs .* got a tuple of 3"),
        (("a", 5), "prompt must be a string"),
        (("a ", "word " * 300), "prompt must be shorter than max_model_len=256 tokens"),
        ("", "prompt must have at least 1 token"),
    ],
)
def test_what_cannot_be_scored(llm: LLM, item: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.score(["fine", item])
    assert not llm.engine.has_unfinished


def test_a_failing_request_gives_no_score(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ValueError("no logits")

    with monkeypatch.context() as patch:
        patch.setattr(GenerationRequest, "_add_prompt_logprobs", broken)
        with pytest.raises(RuntimeError, match="the request failed: ValueError: no logits"):
            llm.score("Some text")


def test_a_failing_request_ends_in_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(BlockManager, "end_step", broken)
        with pytest.raises(RuntimeError, match=r"^the request failed: ValueError: broken$"):
            list(llm.stream("Some text", greedy()))
        with pytest.raises(RuntimeError, match=r"^the request failed: ValueError: broken$"):
            llm.pin_prompt("broken", "Some text")
    llm.pin_prompt("broken", "Some text")
    llm.unpin_prompt("broken")


def test_several_completions(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=8, seed=7)
    [output] = llm.generate(PROMPTS[0], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for index, completion in enumerate(output.outputs):
        alone = SamplingParams(temperature=1.0, max_tokens=8, seed=7 + index)
        assert completion.token_ids == llm.generate(PROMPTS[0], alone)[0].outputs[0].token_ids
    assert len({completion.text for completion in output.outputs}) > 1
    *_, last = llm.stream_outputs(PROMPTS[0], params)
    assert [c.text for c in last.outputs] == [c.text for c in output.outputs]
    with pytest.raises(RequestError, match="n must be 1 for stream, which yields one text, got 3"):
        llm.stream(PROMPTS[0], params)


def test_pinned_prompt(llm: LLM) -> None:
    text, question = "You know the capitals of all countries. " * 10, "The capital of France is"
    llm.pin_prompt("capitals", text)
    ids = llm.tokenizer.encode(text) + llm.tokenizer.encode(question, add_special_tokens=False)
    prompts = [{"prompt": question}, {"prompt_token_ids": llm.tokenizer.encode(question)}]
    by_name = llm.generate([{**prompt, "pinned_prompt": "capitals"} for prompt in prompts], greedy())
    for output in by_name:
        assert output.prompt_token_ids == ids
        assert output.num_cached_tokens == len(llm.tokenizer.encode(text)) // 32 * 32 > 0
    assert by_name[0].prompt == question
    for output in [*by_name, *llm.generate({"prompt_token_ids": ids, "cache_salt": "anew"}, greedy())]:
        assert output.outputs[0].token_ids == by_name[0].outputs[0].token_ids
    with pytest.raises(RequestError, match="name must be new, got 'capitals'"):
        llm.pin_prompt("capitals", "Other text")
    assert llm.engine.stats().num_used_blocks > 0
    llm.unpin_prompt("capitals")
    assert llm.engine.stats().num_used_blocks == 0
    for wrong in ("capitals", "never added"):
        with pytest.raises(RequestError, match="pinned prompt must be one of"):
            llm.unpin_prompt(wrong)
        with pytest.raises(RequestError, match="pinned prompt must be one of"):
            llm.generate({"prompt": question, "pinned_prompt": wrong})
    for bad in ({"prompt": "a", "pinned_prompt": 3}, {"prompt": "a", "cache_salt": None}, {"pinned_prompt": "a"}):
        with pytest.raises(RequestError, match="must be a string"):
            llm.generate(bad)
    with pytest.raises(RequestError, match="name must be a string, got 5"):
        llm.pin_prompt(5, "text")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt must have at least 1 token"):
        llm.pin_prompt("empty", "")


def test_prompt_modules(llm: LLM) -> None:
    """Two modules, of which the second is computed by itself, and a parameter of full length."""
    parts = ["Every country has a capital, and you know it. " * 12, " France", " You answer with one word. " * 12]
    question = "The capital of France is"
    encode = partial(llm.tokenizer.encode, add_special_tokens=False)
    place = PromptParameter("country", len(encode(parts[1])))
    schema = PromptSchema((PromptModule("capitals", parts[0]), place, PromptModule("answer", parts[2])))
    prompt = partial(schema.prompt, question, parameters={"country": parts[1]})
    first, second = (llm.generate(prompt(), greedy())[0] for _ in range(2))
    ids = llm.tokenizer.encode(parts[0]) + [token for part in (*parts[1:], question) for token in encode(part)]
    assert first.prompt_token_ids == second.prompt_token_ids == ids
    assert (first.prompt, first.num_cached_tokens) == (question, 0)
    assert second.num_cached_tokens > len(ids) - 96
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert llm.generate(prompt(cache_salt="other"), greedy())[0].num_cached_tokens == 0
    whole = dataclasses.replace(schema, recomputed_blocks=1000).prompt(question, parameters={"country": parts[1]})
    outputs = llm.generate([whole, {"prompt_token_ids": ids}], greedy())
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert "".join(llm.stream(prompt(), greedy())) == first.outputs[0].text
    for call in (llm.embed, llm.score, lambda each: llm.beam_search(each, BeamSearchParams(2, 1))):
        with pytest.raises(RequestError, match="need prompts without modules, got one with modules"):
            call(prompt())


def test_cache_salt_separates(llm: LLM) -> None:
    text = "A secret that one tenant alone may know about, " * 8

    def cached(salt: str) -> int:
        prompt = {"prompt": text, "cache_salt": salt}
        return llm.generate(prompt, greedy(1))[0].num_cached_tokens

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0
    assert llm.generate(text, greedy(1))[0].num_cached_tokens == 0
    assert llm.beam_search({"prompt": text, "cache_salt": "two"}, BeamSearchParams(2, 1))[0].num_cached_tokens > 0
    assert llm.beam_search({"prompt": text, "cache_salt": "three"}, BeamSearchParams(2, 1))[0].num_cached_tokens == 0
    llm.embed({"prompt": text, "cache_salt": "four"})
    assert cached("four") > 0
    assert cached("five") == 0
    llm.pin_prompt("secret", {"prompt": text, "cache_salt": "six"})
    prompt = {"prompt": "mine.", "pinned_prompt": "secret"}
    assert llm.generate(prompt, greedy(1))[0].num_cached_tokens > 0
    with pytest.raises(RequestError, match="cache_salt must be the pinned_prompt's own, or empty, got 'seven'"):
        llm.generate({**prompt, "cache_salt": "seven"}, greedy(1))
    llm.unpin_prompt("secret")


def test_priority(model_path: Path) -> None:
    llm = LLM(str(model_path), max_model_len=64, max_num_seqs=1)
    outputs = llm.generate(PROMPTS[:2] * 2, greedy(2), priority=[3, 0, 2, 1])
    finished = [output.metrics.finish_time for output in outputs]
    assert sorted(range(4), key=lambda index: finished[index] or 0) == [1, 3, 2, 0]
    with pytest.raises(RequestError, match="priority must be one or 2, as many as prompts, got 1"):
        llm.generate(PROMPTS[:2], greedy(2), priority=[1])
    with pytest.raises(RequestError, match="priority must be an integer"):
        llm.generate(PROMPTS[:2], greedy(2), priority=0.5)  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished


def test_more_prompts_than_may_wait(model_path: Path) -> None:
    llm = LLM(str(model_path), max_model_len=64, max_num_seqs=2, max_num_waiting=3)
    outputs = llm.generate([{"prompt_token_ids": [100 + i]} for i in range(20)], greedy(2, ignore_eos=True))
    assert [output.prompt_token_ids for output in outputs] == [[100 + i] for i in range(20)]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)


STRUCTURED = ["object", "enum", "array of objects", "string lengths", "optional properties", "anyOf", "nullable"]


def test_structured_output(llm: LLM) -> None:
    """Every text that was not cut off parses and validates; greedy and sampled, all in one batch."""
    params, schemas = [], []
    for name in STRUCTURED:
        for temperature in (0.0, 1.0):
            form = StructuredOutputsParams(json=SCHEMAS[name])
            params.append(SamplingParams(temperature=temperature, seed=3, max_tokens=60, structured_outputs=form))
            schemas.append(SCHEMAS[name])
    outputs = llm.generate(["Some JSON about points and colours:\n"] * len(params), params)
    num_finished = 0
    for output, schema in zip(outputs, schemas, strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason in ("stop", "length"), completion.stop_reason
        if completion.finish_reason == "stop":
            num_finished += 1
            jsonschema.validate(json.loads(completion.text), schema)
    assert num_finished >= len(params) // 2


def test_regex_and_choice(llm: LLM) -> None:
    forms = [
        StructuredOutputsParams(regex=r"[A-Z][a-z]{2,8}, [0-9]{4}"),
        StructuredOutputsParams(choice=["positive", "negative", "neutral"]),
        StructuredOutputsParams(regex="("),
    ]
    params = [greedy(30, structured_outputs=form) for form in forms]
    date, mood, bad = (output.outputs[0] for output in llm.generate(["The battle was fought in"] * 3, params))
    assert re.fullmatch(r"[A-Z][a-z]{2,8}, [0-9]{4}", date.text)
    assert mood.text in ("positive", "negative", "neutral")
    assert bad.finish_reason == "error"
    assert "regex cannot be enforced" in str(bad.stop_reason)


def test_structured_output_without_its_package(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    params = [greedy(3), greedy(3, structured_outputs=StructuredOutputsParams(json={"type": "object"}))]
    with pytest.raises(RequestError, match=r"^structured output needs .*: pip install 'fastinfer\[structured\]'$"):
        llm.generate(["A", "B"], params)
    with pytest.raises(RequestError, match="structured output needs"):
        llm.chat([{"role": "user", "content": "A"}], params[1])
    assert not llm.engine.requests.active


@pytest.mark.parametrize("draft", [False, True])
def test_speculation_changes_no_text(llm: LLM, model_path: Path, draft: bool) -> None:
    draft_model = str(model_path) if draft else None
    fast = LLM(str(model_path), max_model_len=256, num_speculative_tokens=4, draft_model=draft_model)
    prompts = [PROMPTS[2], "1, 2, 3, 4, 5, 6,"]
    for other, expected in zip(fast.generate(prompts, greedy(24)), llm.generate(prompts, greedy(24)), strict=True):
        assert other.outputs[0].token_ids == expected.outputs[0].token_ids
    stats = fast.engine.stats()
    assert stats.num_accepted_tokens > 0
    if draft:  # of a model that is as good as itself
        assert stats.num_accepted_tokens == stats.num_drafted_tokens


def test_a_draft_model_needs_tokens_to_guess(model_path: Path) -> None:
    with pytest.raises(RequestError, match="a draft model needs num_speculative_tokens of at least 1, got 0"):
        LLM(str(model_path), draft_model=str(model_path))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int8", "fp8", "int4"])
def test_kv_cache_dtypes(model_path: Path, name: str) -> None:
    llm = LLM(str(model_path), max_model_len=64, kv_cache_dtype=name)
    expected = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}.get(name) or getattr(torch, name)
    assert llm.engine.config.kv_cache_dtype == expected
    assert "Paris" in llm.generate(PROMPTS[0], greedy(6))[0].outputs[0].text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype must be one of auto, float32, bfloat16, float16, int8, fp8, int4"),
        ({"num_speculative_tokens": 99}, "num_speculative_tokens must be an integer in 0..15, got 99"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False, got 1"),
        ({"max_num_waiting": 0}, "max_num_waiting must be an integer in 1.."),
    ],
)
def test_arguments_out_of_range(model_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(str(model_path), **arguments)


def test_async_engine_from_a_model(llm: LLM, model_path: Path) -> None:
    async def main() -> list[str]:
        async with AsyncEngine.from_model(str(model_path), max_model_len=256) as engine:

            async def text(prompt: str) -> str:
                return "".join([output.outputs[0].delta async for output in engine.generate(prompt, greedy())])

            return await asyncio.gather(*map(text, PROMPTS))

    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, greedy())]
    assert asyncio.run(asyncio.wait_for(main(), 60)) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_changes_no_text(model_path: Path, level: int) -> None:
    llm = LLM(str(model_path), max_model_len=256, max_num_seqs=4)
    expected = [output.outputs[0] for output in llm.generate(PROMPTS, greedy())]
    weights = [weakref.ref(tensor) for tensor in tensors_of(llm.engine.model)]
    assert weights
    llm.sleep(level)
    gc.collect()
    assert sum(weight() is not None for weight in weights) == (len(weights) if level == 1 else 0)
    assert not llm.engine.worker.kv_cache.layers
    with pytest.raises(UnavailableError, match=r"the engine sleeps until wake_up\(\) is called"):
        llm.generate("A", greedy())
    llm.wake_up()
    assert [output.outputs[0] for output in llm.generate(PROMPTS, greedy())] == expected


def test_an_engine_with_a_draft_model_sleeps(model_path: Path) -> None:
    options = {"draft_model": str(model_path), "num_speculative_tokens": 3}
    llm = LLM(str(model_path), max_model_len=128, max_num_seqs=4, **options)  # type: ignore[arg-type]
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy(5))]
    llm.sleep(2)
    llm.wake_up()
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy(5))] == expected


def test_sleeping_waits_for_no_other_thread(llm: LLM) -> None:
    stream = llm.stream("A", greedy())
    next(stream)
    with pytest.raises(RequestError, match="sleep needs an engine without unfinished requests, got 1"):
        llm.sleep()
    with llm._shared.lock:
        stream.close()  # as the garbage collector may do in a step; its request is still there
    llm.sleep()
    llm.wake_up()
    assert llm.generate("A", greedy(3))[0].outputs[0].token_ids
