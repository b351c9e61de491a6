"""bench/gpu_check.py keeps its time, and a failure does not stop what comes after it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import pytest
from support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def check(tmp_path: Path) -> gpu_check.Check:
    return gpu_check.Check(tmp_path, 60)


def step_in(check: gpu_check.Check, name: str, command: list[str], limit_s: float = 60, **variables: str) -> str:
    """In a stage of its own."""
    outputs: list[str] = []
    check.stage(name, limit_s, lambda check: outputs.append(check.step(name, command, **variables)))
    return outputs[0]


def steps_of(check: gpu_check.Check) -> list[dict[str, object]]:
    return [step for stage in check.found["stages"] for step in stage["steps"]]


def test_it_ends_before_ten_minutes() -> None:
    assert gpu_check.TOTAL_S < 9 * 60
    assert all(limit_s <= gpu_check.TOTAL_S for limit_s, _ in gpu_check.STAGES.values())


def test_stages_share_the_time_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left_s = [1000.0], {}

    def note(check: gpu_check.Check) -> None:
        left_s[len(left_s)] = check.left_s
        clock[0] += 25

    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    check = gpu_check.Check(tmp_path, 100)
    for limit_s in (30, 80, 80, 80):
        check.stage("any", limit_s, note)
    assert left_s == {0: 30, 1: 75, 2: 50, 3: 25}


def test_output_and_exit_code_are_kept(check: gpu_check.Check) -> None:
    output = step_in(check, "fails", [sys.executable, "-c", "print('hello'); raise SystemExit(3)"])
    assert output == "hello\n"
    assert step_in(check, "works", ["sh", "-c", "echo $WORD"], WORD="there") == "there\n"
    assert [step["returncode"] for step in steps_of(check)] == [3, 0]
    assert not check.passed
    log = (check.out / "gpu_check.log").read_text()
    assert log.index("hello") < log.index("echo $WORD") < log.index("there")


def test_what_takes_too_long_is_stopped_and_its_output_kept(check: gpu_check.Check, tmp_path: Path) -> None:
    """With the processes that it has started, which would write into a pipe when they end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        script = f"trap '' TERM; (sleep 30; echo ended) > {pipe} & echo begun; wait; wait; echo ended"
        assert step_in(check, "slow", ["sh", "-c", script], limit_s=1.5) == "begun\n"
        os.set_blocking(reader.fileno(), True)
        assert reader.read() == b""
    [step] = steps_of(check)
    assert step["returncode"] is None
    assert "stopped" in str(step["note"])


def test_a_stopped_program_may_say_what_it_has(check: gpu_check.Check) -> None:
    script = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('half'))); time.sleep(99)"
    )
    assert step_in(check, "slow", [sys.executable, "-c", script], limit_s=2) == "half\n"


def test_missing_programs_time_and_mistakes_are_said(check: gpu_check.Check) -> None:
    def mistaken(check: gpu_check.Check) -> None:
        raise KeyError("no such result")

    step_in(check, "missing", ["no-such-program"])
    step_in(check, "late", ["true"], limit_s=0)
    check.stage("mistaken", 60, mistaken)
    notes = [step["note"] for step in steps_of(check)]
    assert notes == ["no-such-program is not installed", "no time left", "KeyError: 'no such result'"]


def test_results_are_valid_after_every_step_and_on_a_full_disk(
    check: gpu_check.Check, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def written() -> list[str]:
        found = json.loads((check.out / "gpu_check.json").read_text())
        return [step["name"] for stage in found["stages"] for step in stage["steps"]]

    step_in(check, "first", ["true"])
    assert written() == ["first"]
    write_text = Path.write_text

    def full(path: Path, text: str) -> int:
        write_text(path, text[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        step_in(check, "second", ["true"])
    assert written() == ["first"]
    assert "No space left" in capsys.readouterr().out
    step_in(check, "third", ["true"])
    assert written() == ["first", "second", "third"]
    assert {path.name for path in check.out.iterdir()} == {"gpu_check.json", "gpu_check.txt", "gpu_check.log"}


def test_a_killed_run_leaves_what_it_has(tmp_path: Path) -> None:
    script = f"""if True:
        import sys
        sys.path.insert(0, {str(ROOT / "bench")!r})
        import gpu_check, pathlib
        STEPS = ("first", ["echo", "one"]), ("second", ["sleep", "60"])
        check = gpu_check.Check(pathlib.Path({str(tmp_path)!r}), 60)
        check.stage("one", 60, lambda check: [check.step(*step) for step in STEPS])
    """
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert b"first: ok" in run.stdout.readline()
    time.sleep(0.2)
    run.send_signal(signal.SIGKILL)
    run.wait()
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [step["name"] for step in found["stages"][0]["steps"]] == ["first"]
    assert "first" in (tmp_path / "gpu_check.txt").read_text()
    assert "one" in (tmp_path / "gpu_check.log").read_text()


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "machine", lambda variables: {"torch": "2.13.0"})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path)])
    assert gpu_check.main() == 1
    assert "torch sees no GPU" in capsys.readouterr().out
