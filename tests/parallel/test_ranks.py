"""What happens when a rank fails: a clear error at once, and nothing that is left behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.ranks import in_ranks
from support.tiny_folder import write_tiny_folder
from support.waiting import until

from fastinfer import LLM, AsyncEngine, SamplingParams, ops
from fastinfer.engine.batch_inputs import BatchInputs
from fastinfer.engine.rank_process import RankTask
from fastinfer.parallel.group import Group
from fastinfer.parallel.ranks import Ranks
from fastinfer.utils.process_state import process_state

PROMPT = {"prompt_token_ids": [3, 4, 5, 6]}
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
LIMITS: dict[str, Any] = {"kv_cache_memory": 2**22, "max_model_len": 250}
PROGRAM = """
import os, sys, time
from fastinfer import LLM
llm = LLM(sys.argv[1], tensor_parallel_size=2, kv_cache_memory=2**22, max_model_len=250)
print(*llm.engine.ranks.pids, flush=True)
{then}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("llama"))


def ranks_of(llm: LLM) -> Ranks:
    assert llm.engine.ranks is not None
    return llm.engine.ranks


def is_alive(pid: int) -> bool:
    """Whether there is such a process that is no zombie."""
    return process_state(pid) not in ("", "Z")


@pytest.fixture(params=["tensor", "pipeline"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def divided(folder: Path, kind: str, size: int) -> LLM:
    return LLM(str(folder), **{f"{kind}_parallel_size": size}, **LIMITS)


def test_killed_rank_ends_the_step_with_its_name(folder: Path, kind: str) -> None:
    llm = divided(folder, kind, 3)
    pids = ranks_of(llm).pids
    outputs = llm.stream_outputs(PROMPT, LONG)
    next(outputs)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        list(outputs)
    assert str(raised.value) == f"{kind} parallelism ended: rank 2 ended by signal SIGKILL"
    until(lambda: not any(map(is_alive, pids)))
    with pytest.raises(RuntimeError, match=f"{kind} parallelism ended: rank 2 ended by signal SIGKILL"):
        llm.generate([PROMPT], LONG)


def test_killed_rank_of_an_idle_engine(folder: Path, kind: str) -> None:
    llm = divided(folder, kind, 2)
    [pid] = ranks_of(llm).pids
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))
    with pytest.raises(RuntimeError, match=f"{kind} parallelism ended: rank 1 ended by signal SIGKILL"):
        llm.generate([PROMPT], LONG)


def test_stopped_rank_ends_the_step_before_the_deadline(folder: Path, kind: str) -> None:
    llm = divided(folder, kind, 2)
    [pid] = ranks_of(llm).pids
    outputs = llm.stream_outputs(PROMPT, LONG)
    next(outputs)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError) as raised:
        list(outputs)
    assert str(raised.value) == f"{kind} parallelism ended: rank 1 was stopped"
    until(lambda: not is_alive(pid))


@pytest.mark.parametrize(
    ("rank", "number", "end"),
    [(1, signal.SIGKILL, "ended by signal SIGKILL"), (2, signal.SIGSTOP, "was stopped")],
)
def test_stages_that_are_divided(folder: Path, rank: int, number: int, end: str) -> None:
    """Rank 1 has a part of rank 0's stage, rank 2 of the other one."""
    llm = LLM(str(folder), tensor_parallel_size=2, pipeline_parallel_size=2, **LIMITS)
    pids = ranks_of(llm).pids
    outputs = llm.stream_outputs(PROMPT, LONG)
    next(outputs)
    os.kill(pids[rank - 1], number)
    with pytest.raises(RuntimeError) as raised:
        list(outputs)
    assert str(raised.value) == f"tensor and pipeline parallelism ended: rank {rank} {end}"
    until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(
    "then",
    ["time.sleep(60)", "while True: llm.generate([{'prompt_token_ids': [3, 4]}])", "os.kill(os.getpid(), 9)"],
    ids=["idle", "busy", "at once"],
)
def test_ranks_end_with_a_killed_parent(folder: Path, then: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(then=then), str(folder)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        [pid] = map(int, parent.stdout.readline().split())
        parent.kill()
    until(lambda: not is_alive(pid))


def test_ranks_that_import_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Torch is imported for a second or more."""
    begun = tmp_path / "begun"
    (tmp_path / "slow.py").write_text(f"open({str(begun)!r}, 'w').close()\nimport time\ntime.sleep(60)")
    program = """
import sys, time
from fastinfer.parallel.group import Group
from fastinfer.parallel.ranks import Ranks
ranks = Ranks(Group.create(2), "slow", None, 1)
while not ranks.pids:
    time.sleep(0.01)
print(*ranks.pids, flush=True)
time.sleep(60)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "python")])}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        [pid] = map(int, parent.stdout.readline().split())
        until(begun.exists)
        parent.kill()
    until(lambda: not is_alive(pid))


def test_stopped_ranks_end_with_a_killed_parent(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(then="time.sleep(60)"), str(folder)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        [pid] = map(int, parent.stdout.readline().split())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    until(lambda: not is_alive(pid))


def test_ranks_end_with_the_program_and_leave_no_memory(folder: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    program = PROGRAM.format(then="print(llm.generate([{'prompt_token_ids': [3]}])[0].outputs[0].finish_reason)")
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    pids, reason = done.stdout.splitlines()
    assert reason in ("stop", "length")
    assert not is_alive(int(pids))
    assert done.stderr == ""
    assert {name for name in os.listdir("/dev/shm") if "fastinfer" in name} <= before


@pytest.mark.exhaustive
def test_twenty_programs_that_start_together(folder: Path) -> None:
    """None of them takes what another one needs, as ports or names could be taken."""
    before = set(os.listdir("/dev/shm"))
    generate = "llm.generate([{'prompt_token_ids': [3]}], SamplingParams(temperature=0, max_tokens=5))"
    program = PROGRAM.format(then=f"from fastinfer import SamplingParams\nprint(*{generate}[0].outputs[0].token_ids)")
    command = [sys.executable, "-c", program, str(folder)]
    programs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(20)]
    results = [program.communicate(timeout=500) for program in programs]
    assert [program.returncode for program in programs] == [0] * 20, [errors for _, errors in results]
    pids, texts = zip(*(output.splitlines() for output, _ in results), strict=True)
    assert len(set(texts)) == 1
    assert len(set(pids)) == 20
    assert not any(is_alive(int(pid)) for pid in pids)
    assert {name for name in os.listdir("/dev/shm") if "fastinfer" in name} <= before


def test_ranks_end_with_the_engine(folder: Path) -> None:
    llm = LLM(str(folder), tensor_parallel_size=2, **LIMITS)
    pids = ranks_of(llm).pids
    del llm
    gc.collect()
    assert not any(map(is_alive, pids))


def test_closed_ranks(folder: Path) -> None:
    llm = LLM(str(folder), tensor_parallel_size=2, **LIMITS)
    ranks = ranks_of(llm)
    ranks.close()
    assert not any(map(is_alive, ranks.pids))
    ranks.close()
    with pytest.raises(RuntimeError, match="tensor parallelism ended: the engine was closed"):
        llm.generate([PROMPT], LONG)


def test_interrupt_waits_for_the_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(folder), tensor_parallel_size=2, **LIMITS)
    send = ranks_of(llm).group.send

    def interrupted(words: list[int]) -> None:
        signal.raise_signal(signal.SIGINT)
        send(words)

    monkeypatch.setattr(ranks_of(llm).group, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT], LONG)
    monkeypatch.undo()
    assert llm.generate([PROMPT], LONG)[0].outputs[0].finish_reason == "length"


def test_dead_engine_says_so(folder: Path, kind: str) -> None:
    engine = AsyncEngine.from_model(str(folder), **{f"{kind}_parallel_size": 2}, **LIMITS)
    assert not engine.health().is_dead
    assert engine._engine.ranks is not None
    [pid] = engine._engine.ranks.pids
    os.kill(pid, signal.SIGKILL)
    until(lambda: engine.health().is_dead)
    refusal = engine.health().refusal
    assert refusal == f"the engine is dead: {kind} parallelism ended: rank 1 ended by signal SIGKILL"


def test_forked_process_neither_uses_nor_ends_the_ranks(folder: Path) -> None:
    llm = LLM(str(folder), tensor_parallel_size=2, **LIMITS)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            llm.generate([PROMPT], LONG)
        except RuntimeError as error:
            status = 0 if "a forked process cannot use tensor parallelism" in str(error) else 2
        finally:
            ranks_of(llm).close()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert llm.generate([PROMPT], LONG)[0].outputs[0].finish_reason == "length"


def test_rank_that_cannot_load_its_part(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def other_path(self: RankTask) -> dict[str, Any]:
        return self.__dict__ | {"path": tmp_path / "nothing"}

    monkeypatch.setattr(RankTask, "__getstate__", other_path, raising=False)
    with pytest.raises(ValueError, match=r"rank 1: .*nothing"):
        LLM(str(folder), tensor_parallel_size=2, **LIMITS)


def test_inputs_that_are_not_those_of_the_message_end_all_ranks(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = divided(folder, kind, 3)
    pids = ranks_of(llm).pids
    digest = BatchInputs.digest
    monkeypatch.setattr(BatchInputs, "digest", lambda self, size: digest(self, size) ^ 1)  # of rank 0
    message = rf"^{kind} parallelism ended: rank [12]: .*the inputs of a step must have the digest \d+, got \d+$"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            llm.generate([PROMPT], LONG)
    until(lambda: not any(map(is_alive, pids)))


def test_ranks_that_disagree_end() -> None:
    def run(group: Group) -> str:
        x = torch.zeros(2 + group.rank, 3)
        with pytest.raises(RuntimeError) as raised:
            ops.all_gather(x, group.memory, group.rank, [3, 3])
        return str(raised.value)

    messages = in_ranks(2, run)
    assert any("exchanges something else than rank" in message for message in messages)


def test_rank_that_does_not_come() -> None:
    def run(group: Group) -> str:
        if group.rank == 1:
            return ""
        with pytest.raises(RuntimeError) as raised:
            ops.all_gather(torch.zeros(1, 3), group.memory, 0, [3, 3])
        return str(raised.value)

    message, _ = in_ranks(2, run, deadline=0.1)
    assert "rank 1 did not exchange its part within 100 ms" in message


@pytest.mark.parametrize("seconds", [0.3, 5.0])
def test_a_step_may_take_longer_than_an_exchange(seconds: float) -> None:
    """A stage of a pipeline waits for all of another stage's step."""
    failed = threading.Event()

    def run(group: Group) -> str:
        if group.rank == 1:
            group.receive()
            failed.wait(seconds)
            group.finish()
            return ""
        group.send([])
        try:
            group.wait_for(1)
        except RuntimeError as error:
            failed.set()
            return str(error)
        return ""

    message, _ = in_ranks(2, run, deadline=0.05)
    assert message == ("" if seconds < 1 else "rank 1 did not finish its step within 1000 ms")
