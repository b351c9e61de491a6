"""Layers for the ``kernels`` package, which swaps them into transformers' models by their registered names.

>>> from kernels import Mode, kernelize, use_kernel_mapping
>>> from fastinfer.integrations.transformers.kernel_layers import kernel_mapping
>>> with use_kernel_mapping(kernel_mapping()):  # doctest: +SKIP
...     model = kernelize(model, mode=Mode.INFERENCE, device="cpu")

or, with transformers' own option:

>>> model = AutoModelForCausalLM.from_pretrained(path, kernel_config=FastinferKernels())  # doctest: +SKIP

Such a layer cannot keep state of its own, so only norms profit; :func:`fastinfer.integrations.transformers.replace`
does more. The mapping leaves out ``SwiGLUMLP``, ``GeGLUMLP`` and ``Linear``, which no model of transformers 5
registers, and ``rotary_pos_emb``, a function shared by all models in a process, although models with different rotary
layouts register it.
"""

from dataclasses import dataclass
from typing import Any

from kernels import Mode
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.kernel_config import KernelConfig

from fastinfer import ops

MODE = Mode.INFERENCE | Mode.TORCH_COMPILE  # the layers support both


class RMSNorm(nn.Module):
    """``forward`` for modules with ``weight`` and ``variance_epsilon``, computed by :func:`fastinfer.ops.rms_norm`.

    Devices: CPU, CUDA (not yet run on a GPU).
    """

    can_torch_compile = True
    has_backward = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states.contiguous(), self.weight, self.variance_epsilon)  # type: ignore[arg-type]


class RMSNormZeroCentered(nn.Module):
    """``forward`` for modules with ``eps`` and a ``weight`` that is an offset from one.

    Devices: CPU, CUDA (not yet run on a GPU).
    """

    can_torch_compile = True
    has_backward = False

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x.contiguous(), 1.0 + self.weight.float(), self.eps)  # type: ignore[arg-type, operator]


@dataclass(frozen=True)
class InstalledLayer:
    """Layer that is installed already, in the place of a repository that ``kernels`` would download."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer


def kernel_mapping() -> dict[str, dict[str, dict[Mode, InstalledLayer]]]:
    """Return the layers by registered name and device, for inference with or without ``torch.compile``.

    Training falls back to the model's own layers.
    """
    return {
        layer.__name__: {device: {MODE: InstalledLayer(layer)} for device in ("cpu", "cuda")}
        for layer in (RMSNorm, RMSNormZeroCentered)
    }


class FastinferKernels(KernelConfig):
    """Configuration for ``from_pretrained(kernel_config=...)`` with :func:`kernel_mapping` and nothing from the Hub."""

    def __init__(self) -> None:
        super().__init__(use_local_kernel=True)

    def sanitize_kernel_mapping(self, model: PreTrainedModel) -> None:
        """Store the names that the model registers. Names that it does not register need no check."""
        self.store_registered_layer_names(model)

    def create_compatible_mapping(self, model: PreTrainedModel, compile: bool = False) -> None:
        """Set the mapping. Every other registered name gets an empty entry, which prevents a warning at each use."""
        nothing: dict[str, Any] = {name: {} for name in self.registered_layer_names.values()}
        self.kernel_mapping = nothing | kernel_mapping()
