"""The promise that weights are constant: for the calling thread, and only within its block."""

import threading

import torch
from support.helpers import device_fixture

from fastinfer import ops
from fastinfer.ops import constant

device = device_fixture("cuda", "emulated")


def promised() -> bool:
    before = bool(constant.ops.set_constant_weights.default(False))
    constant.ops.set_constant_weights.default(before)
    return before


def test_it_ends_with_its_block(device: str) -> None:
    assert not promised()
    with ops.constant_weights():
        with ops.constant_weights():
            assert promised()
        assert promised()
    assert not promised()


def test_it_holds_for_the_calling_thread(device: str) -> None:
    others: list[bool] = []
    with ops.constant_weights():
        thread = threading.Thread(target=lambda: others.append(promised()))
        thread.start()
        thread.join()
    assert others == [False]


def test_compiled_code_leaves_it_as_it_was(device: str) -> None:
    """A trace must not set it for good."""

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with ops.constant_weights():
            return x + 1

    for _ in range(2):
        compiled(torch.zeros(2))
    assert not promised()
