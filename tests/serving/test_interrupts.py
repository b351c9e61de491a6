"""KeyboardInterrupt wherever Python may raise it while a thread uses a shared engine.

The interpreter looks for signals after each call, at the start of each function and at the end of each round of a loop.
The thread's own requests then end; those of others lose nothing, no lock stays taken, and no block is lost.
"""

import dis
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from support.case_selection import share
from support.toy import ToyTokenizer, check_blocks, greedy, toy_engine

import fastinfer.engine
import fastinfer.serving
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import RequestOutputKind, SamplingParams
from fastinfer.serving.shared_engine import Job, SharedEngine

SERVING, ENGINE = (str(Path(package.__file__).parent) for package in (fastinfer.serving, fastinfer.engine))
LOOKS_FOR_SIGNALS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
Place = tuple[CodeType, int]


class Interrupter:
    """Calls a function that it may interrupt after one instruction.

    Args:
        folder: only code in this folder is interrupted.
        place: code and offset of the instruction after the one that looks for signals; ``None`` to count them all.
        occurrence: how often that must have been reached.
    """

    def __init__(self, folder: str, place: Place | None = None, occurrence: int = 1) -> None:
        self.seen: Counter[Place] = Counter()
        self.has_raised = False
        self.folder, self._place, self._occurrence = folder, place, occurrence
        self._may_raise: dict[FrameType, bool] = {}

    def __call__(self, function: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(before)
            self._may_raise.clear()

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.folder):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._at

    def _at(self, frame: FrameType, event: str, arg: object) -> Any:
        if event != "opcode" or self.has_raised:
            return self._at
        code, offset = frame.f_code, frame.f_lasti
        if self._may_raise.get(frame):
            self.seen[code, offset] += 1
            if (code, offset) == self._place and self.seen[code, offset] == self._occurrence:
                self.has_raised = True
                raise KeyboardInterrupt
        self._may_raise[frame] = dis.opname[code.co_code[offset]].startswith(LOOKS_FOR_SIGNALS)
        return self._at


class Users:
    """A shared engine with a user who reads a stream slowly, and one who is interrupted."""

    def __init__(self, kind: RequestOutputKind, mode: str) -> None:
        self.engine = toy_engine(
            block_size=4,
            max_model_len=32,
            num_kv_blocks=20,
            max_num_seqs=4,
            max_num_waiting=2,
            async_scheduling=mode == "runs ahead",
        )
        self.shared = SharedEngine(self.engine)
        self.kind = kind
        self.numbers = count()
        self.other = self.shared.run([self.job([7, 8], 12)])
        self.deltas = [self.delta(next(self.other))] if kind is RequestOutputKind.DELTA else []

    def job(self, prompt: list[int], max_tokens: int) -> Job[RequestOutput]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=self.kind)
        request_id = f"job-{next(self.numbers)}"
        return Job(partial(self.engine.add_request, prompt, params, request_id=request_id), request_id)

    @staticmethod
    def delta(output: RequestOutput) -> str:
        return output.outputs[0].delta

    def run(self, interrupter: Interrupter) -> None:
        """Run a third request and leave a fourth early, perhaps interrupted, and check all that must hold then."""
        interrupted = False
        try:
            interrupter(self.use)
        except KeyboardInterrupt:
            interrupted = True
        assert interrupted == interrupter.has_raised
        assert not self.shared.lock.locked()
        check_blocks(self.engine)
        # The next call works, and the other user gets the same text.
        [output] = self.shared.complete([self.job([3, 4], 5)])
        assert output.outputs[0].token_ids[-1:] == greedy([3, 4], 5, stop_at_eos=False)[-1:]
        outputs = list(self.other)
        text, expected = (
            "".join([*self.deltas, *map(self.delta, outputs)]),
            ToyTokenizer().decode(greedy([7, 8], 12, stop_at_eos=False)),
        )
        if outputs[-1].outputs[0].finish_reason == "error":  # it was just being updated
            assert interrupter.folder == ENGINE
            assert expected.startswith(text)
        else:
            assert text == expected
        assert not self.engine.has_unfinished
        assert not self.engine.scheduler.waiting
        assert self.engine.block_manager.num_used == 0
        assert not self.shared._inboxes
        assert not self.shared._abandoned

    def use(self) -> None:
        jobs = [self.job([2, number], 4) for number in range(4)]  # more than the queue takes
        assert len(self.shared.complete(jobs)) == 4
        stream = self.shared.run([self.job([5], 9)])
        if self.kind is RequestOutputKind.DELTA:
            next(stream)
        stream.close()


def check_places(folder: str, kind: RequestOutputKind, mode: str, stride: int) -> int:
    """Interrupt at a ``share`` of the places, every ``stride``-th, and return the number of places."""
    first = Interrupter(folder)
    Users(kind, mode).run(first)
    places = sorted(first.seen, key=lambda place: (place[0].co_filename, place[0].co_firstlineno, place[1]))
    for number, place in share(list(enumerate(places)), stride):
        seen = first.seen[place]
        for occurrence in {1, 1 + number * 7919 % seen, seen}:
            interrupter = Interrupter(folder, place, occurrence)
            try:
                Users(kind, mode).run(interrupter)
            except Exception as error:
                raise AssertionError(f"{place[0].co_name}: {place[1]}, {occurrence} of {seen}") from error
            assert interrupter.has_raised
    return len(places)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_a_shared_engine(kind: RequestOutputKind) -> None:
    assert check_places(SERVING, kind, "plain", 1) > 30


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "runs ahead"])
def test_the_steps_of_a_shared_engine(mode: str) -> None:
    assert check_places(ENGINE, RequestOutputKind.DELTA, mode, 20) > 400
