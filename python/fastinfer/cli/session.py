"""Model and sampling parameters from the arguments of ``generate`` and ``chat``."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from fastinfer.errors import RequestError
from fastinfer.llm import LLM
from fastinfer.sampling_params import DEFAULT_PARAMS, SamplingParams
from fastinfer.structured_output import StructuredOutputsParams

ENGINE_OPTIONS = ("device", "num_speculative_tokens", "kv_cache_dtype")


def load(args: argparse.Namespace) -> tuple[LLM, SamplingParams]:
    """Load the model. The parameters are checked first, so that a mistake is reported at once."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    given = {name: value for name, value in vars(args).items() if name in fields}
    params = dataclasses.replace(DEFAULT_PARAMS, **given, structured_outputs=_structured_outputs(vars(args)))
    options = {name: value for name, value in vars(args).items() if name in ENGINE_OPTIONS}
    return LLM(args.model, dtype=args.dtype, **options), params


def _structured_outputs(args: dict[str, Any]) -> StructuredOutputsParams | None:
    if "json_schema" in args:
        try:
            return StructuredOutputsParams(json=Path(args["json_schema"]).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(f"{args['json_schema']}: expected a JSON schema in UTF-8, got {error}") from error
        except RequestError as error:
            raise RequestError(f"{args['json_schema']}: {error}") from None
    if "regex" in args:
        return StructuredOutputsParams(regex=args["regex"])
    return StructuredOutputsParams(choice=args["choice"]) if "choice" in args else None
