"""Trial run of a model that records the inputs and outputs of its modules."""

from collections import defaultdict
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from fastinfer.integrations.transformers.attention import attention_forward
from fastinfer.integrations.transformers.quantizer import NAME
from fastinfer.integrations.transformers.registration import register

LENGTH = 8  # tokens


@dataclass(frozen=True, eq=False)
class Call:
    """Recorded call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def agrees(self, module: nn.Module) -> bool:
        """Return whether another module gives the same output, up to rounding (ours rounds less often in 16 bits)."""
        return same(module(*self.args, **self.kwargs), self.output)


@dataclass(frozen=True, eq=False)
class Trial:
    """Record of a trial run.

    Attributes:
        calls: calls of each module, in order.
        attention: keyword arguments with which each attention layer called the attention function.
    """

    calls: dict[nn.Module, list[Call]] = field(default_factory=lambda: defaultdict(list))
    attention: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)

    def forget(self, module: nn.Module) -> None:
        """Drop what was recorded of a module and its submodules, and with it the references to them."""
        for part in module.modules():
            self.calls.pop(part, None)
            self.attention.pop(part, None)


def run_trial(model: PreTrainedModel) -> Trial:
    """Switch a model to ``attn_implementation="fastinfer"`` and run it on a few random tokens, without a cache."""
    trial = Trial()

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        trial.calls[module].append(Call(args, kwargs, output))

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        trial.attention[module] = kwargs
        return attention_forward(module, *args, **kwargs)

    register()
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in model.modules()]
    AttentionInterface.register(NAME, attend)
    text = model.config.get_text_config()
    ids = torch.randint(text.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    # Some models scale by position, so they run twice: at the last positions, then at the first ones.
    starts = (
        (text.max_position_embeddings - LENGTH, 0) if "position_ids" in signature(model.forward).parameters else (0,)
    )
    try:
        with torch.no_grad():
            for start in starts:
                positions = {"position_ids": torch.arange(start, start + LENGTH, device=model.device)[None]}
                model(input_ids=ids.to(model.device), use_cache=False, **(positions if start else {}))
    except BaseException:
        model.set_attn_implementation(before)
        raise
    finally:
        register()
        for hook in hooks:
            hook.remove()
    return trial


def same(ours: Any, theirs: Any, quantized: bool = False) -> bool:
    """Return whether two results agree up to rounding.

    The tolerance is 1e-4 of the norm in fp32. It is 5 % in 16 bits, because some models round several times on the way,
    and with quantised weights, because their products round the inputs.
    """
    if isinstance(theirs, tuple):
        return isinstance(ours, tuple) and same(ours[0], theirs[0], quantized)
    if not isinstance(ours, Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    limit = 1e-4 if theirs.dtype == torch.float32 and not quantized else 5e-2
    return bool((ours.float() - theirs.float()).norm() <= limit * theirs.float().norm())
