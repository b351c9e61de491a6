"""Quantizer for transformers: linear layers become :class:`fastinfer.nn.QuantLinear` while a model loads."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from fastinfer.nn.attention import Attention
from fastinfer.nn.linear import KINDS, Linear, QuantLinear
from fastinfer.nn.merged_linear import MergedRows
from fastinfer.nn.mlp import FusedMLP
from fastinfer.utils.torch_threads import one_torch_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "fastinfer"


class FastinferConfig(QuantizationConfigMixin):
    """Quantisation of linear layers by ``from_pretrained``, which rounds weights to nearest.

    Args:
        kind: ``"int4"``, ``"int8"`` or ``"nf4"``, see :class:`fastinfer.nn.QuantLinear`.
        group_size: number of inputs that share a scale; ``None`` for the default of the kind.
        activation_bits: 8, 16 or 32, see :class:`fastinfer.nn.QuantLinear`.
        modules_to_not_convert: names, ends of names or regular expressions of modules that stay dense.
        lm_head: kind of the output layer, which is most sensitive to rounding and so gets at least 16
            ``activation_bits``; ``None`` leaves it dense. If it is tied to the embedding, the two are separated.
        quant_method: value in a configuration file, always ``"fastinfer"``.

    Raises:
        ValueError: no kernel supports this kind, size or number of bits.
    """

    def __init__(
        self,
        kind: str = "int4",
        group_size: int | None = None,
        activation_bits: int = 8,
        modules_to_not_convert: list[str] | None = None,
        lm_head: str | None = None,
        quant_method: str = NAME,
    ) -> None:
        if quant_method != NAME:
            raise ValueError(f"quant_method must be {NAME!r}, got {quant_method!r}")
        for name, value in {"kind": kind, "lm_head": lm_head or "int8"}.items():
            if value not in KINDS:
                raise ValueError(f"{name} must be {', '.join(KINDS)}, got {value!r}")
        if group_size is not None and (group_size < 32 or group_size % 32):
            raise ValueError(f"group_size must be a multiple of 32, got {group_size}")
        if activation_bits not in (8, 16, 32):
            raise ValueError(f"activation_bits must be 8, 16 or 32, got {activation_bits}")
        self.quant_method = NAME  # transformers' enumeration of methods cannot be extended
        self.kind, self.group_size, self.activation_bits = kind, group_size, activation_bits
        self.modules_to_not_convert, self.lm_head = modules_to_not_convert, lm_head

    @property
    def form(self) -> tuple[str, int | None, int]:
        """Kind, group size and activation bits of all layers except the output layer."""
        return self.kind, self.group_size, self.activation_bits


class Quantize(ConversionOps):
    """Loading operation that quantises the weight of a linear layer as soon as it is read; other tensors pass."""

    def __init__(self, quantizer: "FastinferQuantizer") -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *, model: nn.Module, missing_keys: set[str] | None = None, **_: Any
    ) -> dict[str, Any]:
        others = {}
        for name, values in input_dict.items():
            layer = name.removesuffix(".weight")
            if layer not in self.quantizer.layers:
                others[name] = values
                continue
            self.quantizer.quantize(model, layer, values[0] if isinstance(values, list) else values)
            if missing_keys is not None:
                missing_keys.discard(name)
        return others


class FastinferQuantizer(HfQuantizer):
    """Quantises as :class:`FastinferConfig` says, one weight at a time, so that no dense model is ever in memory.

    Every layer keeps its name and place, so that adapters find it. Afterwards
    :func:`fastinfer.integrations.transformers.replace` can merge layers without rounding them again. A saved model is
    loaded without quantising again. Layers whose number of inputs is not a multiple of 32 stay dense.

    Devices: CPU, CUDA (not yet run on a GPU).

    Attributes:
        layers: quantised layers by name, on the meta device until their weights are read.
    """

    quantization_config: FastinferConfig

    def __init__(self, quantization_config: FastinferConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.layers: dict[str, QuantLinear] = {}

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise ValueError if the model would be split between a GPU and something else."""
        if isinstance(device_map, dict):
            _check_devices(device_map)

    def param_needs_quantization(self, model: "PreTrainedModel", param_name: str, **kwargs: Any) -> bool:
        return param_name.endswith(".weight") and param_name.removesuffix(".weight") in self.layers

    def param_element_size(self, model: "PreTrainedModel", param_name: str, param: Tensor) -> float:
        """Return the bytes per element, including the share of the scales."""
        if self.pre_quantized or not self.param_needs_quantization(model, param_name):
            return param.element_size()
        layer = self.layers[param_name.removesuffix(".weight")]
        return sum(buffer.nbytes for buffer in layer.buffers()) / param.numel()

    def get_quantize_ops(self) -> Quantize:
        return Quantize(self)

    def quantize(self, model: nn.Module, name: str, weight: Tensor | None = None) -> None:
        """Replace a layer by its quantised form, with the given weight or its own, on the weight's device."""
        layer, linear = self.layers.pop(name), model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        layer.bias = linear.bias
        with one_torch_thread():  # SmolLM2 in 1.7 s instead of 2.5 to 5, on two busy cores
            layer.quantize(linear.weight.detach() if weight is None else weight)
        model.set_submodule(name, layer)

    def _process_model_before_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> None:
        config = self.quantization_config
        own = config.modules_to_not_convert or []
        skipped = self.get_modules_to_not_convert(
            model, own, list(model._keep_in_fp32_modules or ()), add_default_skips=True
        )
        output = model.get_output_embeddings()
        dense = []
        for name, linear in model.named_modules():
            if type(linear) is not nn.Linear:
                continue
            if linear is output and config.lm_head is not None and should_convert_module(name, own):
                kind, activation_bits = config.lm_head, max(config.activation_bits, 16)
            elif should_convert_module(name, skipped):
                kind, activation_bits = config.kind, config.activation_bits
            else:
                continue
            if linear.in_features % 32:
                dense.append(name)
            else:
                self.layers[name] = self._empty_layer(name, linear, kind, activation_bits)
        if dense:
            warnings.warn(
                f"layers whose number of inputs is not a multiple of 32 stay dense: {', '.join(dense)}", stacklevel=2
            )
        if self.pre_quantized:
            for name, layer in self.layers.items():
                model.set_submodule(name, layer)

    def _empty_layer(self, name: str, linear: nn.Linear, kind: str, activation_bits: int) -> QuantLinear:
        try:
            layer = QuantLinear(
                linear.in_features,
                linear.out_features,
                bias=False,
                kind=kind,
                group_size=self.quantization_config.group_size,
                activation_bits=activation_bits,
                device="meta",
            )
        except ValueError as error:
            raise ValueError(f"{name} cannot be quantised: {error}") from None
        layer.bias = linear.bias
        return layer

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> "PreTrainedModel":
        _check_devices(getattr(model, "hf_device_map", {}))
        if not self.pre_quantized:  # layers that remain were not in the checkpoint: output layers tied to the embedding
            for name in list(self.layers):
                self.quantize(model, name)
                _untie(model, name)
        for _, layer in _quantized_layers(model):
            layer.finish_loading(self.pre_quantized)
        model.requires_grad_(False)
        return model

    def _dequantize(self, model: "PreTrainedModel", dtype: torch.dtype | None = None) -> "PreTrainedModel":
        merged = [name for name, module in model.named_modules() if isinstance(module, (Attention, FusedMLP))]
        if merged:
            raise ValueError(f"modules whose layers replace() has merged cannot be dequantised, got {merged[0]}")
        for name, layer in list(_quantized_layers(model)):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            linear.weight = nn.Parameter(layer.dequantize().to(dtype), requires_grad=False)
            linear.bias = layer.bias  # type: ignore[assignment]
            model.set_submodule(name, linear)
        return model


def config_of(model: "PreTrainedModel") -> FastinferConfig | None:
    """Return the quantisation of a model; ``None`` if it is not quantised, or by another library."""
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return config if isinstance(config, FastinferConfig) else None


def mark_quantized(model: "PreTrainedModel", config: FastinferConfig) -> None:
    """Make a model whose layers were quantised in place save and load like one quantised while loading."""
    config.modules_to_not_convert = [name for name, module in model.named_modules() if _is_dense(model, name, module)]
    if isinstance(output := model.get_output_embeddings(), QuantLinear):
        config.lm_head = output.kind
    for name, _ in _quantized_layers(model):
        _untie(model, name)
    quantizer = FastinferQuantizer(config, pre_quantized=True)
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def _is_dense(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or was merged into one, with a dense weight."""
    if isinstance(module, MergedRows):
        return isinstance(model.get_submodule(f"{name.rpartition('.')[0]}.{module.merged}"), Linear)
    return type(module) in (nn.Linear, Linear)


def _untie(model: "PreTrainedModel", name: str) -> None:
    if model.all_tied_weights_keys.pop(f"{name}.weight", None) is not None:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear))


def _check_devices(device_map: dict[str, Any]) -> None:
    """Raise ValueError for a split between CPU and GPU, whose layouts of packed weights differ."""
    devices = {str(device) for device in device_map.values()}
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        raise ValueError(f"device_map must be the CPU alone or GPUs alone, got {device_map}")
