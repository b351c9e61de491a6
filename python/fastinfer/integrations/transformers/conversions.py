"""Conversion of transformers' modules to those of :mod:`fastinfer.nn`.

Each conversion is checked against the outputs that the original module gave in a trial run. It raises
:class:`NotConvertible` if the outputs differ, or if no kernel supports the module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastinfer.integrations.transformers.trial import Call, Trial, same
from fastinfer.nn.attention import Attention
from fastinfer.nn.decoder_layer import fused_forward
from fastinfer.nn.linear import QuantLinear
from fastinfer.nn.mlp import FusedMLP
from fastinfer.nn.rms_norm import RMSNorm
from fastinfer.nn.rotary import RotaryEmbedding

Module = TypeVar("Module", bound=nn.Module)

DIFFERENT = "computes something else than the kernel"
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # their frequencies depend on the length of the sequence
POSITIONS_PER_CALL = 8192  # of the original module, while its rotary table is computed


class NotConvertible(Exception):
    """The module cannot be converted; the message says why."""


@dataclass(frozen=True)
class Options:
    """Quantisation of linear layers, see :class:`fastinfer.nn.QuantLinear`."""

    quantize: str | None
    group_size: int | None = None
    activation_bits: int = 8

    def arguments(self) -> dict[str, Any]:
        return vars(self)


def convert_norm(norm: nn.Module, trial: Trial) -> RMSNorm:
    """Convert an RMSNorm, whose weight may be an offset from one."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        raise NotConvertible("has no weight or no epsilon")
    for unit_offset in (False, True):
        ours = RMSNorm.from_weight(weight, eps, unit_offset)
        if _agrees(ours, _calls(norm, trial)):
            return ours
    raise NotConvertible(DIFFERENT)


def convert_mlp(mlp: nn.Module, trial: Trial, options: Options) -> FusedMLP:
    """Convert a gated MLP."""
    layers = _linears(mlp, ("gate_proj", "up_proj", "down_proj"))
    activation = _activation(getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None)))
    if not _agrees(_build(FusedMLP, *layers, activation=activation), _calls(mlp, trial)):
        raise NotConvertible(DIFFERENT)
    return _build(FusedMLP, *layers, activation=activation, **options.arguments())


def _activation(function: Any) -> str:
    """Return the name that an activation has in :mod:`fastinfer.ops.gemm`.

    It is identified by its values in fp32, because some activations are nearly equal in 16 bits.
    """
    x = torch.linspace(-8, 8, 1001, dtype=torch.float32)
    known = {
        "silu": nn.functional.silu(x),
        "gelu_tanh": nn.functional.gelu(x, approximate="tanh"),
        "gelu": nn.functional.gelu(x),
    }
    values = function(x) if callable(function) else None
    for name, expected in known.items():
        if values is not None and torch.allclose(values, expected, rtol=0, atol=1e-5):
            return name
    raise NotConvertible("has no activation that the kernels know")


def convert_attention(attention: nn.Module, trial: Trial, options: Options) -> Attention:
    """Convert attention that calls transformers' attention interface, with the arguments recorded in the trial run."""
    layers = _linears(attention, ("q_proj", "k_proj", "v_proj", "o_proj"))
    if attention not in trial.attention:
        raise NotConvertible("does not call transformers' attention interface")
    called = trial.attention[attention]
    norms = {name: norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None}
    arguments = {
        "head_dim": attention.head_dim,
        "layer_idx": attention.layer_idx,
        "scaling": called.get("scaling"),
        "sliding_window": called.get("sliding_window"),
        "softcap": called.get("softcap"),
        "sinks": called.get("s_aux"),
        **{name: norm if isinstance(norm, RMSNorm) else convert_norm(norm, trial) for name, norm in norms.items()},
    }
    if not _agrees(_build(Attention, *layers, **arguments), _calls(attention, trial)):
        raise NotConvertible(DIFFERENT)
    return _build(Attention, *layers, **arguments, **options.arguments())


def fuse_layer(layer: nn.Module, trial: Trial) -> nn.Module:
    """Replace the ``forward`` of a layer whose modules are converted, after comparing both on the trial's inputs."""
    fused = MethodType(fused_forward, layer)
    quantized = any(isinstance(module, QuantLinear) for module in layer.modules())
    for call in _calls(layer, trial):
        if not same(fused(*call.args, **call.kwargs), layer(*call.args, **call.kwargs), quantized):
            raise NotConvertible(DIFFERENT)
    layer.forward = fused
    return layer


def convert_linear(linear: nn.Linear, options: Options) -> QuantLinear:
    """Quantise a linear layer."""
    if options.quantize is None:
        raise NotConvertible("was not to be quantized")
    return _build(QuantLinear.from_linear, linear, options.quantize, options.group_size, options.activation_bits)


def convert_rotary(rotary: nn.Module, trial: Trial, others: Sequence[nn.Module], max_position: int) -> RotaryEmbedding:
    """Convert a rotary embedding to a table of its cosines and sines in fp32.

    Args:
        rotary: the module.
        trial: the model's trial run.
        others: attention layers that were not converted, and so need the original's cosines and sines.
        max_position: number of positions in the table.

    Raises:
        NotConvertible: there are such layers, the frequencies depend on the length, or the table's results differ.
    """
    if others:
        raise NotConvertible(f"{len(others)} attention layers that stay need its cosines and sines")
    kinds = getattr(rotary, "rope_type", None)
    if any(kind in LENGTH_DEPENDENT_ROPE for kind in (kinds.values() if isinstance(kinds, Mapping) else (kinds,))):
        raise NotConvertible("its frequencies change with the length")
    tables: dict[str | None, Tensor] = {}
    for call in _calls(rotary, trial):
        if not isinstance(call.output, tuple):
            raise NotConvertible(DIFFERENT)
        x, positions, layer_type = _rotary_arguments(*call.args, **call.kwargs)
        table = _rotary_table(rotary, x.device, max_position, layer_type)
        cos, sin = table[positions].to(x.dtype).chunk(2, -1)
        if not same(torch.cat((cos, cos, sin, sin), -1), torch.cat(call.output, -1)):
            raise NotConvertible(DIFFERENT)
        tables[layer_type] = table  # both calls of a type give the same table
    ours = RotaryEmbedding(tables)
    if hasattr(rotary, "config"):  # which models with a module for each base read
        ours.config = rotary.config
    return ours


def _rotary_arguments(
    x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor, str | None]:
    return x, position_ids, layer_type


def _rotary_table(rotary: nn.Module, device: torch.device, max_position: int, layer_type: str | None) -> Tensor:
    x = torch.zeros(1, dtype=torch.float32, device=device)
    extra = () if layer_type is None else (layer_type,)
    slices = []
    for positions in torch.arange(max_position, device=device).split(POSITIONS_PER_CALL):
        cos, sin = rotary(x, positions[None], *extra)
        half = cos.shape[-1] // 2
        slices.append(torch.cat((cos[0, :, :half], sin[0, :, :half]), -1))
    return torch.cat(slices)


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    layers = [getattr(module, name, None) for name in names]
    for name, layer in zip(names, layers, strict=True):
        if type(layer) not in (nn.Linear, QuantLinear):
            raise NotConvertible(f"has no plain linear layer {name}")
    return layers  # type: ignore[return-value]


def _calls(module: nn.Module, trial: Trial) -> list[Call]:
    if module not in trial.calls:
        raise NotConvertible("did not run in a trial")
    return trial.calls[module]


def _agrees(ours: nn.Module, calls: Sequence[Call]) -> bool:
    try:
        return all(call.agrees(ours) for call in calls)
    except (RuntimeError, TypeError, ValueError) as error:  # ours does not support these inputs, dtypes or sizes
        raise NotConvertible(str(error)) from None


def _build(make: Callable[..., Module], *args: Any, **kwargs: Any) -> Module:
    try:
        return make(*args, **kwargs)
    except ValueError as error:
        raise NotConvertible(str(error)) from None
