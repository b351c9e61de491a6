"""Layers for the ``kernels`` package, which swaps them into models of transformers by the names that those registered.

>>> from kernels import Mode, kernelize, use_kernel_mapping
>>> from fastinfer.integrations.transformers.kernel_layers import kernel_mapping
>>> with use_kernel_mapping(kernel_mapping()):  # doctest: +SKIP
...     model = kernelize(model, mode=Mode.INFERENCE, device="cpu")

or, by transformers' own means:

>>> model = AutoModelForCausalLM.from_pretrained(path, kernel_config=FastinferKernels())  # doctest: +SKIP

Such a layer has no state of its own, so only norms gain from it; :func:`fastinfer.integrations.transformers.replace` does more. The names
``SwiGLUMLP``, ``GeGLUMLP`` and ``Linear`` are registered by no model of transformers 5; ``rotary_pos_emb`` by models
that rotate in different directions, and stands for a function that all models in a process share. The mapping has none
of them.
"""

from dataclasses import dataclass
from typing import Any

from kernels import Mode
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.kernel_config import KernelConfig

from fastinfer import ops

MODE = Mode.INFERENCE | Mode.TORCH_COMPILE  # serves both


class RMSNorm(nn.Module):
    """``forward`` of modules with ``weight`` and ``variance_epsilon``, by :func:`fastinfer.ops.rms_norm`.

    Devices: CPU, CUDA (not yet run on a GPU).
    """

    can_torch_compile = True
    has_backward = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states.contiguous(), self.weight, self.variance_epsilon)  # type: ignore[arg-type]


class RMSNormZeroCentered(nn.Module):
    """``forward`` of modules with ``eps`` and a ``weight`` that is an offset from one.

    Devices: CPU, CUDA (not yet run on a GPU).
    """

    can_torch_compile = True
    has_backward = False

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x.contiguous(), 1.0 + self.weight.float(), self.eps)  # type: ignore[arg-type, operator]


@dataclass(frozen=True)
class InstalledLayer:
    """What ``kernels`` takes for a repository: here the layer is at hand."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer


def kernel_mapping() -> dict[str, dict[str, dict[Mode, InstalledLayer]]]:
    """Layers for inference, compiled or not, by registered name and device; training falls back to the model's own."""
    return {
        layer.__name__: {device: {MODE: InstalledLayer(layer)} for device in ("cpu", "cuda")}
        for layer in (RMSNorm, RMSNormZeroCentered)
    }


class FastinferKernels(KernelConfig):
    """:func:`kernel_mapping` alone, for ``from_pretrained(kernel_config=...)``; nothing comes from the Hub."""

    def __init__(self) -> None:
        super().__init__(use_local_kernel=True)

    def sanitize_kernel_mapping(self, model: PreTrainedModel) -> None:
        """Nothing to check: what a model does not register is not looked for."""
        self.store_registered_layer_names(model)

    def create_compatible_mapping(self, model: PreTrainedModel, compile: bool = False) -> None:
        """The mapping, and nothing for every other registered name, or each use of one would be warned of."""
        nothing: dict[str, Any] = {name: {} for name in self.registered_layer_names.values()}
        self.kernel_mapping = nothing | kernel_mapping()
