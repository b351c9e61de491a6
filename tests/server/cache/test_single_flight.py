"""Equal requests at the same time: one computes, whoever fails or leaves holds up nobody."""

import asyncio
import time
from typing import Any

import pytest

from fastinfer.server.cache.single_flight import SingleFlight


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Worker:
    """A request that stays in flight until it is told to go."""

    def __init__(self, flight: SingleFlight, key: str = "k") -> None:
        self.leads: bool | None = None
        self.value: bytes | None = None
        self.go = asyncio.Event()
        self.fails = False
        self.task = asyncio.create_task(self._run(flight, key))

    async def _run(self, flight: SingleFlight, key: str) -> None:
        self.leads, self.value = await flight.enter(key)
        value = None
        try:
            await self.go.wait()
            if self.fails:
                raise OSError("failed")
            value = b"answer"
        finally:
            if self.leads:
                flight.leave(key, value)


def test_one_leads_and_the_others_enter_together() -> None:
    async def main() -> None:
        flight = SingleFlight()
        workers = [Worker(flight) for _ in range(4)]
        other = Worker(flight, "another key")
        await settle()
        assert [worker.leads for worker in workers] == [True, None, None, None]
        assert other.leads is True
        workers[0].go.set()
        await settle()
        assert [worker.leads for worker in workers] == [True, False, False, False]
        assert [worker.value for worker in workers[1:]] == [b"answer"] * 3
        # The answer is there; the next request of this key begins anew.
        late = Worker(flight)
        await settle()
        assert late.leads is True
        for worker in (*workers, other, late):
            worker.go.set()
            await worker.task

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_the_next_one_leads_if_the_leader_does_not_finish(how: str) -> None:
    async def main() -> None:
        flight = SingleFlight()
        workers = [Worker(flight) for _ in range(3)]
        await settle()
        if how == "cancelled":
            workers[0].task.cancel()
        else:
            workers[0].fails = True
            workers[0].go.set()
        await settle()
        assert [worker.leads for worker in workers] == [True, True, None]
        for worker in workers[1:]:
            worker.go.set()
        await asyncio.gather(*(worker.task for worker in workers), return_exceptions=True)
        assert workers[2].leads is False

    asyncio.run(main())


def test_a_waiter_that_leaves_is_passed_over() -> None:
    async def main() -> None:
        flight = SingleFlight()
        workers = [Worker(flight) for _ in range(3)]
        await settle()
        workers[1].task.cancel()
        await settle()
        workers[0].task.cancel()
        await settle()
        assert workers[2].leads is True
        workers[2].go.set()
        await workers[2].task

    asyncio.run(main())


def test_the_lead_is_not_lost_if_it_comes_with_a_cancellation() -> None:
    async def main() -> None:
        flight = SingleFlight()
        workers = [Worker(flight) for _ in range(3)]
        await settle()
        # Both are cancelled before either runs again: the first hands its lead to the second, which passes it on.
        workers[0].task.cancel()
        await asyncio.sleep(0)
        workers[1].task.cancel()
        await settle()
        assert workers[2].leads is True
        workers[2].go.set()
        await workers[2].task
        late = Worker(flight)
        await settle()
        assert late.leads is True
        late.go.set()
        await late.task

    asyncio.run(main())


def test_nobody_waits_forever_for_a_slow_leader() -> None:
    async def main() -> None:
        flight = SingleFlight(max_wait_s=0.01)
        leader, follower = Worker(flight), Worker(flight)
        follower.go.set()
        await follower.task
        assert (leader.leads, follower.leads) == (True, False)
        leader.go.set()
        await leader.task

    asyncio.run(main())


def test_a_timer_that_fires_early_does_not_shorten_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = asyncio.wait

    async def early(futures: Any, timeout: float) -> Any:
        return await wait(futures, timeout=timeout / 2)

    async def main() -> None:
        flight = SingleFlight()
        await flight.enter("k")
        begin = time.monotonic()
        assert await flight.enter("k", max_wait_s=0.01) == (False, None)
        assert time.monotonic() - begin >= 0.01

    monkeypatch.setattr(asyncio, "wait", early)
    asyncio.run(main())


def test_nothing_is_kept_of_finished_keys() -> None:
    async def main() -> None:
        flight = SingleFlight()
        for key in "abc":
            workers = [Worker(flight, key) for _ in range(3)]
            await settle()
            workers[1].task.cancel()
            for worker in workers:
                worker.go.set()
            await asyncio.gather(*(worker.task for worker in workers), return_exceptions=True)
        assert not flight._waiting

    asyncio.run(main())
