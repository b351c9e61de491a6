"""replace(): models of transformers with our modules make the same of their inputs."""

import copy
import gc
import io
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import make_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaAttention

from fastinfer.integrations.transformers import Replacement, replace
from fastinfer.nn import Attention, FusedMLP, QuantLinear

WHOLE = ["llama2", "llama3", "llama-biases", "llama-yarn", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
PARTLY = ["phi3", "phi3-longrope", "mixtral", "qwen3-moe", "gpt2"]
HEAD = {"lm_head": ("Linear", "keeps its dense weight")}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 320, shape, generator=torch.Generator().manual_seed(1))


def inputs() -> dict[str, Tensor]:
    """Padded on the left, and beyond every window."""
    mask = (torch.arange(40) >= torch.tensor([0, 23])[:, None]).long()
    return {"input_ids": tokens(2, 40), "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(**inputs()).logits[inputs()["attention_mask"].bool()]


@pytest.mark.parametrize("family", WHOLE + PARTLY)
def test_logits(family: str) -> None:
    model = make_model(family)
    expected = logits(model)
    report = replace(model)
    assert (report.kept == HEAD) == (family in WHOLE), report
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", WHOLE)
def test_generate(family: str) -> None:
    model = make_model(family)
    given = {name: values[:, -20:] for name, values in inputs().items() if name != "position_ids"}
    options: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    expected = model.generate(**given, **options)
    replace(model)
    assert torch.equal(model.generate(**given, **options), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(**given, **options, **static), expected)


@pytest.mark.parametrize("family", ["llama2", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize("quantize", ["int4", "int8", "nf4"])
@pytest.mark.parametrize("fuse", [True, False])
def test_quantized(family: str, quantize: str, fuse: bool) -> None:
    """As a dense model with what the weights are worth."""
    model = make_model(family)
    dense = make_model(family)
    report = replace(model, quantize=quantize, fuse=fuse, activation_bits=32)
    worth = {name: layer.dequantize() for name, layer in named_layers(report, model).items()}
    assert worth
    for name, values in worth.items():
        dense.get_submodule(name).weight = nn.Parameter(values)  # not into a tied embedding
    expected = logits(dense)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=5e-4 * float(expected.abs().max()))


def named_layers(report: Replacement, model: nn.Module) -> dict[str, Any]:
    """The quantised layers under their original names, split from the merged layers."""
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedMLP):
            rows = module.gate_up_proj.dequantize().unflatten(0, (-1, 2, 16))
            for i, part in enumerate(("gate_proj", "up_proj")):
                layers[f"{name}.{part}"] = Worth(rows[:, i].flatten(0, 1))
        elif isinstance(module, Attention):
            sizes = [heads * module.head_dim for heads in module.heads]
            parts = module.qkv_proj.dequantize().split(sizes)
            layers.update({f"{name}.{part}_proj": Worth(rows) for part, rows in zip("qkv", parts, strict=True)})
        elif isinstance(module, QuantLinear) and not name.endswith(("qkv_proj", "gate_up_proj")):
            layers[name] = module
    return layers


class Worth:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def dequantize(self) -> Tensor:
        return self.values


def test_report() -> None:
    """72 inputs are no multiple of 32: attention's output and the MLP's last layer alone have other widths."""
    model = make_model("llama2", hidden_size=72, head_dim=16, num_hidden_layers=2)
    report = replace(model, quantize="int4", skip=["model.layers.0.*norm"])
    assert report.kept["model.layers.0.input_layernorm"] == ("LlamaRMSNorm", "was to be skipped")
    assert "in_features, got 32 for 72" in report.kept["lm_head"][1]
    assert "got 32 for 72" in report.kept["model.layers.1.self_attn"][1]
    assert str(report).splitlines()[:2] == [
        "replaced 3 LlamaRMSNorm -> RMSNorm",
        "replaced 4 Linear -> QuantLinear (int4)",
    ]
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    """Memory is then freed by the last reference alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_what_is_replaced_is_freed_before_the_next_module_is_replaced(
    quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen3", num_hidden_layers=3)
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    unused: list[int] = []

    def count_unused() -> None:
        used = {id(parameter) for parameter in model.parameters()}
        unused.append(sum(weight() is not None and id(weight()) not in used for weight in weights))

    def set_submodule(name: str, module: nn.Module) -> None:
        count_unused()
        type(model).set_submodule(model, name, module)

    monkeypatch.setattr(model, "set_submodule", set_submodule)
    report = replace(model, quantize=quantize, progress=False)
    count_unused()
    assert len(unused) > 10
    assert unused == [0] * len(unused)
    assert sum(weight() is None for weight in weights) >= 5 * 3, report


def test_report_of_memory() -> None:
    """Of parameters and buffers, tied ones once."""
    model = make_model("llama2", tie_word_embeddings=True)
    before = sum(parameter.nbytes for parameter in model.parameters())
    report = replace(model, quantize="int8", lm_head=None)
    tensors = [*model.parameters(), *model.buffers()]
    after = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
    assert (report.memory_before, report.memory_after) == (pytest.approx(before, rel=0.01), after)
    assert str(report).splitlines()[-1] == f"memory   {before / 2**20:.1f} MiB -> {after / 2**20:.1f} MiB"


@pytest.mark.parametrize("progress", [True, False])
def test_progress(progress: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fastinfer.integrations.transformers.stages.DELAY_S", 0.0)
    replace(make_model("llama2"), quantize="int8", progress=progress)
    shown = capsys.readouterr().err
    for stage in ("attention", "MLPs", "norms", "rotary embeddings", "layers", "linear layers"):
        assert (stage in shown) == progress


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_what_was_joined_dense_can_be_quantised_later(quantize: str, tmp_path: Path) -> None:
    at_once, later = make_model("llama2", num_hidden_layers=1), make_model("llama2", num_hidden_layers=1)
    how: Any = {"quantize": quantize, "activation_bits": 32}
    replace(at_once, **how)
    replace(later)
    report = replace(later, skip=["model.layers.0.mlp.down_proj"], **how)
    names = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj"}
    assert set(report.replaced) == {"lm_head", *(f"model.layers.0.{name}" for name in names)}
    assert report.kept["model.layers.0.mlp.down_proj"] == ("Linear", "was to be skipped")
    replace(later, **how)
    assert torch.equal(logits(later), logits(at_once))
    later.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded.model.layers[0].mlp.down_proj, QuantLinear)
    torch.testing.assert_close(logits(loaded), logits(at_once), rtol=0, atol=1e-3)


def test_a_model_is_quantised_in_one_way() -> None:
    model = make_model("llama2", num_hidden_layers=1)
    replace(model, quantize="int4", skip=["*.mlp", "*.mlp.*"])
    expected = r"expected \('int4', None, 8\), got \('int8', None, 8\)"
    with pytest.raises(ValueError, match=expected):
        replace(model, quantize="int8")


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
@pytest.mark.parametrize("quantize", ["int4", "nf4"])
def test_saved_and_loaded(family: str, quantize: str, tmp_path: Path) -> None:
    """A quantised model, tied or not, some of it dense; loaded, its layers stand alone."""
    model = make_model(family)
    replace(model, quantize=quantize, activation_bits=32, skip=["model.layers.1.mlp", "model.layers.1.mlp.*"])
    model.tie_weights()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = logits(model)
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert replace(again).replaced
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_copies() -> None:
    model = make_model("gemma3")
    replace(model, quantize="int8")
    expected = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False)), expected)


class ScaledByPosition(LlamaAttention):
    """As some models scale their queries beyond the length that they were trained on."""

    def forward(self, hidden_states: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        factor = 1.0 + (position_ids >= 100)[..., None]
        return super().forward(hidden_states * factor, position_ids=position_ids, **kwargs)


def test_what_changes_with_the_position_stays() -> None:
    model = make_model("llama2", num_hidden_layers=1)
    model.model.layers[0].self_attn.__class__ = ScaledByPosition
    assert "model.layers.0.self_attn" in replace(model).kept


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_activations_are_told_apart_in_16_bits(activation: str) -> None:
    """Even by a trial whose gates are all near zero."""
    model = make_model("llama2", hidden_act=activation, num_hidden_layers=1).bfloat16()
    model.model.layers[0].mlp.gate_proj.weight.data *= 0.01
    replace(model)
    expected = {"gelu_pytorch_tanh": "gelu_tanh"}.get(activation, activation)
    assert model.model.layers[0].mlp.activation == expected


def test_attention_with_sinks_and_a_rotation_for_each_base() -> None:
    model = make_model("granite-swa")
    expected = logits(model)
    assert replace(model).replaced["model.layers.0.self_attn"] == ("GraniteSWAAttention", "Attention")
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_inputs_of_the_output_layer_have_16_bits() -> None:
    model = make_model("llama2")
    replace(model, "int4", activation_bits=8)
    assert (model.lm_head.activation_bits, model.model.layers[0].mlp.down_proj.activation_bits) == (16, 8)


def test_rotations_that_change_with_the_length_stay() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    report = replace(make_model("llama2", rope_parameters=rope))
    assert report.kept["model.rotary_emb"] == ("LlamaRotaryEmbedding", "its frequencies change with the length")


def test_masks_of_another_kind_are_refused() -> None:
    model = make_model("llama2")
    replace(model)
    for mask in (torch.ones(1, 1, 12, 12).tril().bool(), torch.ones(1, 1, 12, 12).int()):
        with pytest.raises(ValueError, match="attention_mask must be None, or the mask of transformers"):
            model(tokens(1, 12), attention_mask=mask)


@pytest.mark.parametrize("fuse", [False, True])
def test_probabilities_are_refused(fuse: bool) -> None:
    model = make_model("llama2")
    replace(model, fuse=fuse)
    with pytest.raises(ValueError, match="output_attentions"):
        model(**inputs(), output_attentions=True)


def test_a_quantised_output_layer_is_not_resized() -> None:
    model = make_model("llama2")
    replace(model, quantize="int4")
    assert repr(model.lm_head.weight) == "PackedWeight((20, 2, 8, 16, 4), torch.int8)"
    with pytest.raises(TypeError, match="packed and cannot be resized"):
        model.resize_token_embeddings(model.config.vocab_size + 16, mean_resizing=False)


def test_norms_stay_exact_in_16_bits() -> None:
    model = make_model("gemma3")
    replace(model)
    model.bfloat16()
    norm = model.model.norm
    assert torch.equal(norm.scale, 1.0 + norm.weight.float())


def test_hooked_modules_are_called() -> None:
    """Their layer is not fused."""
    model, called = make_model("llama2"), []
    replace(model, skip=["model.layers.*"])
    replace(model, skip=["model.layers.0", "model.layers.1"])
    for index in (0, 2):
        model.model.layers[index].mlp.register_forward_hook(lambda *_: called.append(1))
    report = replace(model)
    assert list(report.replaced) == ["model.layers.1"]
    called.clear()  # in the trial
    logits(model)
    assert len(called) == 1  # layer 2 was fused before


def test_a_failing_trial_changes_nothing() -> None:
    model = make_model("llama2")
    before = model.config._attn_implementation
    model.model.layers[1].mlp.forward = None
    with pytest.raises(TypeError):
        replace(model)
    assert model.config._attn_implementation == before


class Squared(nn.Module):
    """Looks like an MLP."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x).relu().square() * self.up_proj(x))


def test_what_computes_something_else_stays() -> None:
    model = make_model("llama2")
    model.model.layers[1].mlp = Squared(model.model.layers[1].mlp)
    expected = logits(model)
    report = replace(model)
    assert report.kept.pop("model.layers.1.mlp") == ("Squared", "computes something else than the kernel")
    assert set(report.kept) == {"lm_head", *(f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down"))}
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "fp4"}, "quantize and lm_head must be int4, int8, nf4 or None, got 'fp4'"),
        ({"lm_head": "int2"}, "got 'int2'"),
        ({"group_size": 48}, "group_size must be a multiple of 32, got 48"),
        ({"group_size": 0}, "group_size must be a multiple of 32, got 0"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    model = make_model("llama2")
    before = str(model)
    with pytest.raises(ValueError, match=message):
        replace(model, **options)
    assert str(model) == before


PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "Dear Sir or Madam,",
    "In 1492,",
    "The three laws of thermodynamics are",
    "My favourite colour",
    "To make bread you need flour, water, salt and yeast. First",
    "Q: What is 2 + 2?\nA:",
    "The quick brown fox",
    "import numpy as np\n",
    "Photosynthesis is the process by which",
    "She opened the door and",
    "A list of prime numbers: 2, 3, 5,",
    "The stock market",
    "Once there were three bears who lived in a house in the woods. One morning",
    "E = mc^2 means that",
    "Rome was not built",
    "I",
]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_default_model_writes_the_same(model_path: Path) -> None:
    """20 prompts in one left-padded batch, greedy, in fp32."""
    torch.set_num_threads(2)
    options: dict[str, Any] = {"gguf_file": model_path.name, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(model_path.parent, **options, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token

    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)

    def write() -> Tensor:
        return model.generate(**batch, max_new_tokens=12, min_new_tokens=12, do_sample=False)[:, -12:]

    expected = write()
    assert replace(model).kept == HEAD
    assert torch.equal(write(), expected)
