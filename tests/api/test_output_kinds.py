"""What outputs contain, how missed ones are merged, and that a reader who pauses costs no memory."""

import asyncio
import copy
import dataclasses
import pickle
import threading
from functools import partial
from itertools import chain, count
from typing import Any

import pytest
from support.toy import ToyTokenizer, drain, greedy, prompts, toy_engine

from fastinfer import AsyncEngine, RequestError, RequestOutput, RequestOutputKind, SamplingParams
from fastinfer.engine.engine import Engine
from fastinfer.serving.shared_engine import Job, SharedEngine

PARAMS = SamplingParams(n=2, seed=4, max_tokens=30, ignore_eos=True, logprobs=1)
KINDS = list(RequestOutputKind)
NUMBERS = count()


def outputs_of(kind: RequestOutputKind) -> list[RequestOutput]:
    engine = toy_engine()
    engine.add_request([5, 6], dataclasses.replace(PARAMS, output_kind=kind))
    outputs: list[Any] = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def test_each_kind_reports_the_same_generation() -> None:
    cumulative, deltas, final = map(outputs_of, KINDS)
    assert [len(outputs) for outputs in (cumulative, deltas, final)] == [30, 30, 1]
    for index in range(2):
        last = cumulative[-1].outputs[index]
        assert final[0].outputs[index] == dataclasses.replace(last, delta=last.text)
        for number, output in enumerate(cumulative, start=1):
            assert output.outputs[index].token_ids == last.token_ids[:number]
            assert last.text.startswith(output.outputs[index].text)
        parts = [output.outputs[index] for output in deltas]
        assert "".join(part.text for part in parts) == last.text
        assert all(part.text == part.delta for part in parts)
        assert [token for part in parts for token in part.token_ids] == last.token_ids
        assert [entry for part in parts for entry in part.logprobs or ()] == last.logprobs
        assert parts[-1].cumulative_logprob == last.cumulative_logprob


def test_outputs_are_values() -> None:
    [*_, output] = outputs_of(RequestOutputKind.CUMULATIVE)
    [*_, same] = outputs_of(RequestOutputKind.CUMULATIVE)
    completion = output.outputs[0]
    assert completion == same.outputs[0]
    assert pickle.loads(pickle.dumps(completion)) == copy.deepcopy(completion) == completion
    assert dataclasses.replace(completion, text="other").text == "other"
    assert dataclasses.asdict(completion)["token_ids"] == completion.token_ids
    assert repr(same.outputs[1]).startswith("CompletionOutput(index=1, text=")
    with pytest.raises(AttributeError, match="has no attribute 'tokens'"):
        completion.tokens  # type: ignore[attr-defined]  # noqa: B018


def test_a_kind_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match="output_kind must be a RequestOutputKind, got 'delta'"):
        SamplingParams(output_kind="delta")  # type: ignore[arg-type]


def job(engine: Engine, prompt: list[int], params: SamplingParams) -> Job[RequestOutput]:
    request_id = f"job-{next(NUMBERS)}"
    return Job(partial(engine.add_request, prompt, params, request_id=request_id), request_id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_stream_keeps_one_output(kind: RequestOutputKind) -> None:
    engine = toy_engine(max_num_seqs=4)
    shared = SharedEngine(engine)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, output_kind=kind)
    paused = shared.run([job(engine, [7, 8], params)])
    taken = [] if kind is RequestOutputKind.FINAL_ONLY else [next(paused)]
    others: dict[int, RequestOutput] = {}

    def complete(number: int) -> None:
        [others[number]] = shared.complete(
            [job(engine, prompts(4)[number], SamplingParams(temperature=0.0, max_tokens=50))]
        )

    threads = [threading.Thread(target=complete, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(len(inbox) <= 1 for inbox in shared._inboxes.values())
    taken += paused
    expected = greedy([7, 8], 60, stop_at_eos=False)
    assert "".join(output.outputs[0].delta for output in taken) == ToyTokenizer().decode(expected)
    tokens = [output.outputs[0].token_ids for output in taken]
    assert (list(chain(*tokens)) if kind is RequestOutputKind.DELTA else tokens[-1]) == expected
    assert not shared._inboxes
    for number, output in others.items():
        assert output.outputs[0].token_ids == greedy(prompts(4)[number], 50)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_reader_of_an_async_stream(kind: RequestOutputKind) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, output_kind=kind)

    async def main() -> None:
        async with AsyncEngine(toy_engine()) as engine:
            stream = engine.generate([7, 8], params)
            outputs = [await anext(stream)]
            while engine.stats().num_running:
                await asyncio.sleep(0.001)
            outputs += [output async for output in stream]
            assert len(outputs) == (1 if kind is RequestOutputKind.FINAL_ONLY else 2)
            tokens = [output.outputs[0].token_ids for output in outputs]
            expected = greedy([7, 8], 40, stop_at_eos=False)
            assert (list(chain(*tokens)) if kind is RequestOutputKind.DELTA else tokens[-1]) == expected
            assert "".join(o.outputs[0].delta for o in outputs) == ToyTokenizer().decode(expected)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_mailbox_that_fails_ends_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with AsyncEngine(toy_engine()) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
            await engine.pause()  # so that nothing comes before the mailbox is broken
            bad, good = (engine.generate(prompt, params) for prompt in ([7, 8], [9]))

            def broken(content: object) -> bool:
                if isinstance(content, Exception):
                    return put(content)
                raise ValueError("the mailbox broke")

            put = bad._mailbox.put
            monkeypatch.setattr(bad._mailbox, "put", broken)
            await engine.resume()
            with pytest.raises(ValueError, match="the mailbox broke"):
                await anext(bad)
            outputs = [output async for output in good]
            assert outputs[-1].outputs[0].token_ids == greedy([9], 40, stop_at_eos=False)
            while engine.stats().num_used_blocks:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_output_that_nobody_waits_for_is_aborted() -> None:
    engine = toy_engine()
    shared = SharedEngine(engine)
    stray = engine.add_request([1], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    [output] = shared.complete([job(engine, [2, 3], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))])
    assert output.outputs[0].token_ids == greedy([2, 3], 9, stop_at_eos=False)
    assert stray not in drain(engine)
