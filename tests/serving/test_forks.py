"""A model that was loaded before a fork works in the child, which has none of the parent's threads."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_folder import write_tiny_folder

from fastinfer.utils.forks import RenewedLock, renew_in_children

PREAMBLE = """
import asyncio, os, sys, threading, time
from fastinfer import LLM, AsyncEngine, SamplingParams, StructuredOutputsParams

def params(pattern):
    return SamplingParams(temperature=0.0, max_tokens=9, structured_outputs=StructuredOutputsParams(regex=pattern))

def text(llm, pattern="[ab]{3}"):
    [completion] = llm.generate("ab", params(pattern))[0].outputs
    assert completion.finish_reason == "stop", completion
    return completion.text

def fork_and_wait(child):
    \"\"\"Run a function in a forked child, which then ends as any program ends.\"\"\"
    process = os.fork()
    if process == 0:
        child()
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
"""

STRUCTURED = """
llm = LLM(sys.argv[1], max_model_len=64, device="cpu")
expected, other = text(llm), text(llm, "[cd]{4}")

def child():
    assert text(llm) == expected
    assert text(llm, "[cd]{4}") == other
    assert len(text(llm, "[ef]{5}")) == 5
    fork_and_wait(lambda: text(llm, "[gh]{6}"))
    assert llm.engine.block_manager.num_used == 0

fork_and_wait(child)
assert text(llm) == expected
"""

WITHIN_A_STREAM = """
llm = LLM(sys.argv[1], max_model_len=64, device="cpu")
expected = text(llm)
stream = llm.stream("ab", params("[ab]{3}"))
text_so_far = next(stream)
waiting = llm.stream_outputs("ab", params("[xy]{3}z"))

def child():
    assert text_so_far + "".join(stream) == expected
    assert list(waiting)[-1].outputs[0].finish_reason == "stop"
    assert llm.engine.block_manager.num_used == 0

fork_and_wait(child)
assert text_so_far + "".join(stream) == expected
"""

COMPILING = """
llm = LLM(sys.argv[1], max_model_len=64, device="cpu")
engine = llm.engine
compile_now, may_compile = engine.grammars._compile, threading.Event()

def slow(params):  # as another thread has it at the moment of the fork, with the locks that it takes
    if os.getpid() == parent:
        with engine.grammars._lock, engine.grammars._tokenizer_lock:
            started.set()
            may_compile.wait()
    return compile_now(params)

engine.grammars._compile, started, parent = slow, threading.Event(), os.getpid()
engine.add_request([97, 98], params("[ab]{3}"), request_id="before")
started.wait()

def finish():
    last = {}
    while engine.has_unfinished:
        last.update({output.request_id: output for output in engine.step()})
    assert last["before"].outputs[0].finish_reason == "stop"
    assert len(last["before"].outputs[0].text) == 3

fork_and_wait(finish)
may_compile.set()
finish()
"""

OTHER_THREADS = """
llm = LLM(sys.argv[1], max_model_len=128, device="cpu")
expected = text(llm)
long = SamplingParams(temperature=1.0, seed=1, max_tokens=100, ignore_eos=True)
graphs, in_step, may_go_on = llm.engine.worker.runner.graphs, threading.Event(), threading.Event()
compute = graphs._compute

def paused(batch, first_prompt_row):
    in_step.set()
    may_go_on.wait()
    return compute(batch, first_prompt_row)

graphs._compute = paused
other = threading.Thread(target=llm.generate, args=(["xy", "ab"], long))
other.start()
in_step.wait()

def child():  # the other thread held the lock, in the middle of a step whose operators it recorded
    graphs._compute = compute
    outputs = llm.generate(["ab"] * 2, params("[ab]{3}"))
    assert [output.outputs[0].text for output in outputs] == [expected] * 2, outputs
    assert graphs.recorded
    assert not llm.engine.has_unfinished
    assert llm.engine.block_manager.num_used == 0
    assert not llm._shared._inboxes

fork_and_wait(child)
may_go_on.set()
other.join()
assert text(llm) == expected
"""

TOKENIZING = """
llm = LLM(sys.argv[1], max_model_len=64, device="cpu")
expected = text(llm)
encode = llm.tokenizer._encode
lock = next(c.cell_contents for c in encode.__closure__ if type(c.cell_contents).__name__ == "RenewedLock")
with lock.current:
    threads = [threading.Thread(target=llm.generate, args=("ab", params("[ab]{3}"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    fork_and_wait(lambda: text(llm) == expected or sys.exit(1))
for thread in threads:
    thread.join()
"""

TORCH = """
import torch
torch.set_num_threads(2)
llm = LLM(sys.argv[1], max_model_len=64, device="cpu")
numbers = torch.arange(1 << 22) / 1000.0
expected = torch.sin(numbers)  # by two threads

def child():
    assert torch.equal(torch.sin(numbers), expected)
    assert torch.get_num_threads() == 1

fork_and_wait(child)
assert torch.get_num_threads() == 2
"""

ASYNCHRONOUS = """
engine = AsyncEngine.from_model(sys.argv[1], max_model_len=128, device="cpu")

async def complete(pattern):
    async for output in engine.generate("ab", params(pattern)):
        pass
    [completion] = output.outputs
    assert completion.finish_reason == "stop", completion
    return completion.text

def child():
    assert asyncio.run(complete("[ab]{3}")) == expected
    other = asyncio.run(complete("[cd]{4}"))
    assert len(other) == 4, other
    assert not engine._engine.has_unfinished
    assert engine._engine.block_manager.num_used == 0
    asyncio.run(engine.shutdown())
    os._exit(0)  # at an ordinary end the parent's event loop would be closed for both

async def begin():
    expected = await complete("[ab]{3}")
    long = SamplingParams(temperature=1.0, seed=1, max_tokens=100, ignore_eos=True)
    stream = engine.generate("xy", long, request_id="long")
    await anext(stream)
    sleeping = asyncio.create_task(engine.sleep())  # once the stream has ended
    await asyncio.sleep(0)
    return expected, stream, sleeping

async def end():
    async for output in stream:
        pass
    assert len(output.outputs[0].token_ids) == 100
    await sleeping
    await engine.wake_up()
    assert await complete("[ab]{3}") == expected
    await engine.shutdown()

loop = asyncio.new_event_loop()
expected, stream, sleeping = loop.run_until_complete(begin())
fork_and_wait(child)  # the engine's thread is in the middle of the long request; the child has none, and is awake
loop.run_until_complete(end())
"""

SCRIPTS = {
    "structured": STRUCTURED,
    "within a stream": WITHIN_A_STREAM,
    "compiling": COMPILING,
    "other threads": OTHER_THREADS,
    "tokenizing": TOKENIZING,
    "threads of torch": TORCH,
    "asynchronous": ASYNCHRONOUS,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_forked_child(script: str, folder: Path) -> None:
    code = PREAMBLE + SCRIPTS[script]
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def exit_code_in_child(child: Callable[[], bool]) -> int:
    process = os.fork()
    if process == 0:
        os._exit(0 if child() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_objects_are_renewed_in_the_order_of_their_creation() -> None:
    renewed = []

    class Owner:
        def __init__(self, name: str) -> None:
            self.name = name
            renew_in_children(self)

        def renew_after_fork(self) -> None:
            renewed.append(self.name)

    owners = [Owner("first"), Owner("forgotten"), Owner("last")]
    del owners[1]
    assert exit_code_in_child(lambda: renewed == ["first", "last"]) == 0
    assert not renewed


def test_a_lock_that_another_thread_holds() -> None:
    lock = RenewedLock()
    held, may_release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock.current:
            held.set()
            may_release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert exit_code_in_child(lambda: lock.current.acquire(blocking=False)) == 0
    assert not lock.current.acquire(blocking=False)
    may_release.set()
    thread.join()
    assert lock.current.acquire(blocking=False)
