"""``fastinfer chat``: a conversation with streamed answers."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from threading import Event
from types import FrameType

from fastinfer.cli.session import load
from fastinfer.errors import RequestError
from fastinfer.llm import LLM
from fastinfer.sampling_params import SamplingParams

HELP = "Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D or /exit ends"


def run(args: argparse.Namespace) -> int:
    """Read messages from standard input and print the answers, until the input ends."""
    if sys.stdin is None:
        raise RequestError("chat reads standard input, which is closed")
    llm, params = load(args)
    if llm.tokenizer.chat_template is None:
        raise RequestError(f"chat needs a model with a chat template, and {args.model} has none: try generate")
    with contextlib.suppress(ImportError):  # gives input() history and editing, where Python supports it
        import readline  # noqa: F401
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        print(HELP)

    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    messages = list(system)
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(f"\n{HELP}")
            continue
        if text == "/exit":
            return 0
        if text == "/reset":
            messages = list(system)
        elif text:
            question = {"role": "user", "content": text}
            try:
                answer = _answer(llm, [*messages, question], params)
            except RequestError as error:  # most often a conversation longer than the context
                print(f"fastinfer: error: {error}; /reset starts over", file=sys.stderr)
            else:
                messages += [question, {"role": "assistant", "content": answer}]


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer to stdout and return its text, which is partial if the answer was stopped."""
    text = ""
    with _stop_on_interrupt() as stopped, contextlib.closing(llm.stream_chat(messages, params)) as outputs:
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
