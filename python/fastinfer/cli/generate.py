"""``fastinfer generate``: complete or answer one prompt; the text goes to stdout, its speed to stderr."""

import argparse
import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from fastinfer.cli.session import Session
from fastinfer.errors import RequestError
from fastinfer.outputs import RequestOutput
from fastinfer.utils.regular_file import read_regular


@dataclass(frozen=True)
class Speed:
    """Counts and times of one finished request.

    Attributes:
        prompt_tokens, tokens: numbers of prompt tokens and of generated tokens.
        first_token_s: seconds from arrival to the first token.
        tokens_per_s: speed of decoding after the first token; ``None`` with fewer than two tokens.
    """

    prompt_tokens: int
    tokens: int
    first_token_s: float
    tokens_per_s: float | None

    @classmethod
    def of(cls, output: RequestOutput) -> "Speed":
        times, tokens = output.metrics, len(output.outputs[0].token_ids)
        assert times.first_token_time is not None
        assert times.finish_time is not None
        decoding = times.finish_time - times.first_token_time
        return cls(
            prompt_tokens=len(output.prompt_token_ids),
            tokens=tokens,
            first_token_s=times.first_token_time - times.arrival_time,
            tokens_per_s=(tokens - 1) / decoding if tokens > 1 else None,
        )

    def __str__(self) -> str:
        line = f"{self.prompt_tokens} prompt tokens, first token after {self.first_token_s * 1e3:.0f} ms, "
        line += f"{self.tokens} token{'s' * (self.tokens != 1)}"
        return line if self.tokens_per_s is None else f"{line} at {self.tokens_per_s:.1f} tokens/s"


def run(args: argparse.Namespace) -> int:
    """Stream the text of one prompt, or print one JSON object."""
    content = _content(args.prompt, args.image)
    if args.raw and args.image:
        raise RequestError("--image needs the model's chat template, which --raw leaves out")
    session = Session.load(args)
    if args.raw or (session.llm.tokenizer.chat_template is None and not args.image):
        outputs = session.complete(args.prompt)
    else:
        outputs = session.answer([{"role": "user", "content": content}])
    with contextlib.closing(outputs):
        for output in outputs:
            if not args.json:
                print(output.outputs[0].delta, end="", flush=True)
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        raise RequestError(f"the request failed: {completion.stop_reason}")
    if args.json:
        print(
            json.dumps(
                {
                    "model": args.model,
                    "prompt": args.prompt,
                    "text": completion.text,
                    "token_ids": completion.token_ids,
                    "finish_reason": completion.finish_reason,
                    **asdict(Speed.of(output)),
                }
            )
        )
    else:
        print(flush=True)
        print(Speed.of(output), file=sys.stderr)
    return 0


def _content(prompt: str, images: list[str]) -> str | list[dict[str, Any]]:
    """Return the content of a message: the text, behind the images of files.

    Raises:
        RequestError: a file cannot be read.
    """
    if not images:
        return prompt
    parts: list[dict[str, Any]] = []
    for path in images:
        try:
            parts.append({"type": "image", "image": read_regular(path)})
        except OSError as error:
            raise RequestError(f"--image: {path}: {error.strerror}") from None
        except ValueError as error:  # no path
            raise RequestError(f"--image: {path!r}: {error}") from None
    return [*parts, {"type": "text", "text": prompt}]
