"""What ``generate`` and ``chat`` share: the model and the sampling parameters that the arguments ask for."""

import argparse
import dataclasses

from fastinfer.llm import LLM
from fastinfer.sampling_params import DEFAULT_PARAMS, SamplingParams


def load(args: argparse.Namespace) -> tuple[LLM, SamplingParams]:
    """Check the parameters first, so that a mistake costs no loading."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    given = {name: value for name, value in vars(args).items() if name in fields}
    params = dataclasses.replace(DEFAULT_PARAMS, **given)
    return LLM(args.model, dtype=args.dtype), params
