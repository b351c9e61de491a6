"""The mapping for the ``kernels`` package: the same results, in inference only.

Tolerance: the error of the logits may be at most twice that of transformers' own norms, plus fp32's noise. How large it
is depends on the order in which torch's matrix products add up, which differs between CPUs.
"""

import copy
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.utils import is_kernels_available

kernels = pytest.importorskip("kernels")

from fastinfer.integrations.transformers import kernel_layers  # noqa: E402

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model whose norm has a registered name; transformers gives it one if the version of ``kernels`` suits it."""
    monkeypatch.setattr(LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
    monkeypatch.setattr(LlamaRMSNorm, "kernel_condition", staticmethod(lambda module: True), raising=False)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=99, initializer_range=0.3, use_cache=False)).eval()
    for norm in norms(model):
        torch.nn.init.normal_(norm.weight)
    return model


def norms(model: PreTrainedModel) -> list[LlamaRMSNorm]:
    return [module for module in model.modules() if isinstance(module, LlamaRMSNorm)]


def kernelize(model: PreTrainedModel, mode: Any) -> None:
    with kernels.use_kernel_mapping(kernel_layers.kernel_mapping(), inherit_mapping=False):
        kernels.kernelize(model, mode=mode, device="cpu")


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits


def exact_norm(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def exact_logits(model: PreTrainedModel) -> Tensor:
    """In fp64."""
    model = copy.deepcopy(model).double()
    for norm in norms(model):
        norm.forward = MethodType(exact_norm, norm)
    return logits(model)


def assert_as_exact(got: Tensor, naive: Tensor, exact: Tensor) -> None:
    error, allowed = ((values - exact).abs().max() for values in (got, naive))
    assert error <= 2 * allowed + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("mode", [kernels.Mode.INFERENCE, kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE])
def test_same_results(mode: Any, model: PreTrainedModel) -> None:
    before, exact = logits(model), exact_logits(model)
    kernelize(model, mode)
    assert [norm.forward.__func__ for norm in norms(model)] == [kernel_layers.RMSNorm.forward] * 5
    assert_as_exact(logits(model), before, exact)


@pytest.mark.slow
def test_compiles_whole(model: PreTrainedModel) -> None:
    before, exact = logits(model), exact_logits(model)
    kernelize(model, kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_as_exact(logits(compiled), before, exact)


def test_training_falls_back(model: PreTrainedModel) -> None:
    kernelize(model, kernels.Mode.INFERENCE)
    kernelize(model.train(), kernels.Mode.TRAINING)
    assert [norm.forward.__func__ for norm in norms(model)] == [LlamaRMSNorm.forward] * 5
    model(IDS).logits.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("theirs", "layer"), [(LlamaRMSNorm, kernel_layers.RMSNorm), (Qwen3_5RMSNorm, kernel_layers.RMSNormZeroCentered)]
)
def test_layers(theirs: type, layer: type, dtype: torch.dtype) -> None:
    """Called as the package calls them: a forward of somebody else's module. Strided inputs are taken."""
    torch.manual_seed(0)
    norm = theirs(72, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 5, 72).to(dtype).transpose(1, 2)
    with torch.no_grad():
        expected = norm.double()(x.double()) if theirs is LlamaRMSNorm else norm(x.float())
        ours = MethodType(layer.forward, norm.to(dtype))(x)
    assert (ours.dtype, ours.shape) == (dtype, x.shape)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(ours.double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_mapping_is_for_both_devices() -> None:
    mapping = kernel_layers.kernel_mapping()
    assert {name: set(devices) for name, devices in mapping.items()} == {
        "RMSNorm": {"cpu", "cuda"},
        "RMSNormZeroCentered": {"cpu", "cuda"},
    }


@pytest.mark.skipif(not is_kernels_available(), reason="transformers wants another version of kernels")
@pytest.mark.parametrize("while_loading", [False, True])
def test_by_transformers_own_means(while_loading: bool, model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    if while_loading:
        ours = AutoModelForCausalLM.from_pretrained(
            tmp_path, use_kernels=True, kernel_config=kernel_layers.FastinferKernels()
        )
    else:
        ours = AutoModelForCausalLM.from_pretrained(tmp_path)
        ours.set_use_kernels(True, kernel_layers.FastinferKernels())
    assert [norm.forward.__func__ for norm in norms(ours)] == [kernel_layers.RMSNorm.forward] * 5
    assert_as_exact(logits(ours), logits(model), exact_logits(model))
