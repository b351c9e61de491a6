"""Our modules into a model of transformers, in place."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from fastinfer.integrations.transformers import conversions
from fastinfer.integrations.transformers.quantizer import FastinferConfig, config_of, mark_quantised
from fastinfer.integrations.transformers.trial import run_trial
from fastinfer.nn.attention import Attention
from fastinfer.nn.decoder_layer import is_fusible
from fastinfer.nn.linear import KINDS, Linear, QuantLinear
from fastinfer.nn.mlp import FusedMLP
from fastinfer.nn.rms_norm import RMSNorm
from fastinfer.nn.rotary import RotaryEmbedding


@dataclass
class Replacement:
    """What :func:`replace` did.

    Attributes:
        replaced: by name of the module, what it was and what it became.
        kept: by name of the module, what it is and why it stayed.
    """

    replaced: dict[str, tuple[str, str]] = field(default_factory=dict)
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(_counted("replaced", self.replaced, " -> ") + _counted("kept", self.kept, ": "))


def replace(
    model: PreTrainedModel,
    quantize: str | None = None,
    *,
    lm_head: str | None = "int8",
    group_size: int | None = None,
    activation_bits: int = 8,
    skip: Sequence[str] = (),
    fuse: bool = True,
) -> Replacement:
    """Swap norms, rotary embeddings, attention, MLPs and, when quantising, linear layers for those of this package.

    Whether a module means what its replacement computes is not guessed from its name: the model runs once on a few
    random tokens, and a module whose replacement makes something else of what it was given stays. The model is set to
    inference, ``eval()`` and no parameter asks for a gradient, and to ``attn_implementation="fastinfer"``. It knows the
    positions that its configuration names, ``max_position_embeddings``; one beyond them raises on the CPU. Hooks on
    modules that are replaced go with them.

    A quantised model can be saved, and loaded with ``from_pretrained``. A second call quantises what the first one left
    dense, layers that it has joined under the name of the joined one, ``"qkv_proj"`` or ``"gate_up_proj"``.

    Args:
        model: a causal decoder of transformers 5, on the CPU or one GPU.
        quantize: ``"int4"``, ``"int8"`` or ``"nf4"`` for the linear layers, see :class:`QuantLinear`; ``None`` leaves
            the weights as they are. Those that are quantised already stay so.
        lm_head: the same for the output layer, whose errors show most; ``None`` leaves it. Only with ``quantize``.
        group_size, activation_bits: see :class:`QuantLinear`; the output layer has at least 16 bits.
        skip: names of modules, or patterns such as ``"model.layers.0.*"``, that stay.
        fuse: ``False`` replaces linear layers, norms and the attention function alone, so that every layer keeps its
            place, for PEFT adapters to be added to.

    Returns:
        What was replaced, and what was kept and why. ``print`` shows it.

    Raises:
        ValueError: an unknown kind or group size, or another than that of a model of which a part is quantised;
            nothing is replaced then.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from fastinfer.integrations.transformers import replace
    >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> print(replace(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=99)), quantize="int4"))
    replaced 2 LlamaAttention -> Attention (int4)
    replaced 2 LlamaMLP -> FusedMLP (int4)
    replaced 5 LlamaRMSNorm -> RMSNorm
    replaced 1 LlamaRotaryEmbedding -> RotaryEmbedding
    replaced 2 LlamaDecoderLayer -> norms and residuals fused
    replaced 1 Linear -> QuantLinear (int8)
    """
    for kind in (quantize, lm_head):
        if kind is not None and kind not in KINDS:
            raise ValueError(f"quantize and lm_head must be {', '.join(KINDS)} or None, got {kind!r}")
    if group_size is not None and (group_size < 32 or group_size % 32):
        raise ValueError(f"group_size must be a multiple of 32, got {group_size}")

    config = None if quantize is None else FastinferConfig(quantize, group_size, activation_bits, lm_head=lm_head)
    before = config_of(model)
    if config is not None and before is not None:
        if config.form != before.form and any(
            type(module) in (nn.Linear, Linear) and module is not model.get_output_embeddings()
            for module in model.modules()
        ):
            raise ValueError(
                "kind, group_size and activation_bits must be those that the model is quantised with, so that it can "
                f"be saved: expected {before.form}, got {config.form}"
            )
        config = FastinferConfig(*before.form, lm_head=lm_head)
    model.eval().requires_grad_(False)
    trial = run_trial(model)
    layers = conversions.Options(quantize, group_size, activation_bits)
    output = conversions.Options(quantize and lm_head, group_size, max(activation_bits, 16))
    report = Replacement()

    def convert(name: str, module: nn.Module, conversion: Callable[[], nn.Module], became: str | None = None) -> None:
        kind = type(module).__name__
        if any(fnmatch(name, pattern) for pattern in skip):
            report.kept[name] = kind, "was to be skipped"
            return
        try:
            with torch.no_grad():
                ours = conversion()
        except conversions.Kept as reason:
            report.kept[name] = kind, str(reason)
            return
        if ours is not module:
            model.set_submodule(name, ours)
        kinds = sorted({layer.kind for layer in ours.modules() if isinstance(layer, QuantLinear)})
        report.replaced[name] = kind, became or type(ours).__name__ + (f" ({', '.join(kinds)})" if kinds else "")

    if fuse:
        for name, module in _modules(model, lambda m: m in trial.attention or type(m).__name__.endswith("Attention")):
            convert(name, module, partial(conversions.convert_attention, module, trial, layers))
        for name, module in _modules(model, lambda m: hasattr(m, "gate_proj")):
            convert(name, module, partial(conversions.convert_mlp, module, trial, layers))
    for name, module in _modules(model, lambda m: type(m).__name__.endswith("RMSNorm")):
        convert(name, module, partial(conversions.convert_norm, module, trial))
    if fuse:
        theirs = [module for _, module in _modules(model, lambda m: m in trial.attention)]
        for name, module in _modules(model, lambda m: type(m).__name__.endswith("RotaryEmbedding")):
            convert(name, module, partial(conversions.convert_rotary, module, trial, theirs, _max_position(model)))
        for name, module in _modules(model, is_fusible):
            convert(name, module, partial(conversions.fuse_layer, module, trial), "norms and residuals fused")
    if quantize is not None:
        for name, module in _modules(model, lambda m: type(m) in (nn.Linear, Linear)):
            assert isinstance(module, nn.Linear)
            options = output if module is model.get_output_embeddings() else layers
            convert(name, module, partial(conversions.convert_linear, module, options))
    for name, module in _modules(model, lambda m: not isinstance(m, nn.Embedding | QuantLinear)):
        if module._parameters and name not in report.kept and not (isinstance(module, Linear) and quantize is None):
            reason = "keeps its dense weight" if isinstance(module, nn.Linear) else "has no module here"
            report.kept[name] = type(module).__name__, reason
    if config is not None and (before is not None or getattr(model, "hf_quantizer", None) is None):
        mark_quantised(model, config)
    return report


def _modules(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    """Names and modules that are not ours yet."""
    ours = (Attention, FusedMLP, RMSNorm, RotaryEmbedding)
    return [(name, module) for name, module in model.named_modules() if wanted(module) and not isinstance(module, ours)]


def _max_position(model: PreTrainedModel) -> int:
    positions: int = model.config.get_text_config().max_position_embeddings
    return positions


def _counted(title: str, modules: Mapping[str, tuple[str, str]], separator: str) -> list[str]:
    return [f"{title:9}{count} {separator.join(texts)}" for texts, count in Counter(modules.values()).items()]
