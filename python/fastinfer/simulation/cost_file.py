"""The file of costs: the time of a step, and the engine whose steps it describes.

``fastinfer bench step-cost`` writes such a file as JSON. One written by hand, for a machine that nobody has measured,
says so in ``source``::

    {"source": "assumed", "model": "an 8B model in fp8 on one GPU",
     "seconds": {"step": 6e-3, "decode_sequence": 2.5e-5, "prompt_sequence": 1e-4, "prompt_token": 2e-5,
                 "decode_context": 3e-8, "prompt_context": 3e-10},
     "engine": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 8192, "block_size": 32,
                "num_blocks": [20000], "windows": [0]}}
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fastinfer.errors import RequestError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.simulation.step_cost import StepCost
from fastinfer.utils.checks import INT32_MAX, check_int, show

SOURCES = ("measured", "assumed")
# What a file may have; the first three are facts that "fastinfer bench step-cost" adds.
FIELDS = ("date", "machine", "fit", "source", "model", "seconds", "engine")
MAX_COEFFICIENT_S = 1e6
# No engine is faster, and a shorter step would not move the clock late in a long trace.
MIN_STEP_S = 1e-6


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of a simulated engine, as in :class:`fastinfer.engine.config.EngineConfig`.

    Attributes:
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens in a step.
        max_model_len: longest sequence in tokens.
        block_size: tokens per block of the KV cache.
        num_blocks: number of blocks of each group of layers.
        windows: length of the attention window of each group of layers; 0 for none.
        enable_prefix_caching: whether requests reuse computed blocks.
        separates_roles: whether no chunk of a step has tokens of a prompt and generated ones, see
            :mod:`fastinfer.engine.roles`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: tuple[int, ...]
    windows: tuple[int, ...]
    enable_prefix_caching: bool = True
    separates_roles: bool = False


@dataclass(frozen=True, slots=True)
class CostFile:
    """Content of a file of costs.

    Attributes:
        source: ``"measured"`` or ``"assumed"``.
        model: name of the model.
        cost: time of a step.
        limits: limits of the engine.
    """

    source: str
    model: str
    cost: StepCost
    limits: EngineLimits

    @classmethod
    def read(cls, path: Path) -> "CostFile":
        """Read a file of costs.

        Raises:
            RequestError: the file is missing, or is no file of costs.
        """
        file = JsonFields.read(path, RequestError)
        _check_names(path, "", file.values, FIELDS)
        source = file.get("source", str)
        if source not in SOURCES:
            raise RequestError(f"{path}: source: expected {' or '.join(SOURCES)}, got {source!r:.80}")
        seconds, engine = _object(file, "seconds", StepCost), _object(file, "engine", EngineLimits)
        coefficients = [field.name for field in fields(StepCost)]
        bounds = {"minimum": 0.0, "maximum": MAX_COEFFICIENT_S}
        cost = StepCost(**{name: seconds.get(name, float, **bounds) for name in coefficients})
        shortest = cost.step + min(cost.decode_sequence, cost.prompt_sequence + cost.prompt_token)
        if shortest < MIN_STEP_S:
            raise RequestError(f"{path}: seconds: expected steps of at least {MIN_STEP_S} s, got some of {shortest} s")
        names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")
        limits = EngineLimits(
            **{name: engine.get(name, int, minimum=1, maximum=INT32_MAX) for name in names},
            num_blocks=_integers(engine, "num_blocks", 1),
            windows=_integers(engine, "windows", 0),
            enable_prefix_caching=engine.get("enable_prefix_caching", bool, True),
            separates_roles=engine.get("separates_roles", bool, False),
        )
        if len(limits.num_blocks) != len(limits.windows):
            raise RequestError(f"{path}: engine: expected as many windows as num_blocks, got {len(limits.windows)}")
        return cls(source, file.get("model", str), cost, limits)

    def as_dict(self) -> dict[str, Any]:
        """Return the content as JSON values."""
        return {
            "source": self.source,
            "model": self.model,
            "seconds": asdict(self.cost),
            "engine": asdict(self.limits),
        }


def _object(file: JsonFields, key: str, kind: type[StepCost] | type[EngineLimits]) -> JsonFields:
    """Return the object under a key, whose keys are fields of this kind."""
    found = file.object(key)
    if found is None:
        raise RequestError(f"{file.path}: {key} is missing")
    _check_names(file.path, f"{key}: ", found.values, [field.name for field in fields(kind)])
    return found


def _check_names(path: Path, where: str, values: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an unknown name; a default would silently stand for one that is misspelt."""
    for name in values:
        if name not in known:
            raise RequestError(f"{path}: {where}expected {', '.join(known)}, got {show(name)}")


def _integers(engine: JsonFields, key: str, minimum: int) -> tuple[int, ...]:
    values = engine.get(key, list)
    if not values:
        raise RequestError(f"{engine.path}: engine.{key}: expected a list of integers, got an empty one")
    for value in values:
        check_int(f"{engine.path}: engine.{key}", value, minimum, INT32_MAX)
    return tuple(values)
