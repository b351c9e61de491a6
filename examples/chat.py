"""A chat in the terminal with a rolling context window: when the conversation fills it, the oldest turns are dropped.

    python examples/chat.py --window 1024 --system "You are a patient teacher."

Each answer reads the whole conversation. All of it up to the newest question is in the prefix cache, so a turn late in
a long conversation costs no more than the first one. Dropping a turn moves everything after it, which must then be
computed again; therefore half of the window is cleared at a time.
"""

import argparse
import contextlib
from collections.abc import Sequence

from fastinfer import LLM, RequestError, SamplingParams
from fastinfer.hub import DEFAULT_MODEL
from fastinfer.serving.prompt import prepare_chat

Messages = list[dict[str, str]]


def num_tokens(llm: LLM, messages: Messages) -> int:
    return len(prepare_chat(llm.engine, messages).token_ids)


def roll(llm: LLM, system: Messages, turns: Messages, limit: int) -> Messages:
    """Return all turns while they fit, else the newest ones that fill half of the limit."""
    if num_tokens(llm, system + turns) > limit:
        while len(turns) > 1 and num_tokens(llm, system + turns) > limit // 2:
            turns = turns[2:]  # a question and its answer
    return turns


def answer(llm: LLM, messages: Messages, params: SamplingParams) -> str:
    """Stream the answer to the terminal, and say how much of the prompt was in the cache."""
    with contextlib.closing(llm.stream_chat(messages, params)) as outputs:
        for output in outputs:
            print(output.outputs[0].delta, end="", flush=True)
    print(f"\n[{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were in the cache]")
    return output.outputs[0].text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Chat with a rolling context window; Ctrl-D ends.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--system", default="You are a helpful assistant.", help="the system prompt, which stays")
    parser.add_argument("--window", type=int, default=2048, help="tokens of conversation and answer together")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    args = parser.parse_args(argv)

    llm = LLM(args.model, max_model_len=args.window)
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=args.max_tokens)
    system: Messages = [{"role": "system", "content": args.system}]
    turns: Messages = []
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            question = {"role": "user", "content": input("> ")}
            kept = roll(llm, system, [*turns, question], args.window - args.max_tokens)
            try:
                text = answer(llm, system + kept, params)
            except RequestError as error:  # a question that alone is longer than the window
                print(error)
            else:
                turns = [*kept, {"role": "assistant", "content": text}]


if __name__ == "__main__":
    main()
