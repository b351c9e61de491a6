"""A quantizer of transformers: linear layers become :class:`fastinfer.nn.QuantLinear` while a model loads."""

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
    """How :func:`from_pretrained` quantises the linear layers, by rounding to nearest.

    Args:
        kind: ``"int4"``, ``"int8"`` or ``"nf4"``, see :class:`fastinfer.nn.QuantLinear`.
        group_size: inputs that share a scale; ``None`` for the kind's own.
        activation_bits: 8, 16 or 32, see :class:`fastinfer.nn.QuantLinear`.
        modules_to_not_convert: names, ends of names or regular expressions of modules that stay as they are.
        lm_head: kind of the output layer, whose errors show most and which has at least 16 ``activation_bits``;
            ``None`` leaves it as it is. If it is tied to the embedding, the two are parted.
        quant_method: what a configuration file has; only ``"fastinfer"``.

    Raises:
        ValueError: a kind, size or number of bits that there is no kernel for.
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
        self.quant_method = NAME  # theirs is an enumeration that cannot be extended
        self.kind, self.group_size, self.activation_bits = kind, group_size, activation_bits
        self.modules_to_not_convert, self.lm_head = modules_to_not_convert, lm_head

    @property
    def form(self) -> tuple[str, int | None, int]:
        """How the layers are quantised, but for the last."""
        return self.kind, self.group_size, self.activation_bits


class Quantize(ConversionOps):
    """A linear layer whose weight has been read becomes one with a packed weight; other tensors pass."""

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
    """What :class:`FastinferConfig` asks for, one weight at a time, so that no dense model is ever in memory.

    Every layer keeps its name and place, so that adapters find it; :func:`fastinfer.integrations.transformers.replace` joins them afterwards
    without rounding again. Saved, the model is loaded as it was. Layers whose inputs are no multiple of 32 stay dense.

    Devices: CPU, CUDA (not yet run on a GPU).

    Attributes:
        layers: by name of a layer, what it will be, without tensors.
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
        """Refuse to split a model between a GPU and something else."""
        if isinstance(device_map, dict):
            _check_devices(device_map)

    def param_needs_quantization(self, model: "PreTrainedModel", param_name: str, **kwargs: Any) -> bool:
        return param_name.endswith(".weight") and param_name.removesuffix(".weight") in self.layers

    def param_element_size(self, model: "PreTrainedModel", param_name: str, param: Tensor) -> float:
        """Bytes, with a weight's share of its scales."""
        if self.pre_quantized or not self.param_needs_quantization(model, param_name):
            return param.element_size()
        layer = self.layers[param_name.removesuffix(".weight")]
        return sum(buffer.nbytes for buffer in layer.buffers()) / param.numel()

    def get_quantize_ops(self) -> Quantize:
        return Quantize(self)

    def quantize(self, model: nn.Module, name: str, weight: Tensor | None = None) -> None:
        """Swap a layer for one with this weight, or its own, on the weight's device."""
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
            warnings.warn(f"not quantised, for their inputs are no multiple of 32: {', '.join(dense)}", stacklevel=2)
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
        if not self.pre_quantized:  # what the checkpoint did not have: an output layer tied to the embedding
            for name in list(self.layers):
                self.quantize(model, name)
                _untie(model, name)
        for _, layer in _quantised(model):
            layer.finish_loading(self.pre_quantized)
        model.requires_grad_(False)
        return model

    def _dequantize(self, model: "PreTrainedModel", dtype: torch.dtype | None = None) -> "PreTrainedModel":
        joined = [name for name, module in model.named_modules() if isinstance(module, (Attention, FusedMLP))]
        if joined:
            raise ValueError(f"modules whose layers replace() has joined cannot be dequantised, got {joined[0]}")
        for name, layer in list(_quantised(model)):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            linear.weight = nn.Parameter(layer.dequantize().to(dtype), requires_grad=False)
            linear.bias = layer.bias  # type: ignore[assignment]
            model.set_submodule(name, linear)
        return model


def config_of(model: "PreTrainedModel") -> FastinferConfig | None:
    """How a model is quantised; ``None`` for one that is not, or in another way."""
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return config if isinstance(config, FastinferConfig) else None


def mark_quantised(model: "PreTrainedModel", config: FastinferConfig) -> None:
    """Let a model whose layers were quantised in place be saved and loaded like one quantised while it was loaded."""
    config.modules_to_not_convert = [name for name, module in model.named_modules() if _is_dense(model, name, module)]
    if isinstance(output := model.get_output_embeddings(), QuantLinear):
        config.lm_head = output.kind
    for name, _ in _quantised(model):
        _untie(model, name)
    quantizer = FastinferQuantizer(config, pre_quantized=True)
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def _is_dense(model: nn.Module, name: str, module: nn.Module) -> bool:
    """A linear layer, or a merged one, with a dense weight."""
    if isinstance(module, MergedRows):
        return isinstance(model.get_submodule(f"{name.rpartition('.')[0]}.{module.merged}"), Linear)
    return type(module) in (nn.Linear, Linear)


def _untie(model: "PreTrainedModel", name: str) -> None:
    if model.all_tied_weights_keys.pop(f"{name}.weight", None) is not None:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _quantised(model: nn.Module) -> Iterator[tuple[str, QuantLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear))


def _check_devices(device_map: dict[str, Any]) -> None:
    """A packed weight lies as its device reads it, so it cannot wander between kinds of them."""
    devices = {str(device) for device in device_map.values()}
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        raise ValueError(f"device_map must be the CPU alone or GPUs alone, got {device_map}")
