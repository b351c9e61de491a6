"""`fastinfer serve --data-parallel-size`: processes that are started, replaced when they die, and ended."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.paths import ROOT
from support.tiny_folder import write_tiny_folder

from fastinfer.cli.serve_replicas import replica_environments, replica_share
from fastinfer.errors import RequestError

KEY = "very-secret"


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("router") / "tiny", sizes={"max_position_embeddings": 4096})


class Server:
    """A server of two replicas."""

    def __init__(self, folder: Path, *options: str) -> None:
        arguments = ["serve", "--model", str(folder), "--data-parallel-size", "2", "--port", "0", *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "FASTINFER_API_KEY": KEY}
        command = [sys.executable, "-m", "fastinfer", *arguments]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    @property
    def url(self) -> str:
        wait_until(lambda: any("listening on" in line for line in self.log) or self.process.poll() is not None)
        return next(line for line in self.log if "listening on" in line).split()[-1]

    def children(self) -> list[int]:
        """The processes, those that were started first at the beginning."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def metrics(self) -> list[str]:
        return httpx.get(self.url + "/metrics", headers={"X-Api-Key": KEY}).text.splitlines()

    def processes(self, metric: str) -> list[int]:
        """The numbers of the processes of which a metric is 1."""
        pattern = re.compile(rf'fastinfer_router_{metric}{{replica="process (\d+)"}} 1.0')
        return [int(match[1]) for match in map(pattern.fullmatch, self.metrics()) if match]

    def num_ready(self) -> int:
        return len(self.processes("replica_ready"))

    def kill_busy_replica(self) -> None:
        """Kill the replica that streams, before it can end."""
        children = self.children()
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        (busy,) = self.processes("requests_running")
        os.kill(children.pop(busy), signal.SIGKILL)
        os.kill(children.pop(), signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._reader.join(30)


@contextlib.contextmanager
def serve(folder: Path, *options: str) -> Iterator[Server]:
    server = Server(folder, *options)
    try:
        yield server
    finally:
        server.end()


def shared_memory(pid: int) -> tuple[str, int, int]:
    """The weights that a process shares with others: the file's number, its size and the process's part, in KB."""
    lines = Path(f"/proc/{pid}/smaps").read_text().partition("memfd:fastinfer")
    inode = lines[0].rpartition("\n")[2].split()[4]
    sizes = dict(line.split(":") for line in lines[2].splitlines()[1:6])
    return inode, int(sizes["Size"].split()[0]), int(sizes["Pss"].split()[0])


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def stream(url: str, prompt: str, on_first: Callable[[], None] = lambda: None) -> str:
    """The text of a stream; fails if it does not end as it should."""
    body = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 1.0, "seed": 7}
    text, is_first = "", True
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", url + "/v1/completions", json=body, headers=headers, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, line
                text += chunk["choices"][0]["text"]
                if is_first:
                    on_first()
                is_first = False
    assert line == "" or line == "data: [DONE]"
    return text


@pytest.mark.slow
def test_death_restart_and_drain(folder: Path) -> None:
    with serve(folder) as server:
        wait_until(lambda: server.num_ready() == 2)
        children = server.children()
        assert len(children) == 2
        for pid in children:
            assert KEY not in Path(f"/proc/{pid}/cmdline").read_text()
        expected = stream(server.url, "once upon a time")
        (inode, size, part), (other, _, other_part) = map(shared_memory, children)
        assert inode == other
        assert min(part, other_part) > 0
        assert part + other_part < 1.2 * size

        assert stream(server.url, "once upon a time", server.kill_busy_replica) == expected
        assert 'fastinfer_router_retries_total{reason="continued"} 1.0' in server.metrics()
        assert any(re.match('vllm:request_success_total.*replica="process ', line) for line in server.metrics())
        wait_until(lambda: server.num_ready() == 2)
        children = server.children()
        assert len(children) == 2
        assert all(shared_memory(pid)[0] == inode for pid in children)

        assert stream(server.url, "once upon a time", server.process.terminate) == expected
        assert server.process.wait(60) == 0
        assert not any(map(is_running, children))


@pytest.mark.slow
def test_no_process_outlives_the_router(folder: Path) -> None:
    with serve(folder) as server:
        wait_until(lambda: len(server.children()) == 2)
        loading = server.children()
        server.process.kill()
        wait_until(lambda: not any(map(is_running, loading)), 30)


@pytest.mark.slow
def test_replicas_that_cannot_start_end_the_server(folder: Path) -> None:
    with serve(folder, "--context", "100000000") as server:
        assert server.process.wait(120) == 2
        server.end()
        assert any("a replica could not be started" in line for line in server.log)
        assert any("max_model_len" in line for line in server.log)


def test_each_replica_has_its_gpu() -> None:
    threads = {"OMP_NUM_THREADS": "3"}
    for device, num_gpus in (("cpu", 2), ("auto", 0)):
        assert replica_environments(2, device, num_gpus, None, 3) == [threads, threads]
    for visible, gpus in ((None, "01"), ("3,1,2", "31")):
        found = replica_environments(2, "auto", 2, visible, 3)
        assert found == [{**threads, "CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    with pytest.raises(RequestError, match="expected at most one replica per GPU, 2, got 3"):
        replica_environments(3, "cuda", 2, None, 1)
    with pytest.raises(RequestError, match="expected one device with several replicas, got cpu,cpu"):
        replica_environments(2, "cpu,cpu", 0, None, 1)
    with pytest.raises(RequestError, match="expected auto, cuda or cpu with several replicas, got cuda:1"):
        replica_environments(2, "cuda:1", 2, None, 1)


def test_replicas_whose_ranks_divide_the_model_share_no_weights() -> None:
    """Each would have parts of its own, which the size of its KV cache must allow for."""
    assert len(replica_share(2, {}).weights) == 1
    assert len(replica_share(2, {"draft_model": "mtp"}).weights) == 2
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        assert replica_share(2, {name: 2}).weights == ()
