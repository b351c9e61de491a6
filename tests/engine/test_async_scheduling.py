"""Steps that are launched before the results of the last one are known: their order, and that no text changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fake_cuda_graph import Calls, PaddedToy, use_fakes, use_graphs, with_twin
from support.toy import ToyModel, always_speculate, check_blocks, drain, prompts, toy_engine
from support.toy_grammar import Letters, constrained

from fastinfer.engine import cuda_graphs
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.draw import Draw
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams

PROMPT = [9, 4, 17, 2, 30]
LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)


class Device:
    """Notes when a step is launched and when its tokens reach the host; until then nobody else may ask for them."""

    def __init__(self, engine: Engine) -> None:
        self.events: list[str] = []
        self.num_launched = 0
        launch = engine.sampler.launch

        def noted(*args: Any) -> Draw:
            draw, number = launch(*args), self.num_launched
            drawn, self.num_launched = draw.tokens(), number + 1
            self.events.append(f"launch {number}")

            def collect() -> Any:
                self.events.append(f"collect {number}")
                return drawn

            return Draw(collect, torch.tensor([token.token_id for token in drawn]))

        engine.sampler.launch = noted  # type: ignore[method-assign]


def test_the_next_step_is_launched_before_the_last_one_is_collected() -> None:
    engine = toy_engine(async_scheduling=True)
    device = Device(engine)
    engine.add_request(PROMPT, LONG)
    drain(engine)
    expected = ["launch 0"]
    for number in range(1, 8):
        expected += [f"launch {number}", f"collect {number - 1}"]
    # Nothing is launched for a sequence whose last token has been launched: it cannot get another.
    assert device.events == [*expected, "collect 7"]
    assert engine.stats().num_waited_steps == 0


def test_a_text_that_ends_early_costs_one_token_in_vain() -> None:
    stop = drain_one(toy_engine(), LONG).token_ids[3]
    engine = toy_engine(async_scheduling=True)
    device = Device(engine)
    engine.add_request(PROMPT, SamplingParams(temperature=1.0, seed=3, max_tokens=8, stop_token_ids=[stop]))
    drain(engine)
    assert device.events[-3:] == ["collect 2", "launch 4", "collect 3"]
    assert engine.block_manager.num_used == 0
    # What was launched in vain is collected with the next request, which it must not touch.
    engine.add_request(PROMPT, LONG)
    assert drain(engine)["request-1"].outputs[0] == drain_one(toy_engine(), LONG)


def drain_one(engine: Engine, params: SamplingParams) -> Any:
    request_id = engine.add_request(PROMPT, params)
    return drain(engine)[request_id].outputs[0]


def test_synchronous_steps_are_collected_at_once() -> None:
    engine = toy_engine()
    device = Device(engine)
    engine.add_request(PROMPT, LONG)
    drain(engine)
    assert device.events == [f"{event} {number}" for number in range(8) for event in ("launch", "collect")]
    assert engine.stats().num_waited_steps == 0


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 0.5},
        {"bad_words": ["ab"]},
        {"allowed_token_ids": [1, 2, 3]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_needs_the_results_waits_for_them(options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, **options)
    engine = toy_engine(async_scheduling=True)
    device = Device(engine)
    output = drain_one(engine, params)
    assert device.events == [f"{event} {number}" for number in range(6) for event in ("launch", "collect")]
    assert engine.stats().num_waited_steps == engine.stats().num_steps == 6
    assert output == drain_one(toy_engine(), params)


def test_logprobs_of_the_prompt_wait_for_its_steps_alone() -> None:
    engine = toy_engine(async_scheduling=True)
    device = Device(engine)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    engine.add_request(PROMPT, params)
    output = drain(engine)["request-0"]
    ahead = ["launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"]
    assert device.events == ["launch 0", "collect 0", *ahead]
    engine = toy_engine()
    engine.add_request(PROMPT, params)
    assert output.prompt_logprobs == drain(engine)["request-0"].prompt_logprobs


def test_logprobs_do_not_wait_and_are_those_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step's graph overwrites the logits before they are collected; rank and log-probability stay."""
    use_fakes(monkeypatch)
    outputs = []
    for is_async in (False, True):
        engine = use_graphs(toy_engine(model=PaddedToy(), async_scheduling=is_async))
        device = Device(engine) if is_async else None
        for seed, logprobs in enumerate((0, 2, None)):
            params = SamplingParams(temperature=1.5, seed=seed, max_tokens=8, ignore_eos=True, logprobs=logprobs)
            engine.add_request(PROMPT, params)
        outputs.append(results(drain(engine)))
        if device is not None:
            assert device.events[:4] == ["launch 0", "launch 1", "collect 0", "launch 2"]
    assert outputs[0] == outputs[1]
    ranks = {entry.rank for position in outputs[0]["request-0"][0][-1] for entry in position.values()}
    assert len(ranks) > 2


def mixed(engine: Engine) -> dict[str, Any]:
    """Requests of many kinds, some of which arrive late, end early or are aborted."""
    outputs: dict[str, Any] = {}

    def step(count: int) -> None:
        for _ in range(count):
            outputs.update({output.request_id: output for output in engine.step()})
            check_blocks(engine)

    for index, prompt in enumerate(prompts(6)):
        engine.add_request(prompt, SamplingParams(temperature=1.0, seed=index, max_tokens=3 + 4 * index))
    step(3)
    engine.add_request(PROMPT, SamplingParams(temperature=1.0, seed=9, max_tokens=9, n=3, ignore_eos=True))
    engine.add_request(PROMPT, SamplingParams(temperature=1.0, seed=4, max_tokens=9, min_tokens=6))
    step(2)
    constrained(engine, PROMPT, SamplingParams(temperature=1.0, seed=0, max_tokens=8), Letters("abc", 7))
    engine.add_request(PROMPT, SamplingParams(temperature=1.0, seed=5, max_tokens=9, stop=["a", "b", "c"]))
    step(4)
    engine.add_embedding_request(PROMPT)
    engine.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=9, logprobs=2), priority=-1)
    engine.add_request(list(reversed(PROMPT)), LONG, cache_salt="x")
    outputs.update(drain(engine))
    check_blocks(engine)
    assert engine.block_manager.num_used == 0
    return outputs


def results(outputs: dict[str, Any]) -> dict[str, Any]:
    return {
        request_id: output.embedding
        if hasattr(output, "embedding")
        else [(o.text, o.token_ids, o.finish_reason, o.stop_reason, o.logprobs) for o in output.outputs]
        for request_id, output in outputs.items()
    }


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"block_size": 2, "max_num_batched_tokens": 3},
        {"block_size": 2, "num_kv_blocks": 26, "max_model_len": 48, "max_num_batched_tokens": 16},
        {"block_size": 3, "max_num_seqs": 3},
        {"enable_prefix_caching": False},
    ],
    ids=["roomy", "few tokens", "few blocks", "few slots", "no prefix cache"],
)
def test_no_text_changes(limits: dict[str, Any]) -> None:
    engine = toy_engine(async_scheduling=True, **limits)
    assert results(mixed(engine)) == results(mixed(toy_engine(**limits)))
    assert 0 < engine.stats().num_waited_steps < engine.stats().num_steps
    if "num_kv_blocks" in limits:
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("limits", [{}, {"block_size": 2, "max_num_batched_tokens": 3}], ids=["roomy", "few tokens"])
@pytest.mark.parametrize("captured", ["all", "small", "none"])
def test_no_text_changes_on_a_gpu(captured: str, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs for all steps, for those of few tokens, or for none; drawn tokens stay on the device in any case."""
    use_fakes(monkeypatch)
    if captured == "small":
        monkeypatch.setattr(cuda_graphs, "MAX_CAPTURED_TOKENS", 8)
        monkeypatch.setattr(cuda_graphs, "MAX_DECODED_TOKENS", 8)
    engine = toy_engine(model=PaddedToy(), async_scheduling=True, **limits)
    if captured == "none":
        with_twin(engine.worker.runner.inputs)
    else:
        use_graphs(engine)
    assert results(mixed(engine)) == results(mixed(toy_engine(**limits)))
    stats = engine.stats()
    assert (stats.num_eager_steps > 0) == (captured == "none" or (captured == "small" and not limits))
    assert (stats.num_eager_steps < stats.num_steps) == (captured != "none")


def test_a_step_ahead_is_a_copy_a_replay_and_a_copy_back(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    engine = use_graphs(toy_engine(model=PaddedToy(), async_scheduling=True, block_size=64))
    for seed in range(3):
        engine.add_request(PROMPT, SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=seed, max_tokens=20))
    for _ in range(3):
        engine.step()
    calls = Calls(monkeypatch)
    for _ in range(5):
        calls.names.clear()
        with calls:
            engine.step()
        assert calls.names == [
            "Tensor.pin_memory",
            "aten.copy_.default",  # the inputs
            "FakeGraph.replay",
            "FakeHostCopy.__init__",
        ]


def test_a_step_that_begins_a_block_copies_its_entries_too(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    engine = use_graphs(toy_engine(model=PaddedToy(), async_scheduling=True, block_size=4))
    for seed in range(3):
        engine.add_request([1, 2], SamplingParams(temperature=0.8, seed=seed, max_tokens=20))
    for _ in range(3):
        engine.step()
    calls = Calls(monkeypatch)
    steps = []
    for _ in range(8):
        calls.names.clear()
        with calls:
            engine.step()
        steps.append(list(calls.names))
    inputs, rest = ["Tensor.pin_memory", "aten.copy_.default"], ["FakeGraph.replay", "FakeHostCopy.__init__"]
    entries = ["Tensor.pin_memory", "aten.index_put_.default"]
    assert [step == [*inputs, *rest] for step in steps] == [True, True, True, False] * 2, (
        "all sequences are equally long"
    )
    assert steps[3] == steps[7] == [*inputs, *entries, *rest]


def test_no_step_runs_ahead_with_a_speculator() -> None:
    """Drafts continue the last tokens, so those must be known."""
    engine = always_speculate(toy_engine(draft_model=ToyModel(), num_speculative_tokens=3, async_scheduling=True))
    device = Device(engine)
    assert results(mixed(engine)) == results(mixed(toy_engine()))
    assert engine.stats().num_drafted_tokens > 0
    in_turn = [f"{event} {number}" for number in range(device.num_launched) for event in ("launch", "collect")]
    assert device.events == in_turn
    assert engine.stats().num_waited_steps == engine.stats().num_steps


def abort(engine: Engine, request_id: str) -> None:
    output = engine.abort(request_id)
    assert output is not None
    assert output.finished


def remove_and_add(engine: Engine, request_id: str) -> None:
    """Another request gets the name of one whose step is still running."""
    abort(engine, request_id)
    engine.add_request([3, 2, 1], LONG, request_id=request_id)


@pytest.mark.parametrize("act", [abort, remove_and_add])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_request_that_is_aborted_while_a_step_runs(act: Callable[[Engine, str], None], num_steps: int) -> None:
    engine, alone = toy_engine(async_scheduling=True), toy_engine()
    engine.add_request(PROMPT, LONG, request_id="first")
    engine.add_request([5, 6], LONG, request_id="second")
    for _ in range(num_steps):
        engine.step()
    act(engine, "first")
    outputs = drain(engine)
    alone.add_request([5, 6], LONG, request_id="second")
    if act is remove_and_add:
        alone.add_request([3, 2, 1], LONG, request_id="first")
    expected = drain(alone)
    assert results(outputs) == results(expected)
    check_blocks(engine)


class FailsAt(ToyModel):
    """Raises an error in one of its steps."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.num_steps, self.failing = 0, failing

    def forward(self, *args: Any) -> Any:
        self.num_steps += 1
        if self.num_steps == self.failing:
            raise RuntimeError("the device is gone")
        return super().forward(*args)


@pytest.mark.parametrize("failing", range(1, 9))
def test_a_step_that_fails_loses_no_token(failing: int) -> None:
    """Nor does the one before it, which has not been collected yet."""
    engine = toy_engine(model=FailsAt(failing), async_scheduling=True)
    for index in range(3):
        engine.add_request(prompts(3)[index], SamplingParams(temperature=1.0, seed=index, max_tokens=5))
    outputs: dict[str, Any] = {}
    num_errors = 0
    while engine.has_unfinished:
        try:
            outputs.update({output.request_id: output for output in engine.step()})
        except RuntimeError:
            num_errors += 1
        check_blocks(engine)
    alone = toy_engine()
    for index in range(3):
        alone.add_request(prompts(3)[index], SamplingParams(temperature=1.0, seed=index, max_tokens=5))
    assert results(outputs) == results(drain(alone))
    assert num_errors == (failing <= engine.model.num_steps)  # type: ignore[attr-defined]


class NaNAt(ToyModel):
    """The logits after this token are no numbers."""

    def logits(self, *args: Any) -> Any:
        logits = super().logits(*args)
        logits[logits.argmax(-1) == self.bad] = float("nan")
        return logits

    bad = -1


def test_a_token_that_cannot_be_drawn_ends_its_request_alone() -> None:
    model = NaNAt()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = drain_one(toy_engine(), params)
    model.bad = expected.token_ids[3]
    engine = toy_engine(model=model, async_scheduling=True)
    engine.add_request(PROMPT, params)
    engine.add_request(PROMPT, SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True))
    outputs = drain(engine)
    failed = outputs["request-0"].outputs[0]
    assert (failed.finish_reason, failed.token_ids) == ("error", expected.token_ids[:3])
    assert check_blocks(engine) is None


def test_the_default_is_a_gpu() -> None:
    assert not EngineConfig().runs_ahead
    assert EngineConfig(device="cuda").runs_ahead
    assert not EngineConfig(device="cuda", async_scheduling=False).runs_ahead
    with pytest.raises(RequestError, match="async_scheduling must be True or False, got 1"):
        EngineConfig(async_scheduling=1)  # type: ignore[arg-type]
