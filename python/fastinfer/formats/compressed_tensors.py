"""Reader of linear layers in the compressed-tensors format (LLM Compressor, vLLM).

A ``quantization_config`` has groups of layers, each with a scheme. Two kinds of schemes are supported
(https://github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors):

- ``pack-quantized``: weights of 4 or 8 bits, inputs not quantised (W4A16, W8A16). ``weight_packed``
  [out, in * bits / 32] packs inputs; ``weight_scale`` is [out, groups]; ``weight_zero_point``
  [out * bits / 32, groups], if present, packs outputs. All integers are stored with 2**(bits - 1) added.
  ``weight_g_idx`` [in] is the group of each input.
- ``int-quantized``: weights of 8 bits, ``weight`` [out, in] int8 and ``weight_scale`` [out, 1] or [1]. The inputs are
  not quantised (W8A16), or quantised to int8 with a scale per token (W8A8).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.linear_tensors import DENSE_DTYPES, LinearTensors
from fastinfer.formats.packed_integers import unpack_integers
from fastinfer.formats.quantization_settings import one_of, refuse, setting
from fastinfer.formats.unpacked import Dense, Int4, Int8
from fastinfer.formats.zero_points import kernel_scales, with_zero_points

PACKED = "pack-quantized"
PLAIN = ("int-quantized", "naive-quantized")

# A repeated group may take exponential time to match, and each open repetition multiplies the time by the length of a
# name: these four take a millisecond.
MAX_REPETITIONS = 4
_REPEATED_GROUP = re.compile(r"\)[*+?{]*[*+{]")


@dataclass(frozen=True)
class Scheme:
    """Format of the layers of one group.

    Attributes:
        targets: names of layers, ``re:`` followed by a regular expression, or names of classes.
        packed: whether the format is ``pack-quantized``, not one byte per integer.
        bits: 4 or 8.
        group_size: number of inputs per scale, -1 for all.
        per_tensor: whether the whole weight has one scale.
        symmetric: whether there are no zero points.
        int8_activations: whether inputs are quantised to int8.
    """

    targets: tuple[str, ...]
    packed: bool
    bits: int
    group_size: int
    per_tensor: bool
    symmetric: bool
    int8_activations: bool

    @classmethod
    def parse(cls, config: Mapping[str, Any], default_format: str) -> "Scheme":
        """Parse one of the ``config_groups``; errors are those of :meth:`CompressedTensorsFormat.parse`."""
        weights = setting(config, "weights", dict)
        inputs: dict[str, Any] | None = setting(config, "input_activations", dict, None)
        refuse(config, "output_activations")
        format = one_of({"format": config.get("format") or default_format}, "format", (PACKED, *PLAIN))
        one_of(weights, "type", ("int",), "int")
        refuse(weights, "dynamic", "block_structure")
        strategy = one_of(weights, "strategy", ("group", "channel", "tensor"), "channel")
        scheme = cls(
            targets=tuple(str(target) for target in setting(config, "targets", list)),
            packed=format == PACKED,
            bits=one_of(weights, "num_bits", (4, 8) if format == PACKED else (8,), 8),
            group_size=setting(weights, "group_size", int) if strategy == "group" else -1,
            per_tensor=strategy == "tensor",
            symmetric=setting(weights, "symmetric", bool, True),
            int8_activations=inputs is not None,
        )
        if inputs is not None:
            scheme._check_inputs(inputs)
        if not scheme.symmetric and (format != PACKED or strategy == "tensor"):
            raise UnsupportedModelError(
                f"quantization_config: asymmetric weights are not implemented for {format}, {strategy}"
            )
        return scheme

    def _check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Require what the W8A8 kernels support: int8 inputs with dynamic scales per token, one scale per output."""
        prefix = "quantization_config: input_activations: "
        if setting(inputs, "type", str, "int") != "int" or setting(inputs, "num_bits", int, 8) != 8:
            raise UnsupportedModelError(f"{prefix}only int8 is implemented, got {inputs!r:.90}")
        if inputs.get("dynamic") is not True or setting(inputs, "strategy", str, "token") != "token":
            raise UnsupportedModelError(f"{prefix}only dynamic scales by token are implemented, got {inputs!r:.90}")
        if not setting(inputs, "symmetric", bool, True):
            raise UnsupportedModelError(f"{prefix}asymmetric activations are not implemented")
        if self.packed or self.group_size != -1:
            raise UnsupportedModelError(f"{prefix}need int-quantized weights of 8 bits with one scale per output")


@dataclass(frozen=True)
class CompressedTensorsFormat:
    """Format of a checkpoint's layers: the schemes, and the layers that are not quantised."""

    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "CompressedTensorsFormat":
        """Parse a ``quantization_config``; its KV cache settings are ignored, because the engine chooses that dtype.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointFormatError: a setting is missing or of the wrong type.
        """
        if setting(config, "sparsity_config", dict, {}).get("format", "dense") != "dense":
            raise UnsupportedModelError("quantization_config: 'sparsity_config' is not implemented")
        refuse(setting(config, "transform_config", dict, {}), "config_groups")
        format = setting(config, "format", str)
        groups = setting(config, "config_groups", dict)
        schemes = [Scheme.parse(setting(groups, name, dict), format) for name in groups]
        ignore = [str(name) for name in setting(config, "ignore", list, [])]
        return cls(tuple(schemes), tuple(ignore))

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a linear layer, or ``None`` if it is not quantised; names go before classes."""
        if any(_matches(module, pattern) for pattern in self.ignore):
            return None
        for match in (_matches_name, _matches):
            for scheme in self.schemes:
                if any(match(module, target) for target in scheme.targets):
                    return scheme
        return None

    def read(self, layer: LinearTensors, exact: bool = True) -> Int4 | Int8 | Dense:
        """Read a layer's weight: Int4, Int8, or Dense for a layer that is not quantised.

        Args:
            layer: tensors of the layer.
            exact: see :func:`fastinfer.formats.zero_points.with_zero_points`.

        Raises:
            CheckpointFormatError: a tensor is missing or does not have the shape and type of its format.
            UnsupportedModelError: the kernels do not support the group size.
        """
        scheme = self.scheme(layer.module)
        if scheme is None:
            return layer.dense()
        return _read_packed(layer, scheme, exact) if scheme.packed else _read_plain(layer, scheme, exact)


def _read_packed(layer: LinearTensors, scheme: Scheme, exact: bool) -> Int4 | Int8:
    words = layer.take("weight_packed", torch.int32, (None, None))
    rows, columns = layer.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
    if list(words.shape) != [rows, columns * scheme.bits // 32] or columns * scheme.bits % 32:
        layer.fail(
            "weight_packed", f"expected {scheme.bits}-bit integers for {[rows, columns]}, got {list(words.shape)}"
        )
    group_size = layer.group_size(scheme.group_size, columns)
    groups = columns // group_size
    scales = layer.take("weight_scale", DENSE_DTYPES, (1,) if scheme.per_tensor else (rows, groups))
    zeros = None
    if not scheme.symmetric:
        zero_words = layer.take("weight_zero_point", torch.int32, (-(-rows * scheme.bits // 32), groups))
        zeros = unpack_integers(zero_words.t().contiguous(), scheme.bits)[:, :rows].t().contiguous()
    order = layer.get("weight_g_idx")
    permutation = None
    if order is not None and not bool((order == -1).all()):  # all -1: the groups are in order
        permutation = layer.group_order("weight_g_idx", group_size, columns)
    q = unpack_integers(words, scheme.bits)
    q = q if permutation is None else q[:, permutation]
    return with_zero_points(q, scales.expand(rows, groups).contiguous(), zeros, scheme.bits, permutation, exact)


def _read_plain(layer: LinearTensors, scheme: Scheme, exact: bool) -> Int8:
    q = layer.take("weight", torch.int8, (None, None))
    rows, columns = q.shape
    groups = columns // layer.group_size(scheme.group_size, columns)
    scales = layer.take("weight_scale", DENSE_DTYPES, (1,) if scheme.per_tensor else (rows, groups))
    scales, _ = kernel_scales(scales.expand(rows, groups).contiguous(), exact=exact)
    return Int8(q, scales, int8_activations=scheme.int8_activations)


def _matches(module: str, pattern: str) -> bool:
    return pattern == "Linear" or _matches_name(module, pattern)


def _matches_name(module: str, pattern: str) -> bool:
    """Return whether a pattern is the layer's name, or ``re:`` and a regular expression that matches its start."""
    if not pattern.startswith("re:"):
        return pattern == module
    if _REPEATED_GROUP.search(pattern) or sum(pattern.count(sign) for sign in "*+{") > MAX_REPETITIONS:
        raise UnsupportedModelError(
            f"quantization_config: expected regular expressions with at most {MAX_REPETITIONS} repetitions and none of "
            f"a group, got {pattern!r:.90}"
        )
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointFormatError(
            f"quantization_config: {pattern!r:.90} is not a regular expression ({error})"
        ) from None
