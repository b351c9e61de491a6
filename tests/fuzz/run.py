"""Feeds mutated files to the readers and keeps what makes them fail: ``make fuzz``.

Each target begins with valid cases (seeds.py), the failures of the past (cases/) and the corpus of earlier runs
(build/fuzz/corpus): cases that ended at a place of the code, or with a kind of message, where no other had. Failures
are written to build/fuzz/failures; once mended, they move to cases/, which the tests read. The same seed, corpus and
number of cases give the same cases.
"""

import argparse
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.mutate import Case, mutate
from fuzz.process import Worker, read_case, write_case
from fuzz.seeds import SEEDS, gguf_seeds

CASES = Path(__file__).parent / "cases"
MAX_KINDS = 20  # of messages that are kept per place
OUT = Path(__file__).parent.parent.parent / "build" / "fuzz"


def stored_cases(folder: Path) -> Iterator[Case]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        yield read_case(path)


def store(case: Case, folder: Path) -> Path:
    """Write a case into a folder named after its content."""
    digest = hashlib.sha256()
    for name, data in sorted(case.items()):
        digest.update(f"{name} {len(data)} ".encode() + data)
    write_case(case, folder / digest.hexdigest()[:12])
    return folder / digest.hexdigest()[:12]


class Target:
    """The search for failures of one reader.

    Attributes:
        count: number of cases that were read.
        failures: how often each failure occurred, by the place where it did.
    """

    def __init__(self, name: str, worker: Worker, out: Path = OUT) -> None:
        self.name = name
        self.count = 0
        self.failures: Counter[str] = Counter()
        self._worker = worker
        self._out = out
        self._ends: dict[str, set[str]] = {}
        self._corpus: list[Case] = []

    def read_stored(self) -> None:
        """Read all cases that are there already."""
        for case in SEEDS[self.name]():
            end = self._worker.run(case)
            if end.place != "read":
                raise RuntimeError(f"{self.name}: a seed is not valid: {end}")
            self._corpus.append(case)
        for folder in (CASES / self.name, self._out / "corpus" / self.name):
            for case in stored_cases(folder):
                self._corpus.append(case)
                self._read(case)

    def search(self, seconds: float, seed: int) -> None:
        """Read mutated cases for some time."""
        deadline = time.monotonic() + seconds
        index = 0
        while time.monotonic() < deadline:
            random = Random(f"{self.name} {seed} {index}")
            index += 1
            case = mutate(random.choice(self._corpus), random)
            if self._read(case):
                self._corpus.append(case)
                store(case, self._out / "corpus" / self.name)

    def _read(self, case: Case) -> bool:
        """Read a case; return whether it ended without failure, and as no other one had."""
        failure, place, kind = self._worker.run(case)
        self.count += 1
        if failure:
            self.failures[place] += 1
            if self.failures[place] == 1:
                path = store(case, self._out / "failures" / self.name)
                print(f"{self.name}: {failure}\n  at {place}\n  {path}", flush=True)
            return False
        kinds = self._ends.setdefault(place, set())
        if kind in kinds or len(kinds) == MAX_KINDS:
            return False
        kinds.add(kind)
        return True

    @property
    def summary(self) -> str:
        """One line of figures."""
        ends = sum(map(len, self._ends.values()))
        return (
            f"{self.name}: {self.count} cases, {ends} ends, {len(self._corpus)} in the corpus, "
            f"{len(self.failures)} failures in {self.failures.total()} cases"
        )


def replay(target: str, folder: Path) -> bool:
    """Read one stored case and print what becomes of it; return whether it failed."""
    with Worker(target, next(gguf_seeds())) as worker:
        end = worker.run(read_case(folder))
    print(f"{end.failure or 'no failure'} at {end.place}: {end.kind}")
    return bool(end.failure)


def search(name: str, seconds: float, seed: int) -> tuple[str, bool]:
    """Search for failures of one target; return a line of figures, and whether there were any."""
    with Worker(name, next(gguf_seeds())) as worker:
        target = Target(name, worker)
        target.read_stored()
        target.search(seconds, seed)
    return target.summary, bool(target.failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="time per target, but for its start")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other cases")
    parser.add_argument("--target", choices=SEEDS, help="one target alone")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="read one stored case of the target")
    args = parser.parse_args()
    if args.replay:
        if not args.target:
            parser.error("--replay needs --target")
        return int(replay(args.target, args.replay))
    names = [args.target] if args.target else list(SEEDS)
    failed = False
    with ProcessPoolExecutor(os.cpu_count()) as pool:  # a target has one process that works at a time
        for future in as_completed([pool.submit(search, name, args.seconds, args.seed) for name in names]):
            summary, has_failures = future.result()
            print(summary, flush=True)
            failed |= has_failures
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
