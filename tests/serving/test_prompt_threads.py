"""Which prompts count as short, and that they do not wait for long ones."""

import threading
from typing import Any

import pytest

from fastinfer.serving.prompt import PreparedPrompt
from fastinfer.serving.prompt_threads import NUM_SHORT_THREADS, NUM_THREADS, SHORT_SIZE, PromptThreads, is_short

LONG = "x" * (SHORT_SIZE + 1)
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hello", True),
        (LONG, False),
        ({"prompt": "hello", "cache_salt": "a"}, True),
        ({"prompt": LONG}, False),
        ([1] * SHORT_SIZE, True),
        ([1] * (SHORT_SIZE + 1), False),
        ({"prompt_token_ids": [1] * (SHORT_SIZE + 1)}, False),
        (PreparedPrompt(LONG, [1] * SHORT_SIZE), True),  # there is no text to tokenise any more
        (PreparedPrompt(None, [1] * (SHORT_SIZE + 1)), False),
        (("context", "continuation"), True),
        (("context", LONG), False),
        (([{"role": "user", "content": "hello"}], None), True),
        (([{"role": "user", "content": LONG}], None), False),
        (([{"role": "user", "content": [{"type": "text", "text": LONG}]}], None), False),
        (([{"role": "user", "content": "x" * 100}] * (SHORT_SIZE // 100), None), False),
        (([{"role": "user", "content": "hello"}], {"tools": [TOOL]}), False),
        (([{LONG: 1}], None), False),
        (7, True),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_short(content: Any, expected: bool) -> None:
    assert is_short(content) == expected


def test_the_size_of_a_large_content_is_not_counted_to_its_end() -> None:
    nested: list[Any] = []
    nested.append(nested)  # without end
    assert not is_short(nested)


@pytest.mark.parametrize(
    ("slow", "quick"), [(LONG, "hello"), ("hello", LONG)], ids=["a short one behind long ones", "a long one"]
)
def test_short_and_long_prompts_do_not_wait_for_each_other(slow: str, quick: str) -> None:
    threads, may_end = PromptThreads(), threading.Event()
    try:
        count = 2 * (NUM_THREADS + NUM_SHORT_THREADS)
        others = [threads.submit(slow, may_end.wait, 60) for _ in range(count)]
        assert threads.submit(quick, len, quick).result(10) == len(quick)
        assert not any(other.done() for other in others)
    finally:
        may_end.set()
        threads.shutdown()
    assert all(other.result() for other in others)


def test_a_message_with_an_image_is_not_short() -> None:
    """It is encoded in the same thread, which takes much longer than a short text."""
    for part in ({"type": "image", "image": b"x"}, {"type": "image_url", "image_url": {"url": "data:,"}}):
        assert not is_short([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
