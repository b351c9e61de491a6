"""Prompts whose answers a draft head learns to predict."""

from collections.abc import Callable
from dataclasses import dataclass

from fastinfer.engine.engine import Engine
from fastinfer.errors import PromptTooLongError, RequestError
from fastinfer.evaluation.text_file import read_text
from fastinfer.sampling_params import SamplingParams
from fastinfer.serving.prompt import prepare, prepare_chat
from fastinfer.tokenizers.chat_template import before_user_message
from fastinfer.train_head.recorder import MAX_PROMPT

SELF = "self"
# Of this many prompts one is held out, to measure acceptance on.
HELD_OUT = 16
# Messages that the model writes itself, those of them that it always completes, and their longest length in tokens.
NUM_MESSAGES = 512
FIRST_MESSAGES = 32
MESSAGE_TOKENS = 64


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids.

    Attributes:
        learned: prompts to learn from.
        held_out: prompts to measure acceptance on.
        num_too_long: number of messages that were left out, as their prompts leave no room for an answer.
    """

    learned: list[list[int]]
    held_out: list[list[int]]
    num_too_long: int


def read_prompts(data: str, engine: Engine, is_over: Callable[[], bool]) -> Prompts:
    """Read prompts, and hold some of them out.

    Args:
        data: path of a text file with a user's message in each line, or ``"self"`` for messages that the model writes.
        engine: engine of the model. A model without a chat template continues the lines.
        is_over: function that returns whether the time for writing messages is over.

    Raises:
        RequestError: the file cannot be read, or has fewer than two messages that leave room for an answer.
    """
    messages = _written(engine, is_over) if data == SELF else [line.strip() for line in read_text(data).splitlines()]
    messages = list(dict.fromkeys(message for message in messages if message))
    prompts = [tokens for message in messages if (tokens := _tokens(message, engine)) is not None]
    num_too_long = len(messages) - len(prompts)
    if len(prompts) < 2:
        raise RequestError(
            f"{data}: expected at least 2 messages, one in each line, whose prompts have at most {MAX_PROMPT} tokens, "
            f"got {len(prompts)}" + (f" and {num_too_long} longer" if num_too_long else "")
        )
    count = max(1, len(prompts) // HELD_OUT)
    held_out = {index * len(prompts) // count for index in range(count)}
    learned = [prompt for index, prompt in enumerate(prompts) if index not in held_out]
    return Prompts(learned, [prompts[index] for index in sorted(held_out)], num_too_long)


def _tokens(message: str, engine: Engine) -> list[int] | None:
    """Return the tokens of a message's prompt; ``None`` if it leaves no room for an answer."""
    try:
        if engine.tokenizer.chat_template is None:
            tokens = prepare(engine, message).token_ids
        else:
            tokens = prepare_chat(engine, [{"role": "user", "content": message}]).token_ids
    except PromptTooLongError:
        return None
    return tokens if len(tokens) <= MAX_PROMPT else None


def _written(engine: Engine, is_over: Callable[[], bool]) -> list[str]:
    """Let the model write users' messages: it continues what precedes one in the chat template."""
    tokenizer = engine.tokenizer
    if tokenizer.chat_template is None:
        raise RequestError("data must be a file for a model without a chat template, got 'self'")
    text = before_user_message(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    prefix = tokenizer.encode(text, add_special_tokens=False)
    written: list[str] = []
    params = [
        SamplingParams(temperature=1.0, max_tokens=MESSAGE_TOKENS, seed=seed, stop=["\n"])
        for seed in range(NUM_MESSAGES)
    ]
    names = [engine.add_request(prefix, own) for own in params]
    while engine.has_unfinished:
        written += [output.outputs[0].text.strip() for output in engine.step() if output.finished]  # type: ignore[union-attr]
        if len(written) >= FIRST_MESSAGES and is_over():
            for name in names:
                engine.abort(name)
    return written
