"""``fastinfer chat``: a conversation with streamed answers."""

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import FrameType

from fastinfer.cli.conversation import Conversation
from fastinfer.cli.session import Session
from fastinfer.errors import RequestError

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


def run(args: argparse.Namespace) -> int:
    """Read messages from standard input and print the answers, until the input ends."""
    if sys.stdin is None:
        raise RequestError("chat reads standard input, which is closed")
    session = Session.load(args)
    if session.llm.tokenizer.chat_template is None:
        raise RequestError(f"chat needs a model with a chat template, and {args.model} has none: try generate")
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
                answer = _answer(session, [*conversation.messages, question])
            except RequestError as error:  # most often a conversation longer than the context
                print(f"fastinfer: error: {error}; /reset starts over", file=sys.stderr)
            else:
                conversation.messages += [question, {"role": "assistant", "content": answer}]


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


def _answer(session: Session, messages: list[dict[str, str]]) -> str:
    """Stream one answer to stdout and return its text, which is partial if the answer was stopped."""
    text = ""
    with _stop_on_interrupt() as stopped, contextlib.closing(session.answer(messages)) as outputs:
        for output in outputs:
            completion = output.outputs[0]
            text += completion.delta
            print(completion.delta, end="", flush=True)
            if completion.finish_reason == "error":
                raise RequestError(f"the request failed: {completion.stop_reason}")
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
