"""Cost of the HTTP server beside a model that costs nothing: CPU time per frame and request, frames/s, requests/s.

There are 64 streams of chats. Each token is a frame unless the event loop falls behind, and outputs are merged. The
server is a process of its own; the load generator is that of ``fastinfer bench serve``. With ``--checkout`` other
versions of fastinfer, built in place, answer in turns. ``--step-ms`` paces the model, so that no frames are merged.

    python bench/bench_server.py --checkout ../earlier
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STREAMS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=120, help="tokens of an answer, where frames are counted")
    parser.add_argument("--step-ms", type=float, default=0, help="least duration of a step")
    parser.add_argument("--checkout", type=Path, action="append", default=[], help="folder of another version")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(args.step_ms / 1e3)
        return 0
    from fastinfer.utils.table import format_table

    folders = [*args.checkout, ROOT]
    servers = {folder: Server(folder, args.step_ms) for folder in folders}
    samples: dict[tuple[Path, str], list[Sample]] = {}
    for round_number in range(args.rounds + 1):
        for folder, server in servers.items():
            for what, new_tokens, requests in (("frame", args.new_tokens, 1), ("request", 1, 8)):
                sample = server.measure(what, new_tokens, requests)
                if round_number:  # the first round warms up
                    samples.setdefault((folder, what), []).append(sample)
    for server in servers.values():
        server.stop()
    rows = [["version", "of one", "event loop us: least", "median", "other threads us: least", "median", "a second"]]
    rows[0] += ["best"]
    for (folder, what), found in samples.items():
        loop, others, rates = zip(*found, strict=True)
        row = [folder.resolve().name, what]
        row += [f"{of(times):.1f}" for times in (loop, others) for of in (min, statistics.median)]
        rows.append([*row, f"{statistics.median(rates):.0f}", f"{max(rates):.0f}"])
    print(format_table(rows))
    return 0


Sample = tuple[float, float, float]  # CPU us of the event loop and of other threads for one, and how many a second


class Server:
    """A server process of one version."""

    def __init__(self, folder: Path, step_ms: float) -> None:
        from fastinfer.client.endpoint import Endpoint

        environment = {**os.environ, "PYTHONPATH": str(folder / "python"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--child", "--step-ms", str(step_ms)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        assert self.process.stderr is not None
        address = next(line for line in self.process.stderr if "listening on" in line).split()[-1]
        self.endpoint = Endpoint.parse(f"{address}/v1", None)

    def cpu_s(self) -> tuple[float, float]:
        """CPU time of the main thread, which is the event loop's, and of all others."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        seconds = {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks.iterdir()}
        loop = seconds.pop(str(self.process.pid))
        return loop, sum(seconds.values())

    def measure(self, what: str, new_tokens: int, requests: int) -> Sample:
        from fastinfer.benchmarks.load import Requests, run_streams

        bodies = Requests("free", 8, new_tokens, ignore_eos=True)
        before = self.cpu_s()
        run = run_streams(self.endpoint, bodies, STREAMS, requests)
        loop, others = (new - old for new, old in zip(self.cpu_s(), before, strict=True))
        count = len(run.answers) if what == "request" else sum(len(answer.moments) for answer in run.answers)
        return loop / count * 1e6, others / count * 1e6, count / run.seconds

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def serve(step_s: float) -> None:
    """Serve a model that costs nothing until the standard input ends."""
    sys.path.insert(0, str(ROOT / "tests"))
    import time

    import torch
    from support.flat_model import FlatModel, flat_engine

    from fastinfer import AsyncEngine
    from fastinfer.server.app import create_app
    from fastinfer.server.config import ServerConfig
    from fastinfer.server.run import DrainingServer

    letters = torch.eye(64)[torch.arange(64) % 26 + 1]  # every token has a text, and none ends the answer

    class FreeModel(FlatModel):
        def logits(self, hidden: torch.Tensor, indices: torch.Tensor, adapter_ids: Any = None) -> torch.Tensor:
            time.sleep(step_s)
            return letters[hidden[indices, 0] % 64]

    engine = AsyncEngine(flat_engine(model=FreeModel(), max_num_seqs=STREAMS, max_num_waiting=4096))
    logging.basicConfig(level=logging.INFO)  # the address is in the log
    logging.getLogger("fastinfer.server.requests").setLevel(logging.WARNING)
    config = ServerConfig(model_names=("free",), port=0)
    app = create_app(config, lambda: engine)
    server = DrainingServer(app, config)

    def end() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end, daemon=True).start()
    server.run()


if __name__ == "__main__":
    raise SystemExit(main())
