"""The sections of ``bench throughput``: their arithmetic, and that the work is done."""

import dataclasses
import itertools
import json
import math
import sys
from argparse import Namespace
from pathlib import Path

import jsonschema
import pytest
from support.fake_clock import FakeClock, use_fake_clock
from support.toy import VOCAB_SIZE
from support.toy_subject import ToySubject, toy_subject

from fastinfer.benchmarks import (
    batch_sizes,
    batching,
    policies,
    prefix_reuse,
    prompt_arrival,
    prompts,
    report,
    speculation,
    structured,
    throughput,
)
from fastinfer.benchmarks import subject as subject_module
from fastinfer.benchmarks.replay import Job, Timeline, replay
from fastinfer.benchmarks.schemas import SCHEMAS
from fastinfer.benchmarks.subject import Subject
from fastinfer.cli.arguments import THROUGHPUT_SECTIONS
from fastinfer.cli.main import main
from fastinfer.engine.grammar import GrammarCompiler
from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams
from fastinfer.structured_output import StructuredOutputsParams

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def subject(model_path: Path) -> Subject:
    return Subject.load(str(model_path), "auto", device="cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return use_fake_clock(monkeypatch)


def test_the_program_knows_the_sections() -> None:
    assert tuple(throughput.SECTIONS) == tuple(throughput.LONGEST) == THROUGHPUT_SECTIONS


def test_median_ratio_is_of_pairs() -> None:
    assert report.median_ratio([1.0, 10.0, 9.0], [2.0, 10.0, 3.0]) == 1.0


def test_goals() -> None:
    at_least, at_most = report.Goal("speed", 2.5, at_least=2.5), report.Goal("delay", 1.25, at_most=1.0)
    assert (at_least.holds, at_most.holds) == (True, False)
    assert report.goal_rows([at_least, at_most])[1:] == [
        ["speed", "2.5", ">= 2.5", "yes"],
        ["delay", "1.25", "<= 1", "no"],
    ]
    assert at_most.as_dict()["holds"] is False


@pytest.mark.usefixtures("clock")
def test_batch_sizes() -> None:
    """Six tokens each after five of the prompt: one request takes 5 + 5 seconds, three take 15 + 5 * 3."""
    toy = toy_subject()
    result = batch_sizes.measure(toy, [1, 3], 5, 6, 2)
    assert result.sizes == [
        batch_sizes.BatchSize(1, [0.6] * 2, [1.0] * 2, 5.0, {50: 1.0, 95: 1.0, 99: 1.0}),
        batch_sizes.BatchSize(3, [0.6] * 2, [1.0] * 2, 15.0, {50: 3.0, 95: 3.0, 99: 3.0}),
    ]
    # A warm-up and two repeats; each of 4 requests computes its prompt and all but its last token.
    assert sum(toy.model.batch_sizes) == 3 * 4 * (5 + 5)
    assert [row[0] for row in result.rows()] == ["requests at once", "1", "3"]
    assert result.goals() == []


def test_batch_sizes_without_a_window_in_which_all_decode() -> None:
    size = batch_sizes.BatchSize(1, [10.0], [], 0.5, {50: 0.1, 95: 0.1, 99: 0.1})
    assert batch_sizes.BatchSizes(1, 2, [size]).rows()[1][:5] == ["1", "10.0", "1.00", "-", "500"]


def test_batch_gain_is_against_one_at_a_time() -> None:
    sizes = [
        batch_sizes.BatchSize(n, speeds, [], 0.5, {50: 0.1, 95: 0.1, 99: 0.1})
        for n, speeds in ((16, [30.0, 60.0, 45.0]), (1, [10.0, 10.0, 30.0]))
    ]
    result = batch_sizes.BatchSizes(1, 2, sizes)
    assert [row[2] for row in result.rows()[1:]] == ["3.00", "1.00"]
    assert [(goal.value, goal.at_least) for goal in result.goals()] == [(3.0, 2.5)]


def test_mixed_trace() -> None:
    jobs = policies.mixed_trace(toy_subject(), 200, 10.0)
    lengths = [len(job.prompt_token_ids) for job in jobs]
    new_tokens = [job.params.max_tokens or 0 for job in jobs]
    assert min(lengths) in range(16, 20)
    assert max(lengths) in range(100, 129)
    assert min(new_tokens) in range(8, 10)
    assert max(new_tokens) in range(400, 513)
    assert all(job.params.ignore_eos for job in jobs)
    assert max(max(job.prompt_token_ids) for job in jobs) < VOCAB_SIZE
    gaps = [after.arrival_s - before.arrival_s for before, after in itertools.pairwise(jobs)]
    assert min(gaps) > 0
    assert math.isclose(sum(gaps) / len(gaps), 0.1, rel_tol=0.3)
    assert policies.mixed_trace(toy_subject(), 200, 10.0) == jobs
    assert {job.arrival_s for job in policies.mixed_trace(toy_subject(), 5, None)} == {0.0}


@pytest.mark.usefixtures("clock")
def test_policies_do_the_same_work() -> None:
    toy = toy_subject()
    jobs = policies.mixed_trace(toy, 7, None, (2, 20), (2, 16))
    result = policies.measure(toy, jobs, None, 3, 2)
    assert [policy.name for policy in result.policies] == ["continuous", "static", "dynamic"]
    once = sum(len(job.prompt_token_ids) + (job.params.max_tokens or 0) - 1 for job in jobs)
    assert sum(toy.model.batch_sizes) == 3 * 3 * once
    assert result.num_new_tokens == sum(job.params.max_tokens or 0 for job in jobs)
    assert [policy.tokens_per_s for policy in result.policies] == [[result.num_new_tokens / once] * 2] * 3
    assert [row[2] for row in result.rows()[1:]] == ["1.00"] * 3
    assert len(result.goals()) == 1


def test_continuous_batching_takes_fewer_steps() -> None:
    toy = toy_subject()
    jobs = policies.mixed_trace(toy, 12, None, (2, 6), (2, 40))
    steps, texts = {}, []
    for name, policy in batching.policies(4, 512).items():
        toy.model.batch_sizes.clear()
        run = replay(toy.make_engine(max_num_seqs=4, enable_prefix_caching=False), jobs, policy)
        steps[name] = len(toy.model.batch_sizes)
        texts.append([timeline.token_ids for timeline in run.timelines])
    assert texts == [texts[0]] * 3
    assert steps["continuous"] < steps["static"] <= steps["dynamic"]


@pytest.mark.usefixtures("clock")
def test_prompt_arrival() -> None:
    """Alone a prompt of 50 comes in chunks of 16; beside two streams in chunks of 14, each in a step of 16 tokens."""
    toy = toy_subject()
    result = prompt_arrival.measure(toy, 2, prompt_tokens=50, streams=2, settled=4, chunk_tokens=16)
    assert max(toy.model.batch_sizes) == 16
    assert (result.chunk_s, result.alone_s) == ([16.0] * 2, [50.0] * 2)
    assert (result.usual_gap_s, result.longest_gap_s) == ([2.0] * 2, [16.0] * 2)
    assert result.first_token_s == [3 * 16.0 + (50 - 3 * 14) + 2] * 2


def test_prompt_arrival_counts_the_delay_in_chunks() -> None:
    result = prompt_arrival.PromptArrival(50, 2, 16, [0.1, 0.1], [0.3, 0.5], [0.2, 0.2], [1.0, 1.0], [1.0, 1.0])
    (goal,) = result.goals()
    assert math.isclose(goal.value, 1.5)
    assert not goal.holds


@pytest.mark.usefixtures("clock")
def test_prefix_reuse() -> None:
    """Of the prefix two blocks of 32 are found."""
    result = prefix_reuse.measure(toy_subject(), 3, prefix_tokens=70, tail_tokens=5)
    assert (result.first_s, result.second_s) == ([75.0] * 3, [11.0] * 3)
    assert [row[1] for row in result.rows()[1:]] == ["75000.0", "11000.0"]
    [goal] = result.goals()
    assert goal.value == pytest.approx(11 / 75)


def test_prefix_reuse_refuses_a_cache_that_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = toy_subject()
    monkeypatch.setattr(
        ToySubject,
        "make_engine",
        lambda self, **options: Subject.make_engine(self, enable_prefix_caching=False, **options),
    )
    with pytest.raises(RequestError, match="expected 0 and then 64 tokens, got 0 and 0"):
        prefix_reuse.measure(toy, 1, prefix_tokens=70, tail_tokens=5)


@pytest.mark.usefixtures("clock")
def test_speculation() -> None:
    """Alone, and without it, every token but the first takes a second."""
    toy = toy_subject()
    prompts_of = {"copy-heavy": [[1, 2, 3] * 4, [5, 6, 7, 8] * 3], "others": [[9, 1, 4]]}
    result = speculation.measure(toy, 3, 2, new_tokens=10, prompts_of=prompts_of)
    assert [(case.kind, len(case.plain_s), len(case.speculative_s)) for case in result.alone] == [
        ("copy-heavy", 2, 2),
        ("copy-heavy", 2, 2),
        ("others", 2, 2),
    ]
    assert [case.plain_s for case in result.alone] == [[float(case.num_tokens)] * 2 for case in result.alone]
    assert [case.name for case in result.at_once] == ["2 at once", "1 at once"]
    assert [engine.config.num_speculative_tokens for engine in toy.engines] == [0, 3]
    assert all(0 <= case.num_accepted <= case.num_drafted for case in result.alone)
    assert len(result.rows()) == 6


def test_speculation_gain_and_goals() -> None:
    def case(kind: str, plain: float, with_it: float) -> speculation.Case:
        return speculation.Case(kind, "x", 10, [plain], [with_it], 8, 4)

    alone = [case("copy-heavy", 2, 1), case("copy-heavy", 3, 1), case("others", 1, 1), case("others", 0.9, 1)]
    goals = speculation.Speculation(7, alone, []).goals()
    assert [(goal.value, goal.holds) for goal in goals] == [(2.5, True), (0.9, False)]


def test_speculation_refuses_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(ToySubject):
        def make_engine(self, **options: object) -> object:
            if "num_speculative_tokens" in options:
                object.__setattr__(self, "model", type(self.model)())
                self.model.logits = lambda *args: -type(self.model).logits(self.model, *args)
            return super().make_engine(**options)

    toy = toy_subject()
    other = Other(toy.model, toy.tokenizer, toy.kv_cache_dtype)
    object.__setattr__(other, "engines", [])
    with pytest.raises(RequestError, match="expected the same tokens with and without"):
        speculation.measure(other, 3, 1, new_tokens=6, prompts_of={"others": [[9, 1, 4]]})


def test_prompts_fit_the_model(subject: Subject) -> None:
    lengths = [len(subject.chat_prompt(text, prompts.SYSTEM)) for text in (*prompts.COPY_HEAVY, *prompts.OTHERS)]
    assert 100 < min(lengths) < max(lengths) < 700
    text = subject.tokenizer.decode(subject.chat_prompt("Hello", "Be brief."), skip_special_tokens=False)
    assert text.index("Be brief.") < text.index("Hello") < text.index("assistant")


def test_twenty_schemas_compile(subject: Subject) -> None:
    compiler = GrammarCompiler(subject.tokenizer, subject.model.config.vocab_size)
    assert len(SCHEMAS) == 20
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        compiler.submit(StructuredOutputsParams(json=schema)).result(timeout=60)


@pytest.mark.slow
def test_structured(subject: Subject) -> None:
    result = structured.measure(subject, 3, 1, streams=2, string_tokens=6)
    assert [cost.name for cost in result.costs] == ["strings, 1 at once", "strings, 2 at once", "3 answers"]
    assert (result.num_requests, result.num_schemas, result.num_complete, result.num_valid) == (3, 3, 3, 3)
    answers = result.costs[-1]
    assert answers.draws_with < answers.num_tokens == answers.draws_without  # names and punctuation are forced
    assert [goal.name for goal in result.goals()][-1] == "share of 3 JSON answers that validate"
    assert len(result.rows()) == 4


def test_invalid_answers_are_found() -> None:
    structured_outputs = StructuredOutputsParams(json={"type": "integer", "minimum": 3})
    job = Job([1], SamplingParams(structured_outputs=structured_outputs))
    timelines = [Timeline(job, finish_reason=reason) for reason in ("stop", "stop", "stop", "length")]
    invalid = structured.find_invalid(timelines, ["4", "2", "four", "44"])
    assert [line.partition(":")[0] for line in invalid] == ["'2'", "'four'", "'44'"]


@pytest.mark.parametrize("package", ["jsonschema", "llguidance"])
def test_a_missing_package_is_told_before_anything_is_measured(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(throughput.Subject, "load", None)
    assert main(["bench", "throughput"]) == 2
    assert f"needs the package {package}" in capsys.readouterr().err


def test_cost_of_a_schema() -> None:
    cost = structured.Cost("x", 100, draws_with=50, draws_without=100, with_s=[1.0, 1.2], without_s=[1.0, 1.0])
    assert math.isclose(cost.per_token, 1.1)
    assert math.isclose(cost.per_draw, 2.2)


def test_throughput_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(throughput.Subject, "load", lambda name: toy_subject())
    sizes = ["--batch-sizes=1,2", "--prompt-tokens=4", "--new-tokens=4", "--repeats=1", "--only=batch"]
    assert main(["bench", "throughput", *sizes, "--out", str(tmp_path / "new")]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:5]] == ["batch", "requests", "1", "2"]
    written = json.loads((tmp_path / "new/throughput.json").read_text())
    assert written["settings"]["batch_sizes"] == [1, 2]
    assert written["settings"]["device"] == "cpu"
    assert written["machine"]["cpu"]["name"]
    assert [size["batch_size"] for size in written["results"]["batch"]["sizes"]] == [1, 2]
    assert (tmp_path / "new/throughput.png").stat().st_size > 1000


def test_options_reach_every_engine(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    given: dict[str, object] = {}
    toy = dataclasses.replace(toy_subject(), context=90)
    object.__setattr__(toy, "engines", [])

    def load(name: str, **options: object) -> ToySubject:
        given.update(options)
        return toy

    def measure(subject: Subject, jobs: list[Job], rate: float | None, max_num_seqs: int, *_: object) -> None:
        raise RequestError(f"max_num_seqs {max_num_seqs}")

    monkeypatch.setattr(throughput.Subject, "load", load)
    monkeypatch.setattr(policies, "measure", measure)
    monkeypatch.setitem(throughput.LONGEST, "policies", lambda subject, args: 90)
    options = "--device=cpu --dtype=float32 --kv-cache-dtype=int8 --context=90 --max-num-seqs=3"
    sizes = ["--batch-sizes=1,2", "--prompt-tokens=4", "--new-tokens=4", "--repeats=1", "--requests=3"]
    assert main(["bench", "throughput", *sizes, "--only=batch,policies", *options.split()]) == 2
    assert "max_num_seqs 3" in capsys.readouterr().err
    assert given == {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "int8", "max_model_len": 90}
    assert {engine.config.max_model_len for engine in toy.engines} == {90}


def test_a_context_that_is_too_short() -> None:
    with pytest.raises(RequestError, match=r"--context must be at least 41 for these requests, got 40"):
        dataclasses.replace(toy_subject(), context=40).make_engine(max_num_seqs=1, max_model_len=41)


def test_a_context_that_is_too_short_for_a_later_section(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """The toy has 96 positions. Nothing is measured before the error."""
    toy = toy_subject()
    monkeypatch.setattr(throughput.Subject, "load", lambda name: toy)
    sizes = ["--batch-sizes=1", "--prompt-tokens=4", "--new-tokens=4", "--repeats=1"]
    assert main(["bench", "throughput", *sizes, "--only=batch,prefix"]) == 2
    assert "error: --context must be at least 1017 for the section prefix, got 96\n" in capsys.readouterr().err
    assert toy.engines == []


def test_sections_know_their_longest_sequences(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Exception):
        pass

    made: list[int] = []

    def make_engine(self: Subject, *, max_model_len: int, **options: object) -> None:
        made.append(max_model_len)
        raise Made

    monkeypatch.setattr(Subject, "make_engine", make_engine)
    sizes = {"prompt_tokens": 30, "new_tokens": 7, "batch_sizes": [1], "requests": 9, "rate": None, "repeats": 1}
    args = Namespace(**sizes, engine_options={}, speculative_tokens=3, json_requests=20)
    for name, measure in throughput.SECTIONS.items():
        with pytest.raises(Made):
            measure(subject, args, lambda text: None)
        assert made.pop() == throughput.LONGEST[name](subject, args)


def test_loading_leaves_the_device_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def resolve(name: str) -> str:
        raise Asked(name)

    monkeypatch.setattr(subject_module, "resolve_device", resolve)
    with pytest.raises(Asked, match=r"^auto$"):
        Subject.load("model")


def test_throughput_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(throughput.Subject, "load", lambda name: toy_subject())
    sizes = ["--batch-sizes=1", "--prompt-tokens=4", "--new-tokens=4", "--repeats=1", "--only=batch"]
    assert main(["bench", "throughput", *sizes, "--out", str(tmp_path)]) == 0
    assert "needs matplotlib" in capsys.readouterr().err
    assert (tmp_path / "throughput.json").exists()
