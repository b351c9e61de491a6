"""A progress bar that does not stand above the error of a model that is refused."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def late_bar(**options: Any) -> Iterator[Callable[[], "tqdm[Any]"]]:
    """Yield a function that returns a bar, which appears when it is first called.

    Args:
        options: arguments of ``tqdm``.
    """
    with ExitStack() as stack:
        yield functools.cache(lambda: stack.enter_context(tqdm(**options)))
