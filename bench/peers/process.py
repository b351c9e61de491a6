"""Process of an engine, as the benchmark uses it."""

import contextlib
import json
import os
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


class PeerError(Exception):
    """The engine is not installed, failed or took too long."""


class Peer:
    """Engine in its own process, which waits for standard input between turns.

    Args:
        engine: key of the engine in worker.py.
        python: interpreter that has the engine installed.
        settings: model, threads, max_tokens, max_requests.
        limit_s: seconds without an answer after which the process is ended.

    Raises:
        PeerError: the engine is not installed or does not load the model.
    """

    def __init__(self, engine: str, python: str, settings: dict[str, Any], limit_s: float) -> None:
        self._limit_s = limit_s
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        threads = str(settings["threads"])
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)
        try:
            self._process = subprocess.Popen(
                [python, str(WORKER), engine],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
            )
        except OSError as error:
            raise PeerError(f"{python}: {error.strerror}") from None
        self._buffer = b""
        self.facts = self._ask(settings)

    def turn(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Run prompts and return the answer of worker.py.

        Raises:
            PeerError: the engine failed, or a prompt did not get ``new_tokens`` tokens.
        """
        answer = self._ask({"prompts": prompts, "new_tokens": new_tokens})
        counts = [len(tokens) for tokens in answer["tokens"]]
        if counts != [new_tokens] * len(prompts):
            raise PeerError(f"asked for {new_tokens} tokens for each of {len(prompts)} prompts, got {counts}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # the process did not read all of its input
                pipe.close()
        self._log.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line())
        except (OSError, EOFError, ValueError, PeerError) as error:
            reason = str(error) if isinstance(error, PeerError) else self._last_log_line()
            self.close()
            raise PeerError(reason) from None
        if "error" in answer:
            self.close()
            raise PeerError(answer["error"])
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([self._process.stdout], [], [], self._limit_s)[0]:
                raise PeerError(f"no answer within {self._limit_s:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise EOFError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_log_line(self) -> str:
        """Return the last line that the process wrote before it failed."""
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1][:300] if lines else "the process ended without a message"
