"""The threads that render and tokenise prompts beside the event loop."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from fastinfer.serving.images import is_image
from fastinfer.serving.prompt import PreparedPrompt

NUM_THREADS = 4
NUM_SHORT_THREADS = 2
# Largest content, in characters, tokens and entries together, that counts as short. It is tokenised in milliseconds.
SHORT_SIZE = 2**12

Result = TypeVar("Result")


class PromptThreads:
    """Two pools of threads, so that short prompts do not wait for long ones."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="fastinfer-engine-prompts")
        self._short_pool = ThreadPoolExecutor(NUM_SHORT_THREADS, thread_name_prefix="fastinfer-engine-short-prompts")

    def submit(self, content: object, function: Callable[..., Result], *args: Any) -> "Future[Result]":
        """Run a function in a thread.

        Args:
            content: what the function works on: a prompt, messages, or several of these; its size chooses the pool.
            function, args: the function and its arguments.
        """
        return (self._short_pool if is_short(content) else self._pool).submit(function, *args)

    def shutdown(self) -> None:
        """Wait for what was submitted, and end the threads."""
        for pool in (self._short_pool, self._pool):
            pool.shutdown()


def is_short(content: object) -> bool:
    """Return whether texts, lists and dictionaries are short in all; takes time in proportion to ``SHORT_SIZE``."""
    left, parts = SHORT_SIZE, [content]
    while parts:
        part = parts.pop()
        if isinstance(part, int):  # a token
            continue
        if isinstance(part, str):
            left -= len(part)
        elif isinstance(part, list | tuple):
            left -= len(part)
            parts += part if left >= 0 else ()
        elif isinstance(part, PreparedPrompt):
            left -= len(part.token_ids)
        elif is_image(part):  # which is encoded, too
            return False
        elif isinstance(part, Mapping):
            left -= len(part)
            parts += [*part.keys(), *part.values()] if left >= 0 else ()
        if left < 0:
            return False
    return True
