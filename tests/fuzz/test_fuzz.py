"""Readers fed with mutated files: past failures, a fixed share of mutations, and the fuzzer's own eyes."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from fuzz.mutate import Case, gguf_places, mutate
from fuzz.process import Worker, read_case
from fuzz.run import CASES, Target
from fuzz.seeds import SEEDS, gguf_seeds

pytestmark = pytest.mark.slow

STORED = [
    pytest.param(target, folder, id=f"{target}-{folder.name}")
    for target in SEEDS
    for folder in (sorted((CASES / target).iterdir()) if (CASES / target).is_dir() else ())
]


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Worker]]:
    """A worker of each target, started on first use."""
    started = {target: Worker(target, next(gguf_seeds())) for target in SEEDS}
    yield started
    for worker in started.values():
        worker.close()


@pytest.mark.parametrize(("target", "folder"), STORED)
def test_what_once_failed(target: str, folder: Path, workers: dict[str, Worker]) -> None:
    failure = workers[target].run(read_case(folder)).failure
    assert not failure


@pytest.mark.parametrize("target", SEEDS)
def test_mutations_of_valid_files(target: str, workers: dict[str, Worker]) -> None:
    seeds, ends = list(SEEDS[target]()), set()
    for index, seed in enumerate(seeds):
        assert workers[target].run(seed).place == "read", index
    for index in range(100):
        random = Random(index)
        failure, place, _ = workers[target].run(mutate(random.choice(seeds), random))
        assert not failure, index
        ends.add(place)
    assert len(ends) > 4  # mutations get past the first check


FAULTS = [
    ("abort", "exit code -6"),
    ("segmentation fault", "exit code -11"),
    ("hang", "took more than 5 s"),
    ("exit", "SystemExit"),
    ("memory", "MemoryError"),
    ("raw error", "KeyError"),
    ("recursion", "RecursionError"),
    ("two lines", "more than one line"),
    ("long message", "too long"),
    ("empty message", "empty"),
]


def test_planted_faults_are_reported_and_the_next_case_is_read() -> None:
    program = Path(__file__).parent / "faulty_worker.py"
    with Worker("faulty", {}, time_limit=5, program=program) as worker:
        for fault, message in FAULTS:
            assert message in worker.run({"fault": fault.encode()})[0], fault
            assert worker.run({"fault": b"none"}).place == "read"
            assert worker.run({"fault": b"refusal"})[0] == ""


def test_the_input_of_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that begins with a case of its corpus which ends the process."""
    program = Path(__file__).parent / "faulty_worker.py"
    monkeypatch.setitem(SEEDS, "faulty", lambda: iter([{"fault": b"none"}]))
    stored = tmp_path / "corpus" / "faulty" / "a"
    stored.mkdir(parents=True)
    (stored / "fault").write_bytes(b"abort")
    with Worker("faulty", {}, program=program) as worker:
        target = Target("faulty", worker, tmp_path)
        target.read_stored()
    assert dict(target.failures) == {"exit code -6": 1}
    kept = list((tmp_path / "failures" / "faulty").iterdir())
    assert [read_case(folder) for folder in kept] == [{"fault": b"abort"}]


def test_a_seed_gives_the_same_cases_again() -> None:
    for target, seeds in SEEDS.items():
        first, second = ([mutate(seed, Random(7)) for seed in seeds()] for _ in range(2))
        assert first == second, target


def test_places_of_a_gguf_header() -> None:
    (case, *_) = gguf_seeds()
    data = case["model.gguf"]
    spans, entries = gguf_places(data)
    texts = [data[offset : offset + width] for offset, width, kind in spans if kind == "string"]
    assert {b"general.architecture", b"llama", b"token_embd.weight"} <= set(texts)
    assert data[entries[0][0] + 8 : entries[0][1]].startswith(b"general.architecture")


def test_json_stays_json() -> None:
    case: Case = {"request.json": json.dumps({"a": [1, {"b": "c"}], "d": None}).encode()}
    changed = [mutate(case, Random(seed))["request.json"] for seed in range(200)]
    parsed = 0
    for data in changed:
        try:
            json.loads(data)
            parsed += 1
        except (ValueError, RecursionError):
            pass
    assert len(set(changed)) > 100
    assert parsed > 100
