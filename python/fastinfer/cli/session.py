"""Model and sampling parameters from the arguments of ``generate`` and ``chat``."""

import argparse
import dataclasses

from fastinfer.cli.checks import sampling_fields
from fastinfer.llm import LLM
from fastinfer.sampling_params import SamplingParams


def load(args: argparse.Namespace) -> tuple[LLM, SamplingParams]:
    """Load the model; its own sampling parameters are the defaults of those that the arguments do not give."""
    llm = LLM(args.model, **args.engine_options)
    return llm, dataclasses.replace(llm.default_params, **sampling_fields(args))
