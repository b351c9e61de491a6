"""The ablation: that its rows do what they say, on the toy model, and once through its processes on the real one."""

import ctypes
import gc
import json
import math
import mmap
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle_heads import random_head, write_speculators
from support.tiny_folder import write_tiny_folder
from support.toy import VOCAB_SIZE, ToyModel, always_speculate
from support.toy_subject import toy_subject
from torch import Tensor

from fastinfer.benchmarks import ablation
from fastinfer.benchmarks.ablation_row import Measured, Settings, check, make_jobs, measure
from fastinfer.benchmarks.ablation_rows import ROWS, Row
from fastinfer.benchmarks.process_memory import peak_memory, reset_peak_memory
from fastinfer.benchmarks.prompts import SYSTEM
from fastinfer.benchmarks.repack import repack, weight_bytes
from fastinfer.benchmarks.replay import Job
from fastinfer.benchmarks.subject import Subject
from fastinfer.cli.arguments import ABLATION_ROWS, DRAFT_ROW
from fastinfer.cli.main import main
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.models.decoder import Decoder, DecoderLayer
from fastinfer.sampling_params import SamplingParams
from fastinfer.weights.weight import DenseWeight, Weight

pytestmark = pytest.mark.slow

Captured = pytest.CaptureFixture[str]
SETTINGS = Settings(
    "toy",
    requests=5,
    new_tokens=9,
    batch_size=2,
    speculative_tokens=3,
    limit_s=60.0,
    document_tokens=64,
    attention_share=0.9,
)
NEED_LAYERS = ("draft", "sparse")  # which the toy model does not have
NOTHING = Measured(1.0, 0, 35, [], [], 0, 1, 0, 0, 0, 0)
SHARED = [(5 * i) % VOCAB_SIZE for i in range(40)]


def toy_jobs() -> list[Job]:
    return [
        Job([*SHARED, index + 1, 3], SamplingParams(temperature=0, max_tokens=9 - index, ignore_eos=True))
        for index in range(5)
    ]


@pytest.fixture(scope="module")
def subject(model_path: Path) -> Subject:
    return Subject.load(str(model_path), "auto", device="cpu")


def test_the_program_knows_the_rows() -> None:
    assert tuple(row.key for row in ROWS) == ABLATION_ROWS


@pytest.mark.parametrize("row", [row for row in ROWS if row.key not in NEED_LAYERS], ids=lambda row: row.key)
def test_each_row_does_the_whole_work_in_its_way(row: Row) -> None:
    toy = toy_subject()
    measured = measure(toy, row, SETTINGS, toy_jobs())
    ablation.check_complete(row, measured)
    assert measured.num_tokens == measured.num_requested == 9 + 8 + 7 + 6 + 5
    assert len(measured.first_token_s) == 5
    (engine,) = toy.engines
    config = engine.config
    assert config.enable_prefix_caching == row.prefix_caching
    assert config.num_speculative_tokens == (3 if row.speculation else 0)
    assert config.max_num_seqs == (1 if row.batching is None else 2)
    # The first two requests compute the shared block, the others find it; nothing is left of the warm-up.
    assert measured.num_cached_tokens == (3 * 32 if row.prefix_caching else 0)
    if not row.speculation:
        assert len(measured.gaps_s) == measured.num_tokens - 5


def test_rows_without_a_kv_cache_compute_more() -> None:
    computed = {}
    for row in ROWS[:4]:
        toy = toy_subject()
        measure(toy, row, SETTINGS, toy_jobs())
        computed[row.key] = sum(toy.model.batch_sizes)
    assert computed["none"] > 5 * computed["kv"]
    assert computed["batch"] > 5 * computed["kv+batch"]


def test_a_time_limit_is_no_missing_work_but_nothing_at_all_is() -> None:
    run = Measured(1.0, 3, 35, [0.1], [0.1], 0, 1, 0, 0, 0, 0)
    ablation.check_complete(ROWS[0], run)
    with pytest.raises(RequestError, match="KV cache: expected 35 tokens, got 3"):
        ablation.check_complete(ROWS[1], run)
    with pytest.raises(RequestError, match="none: expected 35 tokens, got 0"):
        ablation.check_complete(ROWS[0], replace(run, num_tokens=0))


def test_gain_is_of_each_repeat() -> None:
    def run(num_tokens: int, seconds: float) -> Measured:
        return Measured(seconds, num_tokens, num_tokens, [], [], 0, 1, 0, 0, 0, 0)

    results = {"none": [run(10, 1), run(10, 2), run(10, 1)], "kv": [run(30, 1), run(30, 2), run(50, 1)]}
    assert ablation.gain(ROWS[1], ROWS[:2], results) == 3.0
    results["none"].append(run(20, 1))  # a repeat that failed before the other row
    assert ablation.gain(ROWS[1], ROWS[:2], results) == 3.0


def test_gain_is_relative_to_the_baseline() -> None:
    runs = {row.key: [Measured(1.0, 10 * (1 + index), 0, [], [], 0, 1, 0, 0, 0, 0)] for index, row in enumerate(ROWS)}
    rows = {row.key: row for row in ROWS}
    index = ABLATION_ROWS.index("long")
    assert ablation.gain(rows["sparse"], ROWS, runs) == pytest.approx((index + 3) / (index + 1))
    assert ablation.gain(rows["kv"], ROWS, runs) == 2
    assert ablation.gain(rows["sparse"], [rows["none"], rows["sparse"]], runs) == 1, "the first has another workload"


@pytest.mark.parametrize(("key", "draft"), [("draft", "head"), ("draft", "model"), ("sparse", "head")])
def test_rows_that_need_layers(key: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = (row for row in ROWS if row.key == key)
    engines = []
    make_engine = Subject.make_engine

    def remember(*args: Any, **options: Any) -> Engine:
        engines.append(make_engine(*args, **options))
        return engines[-1] if engines[-1].speculator is None else always_speculate(engines[-1])

    monkeypatch.setattr(Subject, "make_engine", remember)
    write_tiny_folder(tmp_path / "model", sizes={"num_hidden_layers": 4})
    write_speculators(tmp_path / "head", random_head(), eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    tiny = Subject.load(str(tmp_path / "model"), "float32", device="cpu")
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    measured = measure(tiny, row, replace(SETTINGS, draft_model=str(tmp_path / draft)), [Job([7, 8, 9], params)] * 3)
    ablation.check_complete(row, measured)
    assert (measured.num_drafted > 0) is row.draft_model
    assert engines[0].config.sparse_attention == (0.9 if row.sparse_attention else None)


def test_long_prompts_have_the_same_text_with_and_without_modules(subject: Subject) -> None:
    rows = {row.key: row for row in ROWS}
    settings = replace(SETTINGS, document_tokens=200)
    plain, modules = (make_jobs(subject, rows[key], settings) for key in ("long", "modules"))
    for whole, divided in zip(plain, modules, strict=True):
        assert whole.layout is None
        assert divided.layout is not None
        assert divided.layout.as_read(divided.prompt_token_ids) == whole.prompt_token_ids
    assert plain[0].prompt_token_ids[:8] != plain[1].prompt_token_ids[:8]
    assert plain[0].prompt_token_ids[8:208] == plain[1].prompt_token_ids[8:208]
    # The second prompt finds three blocks of 32 in each half of 100 tokens, and computes the first one again.
    cached = measure(subject, rows["modules"], replace(settings, batch_size=1), modules[:2]).num_cached_tokens
    assert cached == 2 * 2 * 32


def test_the_workload_shares_its_beginning(subject: Subject) -> None:
    settings = replace(SETTINGS, requests=12, new_tokens=40)
    jobs = make_jobs(subject, ROWS[0], settings)
    assert len({tuple(job.prompt_token_ids) for job in jobs}) == 8
    shared = len(subject.tokenizer.encode(SYSTEM, add_special_tokens=False))
    assert len({tuple(job.prompt_token_ids[:shared]) for job in jobs}) == 1
    assert all(10 <= (job.params.max_tokens or 0) <= 40 for job in jobs)
    assert make_jobs(subject, ROWS[0], settings) == jobs


def layer_weights(layer: DecoderLayer) -> list[Weight]:
    return [layer.attention.qkv, layer.attention.output.weight, layer.mlp.gate_up, layer.mlp.down.weight]


def test_repacked_models_compute_the_same(subject: Subject) -> None:
    decoder = subject.model
    assert isinstance(decoder, Decoder)
    first = replace(decoder, layers=decoder.layers[:1])
    x = torch.randn(3, decoder.config.hidden_size, generator=torch.Generator().manual_seed(1))
    layer = first.layers[0]
    expected = x @ layer.attention.qkv.rows(None, torch.float32).T
    sizes = []
    for form, tolerance in (("float32", 1e-5), ("int8", 2e-2), ("int4", 2e-2)):
        other = repack(first, form)
        assert other.lm_head is other.embedding
        got = other.layers[0].attention.qkv.linear(x)
        assert float((got - expected).norm() / expected.norm()) < tolerance
        sizes.append(weight_bytes(other))
    assert isinstance(repack(first, "float32").layers[0].mlp.down.weight, DenseWeight)
    num_weights = sum(weight.rows(None, torch.float32).numel() for weight in (*layer_weights(layer), first.embedding))
    assert sizes[0] == 4 * num_weights
    assert math.isclose(sizes[1], num_weights * (1 + 2 / 32), rel_tol=1e-3)
    assert sizes[2] < sizes[1]


def test_repack_refuses_other_files(subject: Subject) -> None:
    decoder = subject.model
    assert isinstance(decoder, Decoder)
    first = replace(decoder, layers=decoder.layers[:1])
    with pytest.raises(UnsupportedModelError, match=r"expected weights of 4 bits, got \[8\]"):
        repack(repack(first, "int8"), "int4")
    with pytest.raises(UnsupportedModelError, match="expected a model of quantised weights, got DenseWeight"):
        repack(repack(first, "float32"), "int8")


def test_rows_are_checked_before_they_are_measured(subject: Subject, tmp_path: Path) -> None:
    rows = {row.key: row for row in ROWS}
    for key in ("none", "kv", "int8", "int4", "sparse"):
        check(subject, rows[key], SETTINGS)
    with pytest.raises(RequestError, match=r"--context must be at least \d+ for the row kv, got 40"):
        check(replace(subject, context=40), rows["kv"], SETTINGS)
    write_tiny_folder(tmp_path / "model")
    with pytest.raises(RequestError, match=r"the draft model must have the vocabulary of \d+ tokens"):
        check(subject, rows["draft"], replace(SETTINGS, draft_model=str(tmp_path / "model")))
    with pytest.raises(RequestError, match="--rows: kv repacks the weights, which needs --device cpu, got cuda:0"):
        check(replace(subject, device="cuda:0"), rows["kv"], SETTINGS)
    assert isinstance(subject.model, Decoder)
    first = replace(subject.model, layers=subject.model.layers[:1])
    with pytest.raises(UnsupportedModelError, match=r"expected weights of 4 bits, got \[8\]"):
        check(replace(subject, model=repack(first, "int8")), rows["prefix"], SETTINGS)


MB = 1 << 20


@pytest.fixture
def resettable() -> None:
    """Some kernels have no peak that can be reset."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(str(error))


def allocate(megabytes: int) -> None:
    """Touch new memory, and give it back. The allocator's might be memory that the process has kept."""
    with mmap.mmap(-1, megabytes * MB) as memory:
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1


@pytest.mark.usefixtures("resettable")
def test_peak_memory_can_be_reset() -> None:
    reset_peak_memory()
    start = peak_memory()
    allocate(128)
    assert 120 * MB < peak_memory() - start < 192 * MB
    reset_peak_memory()
    assert peak_memory() - start < 64 * MB


@pytest.mark.usefixtures("resettable")
def test_peak_memory_of_a_row_is_that_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that of the warm-up before it."""
    forward = ToyModel.forward
    gc.collect()  # what earlier tests have left is given back now, not between two measurements
    ctypes.CDLL(None).malloc_trim(0)
    measure(toy_subject(), ROWS[1], SETTINGS, toy_jobs())
    toy = toy_subject()
    usual = measure(toy, ROWS[1], SETTINGS, toy_jobs()).peak_memory

    def peak_with_large_step(index: int) -> int:
        def step(model: ToyModel, *args: Any) -> Tensor:
            if len(model.batch_sizes) == index:
                allocate(128)
            return forward(model, *args)

        with monkeypatch.context() as patch:
            patch.setattr(ToyModel, "forward", step)
            return measure(toy_subject(), ROWS[1], SETTINGS, toy_jobs()).peak_memory - usual

    assert 120 * MB < peak_with_large_step(len(toy.model.batch_sizes) - 1) < 192 * MB
    assert peak_with_large_step(0) < 64 * MB


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "_check_in_process", lambda rows, settings: settings.loading["device"])


@pytest.mark.usefixtures("no_checks")
def test_a_row_that_fails_does_not_lose_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    order: list[str] = []

    def run(row: Row, settings: Settings) -> Measured:
        order.append(row.key)
        if len(order) == 5:
            raise RequestError("the row failed")
        return Measured(1.0, 10, 10, [0.5], [0.1, 0.2], 50_000_000, 90_000_000, 1, 0, 0, 0)

    monkeypatch.setattr(ablation, "_measure_in_process", run)
    assert main(["bench", "ablation", "--rows=none,kv,int8", "--repeats=3", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith("fastinfer: error: the row failed\n")
    assert [line.split()[0] for line in captured.out.splitlines()[1:4]] == ["none", "KV", "+"]
    written = json.loads((tmp_path / "ablation.json").read_text())
    assert written["settings"]["loading"]["device"] == "cpu"
    assert [len(row["runs"]) for row in written["rows"].values()] == [2, 1, 1]


@pytest.mark.usefixtures("no_checks")
def test_without_any_row_there_is_no_table(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(ablation, "_measure_in_process", lambda row, settings: ablation.check_complete(row, NOTHING))
    assert main(["bench", "ablation", "--rows=kv"]) == 2
    assert capsys.readouterr().out == ""


def test_more_drafts_than_an_engine_takes_are_refused(capsys: Captured) -> None:
    for benchmark in ("ablation", "throughput"):
        assert main(["bench", benchmark, "--speculative-tokens=16", "--model=missing.gguf"]) == 2
        assert "--speculative-tokens: expected an integer in 1..15, got '16'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_checks")
def test_ablation_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    order = []

    def run(row: Row, settings: Settings) -> Measured:
        order.append(row.key)
        tokens = 10 if row.kv_cache else 2
        return Measured(1.0, tokens, 10, [0.5], [0.1, 0.2], 50_000_000, 90_000_000, 1, 0, 8 * row.speculation, 4)

    monkeypatch.setattr(ablation, "_measure_in_process", run)
    keys = [key for key in ABLATION_ROWS if key != DRAFT_ROW]
    assert main(["bench", "ablation", "--rows", ",".join(keys), "--repeats", "2", "--out", str(tmp_path)]) == 0
    assert order == keys * 2  # in turns
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["none", "2.0", "1.00", "-", "100.0", "200.0", "50", "90"]
    assert lines[2].split() == ["KV", "cache", "10.0", "5.00", "3", "0.50", "100.0", "200.0", "50", "90"]
    assert "stopped after 2 of 10 tokens" in lines[13]
    assert "4 of 8 drafts accepted; 10% of the tokens after the answer's own end" in lines[21]
    written = json.loads((tmp_path / "ablation.json").read_text())
    assert list(written["rows"]) == order[: len(ROWS) - 1]
    assert written["rows"]["kv"]["runs"][0]["num_tokens"] == 10
    assert written["settings"]["repeats"] == 2
    assert (tmp_path / "ablation.png").stat().st_size > 1000


def test_ablation_in_its_processes(model_path: Path, capsys: Captured) -> None:
    sizes = ["--requests=1", "--new-tokens=2", "--max-num-seqs=1", "--repeats=1"]
    assert main(["bench", "ablation", "--model", str(model_path), "--rows=int4", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    # No first row without optimisations, hence nothing to compare published figures with.
    assert re.fullmatch(r"\+ INT4 weights +[\d.]+ +1\.00( +[\d.]+){5}", lines[1])


@pytest.mark.usefixtures("no_checks")
def test_options_reach_the_processes_of_an_ablation(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    seen = []

    def run(row: Row, settings: Settings) -> Measured:
        seen.append(settings)
        return Measured(1.0, 10, 10, [0.5], [0.1, 0.2], 50_000_000, 90_000_000, 1, 0, 0, 0)

    monkeypatch.setattr(ablation, "_measure_in_process", run)
    assert main(["bench", "ablation", "--rows=draft"]) == 2
    options = "--device=cpu --dtype=float32 --kv-cache-dtype=int8 --context=200 --max-num-seqs=3 --threads=2"
    assert main(["bench", "ablation", "--rows=kv", "--repeats=1", *options.split()]) == 0
    [settings] = seen
    assert settings.loading == {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "int8", "max_model_len": 200}
    assert (settings.batch_size, settings.threads) == (3, 2)


def test_a_failed_process_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    assert main(["bench", "ablation", "--rows=kv", "--model", str(tmp_path / "damaged.gguf")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("fastinfer: error: ablation: ")
    assert "damaged.gguf" in line
