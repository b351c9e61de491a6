"""Kernels that wait for the one before them: for the calling thread, and only within the block."""

import threading

from support.helpers import device_fixture

from fastinfer.ops import launches
from fastinfer.ops.launches import no_dependent_launches

device = device_fixture("cuda", "emulated")


def may_be_dependent() -> bool:
    before = bool(launches.ops.set_dependent_launches.default(True))
    launches.ops.set_dependent_launches.default(before)
    return before


def test_it_ends_with_its_block(device: str) -> None:
    assert may_be_dependent()
    with no_dependent_launches():
        with no_dependent_launches():
            assert not may_be_dependent()
        assert not may_be_dependent()
    assert may_be_dependent()


def test_it_holds_for_the_calling_thread(device: str) -> None:
    others: list[bool] = []
    with no_dependent_launches():
        thread = threading.Thread(target=lambda: others.append(may_be_dependent()))
        thread.start()
        thread.join()
    assert others == [True]
