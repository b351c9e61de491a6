"""AutoRound's ``quantization_config`` in GPTQ's or AWQ's terms, whose packings it uses.

``packing_format`` is ``auto_round:auto_gptq`` (GPTQ, each zero stored minus one), ``auto_round`` (GPTQ, zeros as they
are) or ``auto_round:auto_awq``. ``extra_config`` has settings of single layers, by name or by regular expression;
https://github.com/intel/auto-round, auto_round/export/export_to_autoround. Method: Cheng et al., 2023,
https://arxiv.org/abs/2309.05516.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastinfer.formats.awq import AWQFormat
from fastinfer.formats.gptq import GPTQFormat
from fastinfer.formats.linear_tensors import LinearTensors
from fastinfer.formats.quantization_settings import compile_pattern, one_of, setting
from fastinfer.formats.unpacked import Dense, Int4, Int8

GPTQ_VERSIONS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
}
AWQ = ("auto_round:auto_awq", "auto_round:awq")
# A layer of this many bits is not quantised, which its tensors show.
DENSE_BITS = 16
# A name with one of these is a regular expression.
_SPECIAL = frozenset("*+?^$()[]{}|\\")


@dataclass(frozen=True)
class AutoRoundFormat:
    """Format of a checkpoint's layers.

    Attributes:
        default: format of the layers without settings of their own.
        named: formats of single layers, by name.
        patterns: formats of layers whose names contain a match of a regular expression; the first one counts.
    """

    default: GPTQFormat | AWQFormat
    named: Mapping[str, GPTQFormat | AWQFormat]
    patterns: tuple[tuple[re.Pattern[str], GPTQFormat | AWQFormat], ...]

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "AutoRoundFormat":
        """Parse a ``quantization_config``.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointFormatError: a setting is missing or of the wrong type.
        """
        layers = setting(config, "extra_config", dict, {})
        formats = {name: _parse({**config, **setting(layers, name, dict)}) for name in layers}
        named = {name: own for name, own in formats.items() if not _SPECIAL.intersection(name)}
        patterns = [(compile_pattern(name), own) for name, own in formats.items() if name not in named]
        return cls(_parse(config), named, tuple(patterns))

    def read(self, layer: LinearTensors, exact: bool = True) -> Int4 | Int8 | Dense:
        """Read a layer's weight; all is as in :meth:`fastinfer.formats.gptq.GPTQFormat.read`."""
        found = (own for pattern, own in self.patterns if pattern.search(layer.module))
        return (self.named.get(layer.module) or next(found, self.default)).read(layer, exact)


def _parse(config: Mapping[str, Any]) -> GPTQFormat | AWQFormat:
    """Parse the settings of all layers or of one."""
    packing = one_of(config, "packing_format", (*GPTQ_VERSIONS, *AWQ))
    one_of(config, "act_bits", (DENSE_BITS,), DENSE_BITS)
    if config.get("bits") == DENSE_BITS:
        return AWQFormat(-1)  # whose layers without "qweight" are dense
    one_of(config, "data_type", ("int",), "int")
    if packing in AWQ:
        return AWQFormat.parse({"bits": config.get("bits"), "group_size": config.get("group_size")})
    return GPTQFormat.parse({**config, "checkpoint_format": GPTQ_VERSIONS[packing], "desc_act": False})
