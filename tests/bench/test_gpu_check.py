"""bench/gpu_check.py keeps its time, and a failure does not stop what comes after it."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import pytest

pytestmark = pytest.mark.slow


def stage(seconds: float) -> gpu_check.Stage:
    return gpu_check.Stage("any", seconds, deadline=time.monotonic() + seconds)


def test_limits_add_up_to_less_than_nine_minutes() -> None:
    assert sum(limit_s for limit_s, _ in gpu_check.STAGES.values()) < 9 * 60


@pytest.mark.parametrize("alone", [False, True])
def test_what_a_stage_leaves_over_goes_to_the_next(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes ten seconds of its time; one that runs alone gets nearly nine minutes."""
    clock, left_s = [1000.0], {}

    def note(any_stage: gpu_check.Stage, results: dict[str, object]) -> None:
        left_s[any_stage.name] = any_stage.deadline - clock[0]
        clock[0] += 10

    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(gpu_check, "STAGES", {"build": (200, note), "test": (90, note), "bench": (180, note)})
    arguments = ["--stage", "test"] if alone else []
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path), *arguments])
    gpu_check.main()
    assert left_s == ({"test": 520} if alone else {"build": 200, "test": 280, "bench": 450})


def test_output_and_exit_code_are_kept() -> None:
    any_stage = stage(60)
    output = any_stage.run("fails", [sys.executable, "-c", "print('hello'); raise SystemExit(3)"])
    assert output == "hello\n"
    assert any_stage.run("works", ["sh", "-c", "echo $WORD"], WORD="there") == "there\n"
    assert [step.returncode for step in any_stage.steps] == [3, 0]
    assert not any_stage.passed


def test_what_takes_too_long_is_stopped_and_its_output_kept(tmp_path: Path) -> None:
    """With the processes that it has started, which would write into a pipe when they end."""
    any_stage, pipe = stage(60), tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        script = f"(sleep 30; echo ended) > {pipe} & echo begun; wait; echo ended"
        assert any_stage.run("slow", ["sh", "-c", script], limit_s=1.5) == "begun\n"
        os.set_blocking(reader.fileno(), True)
        assert reader.read() == b""
    assert any_stage.steps[0].returncode is None
    assert "stopped" in any_stage.steps[0].note


def test_missing_programs_and_time_are_said() -> None:
    any_stage = stage(60)
    any_stage.run("missing", ["no-such-program"])
    any_stage.deadline = 0
    any_stage.run("late", ["true"])
    assert [step.note for step in any_stage.steps] == ["no-such-program is not installed", "no time left"]


def test_report_names_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(any_stage: gpu_check.Stage, results: dict[str, object]) -> None:
        any_stage.run("breaks", ["false"])

    monkeypatch.setattr(gpu_check, "STAGES", {"first": (9, broken), "second": (9, broken)})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path)])
    assert gpu_check.main() == 1
    text = (tmp_path / "gpu_check.txt").read_text()
    assert text.count("exit code 1") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"gpu_check.json", "gpu_check.txt", "first.log", "second.log"}
