"""Prompts whose answers a draft head learns to predict."""

from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.evaluation.text_file import read_text
from fastinfer.sampling_params import SamplingParams
from fastinfer.serving.prompt import prepare_chat
from fastinfer.tokenizers.chat_template import before_user_message

SELF = "self"
# Of this many prompts one is held out, to measure acceptance on.
HELD_OUT = 16
# Messages that the model writes itself, and their longest length in tokens.
NUM_MESSAGES = 512
MESSAGE_TOKENS = 64


def read_prompts(data: str, engine: Engine) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts to learn from and those that are held out, as token ids.

    Args:
        data: path of a text file with a user's message in each line, or ``"self"`` for messages that the model writes.
        engine: engine of the model. A model without a chat template continues the lines.

    Raises:
        RequestError: the file cannot be read, or has fewer than two messages.
    """
    messages = _written(engine) if data == SELF else [line.strip() for line in read_text(data).splitlines()]
    messages = list(dict.fromkeys(message for message in messages if message))
    if len(messages) < 2:
        raise RequestError(f"{data}: expected at least 2 messages, one in each line, got {len(messages)}")
    count = max(1, len(messages) // HELD_OUT)
    held_out = {index * len(messages) // count for index in range(count)}
    prompts = [_tokens(message, engine) for message in messages]
    return (
        [prompt for index, prompt in enumerate(prompts) if index not in held_out],
        [prompts[index] for index in sorted(held_out)],
    )


def _tokens(message: str, engine: Engine) -> list[int]:
    if engine.tokenizer.chat_template is None:
        return engine.tokenizer.encode(message)
    return prepare_chat(engine, [{"role": "user", "content": message}]).token_ids


def _written(engine: Engine) -> list[str]:
    """Let the model write users' messages: it continues what precedes one in the chat template."""
    tokenizer = engine.tokenizer
    if tokenizer.chat_template is None:
        raise RequestError("data must be a file for a model without a chat template, got 'self'")
    text = before_user_message(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    prefix = tokenizer.encode(text, add_special_tokens=False)
    for seed in range(NUM_MESSAGES):
        engine.add_request(prefix, SamplingParams(temperature=1.0, max_tokens=MESSAGE_TOKENS, seed=seed, stop=["\n"]))
    written = []
    while engine.has_unfinished:
        written += [output.outputs[0].text.strip() for output in engine.step() if output.finished]  # type: ignore[union-attr]
    return written
