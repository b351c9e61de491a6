"""``fastinfer bench step-cost``, on the toy model with a clock that makes every time exact."""

import json
import random
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_clock import use_fake_clock
from support.flat_model import flat_engine
from support.toy import MAX_POSITION
from support.toy_subject import toy_subject

from fastinfer.benchmarks import step_cost
from fastinfer.benchmarks.replay import Job, replay
from fastinfer.benchmarks.step_cost import StepTimes, limits_of, measure
from fastinfer.cli.main import main
from fastinfer.engine import step
from fastinfer.engine.stats import StepStats, StepWork
from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams
from fastinfer.simulation.cost_file import CostFile, EngineLimits
from fastinfer.simulation.fit import fit
from fastinfer.simulation.fleet import simulate
from fastinfer.simulation.generator import Lengths, generate_trace
from fastinfer.simulation.routing import RoundRobin
from fastinfer.simulation.step_cost import StepCost, Work


def test_the_fit_finds_the_time_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy takes a second per token, whatever the context."""
    monkeypatch.setattr(step, "time", use_fake_clock(monkeypatch))
    engine = toy_subject().make_engine(max_num_seqs=3)
    samples = measure(engine, repeats=1)
    assert all(seconds == work.num_tokens for work, seconds in samples)
    assert {work.num_seqs for work, _ in samples} == {1, 2, 3}
    alone = [work for work, _ in samples if work.num_seqs == 1 and work.num_decodes == 0]
    assert sum(work.num_tokens <= step_cost.SHORT_PROMPT_TOKENS for work in alone) >= step_cost.NUM_SHORT_PROMPTS
    assert engine.on_step is None
    cost = fit(samples).cost
    assert (cost.decode_sequence, cost.prompt_token) == pytest.approx((1.0, 1.0))
    rest = (cost.step, cost.prompt_sequence, cost.decode_context, cost.prompt_context)
    assert rest == pytest.approx((0.0,) * 4, abs=1e-9)


def test_the_file_is_read_by_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request of 5 prompt tokens and 3 output tokens takes 7 s: the last token is not computed."""
    monkeypatch.setattr(step, "time", use_fake_clock(monkeypatch))
    engine = toy_subject().make_engine(max_num_seqs=2)
    monkeypatch.setattr(step_cost, "LLM", lambda model: SimpleNamespace(engine=engine))
    args = Namespace(model="toy", engine_options={}, repeats=1, out=str(tmp_path))
    assert step_cost.run(args) == 0
    path = tmp_path / "step_cost.json"
    assert capsys.readouterr().out.endswith(f"{path}\n")
    costs = CostFile.read(path)
    assert (costs.source, costs.model, costs.limits) == ("measured", "toy", limits_of(engine))
    arguments = ["--requests", "1", "--prompt-tokens", "5", "--output-tokens", "3", "--json"]
    assert main(["simulate", str(path), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(7.0)


def test_every_pass_has_new_prompts() -> None:
    engines = [toy_subject().make_engine(max_num_seqs=2) for _ in range(2)]
    once, twice = ([work for work, _ in measure(engine, number)] for number, engine in enumerate(engines, 1))
    assert twice[: len(once)] == once
    assert twice[len(once) :] != once
    assert engines[1].block_manager.num_hit_tokens == 0


def test_a_step_takes_the_time_from_the_end_of_the_last_one() -> None:
    """Whether it began before that or right after it, but not if there was nothing to compute."""
    times, work = StepTimes(), StepWork(1, 1, 0, 1, 1, 0)
    for start, seconds in ((10.0, 2.0), (11.0, 3.0), (14.001, 1.0), (20.0, 1.0)):
        times(StepStats(start, seconds, work, 1))
    assert [seconds for _, seconds in times.samples] == pytest.approx([2.0, 2.0, 1.001, 1.0])


def test_limits_are_those_of_the_engine() -> None:
    engine = toy_subject().make_engine(max_num_seqs=3, max_num_batched_tokens=40, block_size=8)
    num_blocks, separates = engine.block_manager.pools[0].num_blocks, engine.scheduler.separates_roles
    assert limits_of(engine) == EngineLimits(3, 40, MAX_POSITION, 8, (num_blocks,), (0,), separates_roles=separates)


@pytest.mark.parametrize("separates_roles", [True, False])
def test_simulated_steps_are_those_of_the_engine(separates_roles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside generated tokens, preemptions, and more requests than the scheduler looks at."""
    monkeypatch.setattr("fastinfer.engine.engine.roles_differ", lambda device, exact: separates_roles)
    rng = random.Random(0)
    trace = generate_trace(80, None, Lengths(1, 60), Lengths(1, 40), num_prefixes=3, prefix_tokens=40)
    engine = flat_engine(max_num_seqs=8, max_num_batched_tokens=24, max_model_len=160, num_kv_blocks=24, block_size=8)
    steps: list[StepWork] = []
    engine.on_step = lambda step: steps.append(step.work)
    prefixes = {request.prefix: rng.choices(range(64), k=40) for request in trace}
    jobs = []
    for number, request in enumerate(trace):
        own = [number % 64, *rng.choices(range(64), k=request.prompt_tokens - 41)]
        params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
        jobs.append(Job(prefixes[request.prefix] + own, params))
    replay(engine, jobs)
    simulated: list[StepWork] = []

    class Cost(StepCost):
        def seconds(self, work: Work) -> float:
            simulated.append(work)  # type: ignore[arg-type]
            return 1.0

    costs = CostFile("assumed", "flat", Cost(1.0, 0.0, 0.0, 0.0, 0.0, 0.0), limits_of(engine))
    [replica] = simulate(trace, costs, RoundRobin(1)).replicas
    assert simulated == steps
    assert replica.scheduler.num_preemptions == engine.scheduler.num_preemptions > 0


def test_a_context_that_is_too_short_is_refused() -> None:
    engine = toy_subject().make_engine(max_num_seqs=1, max_model_len=63)
    with pytest.raises(RequestError, match="--context must be at least 64 to measure steps, got 63"):
        measure(engine, repeats=1)
