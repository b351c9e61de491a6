"""Options shared by several commands, and types of arguments."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from fastinfer.errors import RequestError
from fastinfer.hub import DEFAULT_MODEL
from fastinfer.utils.checks import show
from fastinfer.utils.device_name import DEVICE_NAMES, is_device_name
from fastinfer.utils.dtypes import DTYPES, KV_CACHE_DTYPES
from fastinfer.utils.places import is_list_of_places, parse_places

# A key on a command line can be seen by every user of the machine. The variable may have several, separated by commas.
API_KEY_VARIABLE = "FASTINFER_API_KEY"
# The engine's limits, whose modules import torch; a test compares them.
MAX_SPECULATIVE_TOKENS = 15
MAX_RANKS = 64


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add the model."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a .gguf file or a folder, a name from 'fastinfer models', org/repo or org/repo/file.gguf; "
        f"default: {DEFAULT_MODEL}",
    )


def add_threads_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the number of threads, which :func:`fastinfer.cli.commands.run` sets."""
    parser.add_argument(
        "--threads", type=count(1, 1024), default=None, metavar="N", help="CPU threads; default: one per core"
    )


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the number of tokens of a text."""
    parser.add_argument(
        "--tokens",
        type=count(32),
        default=16384,
        metavar="N",
        help="largest number of tokens of all sections; default: %(default)s",
    )


def add_server_options(parser: argparse.ArgumentParser, *, is_required: bool, url_help: str) -> None:
    """Add the address of an OpenAI-compatible server, and the key for it."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", required=is_required, metavar="URL", help=url_help)
    group.add_argument(
        "--api-key", metavar="KEY", help=f"sent to the server; ${API_KEY_VARIABLE} keeps it from other users"
    )


class EngineOption(argparse.Action):
    """Collects arguments of :class:`fastinfer.LLM`, which has the defaults, in the dictionary ``engine_options``.

    An option without a value (``nargs=0``) stands for ``const``.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.engine_options = namespace.engine_options | {self.dest: self.const if self.nargs == 0 else values}


def add_engine_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the model and options of :class:`fastinfer.LLM`, and return the group of the latter."""
    add_model_option(parser)
    options = add_loading_options(
        parser,
        context="longest sequence in tokens; default: the model's limit, or what fits into memory",
        max_num_seqs="sequences that run at once; default: 64, on a GPU 256",
    )
    options.add_argument(
        "--kv-offloading-size",
        action=EngineOption,
        type=rate,
        metavar="GIB",
        help="host memory for keys and values that leave the KV cache; default: none",
    )
    options.add_argument(
        "--kv-offloading-dir",
        action=EngineOption,
        metavar="DIR",
        help="folder that keeps keys and values for later processes; default: none",
    )
    options.add_argument(
        "--kv-offloading-dir-size",
        action=EngineOption,
        type=rate,
        metavar="GIB",
        help="largest size of that folder; default: 16",
    )
    options.add_argument(
        "--speculate",
        dest="num_speculative_tokens",
        action=EngineOption,
        type=count(0, MAX_SPECULATIVE_TOKENS),
        metavar="N",
        help="draft up to N tokens per step, from n-grams of the text unless there is a draft model; default: 0",
    )
    options.add_argument(
        "--draft-model",
        action=EngineOption,
        metavar="MODEL",
        help="smaller model or draft head that drafts them, named like a model; mtp: the model's layers for "
        "multi-token prediction",
    )
    options.add_argument(
        "--mmproj",
        action=EngineOption,
        metavar="FILE",
        help="image encoder of a GGUF model, a .gguf file or org/repo/file.gguf; default: the only file beside the "
        "model with mmproj in its name",
    )
    options.add_argument(
        "--sparse-attention",
        action=EngineOption,
        type=share,
        metavar="SHARE",
        help="part of its attention, as 0.9, that the blocks hold which a token reads of a long context; default: all",
    )
    options.add_argument(
        "--deterministic",
        action=EngineOption,
        nargs=0,
        const=True,
        help="let no text depend on the requests beside it, where that costs time: on GPUs, on CPUs with AVX-512 BF16 "
        "or AMX, and with LoRA adapters",
    )
    options.add_argument(
        "--tensor-parallel-size",
        action=EngineOption,
        type=count(1, MAX_RANKS),
        metavar="N",
        help="processes of this machine that compute the model together; default: 1",
    )
    options.add_argument(
        "--tensor-parallel-layout",
        action=EngineOption,
        choices=("gather", "reduce"),
        help="gather: results bitwise those of one process; reduce: half as many exchanges; default: gather",
    )
    options.add_argument(
        "--pipeline-parallel-size",
        action=EngineOption,
        type=count(1, MAX_RANKS),
        metavar="N",
        help="processes of this machine that compute some layers each, on a CPU; default: 1",
    )
    options.add_argument(
        "--pipeline-parallel-layers",
        action=EngineOption,
        type=counts,
        metavar="N,N",
        help="number of layers of each of these processes; default: by the number of weights that a token uses",
    )
    return options


def add_loading_options(
    parser: argparse.ArgumentParser,
    *,
    context: str,
    max_num_seqs: str,
    min_context: int = 1,
    one_device: bool = False,
    default_device: str = "auto, a GPU if there is one",
) -> argparse._ArgumentGroup:
    """Add what every command has that loads a model.

    Args:
        parser: the command's parser.
        context, max_num_seqs: help of these options, which mean something else in each command.
        min_context: smallest context.
        one_device: whether the command takes no list of places.
        default_device: help of the device's default.

    Returns:
        The group of these options. Its options are collected in ``engine_options``.
    """
    parser.set_defaults(engine_options={})
    options = parser.add_argument_group("engine", argument_default=argparse.SUPPRESS)

    def add(name: str, dest: str, **settings: Any) -> None:
        options.add_argument(name, dest=dest, action=EngineOption, **settings)

    several = "" if one_device else ", or several like cuda:0=24,cuda:1=8 or cuda+cpu"
    add(
        "--device",
        "device",
        type=device_name if one_device else device,
        metavar="NAME",
        help=f"{DEVICE_NAMES}{several}; default: {default_device}",
    )
    add("--dtype", "dtype", choices=DTYPES, help="dtype to compute in; default: auto")
    add(
        "--context",
        "max_model_len",
        type=count(min_context),
        metavar="N",
        help=context,
    )
    add("--kv-cache-dtype", "kv_cache_dtype", choices=KV_CACHE_DTYPES, help="dtype of keys and values; default: auto")
    add(
        "--max-num-seqs",
        "max_num_seqs",
        type=count(1),
        metavar="N",
        help=max_num_seqs,
    )
    add_threads_option(options)
    return options


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """Add the LoRA adapter."""
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter, a folder that PEFT has saved")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add options named as the fields of SamplingParams, which checks their ranges and has the defaults."""
    options = parser.add_argument_group("sampling", argument_default=argparse.SUPPRESS)
    options.add_argument("--max-tokens", type=integer, metavar="N", help="end after N generated tokens; default: 256")
    options.add_argument("--min-tokens", type=integer, metavar="N", help="no end of sequence before N generated tokens")
    options.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    recommended = "default: what the checkpoint recommends, or {} if it recommends nothing"
    options.add_argument(
        "--temperature",
        type=number,
        metavar="T",
        help=f"0 takes the most likely token; {recommended.format(0.7)}",
    )
    options.add_argument(
        "--top-p",
        type=number,
        metavar="P",
        help=f"keep the most likely tokens with this total probability; {recommended.format(0.95)}",
    )
    options.add_argument("--top-k", type=integer, metavar="K", help="keep the K most likely tokens")
    options.add_argument(
        "--min-p", type=number, metavar="P", help="drop tokens below this fraction of the largest probability"
    )
    options.add_argument(
        "--repetition-penalty", type=number, metavar="R", help="above 1: makes tokens of prompt and text less likely"
    )
    options.add_argument(
        "--presence-penalty", type=number, metavar="X", help="subtracted from logits of tokens in the text"
    )
    options.add_argument(
        "--frequency-penalty", type=number, metavar="X", help="the same, times the number of occurrences"
    )
    options.add_argument("--seed", type=integer, metavar="N", help="the same seed gives the same text")
    group = parser.add_argument_group("structured output", argument_default=argparse.SUPPRESS)
    structured = group.add_mutually_exclusive_group()
    structured.add_argument("--json-schema", metavar="FILE", help="the text is JSON that this schema allows")
    structured.add_argument("--regex", metavar="PATTERN", help="the whole text matches this regular expression")
    structured.add_argument(
        "--choice", action="append", metavar="TEXT", help="the text is one of these; may be repeated"
    )


def count(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return the argument type of integers of at least ``low`` and, if given, at most ``high``."""

    def parse(text: str) -> int:
        value = _as_int(text) if text.isdecimal() else None
        if value is None or value < low or (high is not None and value > high):
            limits = f"of at least {low}" if high is None else f"in {low}..{high}"
            raise argparse.ArgumentTypeError(f"expected an integer {limits}, got {show(text)}")
        return value

    return parse


def integer(text: str) -> int:
    """Parse an integer."""
    value = _as_int(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"expected an integer, got {show(text)}")
    return value


def number(text: str) -> float:
    """Parse a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {show(text)}") from None


def _as_int(text: str) -> int | None:
    """Return the integer; ``None`` if the text is none, or one of more digits than Python reads."""
    try:
        return int(text)
    except ValueError:
        return None


def device(text: str) -> str:
    """Check the name of a device, or a list of places."""
    if is_list_of_places(text):
        try:
            parse_places(text)
        except RequestError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("device: ")) from None
        return text
    return device_name(text)


def device_name(text: str) -> str:
    """Check the name of one device."""
    if not is_device_name(text):
        raise argparse.ArgumentTypeError(f"expected {DEVICE_NAMES}, got {show(text)}")
    return text


def counts(text: str) -> list[int]:
    """Parse positive integers separated by commas."""
    return [count(1)(part) for part in text.split(",")]


def rate(text: str) -> float:
    """Parse a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {show(text)}")
    return value


def share(text: str) -> float:
    """Parse a positive number of at most 1."""
    value = rate(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {show(text)}")
    return value


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the argument type of different names separated by commas, each of which must be known."""

    def parse(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {show(name)}")
        if len(set(given)) < len(given):
            raise argparse.ArgumentTypeError(f"expected different names, got {show(text)}")
        return given

    return parse
