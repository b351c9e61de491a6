"""PEFT's adapters on models with quantised linear layers: applied, switched, and never merged by halves."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from fastinfer.integrations.transformers import FastinferConfig, register, replace
from fastinfer.nn import QuantLinear

peft = pytest.importorskip("peft")

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    register()
    logging.disable_progress_bar()
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, and beside it the adapters ``one`` and ``two`` of it."""
    root = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=99, initializer_range=0.3, attention_bias=True)
    LlamaForCausalLM(config).save_pretrained(root / "dense")
    for name, rank, targets in (("one", 4, TARGETS), ("two", 8, ["o_proj", "gate_proj"])):
        model = AutoModelForCausalLM.from_pretrained(root / "dense")
        settings = peft.LoraConfig(r=rank, lora_alpha=6, target_modules=targets, init_lora_weights=False)
        peft.get_peft_model(model, settings).save_pretrained(root / name)
    return root


def while_loading(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    config = FastinferConfig("int4", **settings)
    return AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=dtype, quantization_config=config)


def afterwards(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=dtype)
    replace(model, quantize="int4", lm_head=None, fuse=False, **settings)
    return model


MAKERS = [while_loading, afterwards]


def logits(model: torch.nn.Module) -> Tensor:
    return model(IDS).logits


def by_hand(folder: Path, model: PreTrainedModel, adapter: str) -> Tensor:
    """The model's logits with hooks that add what the adapter's matrices make of each layer's input."""
    weights = peft.utils.load_peft_weights(str(folder / adapter), device="cpu")
    rank = next(a.shape[0] for name, a in weights.items() if "lora_A" in name)
    hooks = []
    for name, module in model.named_modules():
        prefix = f"base_model.model.{name}.lora_"
        if f"{prefix}A.weight" in weights:
            assert isinstance(module, QuantLinear)
            a, b = weights[f"{prefix}A.weight"], weights[f"{prefix}B.weight"]

            def add(layer: Any, args: tuple[Tensor], out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                return out + (6 / rank * (args[0].double() @ a.double().T @ b.double().T)).to(out.dtype)

            hooks.append(module.register_forward_hook(add))
    assert len(hooks) == len(weights) // 2
    out = logits(model)
    for hook in hooks:
        hook.remove()
    return out


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("adapter", ["one", "two"])
def test_adds_what_the_matrices_make(adapter: str, make: Callable[..., PreTrainedModel], folder: Path) -> None:
    model = make(folder, activation_bits=32)
    base, expected = logits(model), by_hand(folder, model, adapter)
    assert (expected - base).abs().max() > 0.1
    adapted = peft.PeftModel.from_pretrained(model, folder / adapter)
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("make", MAKERS)
def test_bfloat16(make: Callable[..., PreTrainedModel], folder: Path) -> None:
    model = make(folder, torch.bfloat16)
    expected = by_hand(folder, model, "one")
    adapted = peft.PeftModel.from_pretrained(model, folder / "one")
    assert logits(adapted).dtype == torch.bfloat16
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=0.05 * expected.abs().max().item())


@pytest.mark.parametrize("make", MAKERS)
def test_several_adapters(make: Callable[..., PreTrainedModel], folder: Path) -> None:
    model = make(folder, activation_bits=32)
    base, one, two = logits(model), by_hand(folder, model, "one"), by_hand(folder, model, "two")
    adapted = peft.PeftModel.from_pretrained(model, folder / "one", adapter_name="one")
    adapted.load_adapter(folder / "two", adapter_name="two")
    torch.testing.assert_close(logits(adapted), one, rtol=0, atol=1e-4)
    adapted.set_adapter("two")
    torch.testing.assert_close(logits(adapted), two, rtol=0, atol=1e-4)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), base)
    adapted.set_adapter("one")
    torch.testing.assert_close(logits(adapted), one, rtol=0, atol=1e-4)
    adapted.delete_adapter("two")
    assert torch.equal(logits(adapted.unload()), base)


def test_by_transformers_own_loader(folder: Path) -> None:
    model = while_loading(folder, activation_bits=32)
    expected = by_hand(folder, model, "one")
    model.load_adapter(str(folder / "one"))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_merging_is_refused(make: Callable[..., PreTrainedModel], safe: bool, folder: Path) -> None:
    model = make(folder)
    base = logits(model)
    adapted = peft.PeftModel.from_pretrained(model, folder / "one")
    with_adapter = logits(adapted)
    message = (
        "no dense weight to read, change or merge an adapter into; merge it into the dense model and quantise that"
    )
    for merge in (adapted.merge_adapter, adapted.merge_and_unload):
        with pytest.raises(TypeError, match=message):
            merge(safe_merge=safe)
    assert torch.equal(logits(adapted), with_adapter)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), base)


def test_dora_is_refused(folder: Path) -> None:
    """It divides by the norms of the dense weight's rows."""
    settings = peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True)
    with pytest.raises(TypeError, match="no dense weight to read"):
        peft.get_peft_model(while_loading(folder), settings)


@pytest.mark.parametrize("adapter", ["one", "two"])
def test_joined_layers_take_no_adapter(adapter: str, folder: Path) -> None:
    """Of ``one`` they have a ``down_proj``, to which alone PEFT would apply it."""
    model = while_loading(folder)
    replace(model)
    with pytest.raises(
        ValueError,
        match=r"MergedRows\(rows of .*; adapters need fastinfer.integrations.transformers.replace\(.*fuse=False\)",
    ):
        peft.PeftModel.from_pretrained(model, folder / adapter)


def test_layers_with_adapters_are_not_joined(folder: Path) -> None:
    model = while_loading(folder, activation_bits=32)
    adapted = peft.PeftModel.from_pretrained(model, folder / "one")
    before = logits(adapted)
    report = replace(model)
    assert report.kept["model.layers.0.self_attn"] == ("LlamaAttention", "has no plain linear layer q_proj")
    torch.testing.assert_close(logits(adapted), before, rtol=0, atol=1e-4)
