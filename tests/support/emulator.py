"""Settings of the emulator of the CUDA kernels (tests/emulation) that a test may change."""

import ctypes
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from torch import Tensor

ORDERS = ("ascending", "descending", "random:1")
# Architecture, multiprocessors, and the shared memory that a block may have. The small one is the emulator's own.
DEVICES = {
    "small": (80, 6, 163 << 10),
    "small Hopper": (90, 6, 227 << 10),
    "A100": (80, 108, 163 << 10),
    "H100": (90, 132, 227 << 10),
}


class Emulator:
    """The library of the emulated kernels."""

    _order: ClassVar[str] = "ascending"

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emulation_set_block_order.restype = ctypes.c_bool
        self._library.emulation_run_held.restype = ctypes.c_char_p

    @contextmanager
    def block_order(self, order: str) -> Iterator[None]:
        """Start the blocks of every launch in this order: "ascending", "descending" or "random:SEED"."""
        before = Emulator._order
        self._set_block_order(order)
        try:
            yield
        finally:
            self._set_block_order(before)

    @contextmanager
    def device(self, name: str) -> Iterator[None]:
        """Let launch policies see one of DEVICES."""
        self._set_device(name)
        try:
            yield
        finally:
            self._set_device("small")

    @contextmanager
    def constant_memory(self, *tensors: Tensor) -> Iterator[None]:
        """Let dependent launches access these tensors before they wait for the kernel before."""
        self._set_constant_memory(*tensors)
        try:
            yield
        finally:
            self._set_constant_memory()

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        """Hold launches in a stream until :meth:`run_streams`: each stands for a GPU. Their tensors must stay alive."""
        self._library.emulation_hold(number)
        try:
            yield
        except BaseException:
            self._library.emulation_drop_held()
            raise
        finally:
            self._library.emulation_hold(-1)

    def run_streams(self, slow: int = -1) -> None:
        """Run the held launches, those of different streams at the same time; the stream ``slow`` rarely gets a turn.

        Raises:
            RuntimeError: a kernel ended with an error.
        """
        error = self._library.emulation_run_held(slow)
        if error is not None:
            raise RuntimeError(error.decode())

    def _set_block_order(self, order: str) -> None:
        if not self._library.emulation_set_block_order(order.encode()):
            raise ValueError(f"unknown order of blocks: {order}")
        Emulator._order = order

    def _set_device(self, name: str) -> None:
        arch, multiprocessors, shared_bytes = DEVICES[name]
        self._library.emulation_set_device(arch, multiprocessors, ctypes.c_size_t(shared_bytes))

    def _set_constant_memory(self, *tensors: Tensor) -> None:
        addresses = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        self._library.emulation_set_constant_memory(addresses, ctypes.c_size_t(len(tensors)))


def order_of(test: str) -> str:
    """The order of blocks that a test runs in: a third of the tests has each kind.

    FASTINFER_BLOCK_ORDER sets one for all tests.
    """
    number = zlib.crc32(test.encode())
    own = ("ascending", "descending", f"random:{number}")[number % 3]
    return os.environ.get("FASTINFER_BLOCK_ORDER", own)
