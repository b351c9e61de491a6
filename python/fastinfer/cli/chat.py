"""``fastinfer chat``: a conversation with streamed answers, from a model in this process or from a server."""

import argparse
import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from threading import Event
from types import FrameType

from fastinfer.cli.conversation import Conversation, Piece
from fastinfer.errors import FastinferError, RequestError
from fastinfer.utils.text import is_text

HELP = """\
/help         show this list
/system TEXT  set the system message; without TEXT remove it
/save FILE    write the conversation as JSON
/load FILE    go on with a conversation that /save has written
/reset        forget the conversation, except its system message
/quit         end, as Ctrl-D does
Ctrl-C        stop an answer"""
HINT = "Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands"
# A word alone; a message may begin with the path of a file.
COMMAND = re.compile(r"/(\w+)(?:\s+(.*))?", re.DOTALL)

# Function from the messages of a conversation to the answer in pieces. Closing the generator stops the answer.
Answer = Callable[[list[dict[str, str]]], Generator[Piece, None, None]]


def run(args: argparse.Namespace) -> int:
    """Read messages from standard input and print the answers, until the input ends."""
    if sys.stdin is None:
        raise RequestError("chat reads standard input, which is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # so that a wrong line does not end the chat
    answer = _local(args) if args.url is None else _remote(args)
    with contextlib.suppress(ImportError):  # gives input() history and editing, where Python supports it
        import readline  # noqa: F401
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        print(HINT)

    conversation = Conversation(args.system)
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(f"\n{HINT}")
            continue
        if not is_text(text):
            print(f"fastinfer: error: expected a line in UTF-8, got {os.fsencode(text)[:80]!r}", file=sys.stderr)
            continue
        if text == "/quit":
            return 0
        if command := COMMAND.fullmatch(text):
            try:
                _execute(command[1], command[2] or "", conversation)
            except RequestError as error:
                print(f"fastinfer: error: {error}", file=sys.stderr)
        elif text:
            question = {"role": "user", "content": text}
            try:
                text = _stream(answer([*conversation.messages, question]))
            except FastinferError as error:
                # What is wrong with a request is most often a conversation longer than the context.
                hint = "; /reset starts over" if isinstance(error, RequestError) else ""
                print(f"fastinfer: error: {error}{hint}", file=sys.stderr)
            else:
                conversation.messages += [question, {"role": "assistant", "content": text}]


# Imported when needed: one needs torch, the other httptools.


def _local(args: argparse.Namespace) -> Answer:
    from fastinfer.cli.session import Session

    session = Session.load(args)
    if session.llm.tokenizer.chat_template is None:
        raise RequestError(f"chat needs a model with a chat template, and {args.model} has none: try generate")
    return session.chat


def _remote(args: argparse.Namespace) -> Answer:
    from fastinfer.cli.chat_url import RemoteSession

    return RemoteSession.connect(args).chat


def _execute(command: str, argument: str, conversation: Conversation) -> None:
    """Execute a command other than ``/quit``.

    Raises:
        RequestError: there is no such command, its argument is missing or superfluous, or its file is not valid.
    """
    if command in ("help", "reset", "quit") and argument:
        raise RequestError(f"/{command} takes no argument, got {argument!r}")
    if command in ("save", "load") and not argument:
        raise RequestError(f"/{command} needs a FILE")
    match command:
        case "help":
            print(HELP)
        case "system":
            conversation.set_system(argument or None)
        case "save":
            conversation.save(_path(argument))
        case "load":
            conversation.load(_path(argument))
        case "reset":
            conversation.reset()
        case _:
            raise RequestError(f"unknown command /{command}: /help lists them")


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # that of pathlib raises for unknown users


def _stream(pieces: Generator[Piece, None, None]) -> str:
    """Stream one answer to stdout and return its text, which is partial if the answer was stopped."""
    text, was_reasoning = "", False
    with _stop_on_interrupt() as stopped, contextlib.closing(pieces):
        for piece in pieces:
            if was_reasoning and piece.text and not piece.is_reasoning:
                print("\n")
            was_reasoning = piece.is_reasoning
            print(piece.text, end="", flush=True)
            if not piece.is_reasoning:
                text += piece.text
            if stopped.is_set():
                break
    print(" [stopped]" if stopped.is_set() else "")
    return text


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Event]:
    """Turn the first Ctrl-C into an event, because an exception inside a step would leave the engine inconsistent.

    The second Ctrl-C raises KeyboardInterrupt as usual, in case a step takes too long.
    """
    stopped = Event()
    usual = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, usual)
