"""Sampling parameters that a checkpoint recommends, for requests that give none."""

import math
from typing import Any

from fastinfer.errors import CheckpointFormatError, RequestError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.sampling_params import DEFAULT_PARAMS, SamplingParams

# Field of SamplingParams to its name in GGUF files; in generation_config.json it has the field's own name.
GGUF_NAMES = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def sampling_defaults(checkpoint: Checkpoint) -> SamplingParams:
    """Return the parameters of ``generation_config.json`` or of the GGUF file's ``general.sampling`` keys.

    Parameters that it leaves out do not change the model's distribution. If it has none of them, the result is
    temperature 0.7 and top_p 0.95. Whether to sample at all (``do_sample``) is ignored, as in vLLM.

    Raises:
        CheckpointFormatError, GGUFFormatError: a value is of a wrong type or out of range.
    """
    if isinstance(checkpoint, GGUFCheckpoint):
        source, given = str(checkpoint.path), _from_gguf(checkpoint)
    else:
        path = checkpoint.path / "generation_config.json"
        source, given = str(path), {}
        if path.exists():
            fields = JsonFields.read(path, CheckpointFormatError)
            given = {name: fields.values[name] for name in GGUF_NAMES if fields.values.get(name) is not None}
    if not given:
        return DEFAULT_PARAMS
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise CheckpointFormatError(f"{source}: {error}") from None


def _from_gguf(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    values = {name: checkpoint.file.metadata.get(f"general.sampling.{key}") for name, key in GGUF_NAMES.items()}
    # The file has single precision: 0.7 is 0.699999988.
    return {
        name: float(f"{value:.7g}") if isinstance(value, float) and math.isfinite(value) else value
        for name, value in values.items()
        if value is not None
    }
