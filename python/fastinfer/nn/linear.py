"""Dense and quantised linear layers with an optional fused norm, activation and residual."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fastinfer import ops
from fastinfer.formats.unpacked import Grouped
from fastinfer.nn.exact_buffers import ExactBuffers
from fastinfer.ops.pack import TILE_ROWS
from fastinfer.quantize.rounding import NF4_TABLE, round_to_int8, round_to_nf4, round_with_minimum
from fastinfer.weights.weight import LinearOptions

# Rounding function and default group size of each kind.
KINDS: dict[str, tuple[Callable[[Tensor, int], Grouped], int]] = {
    "int4": (round_with_minimum, 32),
    "int8": (round_to_int8, 32),
    "nf4": (round_to_nf4, 64),
}
PACKED = ("qweight", "scales", "mins")


class Linear(nn.Linear):
    """``torch.nn.Linear`` computed by :func:`fastinfer.ops.gemm`.

    ``forward`` takes [..., in_features] and the options ``norm_weight``, ``eps``, ``activation`` and ``residual`` of
    :func:`fastinfer.ops.gemm`; ``residual`` has the shape of the result.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "Linear":
        """Create a layer that shares the parameters of ``linear``."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        if not _is_rows(x):
            return _by_rows(self, x, options)
        return ops.gemm(x, self.weight, bias=self.bias, **options)


class PackedWeight(Tensor):
    """Packed integers of a :class:`QuantLinear`, for code that reads the device, dtype or type of a layer's weight."""

    _is_hf_initialized = True  # keeps transformers from filling it with random numbers

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        raise TypeError(
            "a QuantLinear has no dense weight to read, change or merge an adapter into; merge it into the dense model "
            "and quantise that"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedWeight({tuple(self.shape)}, {self.dtype})"

    def size(self, *_: Any) -> Any:
        raise TypeError("a QuantLinear's weight is packed and cannot be resized; resize the dense model first")


class QuantLinear(ExactBuffers, nn.Linear):
    """Linear layer with a weight of 4 or 8 bits.

    The state dictionary has the packed weight (``qweight``, ``scales`` and, for int4, ``mins``) in the CPU's layout of
    :mod:`fastinfer.ops.pack`, whatever the device. A state dictionary with a dense ``weight`` is quantised while it is
    loaded, with ``assign=True`` on the device of that weight.

    Args:
        in_features: number of inputs, a multiple of 32 and of ``group_size``.
        out_features: number of outputs.
        bias: whether the layer has a bias.
        kind: ``"int4"`` (16 levels between the smallest and the largest value of a group), ``"int8"`` (symmetric) or
            ``"nf4"`` (16 quantiles of a normal distribution, https://arxiv.org/abs/2305.14314).
        group_size: number of inputs that share a scale, a multiple of 32; 32 by default, 64 for nf4.
        activation_bits: 8, 16 or 32, precision to which products on the CPU round their input, see
            :func:`fastinfer.ops.int8_gemm`. Products on a GPU and those of nf4 do not round it.
        device: device of the buffers.
        dtype: dtype of the bias.

    Raises:
        ValueError: no kernel supports this size, kind or number of bits.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]
    qweight: Tensor
    scales: Tensor
    mins: Tensor | None
    table: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        kind: str = "int4",
        group_size: int | None = None,
        activation_bits: int = 8,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would create a dense weight
        if kind not in KINDS:
            raise ValueError(f"kind must be {', '.join(KINDS)}, got {kind!r}")
        if activation_bits not in (8, 16, 32):
            raise ValueError(f"activation_bits must be 8, 16 or 32, got {activation_bits}")
        group_size = group_size or default_group_size(kind, in_features)
        if group_size <= 0 or group_size % 32 or in_features % group_size:
            raise ValueError(
                f"group_size must be a multiple of 32 that divides in_features, got {group_size} for {in_features}"
            )
        self.in_features, self.out_features = in_features, out_features
        self.kind, self.group_size, self.activation_bits = kind, group_size, activation_bits
        tiles = -(-out_features // TILE_ROWS)
        integers = torch.int8 if kind == "int8" else torch.uint8
        runs = 8 if kind == "int8" else 4
        self.qweight = nn.Buffer(torch.empty(tiles, in_features // 32, runs, 16, 4, dtype=integers, device=device))
        self.scales = nn.Buffer(torch.empty(tiles, in_features // group_size, 16, dtype=torch.half, device=device))
        self.mins = nn.Buffer(torch.empty_like(self.scales)) if kind == "int4" else None
        self.table = nn.Buffer(NF4_TABLE.to(self.qweight.device), persistent=False) if kind == "nf4" else None
        values = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        self.bias = None if values is None else nn.Parameter(values, requires_grad=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The packed integers; not a matrix."""
        return self.qweight.as_subclass(PackedWeight)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, kind: str = "int4", group_size: int | None = None, activation_bits: int = 8
    ) -> "QuantLinear":
        """Create a layer from ``linear``, whose weight is rounded to nearest and whose bias is shared."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            kind=kind,
            group_size=group_size,
            activation_bits=activation_bits,
            bias=False,
            device="meta",
        )
        layer.bias = linear.bias
        layer.quantize(linear.weight.detach())
        return layer

    def quantize(self, weight: Tensor) -> None:
        """Set the weight to the quantised values of ``weight`` [out_features, in_features], on its device."""
        for name, values in self._round(weight).items():
            setattr(self, name, values)
        self.finish_loading(cpu_layout=False)

    def finish_loading(self, cpu_layout: bool) -> None:
        """Bring the buffers into their final form after a loader has assigned them without :meth:`load_state_dict`.

        Args:
            cpu_layout: whether ``qweight`` came from a state dictionary, and so has the CPU's layout on any device.
        """
        if cpu_layout and self.qweight.is_cuda:
            self.qweight = self._pack(self._integers(self.qweight.cpu()).to(self.qweight.device))
        if self.table is not None:
            self.table = NF4_TABLE.to(self.qweight.device)

    def dequantize(self) -> Tensor:
        """Return the weight as [out_features, in_features] fp32."""
        scales = self.scales.transpose(1, 2).flatten(0, 1)[: self.out_features].float()[..., None]
        integers = self._integers(self.qweight)
        levels = integers.float() if self.table is None else self.table[integers.long()]
        groups: Tensor = levels.unflatten(1, (-1, self.group_size)) * scales
        if self.mins is not None:
            groups += self.mins.transpose(1, 2).flatten(0, 1)[: self.out_features].float()[..., None]
        return groups.flatten(1)

    def forward(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        if not _is_rows(x):
            return _by_rows(self, x, options)
        buffers: Any = self._buffers  # reading them as attributes takes 3 us of a product's 60
        packed = buffers["qweight"], buffers["scales"]
        if "table" in buffers:
            return ops.lut_gemm(x, *packed, buffers["table"], self.out_features, bias=self.bias, **options)
        gemm = ops.int8_gemm if self.kind == "int8" else ops.int4_gemm
        return gemm(
            x,
            *packed,
            buffers.get("mins"),
            self.out_features,
            bias=self.bias,
            activation_bits=32 if x.is_cuda else self.activation_bits,
            **options,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"kind={self.kind}, group_size={self.group_size}"
        )

    def _pack(self, integers: Tensor) -> Tensor:
        return ops.int8_pack(integers) if self.kind == "int8" else ops.int4_pack(integers)

    def _round(self, weight: Tensor) -> dict[str, Tensor]:
        if weight.shape != (self.out_features, self.in_features):
            expected = (self.out_features, self.in_features)
            raise ValueError(f"weight must have the shape {expected}, got {tuple(weight.shape)}")
        rounded = KINDS[self.kind][0](weight.float(), self.group_size)
        packed = {"qweight": self._pack(rounded.q), "scales": ops.pack_scales(rounded.scales.half())}
        return packed if rounded.mins is None else packed | {"mins": ops.pack_scales(rounded.mins)}

    def _integers(self, qweight: Tensor) -> Tensor:
        """Unpack a ``qweight`` of this layer's size to [out_features, in_features], 0..15 or -128..127."""
        one = torch.ones_like(self.scales, device=qweight.device)
        if self.kind == "int8":
            return ops.int8_dequantize(qweight, one, None, self.out_features).to(torch.int8)
        return ops.int4_dequantize(qweight, one, torch.zeros_like(one), self.out_features).byte()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantLinear":
        """Repack the weight when the module moves between CPU and GPU, whose packed layouts differ."""
        packed = self.qweight
        super()._apply(fn, recurse)
        device = self.qweight.device
        if {packed.device.type, device.type} == {"cpu", "cuda"}:
            self.qweight = self._pack(self._integers(packed).to(device))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.qweight.is_cuda:
            destination[prefix + "qweight"] = self._pack(self._integers(self.qweight).cpu())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        assign = local_metadata.get("assign_to_params_buffers", False)

        def device_of(values: Tensor) -> torch.device:
            """The device on which the layer will have them; into a layer on meta torch copies nothing, and warns."""
            return values.device if assign or self.qweight.is_meta else self.qweight.device

        if prefix + "weight" in state_dict:
            weight = state_dict.pop(prefix + "weight")
            rounded = self._round(weight.to(device_of(weight)))
            state_dict.update({prefix + name: values for name, values in rounded.items()})
        elif prefix + "qweight" in state_dict:
            qweight = state_dict[prefix + "qweight"]
            # The state of a layer on a GPU has it on the CPU, and the scales on the GPU.
            device = device_of(state_dict.get(prefix + "scales", qweight))
            if device.type == "cuda":
                state_dict[prefix + "qweight"] = self._pack(self._integers(qweight.cpu()).to(device))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if self.table is not None:  # the state has none
            if self.table.device == self.qweight.device:
                self.table.copy_(NF4_TABLE)  # in place, like the weight
            else:
                self.table = NF4_TABLE.to(self.qweight.device)


def make_linear(
    linear: nn.Linear, quantize: str | None, group_size: int | None, activation_bits: int
) -> Linear | QuantLinear:
    """Convert a layer to :class:`Linear`, or to :class:`QuantLinear` if ``quantize`` is given.

    A layer that is quantised already is returned as it is.
    """
    if isinstance(linear, QuantLinear):
        return linear
    if quantize is None:
        return Linear.from_linear(linear)
    return QuantLinear.from_linear(linear, quantize, group_size, activation_bits)


def default_group_size(kind: str, in_features: int) -> int:
    """Return the default group size of a kind, or 32 if that does not divide ``in_features``."""
    usual = KINDS[kind][1]
    return usual if in_features % usual == 0 else 32


def _is_rows(x: Tensor) -> bool:
    """Return whether the kernels take ``x`` as it is. One column, or no row, is contiguous with any stride."""
    return x.dim() == 2 and (x.stride(1) == 1 or x.is_contiguous())


def _by_rows(layer: Linear | QuantLinear, x: Tensor, options: LinearOptions) -> Tensor:
    """Compute a layer's result for [..., in_features] by reshaping it to [tokens, in_features]."""
    residual = options.get("residual")
    if residual is not None:
        options["residual"] = residual.reshape(-1, residual.shape[-1])
    out = layer.forward(x.reshape(-1, x.shape[-1]).contiguous(), **options)
    return out.view(*x.shape[:-1], out.shape[-1])
