"""Other threads run while a text is tokenised: those of the engine and of an event loop."""

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from fastinfer.tokenizers import library
from fastinfer.tokenizers.sentencepiece import _Splitter

TEXT = "hello world, " * 20_000


@pytest.fixture(autouse=True)
def _no_forced_switches() -> Iterator[None]:
    """A thread runs only when another one releases the interpreter's lock by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def lets_others_run(call: Callable[[], object]) -> bool:
    begun, ended, seen = False, False, []

    def watch() -> None:
        while not begun:
            time.sleep(0)
        seen.append(not ended)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = True
    call()
    ended = True
    watcher.join()
    return seen == [True]


def test_what_is_counted() -> None:
    assert lets_others_run(lambda: time.sleep(0.01))
    assert not lets_others_run(lambda: sum(range(100_000)))


def test_the_library() -> None:
    vocab = {letter: number for number, letter in enumerate(sorted(set(TEXT)))}
    backend = Backend(models.BPE(vocab, []))
    ids: list[int] = []
    assert lets_others_run(lambda: ids.extend(library.encode(backend, TEXT)))
    assert ids == [vocab[letter] for letter in TEXT]


def test_the_search_for_special_tokens() -> None:
    splitter = _Splitter({"world": 7})
    parts: list[int | str] = []
    assert lets_others_run(lambda: parts.extend(splitter.split(TEXT)))
    assert parts == ["hello ", 7, *([", hello ", 7] * 19_999), ", "]
