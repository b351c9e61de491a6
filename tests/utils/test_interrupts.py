"""Interrupts that wait for the end of a block."""

import signal
import threading

import pytest

from fastinfer.utils.interrupts import deferred_interrupts


def test_interrupt_waits_for_the_end_of_the_block() -> None:
    seen = []

    def interrupted() -> None:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            seen.append("the rest of the block")

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == ["the rest of the block"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_nothing_happens_without_an_interrupt_or_in_another_thread() -> None:
    handlers = []

    def run() -> None:
        with deferred_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers[0] is not before
    assert handlers[1] is before
    assert signal.getsignal(signal.SIGINT) is before
