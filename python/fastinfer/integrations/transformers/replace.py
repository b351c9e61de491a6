"""Replacement of the modules of a transformers model by those of :mod:`fastinfer.nn`, in place."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

import torch
from torch import nn
from transformers import PreTrainedModel

from fastinfer.integrations.transformers import conversions
from fastinfer.integrations.transformers.quantizer import FastinferConfig, config_of, mark_quantized
from fastinfer.integrations.transformers.stages import with_progress
from fastinfer.integrations.transformers.trial import Trial, run_trial
from fastinfer.nn.attention import Attention
from fastinfer.nn.decoder_layer import is_fusible
from fastinfer.nn.linear import KINDS, Linear, QuantLinear
from fastinfer.nn.mlp import FusedMLP
from fastinfer.nn.rms_norm import RMSNorm
from fastinfer.nn.rotary import RotaryEmbedding
from fastinfer.utils.mapped_files import MappedFiles


@dataclass
class Replacement:
    """Report of :func:`replace`.

    Attributes:
        replaced: old and new type of each replaced module, by the module's name.
        kept: type of each module that was not replaced and the reason, by the module's name.
        memory_before, memory_after: bytes of the model's parameters and buffers.
    """

    replaced: dict[str, tuple[str, str]] = field(default_factory=dict)
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)
    memory_before: int = 0
    memory_after: int = 0

    def __str__(self) -> str:
        memory = f"memory   {_mib(self.memory_before)} -> {_mib(self.memory_after)}"
        return "\n".join([*_counted("replaced", self.replaced, " -> "), *_counted("kept", self.kept, ": "), memory])


def replace(
    model: PreTrainedModel,
    quantize: str | None = None,
    *,
    lm_head: str | None = "int8",
    group_size: int | None = None,
    activation_bits: int = 8,
    skip: Sequence[str] = (),
    fuse: bool = True,
    progress: bool = True,
) -> Replacement:
    """Replace norms, rotary embeddings, attention, MLPs and, when quantising, linear layers by this package's modules.

    The names of modules are not trusted: the model runs on a few random tokens, and a module is replaced only if its
    replacement gives the same outputs for the same inputs. The model is set to inference (``eval()``, no gradients)
    and to ``attn_implementation="fastinfer"``. Rotary tables have ``max_position_embeddings`` positions; a position
    beyond them raises an error on the CPU. Hooks on replaced modules are lost. Each module is freed when it has been
    replaced, so not more than one is in memory twice.

    A quantised model can be saved, and loaded with ``from_pretrained``. A second call quantises the layers that the
    first one left dense; merged layers are then named ``"qkv_proj"`` and ``"gate_up_proj"``.

    Args:
        model: a causal decoder of transformers 5, on the CPU or one GPU.
        quantize: ``"int4"``, ``"int8"`` or ``"nf4"`` for the linear layers, see :class:`QuantLinear`; ``None`` leaves
            the weights as they are. Layers that are quantised already stay as they are.
        lm_head: the same for the output layer, which is most sensitive to rounding; ``None`` leaves it dense. Ignored
            without ``quantize``.
        group_size, activation_bits: see :class:`QuantLinear`; the output layer gets at least 16 bits.
        skip: names of modules to keep, or patterns such as ``"model.layers.0.*"``.
        fuse: ``False`` replaces only linear layers, norms and the attention function, so that every layer keeps its
            name and PEFT can add adapters.
        progress: show the progress of what takes long on stderr.

    Returns:
        A report of the replaced and the kept modules and of the memory, for ``print``.

    Raises:
        ValueError: the kind or group size is unknown, or differs from that of the layers that are quantised already.
            Nothing is replaced in this case.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from fastinfer.integrations.transformers import replace
    >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> config = LlamaConfig(**sizes, vocab_size=99, max_position_embeddings=128)
    >>> print(replace(LlamaForCausalLM(config), quantize="int4"))
    replaced 2 LlamaAttention -> Attention (int4)
    replaced 2 LlamaMLP -> FusedMLP (int4)
    replaced 5 LlamaRMSNorm -> RMSNorm
    replaced 1 LlamaRotaryEmbedding -> RotaryEmbedding
    replaced 2 LlamaDecoderLayer -> norms and residuals fused
    replaced 1 Linear -> QuantLinear (int8)
    memory   0.3 MiB -> 0.1 MiB
    """
    for kind in (quantize, lm_head):
        if kind is not None and kind not in KINDS:
            raise ValueError(f"quantize and lm_head must be {', '.join(KINDS)} or None, got {kind!r}")
    if group_size is not None and (group_size < 32 or group_size % 32):
        raise ValueError(f"group_size must be a multiple of 32, got {group_size}")

    config = _quantization_config(model, quantize, group_size, activation_bits, lm_head)
    model.eval().requires_grad_(False)
    layers = conversions.Options(quantize, group_size, activation_bits)
    output = conversions.Options(quantize and lm_head, group_size, max(activation_bits, 16))
    memory_before = model.get_memory_footprint()
    replacer = _Replacer(model, run_trial(model), skip, progress)
    if fuse:
        replacer.replace_attention(layers)
        replacer.replace_mlps(layers)
    replacer.replace_norms()
    if fuse:
        replacer.replace_rotary_embeddings()
        replacer.fuse_layers()
    if quantize is not None:
        replacer.quantize_linears(layers, output)
    replacer.report_rest(quantize)
    # A quantizer of another library stays responsible for saving the model.
    if config is not None and (config_of(model) is not None or getattr(model, "hf_quantizer", None) is None):
        mark_quantized(model, config)
    replacer.report.memory_before, replacer.report.memory_after = memory_before, model.get_memory_footprint()
    return replacer.report


def _quantization_config(
    model: PreTrainedModel, quantize: str | None, group_size: int | None, activation_bits: int, lm_head: str | None
) -> FastinferConfig | None:
    """Return the configuration with which the quantised model is saved; ``None`` without ``quantize``.

    Raises:
        ValueError: it differs from that of the layers that are quantised already.
    """
    if quantize is None:
        return None
    config = FastinferConfig(quantize, group_size, activation_bits, lm_head=lm_head)
    before = config_of(model)
    if before is None:
        return config
    dense = (module for module in model.modules() if type(module) in (nn.Linear, Linear))
    if config.form != before.form and any(module is not model.get_output_embeddings() for module in dense):
        raise ValueError(
            "kind, group_size and activation_bits must be those that the model is quantised with, so that it can "
            f"be saved: expected {before.form}, got {config.form}"
        )
    return FastinferConfig(*before.form, lm_head=lm_head)


class _Replacer:
    """Replaces the modules of a model, one kind after the other.

    Args:
        model: model to change.
        trial: record of its trial run.
        skip: patterns of the names of modules to keep.
        progress: whether to show the progress.

    Attributes:
        report: modules that were replaced or kept so far.
    """

    def __init__(self, model: PreTrainedModel, trial: Trial, skip: Sequence[str], progress: bool) -> None:
        self.report = Replacement()
        self._model = model
        self._trial = trial
        self._skip = skip
        self._progress = progress
        self._files = MappedFiles()

    def replace_attention(self, options: conversions.Options) -> None:
        for name in self._stage("attention", lambda m: self._attends(m) or type(m).__name__.endswith("Attention")):
            self._replace(name, lambda module: conversions.convert_attention(module, self._trial, options))

    def replace_mlps(self, options: conversions.Options) -> None:
        for name in self._stage("MLPs", lambda m: hasattr(m, "gate_proj")):
            self._replace(name, lambda module: conversions.convert_mlp(module, self._trial, options))

    def replace_norms(self) -> None:
        for name in self._stage("norms", lambda m: type(m).__name__.endswith("RMSNorm")):
            self._replace(name, lambda module: conversions.convert_norm(module, self._trial))

    def replace_rotary_embeddings(self) -> None:
        """Replace the rotary embeddings; call this after :meth:`replace_attention`."""
        unconverted = [self._model.get_submodule(name) for name in self._names(self._attends)]
        max_position = self._model.config.get_text_config().max_position_embeddings
        for name in self._stage("rotary embeddings", lambda m: type(m).__name__.endswith("RotaryEmbedding")):
            self._replace(
                name, lambda module: conversions.convert_rotary(module, self._trial, unconverted, max_position)
            )

    def fuse_layers(self) -> None:
        """Fuse the norms and residuals of layers all of whose modules are replaced."""
        for name in self._stage("layers", is_fusible):
            self._replace(name, lambda module: conversions.fuse_layer(module, self._trial), "norms and residuals fused")

    def quantize_linears(self, layers: conversions.Options, output: conversions.Options) -> None:
        """Quantise the linear layers that are still dense; ``output`` has the options of the output layer."""

        def convert(module: nn.Module) -> QuantLinear:
            assert isinstance(module, nn.Linear)
            is_output = module is self._model.get_output_embeddings()
            return conversions.convert_linear(module, output if is_output else layers)

        for name in self._stage("linear layers", lambda m: type(m) in (nn.Linear, Linear)):
            self._replace(name, convert)

    def report_rest(self, quantize: str | None) -> None:
        """Report the modules with parameters of their own that no step above has looked at."""
        for name in self._names(lambda m: not isinstance(m, nn.Embedding | QuantLinear)):
            module = self._model.get_submodule(name)
            is_converted = isinstance(module, Linear) and quantize is None
            if module._parameters and name not in self.report.kept and not is_converted:
                reason = (
                    "keeps its dense weight" if isinstance(module, nn.Linear) else "has no counterpart in fastinfer.nn"
                )
                self.report.kept[name] = type(module).__name__, reason

    def _replace(self, name: str, convert: Callable[[nn.Module], nn.Module], became: str | None = None) -> None:
        """Replace one module by its conversion, unless it is to be skipped or cannot be converted; report either."""
        module = self._model.get_submodule(name)
        kind = type(module).__name__
        if any(fnmatch(name, pattern) for pattern in self._skip):
            self.report.kept[name] = kind, "was to be skipped"
            return
        try:
            with torch.no_grad():
                ours = convert(module)
        except conversions.NotConvertible as reason:
            self.report.kept[name] = kind, str(reason)
            return
        if ours is not module:
            self._model.set_submodule(name, ours)
            self._free(module)
        kinds = sorted({layer.kind for layer in ours.modules() if isinstance(layer, QuantLinear)})
        became = became or type(ours).__name__ + (f" ({', '.join(kinds)})" if kinds else "")
        self.report.replaced[name] = kind, became

    def _free(self, module: nn.Module) -> None:
        """Let go of a module that was replaced; the caller must have the last reference to it."""
        self._trial.forget(module)
        in_use = {parameter.data_ptr() for parameter in self._model.parameters()}
        for parameter in module.parameters():
            if parameter.data_ptr() not in in_use:
                self._files.release(parameter)

    def _attends(self, module: nn.Module) -> bool:
        """Return whether a module called the attention interface in the trial run."""
        return module in self._trial.attention

    def _stage(self, title: str, wanted: Callable[[nn.Module], bool]) -> Iterator[str]:
        """Yield the names of :meth:`_names`, with a progress bar."""
        return with_progress(title, self._names(wanted), self._progress)

    def _names(self, wanted: Callable[[nn.Module], bool]) -> list[str]:
        """Return the names of modules that match ``wanted`` and are not replaced yet; not the modules, to free them."""
        ours = (Attention, FusedMLP, RMSNorm, RotaryEmbedding)
        named = self._model.named_modules()
        return [name for name, module in named if wanted(module) and not isinstance(module, ours)]


def _counted(title: str, modules: Mapping[str, tuple[str, str]], separator: str) -> list[str]:
    return [f"{title:9}{count} {separator.join(texts)}" for texts, count in Counter(modules.values()).items()]


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
