"""Objects that a forked child makes anew: it has one thread, and its parent's other threads may have held the locks."""

import os
import threading
import weakref
from typing import Protocol


class Renewable(Protocol):
    """An object with threads or locks."""

    def renew_after_fork(self) -> None:
        """Replace threads and locks. Called in a forked child, whose other threads are gone, wherever they were."""
        ...


# In the order of creation: what an object uses is renewed before the object itself.
_objects: "weakref.WeakKeyDictionary[Renewable, None]" = weakref.WeakKeyDictionary()


def renew_in_children(renewable: Renewable) -> None:
    """Have an object renewed in each child that this process forks, for as long as the object lives."""
    _objects[renewable] = None


def _renew_all() -> None:
    for renewable in list(_objects):
        renewable.renew_after_fork()


os.register_at_fork(after_in_child=_renew_all)


class RenewedLock:
    """A lock that is free in a forked child, even if another thread of the parent held it.

    Attributes:
        current: the lock, for ``with lock.current:``. That is safe against interrupts, which methods in Python are not.
    """

    def __init__(self) -> None:
        self.renew_after_fork()
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        self.current = threading.Lock()
