"""Options that several commands share, and the types of their values."""

import argparse
import math
from collections.abc import Callable, Sequence

from fastinfer.hub import DEFAULT_MODEL
from fastinfer.utils.dtypes import DTYPES, KV_CACHE_DTYPES


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add_model_option(parser)
    add_dtype_option(parser)


def add_model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a .gguf file or a folder, a name from 'fastinfer models', org/repo or org/repo/file.gguf; "
        "default: %(default)s",
    )


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="what to compute in; default: %(default)s")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options of :class:`fastinfer.LLM`, which has the defaults."""
    options = parser.add_argument_group("engine", argument_default=argparse.SUPPRESS)
    options.add_argument(
        "--speculate",
        type=int,
        dest="num_speculative_tokens",
        metavar="N",
        help="guess up to N tokens ahead, from the text itself; default: 0",
    )
    options.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="where to compute; default: auto, a GPU where there is one"
    )
    options.add_argument(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="of the cached keys and values; default: auto"
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options named as the fields of SamplingParams, which checks their ranges and has the defaults."""
    options = parser.add_argument_group("sampling", argument_default=argparse.SUPPRESS)
    options.add_argument("--max-tokens", type=int, metavar="N", help="end after N generated tokens; default: 256")
    options.add_argument("--min-tokens", type=int, metavar="N", help="do not end by itself before N generated tokens")
    options.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    options.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token; default: 0.7")
    options.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest of this sum; default: 0.95")
    options.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    options.add_argument("--min-p", type=float, metavar="P", help="drop tokens below this share of the likeliest")
    options.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="above 1, tokens of prompt and text come less often"
    )
    options.add_argument("--presence-penalty", type=float, metavar="X", help="subtracted for tokens in the text")
    options.add_argument("--frequency-penalty", type=float, metavar="X", help="the same, as often as the token occurs")
    options.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    form = parser.add_argument_group("structured output", argument_default=argparse.SUPPRESS)
    form = form.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="the text is JSON that this schema allows")
    form.add_argument("--regex", metavar="PATTERN", help="the whole text matches this regular expression")
    form.add_argument("--choice", action="append", metavar="TEXT", help="the text is one of these; to be repeated")


def count(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {low}, got {text!r}")
        return int(text)

    return parse


def counts(text: str) -> list[int]:
    return [count(1)(part) for part in text.split(",")]


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {name!r}")
        return given

    return parse
