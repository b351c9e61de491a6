"""Checks of arguments beyond their types. They need no torch, so a mistake is reported at once.

Names of models are looked up last, because that may download one.
"""

import argparse
import dataclasses
import importlib.util
import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from fastinfer import hub
from fastinfer.cli.arguments import DRAFT_ROW, SECTION_TOKENS
from fastinfer.cli.options import API_KEY_VARIABLE
from fastinfer.client.endpoint import Endpoint
from fastinfer.distill.settings import SELF, Settings
from fastinfer.engine.grammar_source import check_syntax
from fastinfer.errors import AdapterError, RequestError
from fastinfer.evaluation.text_file import read_text
from fastinfer.quantize.methods import METHODS, SYMMETRIC, Method
from fastinfer.sampling_params import SamplingParams
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.utils.checks import check_new_folder, show_path

ADAPTER_CONFIG = "adapter_config.json"
# Options of ``info`` that say more about what another one asks for.
INFO_OPTIONS = {"memory": ("context", "batch", "device", "draft_model", "speculate"), "plan": ("group", "arch")}


def check_nothing(args: argparse.Namespace) -> None:
    """Check the arguments of a command whose types say it all."""


def check_generate(args: argparse.Namespace) -> None:
    """Check the arguments of ``generate``, and read the prompt if it comes from standard input."""
    if args.prompt == "-" or (args.prompt is None and not _is_terminal(sys.stdin)):
        args.prompt = _read_stdin()
    if not args.prompt:
        raise RequestError("PROMPT: expected the text, got nothing (see fastinfer generate --help)")
    check_session(args)


def check_session(args: argparse.Namespace) -> None:
    """Check the arguments that ``generate`` and ``chat`` have in common."""
    params = SamplingParams(**sampling_fields(args))
    if params.structured_outputs is not None:
        check_syntax(params.structured_outputs)
    if args.adapter is not None and not os.path.isfile(os.path.join(args.adapter, ADAPTER_CONFIG)):
        raise AdapterError(f"--adapter: expected a folder with {ADAPTER_CONFIG}, got {show_path(args.adapter)}")
    check_models(args)


def check_models(args: argparse.Namespace) -> None:
    """Look up the model, and the draft model and the image encoder if there are any."""
    draft_model = args.engine_options.get("draft_model")
    if draft_model is not None and not args.engine_options.get("num_speculative_tokens"):
        raise RequestError("--draft-model: expected --speculate of at least 1 with it, got none")
    hub.resolve(args.model)
    if draft_model not in (None, hub.MTP):
        hub.resolve(draft_model)
    if (mmproj := args.engine_options.get("mmproj")) is not None:
        hub.resolve(mmproj)


def check_chat(args: argparse.Namespace) -> None:
    """Check the arguments of ``chat``, and fill in the default model unless a server decides."""
    if args.url is None:
        if args.api_key is not None:
            raise RequestError("--api-key: expected --url with it, got none")
        args.model = hub.DEFAULT_MODEL if args.model is None else args.model
        check_session(args)
        return
    loading = [name for name in ("adapter", "threads") if getattr(args, name, None) is not None]
    loading += args.engine_options
    if loading:
        raise RequestError(f"--url: a server has loaded its model already, so {loading[0]} has no effect")
    check_server(args)
    SamplingParams(**sampling_fields(args))


def check_bench(args: argparse.Namespace) -> None:
    """Check the arguments of a benchmark."""
    _check_benchmark(args)
    if args.out is not None:
        _make_folder(args.out)


def _check_benchmark(args: argparse.Namespace) -> None:
    if "url" in args:
        check_server(args)
        return
    if "draft_model" in args and (args.draft_model is None) is (DRAFT_ROW in args.rows):
        row = "with" if args.draft_model is None else "without"
        raise RequestError(
            f"--draft-model: expected one with the row {DRAFT_ROW} alone, got {args.draft_model} {row} it"
        )
    if vars(args).get("draft_model") is not None:
        hub.resolve(args.draft_model)
    check_models(args)


def check_server(args: argparse.Namespace) -> None:
    """Check the address of a server, and take the key from the environment if none is given."""
    if importlib.util.find_spec("httptools") is None:
        raise RequestError("--url needs a further package: pip install 'fastinfer[client]'")
    if args.api_key is None:
        args.api_key = os.environ.get(API_KEY_VARIABLE, "").split(",")[0].strip() or None
    Endpoint.parse(args.url, args.api_key)


def check_info(args: argparse.Namespace) -> None:
    """Check the arguments of ``info``."""
    for option, names in INFO_OPTIONS.items():
        given = [name for name in names if getattr(args, name) is not None]
        if given and getattr(args, option) is None:
            raise RequestError(f"--{given[0].replace('_', '-')}: expected --{option} with it, got none")
    if args.speculate is not None and args.draft_model is None:
        raise RequestError("--speculate: expected --draft-model with it, got none")
    for model in (args.memory, args.draft_model):
        if model not in (None, hub.MTP):
            hub.resolve(model)


def check_quantize(args: argparse.Namespace) -> None:
    """Check the arguments of ``quantize``."""
    method = quantization_method(args)
    if method.needs_inputs and args.calibration is None:
        raise RequestError(f"--calibration: {method.name} needs a text, got none")
    for option in ("calibration", "evaluation"):
        if (path := getattr(args, option)) is not None:
            _check_sections(args.tokens, args.context)
            _read_text(option, path)
    check_new_folder("--out", Path(args.out))
    hub.resolve(args.model)


def check_train_head(args: argparse.Namespace) -> None:
    """Check the arguments of ``train-head``."""
    if args.data != SELF:
        _read_text("data", args.data)
    check_new_folder("--out", Path(args.out))
    hub.resolve(args.model)
    _make_folder(args.out)


def check_distill(args: argparse.Namespace) -> None:
    """Check the arguments of ``distill``."""
    if importlib.util.find_spec("transformers") is None:
        raise RequestError("distill needs further packages: pip install 'fastinfer[distill]'")
    settings = distillation_settings(args)
    if settings.student is not None and settings.kept_layers is None:
        hub.resolve(settings.student)
    if args.data != SELF:
        _read_text("data", args.data)
    if args.evaluation is not None:
        _read_text("evaluation", args.evaluation)
    hub.resolve(args.teacher)
    _make_folder(args.out)


def check_eval(args: argparse.Namespace) -> None:
    """Check the arguments of ``eval``."""
    _check_sections(args.tokens, args.engine_options.get("max_model_len", SECTION_TOKENS))
    _read_text("text", args.text)
    for model in args.models:
        hub.resolve(model)
    if vars(args).get("out") is not None:
        _make_folder(args.out)


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of :class:`SamplingParams` that the arguments give.

    Raises:
        RequestError: the file of the JSON schema is not a schema in UTF-8, or a constraint on the text is not valid.
    """
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    given = {name: value for name, value in vars(args).items() if name in names}
    return given | {"structured_outputs": _structured_outputs(vars(args))}


def quantization_method(args: argparse.Namespace) -> Method:
    """Return the method of ``quantize``.

    Raises:
        RequestError: the method does not support a number.
    """
    bits = args.bits or METHODS[args.method][0]
    symmetric = args.method in SYMMETRIC if args.symmetric is None else args.symmetric
    group_size = Method.group_size if args.group_size is None else args.group_size
    method = Method(args.method, bits, group_size, symmetric)
    if method.by_row and args.group_size not in (None, -1):
        raise RequestError(f"group_size: expected none for {method.name}, which has whole rows, got {args.group_size}")
    return method


def distillation_settings(args: argparse.Namespace) -> Settings:
    """Return the settings of ``distill``.

    Raises:
        RequestError: the list of layers or of stages is wrong.
    """
    fields = {field.name for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in vars(args).items() if name in fields}
    return Settings(**given | {"stages": tuple(args.stages or ()), "losses": tuple(args.losses)})


def _read_text(option: str, path: str) -> str:
    try:
        return read_text(path)
    except RequestError as error:
        raise RequestError(f"--{option}: {error}") from None


def _check_sections(tokens: int, context: int) -> None:
    if tokens < context:
        raise RequestError(f"--tokens: expected at least {context}, those of one section (--context), got {tokens}")


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--out: expected a folder, got {show_path(path)}: {error.strerror}") from None


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _read_stdin() -> str:
    if sys.stdin is None:
        raise RequestError("PROMPT: expected text on standard input, which is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # some locales turn any bytes into something
    try:
        # The newline at the end comes from the shell or the editor and is not part of the prompt.
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"PROMPT: expected UTF-8 on standard input, got {error}") from error


def _structured_outputs(args: dict[str, Any]) -> StructuredOutputsParams | None:
    if "json_schema" in args:
        path = args["json_schema"]
        schema = _read_text("json-schema", path)
        try:
            return StructuredOutputsParams(json=schema)
        except RequestError as error:
            raise RequestError(f"--json-schema: {path}: {error}") from None
    if "regex" in args:
        return StructuredOutputsParams(regex=args["regex"])
    return StructuredOutputsParams(choice=args["choice"]) if "choice" in args else None
