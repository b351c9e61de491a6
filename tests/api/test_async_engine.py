"""AsyncEngine on the toy model: streams, and that nothing is lost or left behind however they end."""

import asyncio
import contextlib
import gc
import itertools
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.toy import EOS_ID, ToyModel, ToyTokenizer, drain, greedy, logits_of, prompts, toy_engine

from fastinfer import (
    AsyncEngine,
    BeamSearchParams,
    Health,
    OutputStream,
    QueueFullError,
    RequestError,
    RequestOutput,
    SamplingParams,
    UnavailableError,
)
from fastinfer.engine import deadlines
from fastinfer.serving import prompt_threads
from fastinfer.serving.mailbox import Mailbox

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)  # 90 tokens


def run(main: Coroutine[Any, Any, None]) -> None:
    """With a limit, as what could go wrong is hanging."""
    asyncio.run(asyncio.wait_for(main, 60))


@contextlib.asynccontextmanager
async def toy_async_engine(**limits: Any) -> AsyncIterator[AsyncEngine]:
    """An engine that is checked for blocks and requests left behind."""
    engine = toy_engine(**limits)
    async with AsyncEngine(engine) as async_engine:
        yield async_engine
    assert not engine.has_unfinished
    assert engine.block_manager.num_free + engine.block_manager.num_cached == engine.block_manager.num_blocks
    assert not async_engine._mailboxes
    assert async_engine._num_submitted == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastinfer-engine")]


async def read(stream: OutputStream[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def is_idle(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_streams_are_what_each_request_alone_would_give() -> None:
    async def main() -> None:
        async with toy_async_engine(max_num_seqs=5, block_size=3) as engine:
            every = await asyncio.gather(*(read(engine.generate(prompt, GREEDY)) for prompt in prompts(12)))
            for prompt, outputs in zip(prompts(12), every, strict=True):
                assert outputs[-1].outputs[0].token_ids == greedy(prompt, 12)
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
                assert "".join(output.outputs[0].delta for output in outputs) == outputs[-1].outputs[0].text
                assert len({output.request_id for output in outputs}) == 1
            assert is_idle(engine)

    run(main())


def test_steps_run_beside_the_loop_and_an_idle_engine_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step waits until the loop has run something else."""

    async def main() -> None:
        async with toy_async_engine() as engine:
            threads = set()
            step, num_steps, loop = engine._engine.step, itertools.count(), asyncio.get_running_loop()

            def waiting() -> list[Any]:
                threads.add(threading.current_thread())
                next(num_steps)
                loop_runs = threading.Event()
                loop.call_soon_threadsafe(loop_runs.set)
                if not loop_runs.wait(10):
                    raise TimeoutError("the loop is held up")
                return step()

            monkeypatch.setattr(engine._engine, "step", waiting)
            [*_, last] = await read(engine.generate([1, 2], LONG))
            assert last.outputs[0].stop_reason is None
            assert len(last.outputs[0].token_ids) == next(num_steps) == 94
            assert len(threads) == 1
            assert threading.main_thread() not in threads
            await asyncio.sleep(0.05)
            assert next(num_steps) == 95  # the call above counts

    run(main())


@pytest.mark.parametrize("num_completions", [1, 3])
def test_a_slow_reader_misses_outputs_but_no_text(num_completions: int) -> None:
    params = SamplingParams(n=num_completions, seed=1, max_tokens=40, ignore_eos=True)

    async def main() -> None:
        async with toy_async_engine() as engine:
            [expected] = [outputs[-1] for outputs in [await read(engine.generate([5], params))]]
            slow = engine.generate([5], params)
            deltas = ["" for _ in range(num_completions)]
            num_outputs = 0
            async for output in slow:
                num_outputs += 1
                deltas = [text + c.delta for text, c in zip(deltas, output.outputs, strict=True)]
                assert deltas == [c.text for c in output.outputs]
                if num_outputs == 1:
                    await until(lambda: is_idle(engine))  # nobody waited for the reader
            assert num_outputs == 2  # and one output was kept for it, not forty
            assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]

    run(main())


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "cancel elsewhere", "never read", "timeout"])
def test_leaving_early_aborts_the_request(way: str) -> None:
    async def leave(engine: AsyncEngine, started: asyncio.Event) -> None:
        if way == "never read":
            engine.generate([1, 2], LONG)
            started.set()
            return
        if way == "aclose":
            stream = engine.generate([1, 2], LONG)
            await anext(stream)
            await stream.aclose()
            assert engine.stats().num_used_blocks == 0  # by now, not soon
            assert [output async for output in stream] == []
            started.set()
            return
        if way == "timeout":
            stream = engine.generate([1, 2], LONG)
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                while True:
                    await asyncio.wait_for(anext(stream), 0.001)
            started.set()
            return
        async for _ in engine.generate([1, 2], LONG):
            started.set()
            if way == "break":
                break
            if way == "cancel elsewhere":
                await asyncio.sleep(60)

    async def main() -> None:
        async with toy_async_engine() as engine:
            step = engine._engine.step
            engine._engine.step = lambda: (time.sleep(0.005), step())[1]  # type: ignore[method-assign]
            started = asyncio.Event()
            task = asyncio.create_task(leave(engine, started))
            await started.wait()
            if way.startswith("cancel"):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            num_steps = len(engine._engine.model.batch_sizes)  # type: ignore[attr-defined]
            await until(lambda: is_idle(engine))
            assert len(engine._engine.model.batch_sizes) <= num_steps + 1 < 90  # type: ignore[attr-defined]
            # It lives on.
            assert (await read(engine.generate([3], GREEDY)))[-1].outputs[0].token_ids == greedy([3], 12)

    run(main())


def test_a_thousand_aborts_at_random_moments_leak_no_block() -> None:
    rng = random.Random(0)

    async def one(engine: AsyncEngine, index: int) -> str:
        prompt = [5] * rng.randrange(1, 20) + [rng.randrange(1, 64)] * rng.randrange(10)
        params = SamplingParams(
            temperature=0.0, max_tokens=rng.randrange(1, 30), n=rng.choice([1, 1, 3]), ignore_eos=True
        )
        await asyncio.sleep(rng.random() * 2)
        how = rng.choice(["break", "cancel", "abort", "drop", "aclose"])
        stream = engine.generate(prompt, params, priority=rng.randrange(3), cache_salt=rng.choice(["", "a"]))
        wait = rng.random() * 0.1
        if how == "drop":
            return how
        if how == "cancel":
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(read(stream), wait)
        elif how == "abort":
            task = asyncio.create_task(read(stream))
            await asyncio.sleep(wait)
            await engine.abort(stream.request_id)
            output = (await task)[-1]
            assert output.finished
            assert {c.finish_reason for c in output.outputs} <= {"abort", "length"}
        else:
            limit = rng.randrange(1, 10)
            async for output in stream:
                if len(output.outputs[0].token_ids) >= limit:
                    break
            if how == "aclose":
                await stream.aclose()
        return how

    async def main() -> None:
        async with toy_async_engine(block_size=4, max_model_len=60, num_kv_blocks=30, max_num_seqs=16) as engine:
            hows = await asyncio.gather(*(one(engine, index) for index in range(1000)))
            assert len(set(hows)) == 5
            await until(lambda: is_idle(engine))
            stats = engine.stats()
            assert stats.num_free_blocks + stats.num_cached_blocks == 30
            assert stats.num_preemptions > 0
            assert stats.num_hit_tokens > 0
            assert (await read(engine.generate([3], GREEDY)))[-1].outputs[0].token_ids == greedy([3], 12)

    run(main())


def test_abort_by_name() -> None:
    async def main() -> None:
        async with toy_async_engine(max_num_seqs=1) as engine:
            running = engine.generate([1, 2], LONG, request_id="running")
            first = await anext(running)
            waiting = engine.generate([1, 2], LONG, request_id="waiting")
            for stream in (waiting, running):
                await engine.abort(stream.request_id)
                outputs = await read(stream)
                assert outputs[-1].outputs[0].finish_reason == "abort"
            assert outputs[-1].outputs[0].text.startswith(first.outputs[0].text)
            assert is_idle(engine)
            await engine.abort("running")
            await engine.abort("never heard of")
            assert (await read(engine.generate([3], GREEDY, request_id="running")))[-1].finished

    run(main())


def test_a_late_abandonment_does_not_hit_the_next_request_of_the_same_name() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            unread = engine.generate([1], GREEDY, request_id="mine")
            await until(lambda: "mine" not in engine._mailboxes)
            again = engine.generate([1], LONG, request_id="mine")
            del unread
            gc.collect()
            assert (await read(again))[-1].outputs[0].finish_reason == "length"

    run(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "prompt must have at least 1 token, got 0"),
        (([1] * 96,), "prompt must be shorter than max_model_len=96 tokens, got 96"),
        (([1, 64],), "prompt_token_ids must be an integer in 0..63, got 64"),
        (({"text": "a"},), r"prompt must be a string.* got \['text'\]"),
        (([1], {"temperature": 0}), "params must be SamplingParams, got dict"),
        (([1], SamplingParams(n=65)), "n must be an integer in 1..64, got 65"),
    ],
)
def test_what_can_never_be_served_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            stream = engine.generate(*arguments)
            with pytest.raises(RequestError, match=message):
                await stream.accepted()
            assert not engine._mailboxes
            with pytest.raises(RequestError, match=message):
                await anext(engine.generate(*arguments))
            assert await read(stream) == []

    run(main())


def test_other_arguments_out_of_range() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            for name, value in (("priority", 1.5), ("priority", 2**63), ("cache_salt", 7), ("timeout", 0)):
                with pytest.raises(RequestError, match=f"^{name} must be "):
                    await engine.generate([1], **{name: value}).accepted()
            with pytest.raises(RequestError, match=r"^request_id must be a string, got 7"):
                engine.generate([1], request_id=7)  # type: ignore[arg-type]
            stream = engine.generate([1], LONG, request_id="mine")
            with pytest.raises(RequestError, match="request_id must be new, got 'mine', which is still running"):
                engine.generate([1], GREEDY, request_id="mine")
            assert len(await read(stream)) > 0
            with pytest.raises(RequestError, match="pooling must be one of last, mean, got 'max'"):
                await engine.embed([1], pooling="max")
            with pytest.raises(RequestError, match=r"priority must be .* got 1\.5"):
                await engine.embed([1], priority=1.5)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="'a'"):
                await engine.embed([1], adapter="a")

    run(main())


def test_outside_of_an_event_loop() -> None:
    engine = AsyncEngine(toy_engine())
    with pytest.raises(RuntimeError, match="no running event loop"):
        engine.generate([1])
    busy = toy_engine()
    busy.add_request([1])
    with pytest.raises(RequestError, match="engine must have no requests yet"):
        AsyncEngine(busy)


def test_a_full_queue_refuses_and_recovers() -> None:
    async def main() -> None:
        async with toy_async_engine(max_num_seqs=2, max_num_waiting=3) as engine:
            step, may_step = engine._engine.step, threading.Event()
            engine._engine.step = lambda: (may_step.wait(), step())[1]  # type: ignore[method-assign]
            streams = [engine.generate([7], GREEDY) for _ in range(3)]
            for _ in range(2):
                with pytest.raises(QueueFullError, match="the queue is full: max_num_waiting=3 requests"):
                    engine.generate([7], GREEDY)
                await asyncio.sleep(0.01)  # the first one is in the engine's queue by now
            may_step.set()
            for outputs in await asyncio.gather(*map(read, streams)):
                assert outputs[-1].outputs[0].token_ids == greedy([7], 12)
            assert (await read(engine.generate([7], GREEDY)))[-1].finished

    run(main())


def test_it_says_that_it_is_full() -> None:
    """By the number of requests, those included that are still being checked, or by that of their tokens."""

    async def main() -> None:
        async with toy_async_engine(max_num_waiting=3, max_num_waiting_tokens=10) as engine:
            await engine.pause()
            streams = [engine.generate([7], GREEDY) for _ in range(2)]
            assert not engine.is_full
            streams.append(engine.generate([7], GREEDY))
            assert engine.is_full
            await engine.resume()
            await asyncio.gather(*map(read, streams))
            for length in (9, 10):
                await engine.pause()
                stream = engine.generate([7] * length, GREEDY)
                await stream.accepted()
                assert engine.is_full == (length == 10)
                await engine.resume()
                await read(stream)

    run(main())


def test_a_refusal_by_the_engine_itself_reaches_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check and the adding, preemptions can fill the queue."""

    def full(*args: object, **kwargs: object) -> str:
        raise QueueFullError("the queue is full")

    async def main() -> None:
        async with toy_async_engine() as engine:
            with monkeypatch.context() as patch:
                patch.setattr(engine._engine, "add_request", full)
                stream = engine.generate([1], GREEDY)
                with pytest.raises(QueueFullError):
                    await anext(stream)
            assert await read(stream) == []
            assert (await read(engine.generate([7], GREEDY)))[-1].finished

    run(main())


@pytest.mark.parametrize("abort_fails", [False, True])
def test_a_failing_step_ends_all_requests_and_the_engine_lives_on(abort_fails: bool) -> None:
    async def main() -> None:
        engine = toy_engine(max_num_seqs=2)
        model: ToyModel = engine.model  # type: ignore[assignment]
        async with AsyncEngine(engine) as async_engine:
            streams = [async_engine.generate(prompt, LONG) for prompt in prompts(4)]
            first = await anext(streams[0])
            abort = engine.abort
            if abort_fails:

                def broken(request_id: str, error: Exception) -> None:
                    abort(request_id, error)
                    raise ValueError("cannot even abort")

                engine.abort = broken  # type: ignore[method-assign, assignment]
            model.fail = True
            for stream in streams:
                if abort_fails:
                    with pytest.raises(ValueError, match="cannot even abort"):
                        await read(stream)
                    continue
                [*_, last] = await read(stream)
                assert last.finished
                assert last.outputs[0].finish_reason == "error"
                assert last.outputs[0].stop_reason == "RuntimeError: the model broke"
                if stream is streams[0]:
                    assert last.outputs[0].text.startswith(first.outputs[0].text)
            engine.abort = abort  # type: ignore[method-assign]
            await until(lambda: is_idle(async_engine))
            [failed] = await read(async_engine.generate([1], GREEDY))
            assert failed.outputs[0].finish_reason == "error"
            assert (await async_engine.embed([1, 2])).finish_reason == "error"
            model.fail = False
            assert (await read(async_engine.generate([7], GREEDY)))[-1].outputs[0].token_ids == greedy([7], 12)

    run(main())


def test_an_error_in_one_request_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def token_bytes(self: ToyTokenizer, token_id: int, skip_special_tokens: bool = True) -> bytes:
        if token_id == bad:
            raise ValueError("no text for this token")
        return b"x"

    bad = greedy([5, 9], 12)[3]
    assert bad not in greedy([7], 12)
    monkeypatch.setattr(ToyTokenizer, "token_bytes", token_bytes)

    async def main() -> None:
        async with toy_async_engine() as engine:
            one, other = await asyncio.gather(*(read(engine.generate(prompt, GREEDY)) for prompt in ([5, 9], [7])))
            assert one[-1].outputs[0].stop_reason == "ValueError: no text for this token"
            assert other[-1].outputs[0].token_ids == greedy([7], 12)

    run(main())


def test_shutdown_ends_what_is_pending() -> None:
    async def main() -> None:
        async with toy_async_engine(max_num_seqs=1) as engine:
            running = engine.generate([1], LONG)
            await anext(running)
            waiting = engine.generate([2], LONG)
            submitted = engine.generate([3], LONG)
            readers = [asyncio.create_task(read(stream)) for stream in (running, waiting, submitted)]
            await asyncio.gather(engine.shutdown(), engine.shutdown())
            for outputs in await asyncio.gather(*readers):
                assert outputs[-1].outputs[0].finish_reason == "abort"
            with pytest.raises(UnavailableError, match="the engine is shut down"):
                engine.generate([1])
            assert engine.health().refusal == "the engine is shut down"
            await engine.abort("any")
            await running.aclose()
            await engine.shutdown()

    run(main())


def test_loops_of_several_threads() -> None:
    engine = AsyncEngine(toy_engine(max_num_seqs=4))
    got: dict[int, list[int]] = {}

    async def main(index: int) -> None:
        got[index] = (await read(engine.generate(prompts(8)[index], GREEDY)))[-1].outputs[0].token_ids

    threads = [threading.Thread(target=run, args=(main(index),)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[index] for index in range(8)] == [greedy(prompt, 12) for prompt in prompts(8)]
    run(engine.shutdown())


def test_requests_of_a_closed_loop_are_aborted() -> None:
    engine = AsyncEngine(toy_engine())
    streams, may_step = [], threading.Event()
    step = engine._engine.step

    def waiting() -> list[Any]:
        may_step.wait(60)
        return step()

    async def begin() -> None:
        streams.append(engine.generate([1], LONG))
        await until(lambda: engine.stats().num_waiting == 1)

    async def rest() -> None:
        await until(lambda: is_idle(engine))
        await engine.shutdown()

    engine._engine.step = waiting  # type: ignore[method-assign]
    run(begin())
    may_step.set()
    run(rest())
    assert engine._engine.model.batch_sizes == [1]  # type: ignore[attr-defined]


def test_embeddings_and_pinned_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyTokenizer, "encode", lambda self, text, **options: [9] * len(text))

    async def main() -> None:
        async with toy_async_engine(block_size=4) as engine:
            output = await engine.embed([1, 2, 3])
            assert output.finish_reason == "stop"
            assert output.embedding is not None
            assert sum(x * x for x in output.embedding) == pytest.approx(1)
            await engine.pin_prompt("system", "x" * 20)
            with pytest.raises(RequestError, match="name must be new, got 'system'"):
                await engine.pin_prompt("system", "y")
            assert engine.stats().num_used_blocks == 5
            prompt = {"prompt_token_ids": [1, 2], "pinned_prompt": "system"}
            [*_, last] = await read(engine.generate(prompt, GREEDY))
            assert last.num_cached_tokens == 20
            assert last.outputs[0].token_ids == greedy([9] * 20 + [1, 2], 12)
            with pytest.raises(RequestError, match="cache_salt must be the pinned_prompt's own, or empty, got 'a'"):
                await anext(engine.generate(prompt, GREEDY, cache_salt="a"))
            await engine.unpin_prompt("system")
            await engine.pin_prompt("salted", {"prompt_token_ids": [8] * 20, "cache_salt": "a"})
            for salt in ("", "a"):
                prompt = {"prompt_token_ids": [1, 2], "pinned_prompt": "salted"}
                [*_, last] = await read(engine.generate(prompt, GREEDY, cache_salt=salt))
                assert last.num_cached_tokens == 20
            await engine.unpin_prompt("salted")
            with pytest.raises(RequestError, match=r"pinned prompt must be one of \[\], got 'system'"):
                await engine.unpin_prompt("system")
            engine._engine.model.fail = True  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="'system' was not computed: RuntimeError: the model broke"):
                await engine.pin_prompt("system", "z" * 20)

    run(main())


def test_a_pinned_prompt_that_is_aborted_was_not_computed() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            await engine.pause()
            pinning = asyncio.create_task(engine.pin_prompt("system", [1] * 20))
            await until(lambda: engine.stats().num_waiting)
            await engine.shutdown()
            with pytest.raises(RuntimeError, match=r"^pinned prompt 'system' was not computed: abort$"):
                await pinning

    run(main())


def test_a_reset_of_the_prefix_cache_shows_in_the_statistics() -> None:
    async def main() -> None:
        async with toy_async_engine(block_size=4) as engine:
            await read(engine.generate([1] * 20, GREEDY))
            assert engine.stats().num_cached_blocks
            await engine.reset_prefix_cache()
            assert engine.stats().num_cached_blocks == 0

    run(main())


def test_adapters_are_read_beside_the_steps_and_change_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        threads = {}

        def note(name: str) -> Any:
            return lambda *args, **options: threads.setdefault(name, threading.current_thread())

        async with toy_async_engine() as engine:
            own = await asyncio.wrap_future(engine._thread.submit(threading.current_thread))
            for name in ("read_adapter", "load_adapter", "register_adapter", "unload_adapter"):
                monkeypatch.setattr(engine._engine, name, note(name))
            await engine.load_adapter("a", "folder")
            await engine.register_adapter("b", "folder")
            await engine.unload_adapter("a")
            assert threads.pop("read_adapter") not in (own, threading.current_thread())
            assert threads == dict.fromkeys(("load_adapter", "register_adapter", "unload_adapter"), own)

    run(main())


class SlowTokenizer(ToyTokenizer):
    """Tokenises "slow" only when it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def encode(self, text: str, **options: Any) -> list[int]:
        if text == "slow":
            self.has_begun.set()
            assert self.may_end.wait(30)
        return super().encode(text)


class LateTokenizer(ToyTokenizer):
    """Tokenises what ends with a long word only when it may."""

    late = "x" * 60

    def __init__(self) -> None:
        self.num_begun, self.may_end = 0, threading.Event()

    def encode(self, text: str, **options: Any) -> list[int]:
        if text.endswith(self.late):
            self.num_begun += 1
            assert self.may_end.wait(30)
        return super().encode(text)


def test_a_pinned_prompt_takes_no_id_that_others_may_choose() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            await engine.pause()
            pinning = asyncio.create_task(engine.pin_prompt("system", [5, 6, 7]))
            await until(lambda: engine.stats().num_waiting)
            stream = engine.generate([1, 2], GREEDY, request_id="request-0")
            await stream.accepted()
            await engine.resume()
            assert (await read(stream))[-1].outputs[0].token_ids == greedy([1, 2], 12)
            await pinning
            await engine.unpin_prompt("system")

    run(main())


def test_other_requests_run_while_a_prompt_is_tokenised() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            tokenizer = engine._engine.tokenizer = SlowTokenizer()  # type: ignore[assignment]
            slow = engine.generate("slow", GREEDY)
            for prompt in ("a", "b"):
                ids = tokenizer.encode(prompt)
                assert (await read(engine.generate(prompt, GREEDY)))[-1].outputs[0].token_ids == greedy(ids, 12)
            assert tokenizer.has_begun.is_set()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(slow.accepted(), 0.01)
            tokenizer.may_end.set()
            await slow.accepted()
            assert (await read(slow))[-1].outputs[0].token_ids == greedy(tokenizer.encode("slow"), 12)

    run(main())


def test_short_requests_run_while_several_long_ones_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_threads, "SHORT_SIZE", 40)
    messages = [{"role": "user", "content": "hello"}]

    async def main() -> None:
        async with toy_async_engine() as engine:
            tokenizer = engine._engine.tokenizer = LateTokenizer()  # type: ignore[assignment]
            slow = [engine.generate(LateTokenizer.late, GREEDY) for _ in range(9)]
            pair = "a", LateTokenizer.late
            slow_calls = [engine.prepare(LateTokenizer.late), engine.score(pair), engine.embed(LateTokenizer.late)]
            tasks = [asyncio.ensure_future(call) for call in slow_calls]
            await until(lambda: tokenizer.num_begun >= 4)
            assert (await read(engine.generate("a", GREEDY)))[-1].finished
            assert (await read(engine.chat(messages, GREEDY)))[-1].finished
            assert (await engine.prepare_chat(messages)).token_ids
            assert (await engine.embed("a")).embedding
            assert await engine.tokenize("ab")
            assert await engine.detokenize([1, 2])
            assert (await engine.score(("a", "b"))).num_tokens
            assert not any(task.done() for task in tasks)
            tokenizer.may_end.set()
            for stream in slow:
                assert (await read(stream))[-1].finished
            await asyncio.gather(*tasks)

    run(main())


@pytest.mark.parametrize("way", ["abort", "shutdown", "aclose"])
def test_a_request_ends_while_its_prompt_is_tokenised(way: str) -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            tokenizer = engine._engine.tokenizer = SlowTokenizer()  # type: ignore[assignment]
            stream = engine.generate("slow", LONG)
            await until(tokenizer.has_begun.is_set)
            ways = {"abort": lambda: engine.abort(stream.request_id), "shutdown": engine.shutdown}
            ending = asyncio.create_task((ways | {"aclose": stream.aclose})[way]())
            await asyncio.sleep(0.01)
            tokenizer.may_end.set()
            await ending
            reasons = [output.outputs[0].finish_reason for output in await read(stream)]
            assert reasons == ([] if way == "aclose" else ["abort"])

    run(main())


def test_a_text_that_is_much_too_long_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            assert len(await engine.tokenize("a" * 96 * 2)) == 192
            monkeypatch.setattr(ToyTokenizer, "encode", None)
            message = "prompt must have at most 192 characters, the most that max_model_len=96 tokens can have, got 193"
            with pytest.raises(RequestError, match=message):
                await engine.generate("a" * 193, GREEDY).accepted()
            with pytest.raises(RequestError, match=message):
                await engine.tokenize("a" * 193)

    run(main())


def test_nothing_is_kept_of_refused_requests_though_no_step_follows() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            kept: weakref.WeakSet[Mailbox[RequestOutput]] = weakref.WeakSet()
            for ask in ("accepted", "__anext__"):
                stream = engine.generate("a" * 193, GREEDY)
                kept.add(stream._mailbox)
                with pytest.raises(RequestError, match="at most 192 characters"):
                    await getattr(stream, ask)()
                del stream

            def is_forgotten() -> bool:
                gc.collect()
                return not kept

            await until(is_forgotten)  # the engine's thread may not have left the call that has refused it
            # Abandoned before it is queued, so that it is still known to the engine then.
            tokenizer = engine._engine.tokenizer = SlowTokenizer()  # type: ignore[assignment]
            slow = engine.generate("slow", GREEDY)
            await until(tokenizer.has_begun.is_set)
            slow.abandon()
            tokenizer.may_end.set()
            await until(lambda: not engine._mailboxes)
            assert not engine._abandoned

    run(main())


def test_what_else_it_does_equals_the_engine() -> None:
    plain = toy_engine()

    async def main() -> None:
        async with toy_async_engine() as engine:
            assert (engine.max_model_len, engine.adapters) == (96, [])
            assert engine.default_params == plain.default_params
            assert await engine.tokenize("xyz") == engine.tokenizer.encode("xyz")
            assert await engine.detokenize([1, 2, EOS_ID]) == "ab</s>"
            messages = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]
            chat = engine.chat(messages, GREEDY, template_variables={"extra": "x"})
            [*_, last] = await read(chat)
            assert last.prompt == "nox,yesx,"
            assert last.outputs[0].token_ids == greedy(engine.tokenizer.encode("nox,yesx,"), 12)
            for make in (engine.chat, engine.prepare_chat):
                refused: Any = make(messages, template_variables={"engine": 1})
                with pytest.raises(RequestError, match="template_variables must not have engine"):
                    await (read(refused) if make == engine.chat else refused)

            params = BeamSearchParams(beam_width=3, max_tokens=6)
            plain.add_beam_request([4, 5], params)
            [expected] = drain(plain).values()
            assert (await engine.beam_search([4, 5], params)).outputs == expected.outputs

            scored = await engine.score(({"prompt_token_ids": [4, 5]}, {"prompt_token_ids": [6, 7]}))
            steps = (([4, 5], 6), ([4, 5, 6], 7))
            expected_logprob = sum(float(logits_of(tokens).log_softmax(0)[token]) for tokens, token in steps)
            assert scored.logprob == pytest.approx(expected_logprob, abs=1e-5)
            assert (scored.num_tokens, scored.prompt_token_ids) == (2, [4, 5, 6, 7])
            with pytest.raises(RequestError, match="continuation must have at least 1 token, got 0"):
                await engine.score(("ab", ""))
            with pytest.raises(RequestError, match=r"prompt must be .* got int"):
                await engine.tokenize(7)  # type: ignore[arg-type]
            for bad, message in (("a", "a list, got 'a'"), ([1, 64], r"in 0\.\.63, got 64"), ([None], "got None")):
                with pytest.raises(RequestError, match=f"token_ids must be .*{message}"):
                    await engine.detokenize(bad)  # type: ignore[arg-type]
        with pytest.raises(UnavailableError, match="the engine is shut down"):
            await engine.tokenize("a")

    run(main())


def test_draining_ends_what_there_is_and_takes_no_more() -> None:
    async def main() -> None:
        async with toy_async_engine(max_num_seqs=1) as engine:
            await engine.pause()
            readers = [asyncio.create_task(read(engine.generate([number], GREEDY))) for number in (1, 2)]
            await asyncio.sleep(0)
            await engine.drain()
            await until(lambda: engine.health() == Health("the engine is draining", False, False, 0.0, False))
            with pytest.raises(UnavailableError, match="the engine is draining"):
                engine.generate([3], GREEDY)
            with pytest.raises(UnavailableError, match="the engine is draining"):
                await engine.embed([3])
            assert await engine.tokenize("a") == [1]
            for number, outputs in zip((1, 2), await asyncio.gather(*readers), strict=True):
                assert outputs[-1].outputs[0].token_ids == greedy([number], 12)

    run(main())


def test_a_paused_engine_computes_nothing_and_goes_on() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            model: ToyModel = engine._engine.model  # type: ignore[assignment]
            running = engine.generate([1], LONG)
            await anext(running)
            await engine.pause()
            num_steps = len(model.batch_sizes)
            assert engine.health() == Health(None, True, False, 0.0, False)
            later = engine.generate([2], GREEDY)
            await later.accepted()
            await running.aclose()
            assert engine.stats().num_used_blocks == 0
            await engine.pause()
            await asyncio.sleep(0.02)
            assert len(model.batch_sizes) == num_steps
            await engine.resume()
            await engine.resume()
            assert (await read(later))[-1].outputs[0].token_ids == greedy([2], 12)
            await until(
                lambda: engine.health() == Health(None, False, False, 0.0, False)
            )  # the last step may still end

    run(main())


def test_an_engine_falls_asleep_once_its_requests_have_ended() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            stream = engine.generate([1], LONG)
            await anext(stream)
            await engine.pause()
            falling = asyncio.create_task(engine.sleep())
            await asyncio.sleep(0)
            message = r"the engine sleeps until wake_up\(\) is called"
            with pytest.raises(UnavailableError, match=message):
                engine.generate([2], GREEDY)
            with pytest.raises(RequestError, match="the engine is about to sleep already"):
                await engine.sleep()
            assert not engine.health().is_sleeping
            assert (await read(stream))[-1].outputs[0].token_ids == greedy([1], 200, stop_at_eos=False)
            await falling
            assert engine.health() == Health("the engine sleeps until wake_up() is called", False, False, 0.0, True)
            assert engine.stats().is_sleeping
            assert not engine._engine.worker.kv_cache.layers
            for call in (engine.embed([3]), engine.score("ab"), engine.pin_prompt("a", [3])):
                with pytest.raises(UnavailableError, match=message):
                    await call
            assert await engine.detokenize(await engine.tokenize("ab")) == "ab"
            with pytest.raises(RequestError, match="the engine sleeps already, at level 1"):
                await engine.sleep()
            for _ in range(2):
                await engine.wake_up()
                assert engine.health() == Health(None, False, False, 0.0, False)
            assert (await read(engine.generate([2], GREEDY)))[-1].outputs[0].token_ids == greedy([2], 12)

    run(main())


def test_what_keeps_an_engine_awake() -> None:
    """A level that there is not, and a caller that waits no longer."""

    async def main() -> None:
        async with toy_async_engine() as engine:
            stream = engine.generate([1], LONG)
            for level in (0, 2, None):
                with pytest.raises(RequestError, match=f"level must be .*got {level}"):
                    await engine.sleep(level)  # type: ignore[arg-type]
            falling = asyncio.create_task(engine.sleep())
            await asyncio.sleep(0)
            falling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await falling
            assert engine.health().refusal is None
            other = engine.generate([2], GREEDY)
            assert (await read(other))[-1].outputs[0].token_ids == greedy([2], 12)
            await read(stream)

    run(main())


def test_pinned_prompts_are_there_after_sleeping() -> None:
    async def main() -> None:
        async with toy_async_engine(block_size=2) as engine:
            await engine.pin_prompt("system", [5, 6, 7, 8, 9])
            await engine.sleep()
            await engine.wake_up()
            assert engine.stats().num_used_blocks == 3
            prompt = {"prompt_token_ids": [1, 2], "pinned_prompt": "system"}
            output = (await read(engine.generate(prompt, GREEDY)))[-1]  # type: ignore[arg-type]
            assert output.num_cached_tokens == 4
            assert output.outputs[0].token_ids == greedy([5, 6, 7, 8, 9, 1, 2], 12)
            await engine.unpin_prompt("system")

    run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_sleeps_once_pinned_prompts_are_computed_again(fails: bool) -> None:
    async def main() -> None:
        async with toy_async_engine(block_size=4, max_num_batched_tokens=4) as engine:
            await engine.pin_prompt("system", [5] * 20)
            model: Any = engine._engine.model
            model.fail = fails
            await engine.reset_prefix_cache()
            await engine.sleep()
            model.fail = False
            await engine.wake_up()
            prompt = {"prompt_token_ids": [1, 2], "pinned_prompt": "system"}
            if fails:
                with pytest.raises(RequestError, match=r"pinned prompt must be one of \[\], got 'system'"):
                    await read(engine.generate(prompt, GREEDY))
            else:
                [*_, output] = await read(engine.generate(prompt, GREEDY))
                assert output.num_cached_tokens == 20
                await engine.unpin_prompt("system")

    run(main())


def test_an_engine_can_be_shut_down_while_it_sleeps() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            await engine.sleep()
            await engine.shutdown()
            assert engine.health().refusal == "the engine is shut down"

    run(main())


def test_a_paused_engine_can_be_shut_down() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            await engine.pause()
            stream = engine.generate([1], LONG)
            await stream.accepted()
            await engine.shutdown()
            assert (await read(stream))[-1].outputs[0].finish_reason == "abort"

    run(main())


def test_health_shows_a_step_that_hangs() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            step, may_step = engine._engine.step, threading.Event()
            engine._engine.step = lambda: (may_step.wait(30), step())[1]  # type: ignore[method-assign]
            stream = engine.generate([1], GREEDY)
            await until(lambda: engine.health().step_seconds > 0)
            first = engine.health().step_seconds
            await until(lambda: engine.health().step_seconds > first)
            may_step.set()
            await read(stream)
            await until(lambda: engine.health().step_seconds == 0)

    run(main())


def test_an_error_of_the_device_is_the_end() -> None:
    async def main() -> None:
        async with toy_async_engine() as engine:
            stream = engine.generate([1], LONG)
            await anext(stream)

            def broken() -> list[Any]:
                raise torch.AcceleratorError("an illegal memory access was encountered")

            engine._engine.step = broken  # type: ignore[method-assign]
            [*_, last] = await read(stream)
            assert last.outputs[0].stop_reason == "AcceleratorError: an illegal memory access was encountered"
            assert engine.health().is_dead
            with pytest.raises(UnavailableError, match="the engine is dead"):
                engine.generate([1], GREEDY)

    run(main())


def test_steps_are_observed() -> None:
    async def main() -> None:
        seen = []
        async with toy_async_engine() as engine:
            engine.on_step(seen.append)
            await read(engine.generate([1, 2], GREEDY))
        assert [step.num_prompt_tokens for step in seen] == [2] + [0] * (len(seen) - 1)

    run(main())


def test_a_timeout_ends_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    async def main() -> None:
        async with toy_async_engine(max_num_seqs=1) as engine:
            running = engine.generate([1], LONG, timeout=5)
            await anext(running)
            await engine.pause()
            waiting = engine.generate([2], LONG, queue_timeout=2)
            await waiting.accepted()
            clock.now += 5
            await engine.resume()
            for stream, limit in ((waiting, "queue_timeout"), (running, "timeout")):
                [*_, last] = await read(stream)
                assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("timeout", limit)
            assert engine.stats().num_expired == 2

    run(main())


def test_cache_salt() -> None:
    async def main() -> None:
        async with toy_async_engine(block_size=4) as engine:

            async def cached(salt: str) -> int:
                [*_, last] = await read(engine.generate([5] * 21, GREEDY, cache_salt=salt))
                return last.num_cached_tokens

            assert [await cached(salt) for salt in ("", "", "a", "a", "b")] == [0, 20, 0, 20, 0]
            prompt = {"prompt_token_ids": [5] * 21, "cache_salt": "a"}
            assert (await read(engine.generate(prompt, GREEDY)))[-1].num_cached_tokens == 20

    run(main())


def test_a_program_that_forgets_the_shutdown_ends() -> None:
    code = (
        "import asyncio\n"
        "from support.toy import toy_engine\n"
        "from fastinfer import AsyncEngine, SamplingParams\n"
        "engine = AsyncEngine(toy_engine())\n"
        "async def main():\n"
        "    stream = engine.generate([1], SamplingParams(max_tokens=None, ignore_eos=True))\n"
        "    print((await anext(stream)).finished)\n"
        "    return stream\n"
        "stream = asyncio.run(main())\n"
    )
    program = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, timeout=60
    )
    assert (program.returncode, program.stdout, program.stderr) == (0, "False\n", "")
