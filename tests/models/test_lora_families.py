"""LoRA adapters of all kinds of models, made and computed by PEFT in fp32: fused matrices, experts, output layers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import load, make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.helpers import assert_bitwise
from support.teacher_forcing import BLOCK_SIZE, log_probabilities
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import AdapterError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.formats.peft import read_adapter
from fastinfer.models.batch import Batch
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.kv_cache import KVCache, num_blocks_for
from fastinfer.models.loader import load_decoder
from fastinfer.models.lora import AdapterSlots

FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama2", {"target_modules": ["lm_head"], "r": 3}),
    "tied": ("llama3", {"target_modules": ["q_proj", "lm_head"], "r": 5, "rank_pattern": {"lm_head": 7}}),
    "softcap": ("gemma2", {"target_modules": ["down_proj", "lm_head"], "r": 4, "use_rslora": True}),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "r": 7}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc", "lm_head"], "r": 5, "fan_in_fan_out": True}),
    "gpt2-patterns": (
        "gpt2",
        {
            "target_modules": ["c_attn", "c_proj"],
            "r": 1,
            "rank_pattern": {"attn.c_proj": 9, "h.1.attn.c_attn": 3},
            "alpha_pattern": {"mlp.c_proj": 5, "c_attn": 2},
        },
    ),
    "gemma 4": ("gemma4", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"], "r": 3}),
    "gemma 4's shared keys": ("gemma4-inputs", {"target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj"], "r": 3}),
    "gemma 4's MLP beside experts": ("gemma4-moe", {"target_modules": ["v_proj", "gate_proj", "down_proj"], "r": 3}),
    "norms behind": ("olmo2", {"target_modules": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"], "r": 3}),
    "parallel": ("cohere2", {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], "r": 3}),
    "rows by head": (
        "gpt-neox",
        {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], "r": 3},
    ),
    "a norm and a bias of the output layer": (
        "phi",
        {"target_modules": ["q_proj", "v_proj", "dense", "fc1", "fc2", "lm_head"], "r": 3},
    ),
    "a shared MLP": (
        "hunyuan-moe",
        {
            "target_modules": ["q_proj", "k_proj", "gate_proj", "up_proj", "down_proj"],
            "target_parameters": FUSED,
            "r": 3,
        },
    ),
    "averaged experts": (
        "cohere2-moe",
        {
            "target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"],
            "target_parameters": [*FUSED, "mlp.gate.weight"],
            "r": 3,
        },
    ),
    "mixtral": (
        "mixtral",
        {
            "target_modules": ["q_proj", "o_proj", "lm_head"],
            "target_parameters": [*FUSED, "mlp.gate.weight"],
            "r": 3,
            "rank_pattern": {"q_proj": 7, "experts.down_proj": 2, "gate.weight": 1},
            "alpha_pattern": {"experts.gate_up_proj": 5},
        },
    ),
    "only down": (
        "qwen3-moe",
        {"target_modules": [], "target_parameters": FUSED[1:], "r": 2, "use_rslora": True},
    ),
    "only gate and up": ("qwen3-moe-renormalized", {"target_modules": ["v_proj"], "target_parameters": FUSED[:1]}),
    "gpt-oss": (
        "gpt-oss",
        {
            "target_modules": ["q_proj", "o_proj"],
            "target_parameters": [*FUSED, "mlp.router.weight"],
            "r": 3,
            "rank_pattern": {"experts.down_proj": 2},
        },
    ),
    "factors": ("granite", {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj", "lm_head"], "r": 3}),
    "shared expert with a gate": (
        "qwen2-moe",
        {
            "target_modules": ["v_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate"],
            "target_parameters": [*FUSED, "mlp.gate.weight"],
            "r": 3,
        },
    ),
    "values smaller than keys": (
        "mimo-v2-flash",
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "r": 3},
    ),
    "norms behind experts": (
        "afmoe",
        {
            "target_modules": ["v_proj", "o_proj", "router.gate"],
            "target_parameters": FUSED,
            "r": 3,
        },
    ),
    "shared expert by another name": (
        "hy-v3",
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"], "r": 2},
    ),
    "no norms before experts": ("flex-olmo", {"target_modules": ["k_proj"], "target_parameters": FUSED, "r": 2}),
    "shared expert": ("glm4-moe", {"target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"], "r": 2}),
    "shared expert of fused matrices": (
        "granite-moe-shared",
        {
            "target_modules": ["q_proj", "input_linear", "output_linear"],
            "target_parameters": ["experts.down_proj", "block_sparse_moe.router.weight"],
            "r": 3,
        },
    ),
    "linear attention": (
        "qwen3.5",
        {
            "target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "o_proj"],
            "r": 3,
            "rank_pattern": {"in_proj_a": 1, "self_attn.q_proj": 5},
        },
    ),
    "linear attention by key head": (
        "qwen3-next",
        {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"], "target_parameters": FUSED, "r": 3},
    ),
    "linear attention without norms of its inputs elsewhere": (
        "olmo-hybrid",
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_proj", "up_proj"],
            "r": 3,
        },
    ),
    "decays of channels, and latent attention": (
        "kimi-linear",
        {
            "target_modules": [
                *("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"),
                *("kv_a_proj_with_mqa", "kv_b_proj", "up_proj"),
            ],
            "r": 3,
        },
    ),
    "gates of heads, of channels in layers with linear attention": (
        "bailing-hybrid",
        {
            "target_modules": ["q_proj", "k_proj", "f_proj", "b_proj", "g_proj", "o_proj", "kv_b_proj", "up_proj"],
            "r": 3,
        },
    ),
    "short convolutions": (
        "lfm2-biases",
        {"target_modules": ["in_proj", "out_proj", "q_proj", "v_proj", "w1", "w2", "w3"], "r": 3},
    ),
    "gates of heads": (
        "lfm3",
        {"target_modules": ["in_proj", "out_proj", "q_proj", "g_proj", "o_proj", "w1", "w2", "w3"], "r": 3},
    ),
    "short convolutions and experts": (
        "lfm2-moe",
        {
            "target_modules": ["in_proj", "out_proj", "w1", "w3"],
            "target_parameters": [
                "feed_forward.experts.gate_up_proj",
                "feed_forward.experts.down_proj",
                "feed_forward.gate.weight",
            ],
            "r": 3,
        },
    ),
    "mamba-2": (
        "granite-hybrid-biases",
        {"target_modules": ["in_proj", "out_proj", "q_proj", "input_linear", "output_linear"], "r": 3},
    ),
    "mamba-2 and experts": (
        "granite-hybrid",
        {
            "target_modules": ["in_proj", "out_proj", "k_proj", "input_linear", "output_linear"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "r": 3,
        },
    ),
    "attention beside mamba-2": (
        "falcon-h1",
        {
            "target_modules": ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "r": 3,
        },
    ),
    "layers of one part": (
        "nemotron-h",
        {
            # PEFT refuses out_proj.
            "target_modules": ["in_proj", "q_proj", "o_proj", "up_proj", "down_proj", "lm_head"],
            "target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj", "mixer.gate.weight"],
            "r": 3,
        },
    ),
    "experts of latents": (
        "nemotron-h-latent",
        {
            "target_modules": ["q_proj", "up_proj", "down_proj"],
            "target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj", "mixer.gate.weight"],
            "r": 3,
        },
    ),
    "latent attention": (
        "deepseek-v2",
        {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], "r": 3},
    ),
    "latent queries": (
        "deepseek-v3-mscale",
        {
            "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj"],
            "r": 3,
        },
    ),
    "latent attention to chosen tokens": (
        "glm-dsa",
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], "r": 3},
    ),
    "weights of experts' inputs": (
        "llama4",
        {
            "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "r": 3,
        },
    ),
    "latent attention and norms of experts": (
        "axk1",
        {
            "target_modules": ["q_a_proj", "kv_b_proj", "o_proj", "gate_proj", "down_proj"],
            "target_parameters": ["mlp.experts.down_proj"],
            "r": 3,
        },
    ),
    "limits and heads that differ by layer": (
        "step3.7",
        {"target_modules": r".*language_model.*\.(q_proj|v_proj|g_proj|o_proj|gate_proj|up_proj|down_proj)", "r": 3},
    ),
    "gates by softplus": (
        "laguna",
        {
            "target_modules": ["q_proj", "g_proj", "o_proj", "up_proj", "down_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj"],
            "r": 3,
        },
    ),
    "experts chosen by biased logits": (
        "kolibri",
        {"target_modules": ["k_proj", "o_proj", "gate_proj"], "target_parameters": ["mlp.gate.weight"], "r": 3},
    ),
    "router": ("qwen3-moe", {"target_modules": [], "target_parameters": ["gate.weight"], "r": 1}),
    "one layer's": (
        "mixtral",
        {
            "target_modules": [],
            "target_parameters": ["model.layers.1.mlp.experts.gate_up_proj", "layers.2.mlp.experts.down_proj"],
            "r": 3,
        },
    ),
}


def randomize(model: Any, seed: int) -> None:
    """B starts as zeros: an adapter that is not applied would not be noticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)


def peft_model(base: Any, **settings: Any) -> Any:
    """A model with a new adapter by PEFT, whose import takes two seconds: not wherever this file is collected."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base, LoraConfig(**settings))


def peft_log_probabilities(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([some_tokens()])).logits[0].log_softmax(-1)


def with_adapters(folder: Path, *adapters: Path, max_rank: int = 16) -> Decoder:
    """The folder's model with these adapters in slots 1, 2, ..., and NaN in whatever is not used."""
    return adapted(load(folder), *adapters, max_rank=max_rank)


def adapted(model: Decoder, *adapters: Path, max_rank: int = 16) -> Decoder:
    slots = AdapterSlots(model.config, len(adapters) + 1, max_rank, torch.float32)
    for modules in (*slots.layers, {"lm_head": slots.lm_head}):
        for module in modules.values():
            module.a.fill_(torch.nan), module.b.fill_(torch.nan)
    for index, adapter in enumerate(adapters):
        slots.load(1 + index, slots.prepare(read_adapter(adapter)))
    return model.with_adapters(slots)


@pytest.mark.parametrize("case", CASES)
def test_equals_peft(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base = make_model(family)
    base.save_pretrained(tmp_path / "model")
    plain = peft_log_probabilities(base)
    peer = peft_model(base, lora_alpha=6, **settings)
    randomize(peer, seed=1)
    peer.save_pretrained(tmp_path / "adapter")
    expected = peft_log_probabilities(peer)
    model = with_adapters(tmp_path / "model", tmp_path / "adapter")
    got = log_probabilities(model, some_tokens(), "float32", adapter=1)
    assert (expected - plain).abs().mean() > 0.02
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    without = log_probabilities(model, some_tokens(), "float32", adapter=-1)
    torch.testing.assert_close(without, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", ["linear attention", "latent queries", "rows by head"])
def test_gguf_files(case: str, tmp_path: Path) -> None:
    """Adapters have the order of transformers' rows and columns, also where such a file has another one."""
    family, settings = CASES[case]
    base = make_model(family)
    write_gguf(tmp_path / "model.gguf", base)
    peer = peft_model(base, lora_alpha=6, **settings)
    randomize(peer, seed=1)
    peer.save_pretrained(tmp_path / "adapter")
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    model = adapted(load_decoder(checkpoint, Precision.of("float32"), None), tmp_path / "adapter")
    got = log_probabilities(model, some_tokens(), "float32", adapter=1)
    torch.testing.assert_close(got, peft_log_probabilities(peer), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("mixtral", {"experts": "block_sparse_moe.experts", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
        ("qwen3-moe", {"experts": "mlp.experts"}),
    ],
)
def test_experts_that_were_modules(family: str, names: dict[str, str], tmp_path: Path) -> None:
    """Adapters from before transformers 5 have matrices for every expert; PEFT fuses them when it loads them."""
    base = make_model(family)
    base.save_pretrained(tmp_path / "model")
    config = load(tmp_path / "model").config
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    hidden, inner, rank = config.hidden_size, config.intermediate_size, 3
    sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    modules = {names.get(name, name): size for name, size in sizes.items()}
    for layer in range(config.num_layers):
        for expert in range(config.num_experts):
            for module, (features, out) in modules.items():
                name = f"base_model.model.model.layers.{layer}.{names['experts']}.{expert}.{module}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, features, generator=generator) / 5
                tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) / 5
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": list(modules),
        "task_type": "CAUSAL_LM",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    from peft import PeftModel

    plain = peft_log_probabilities(base)
    peer = PeftModel.from_pretrained(base, adapter)
    expected = peft_log_probabilities(peer)
    assert (expected - plain).abs().mean() > 0.05
    model = with_adapters(tmp_path / "model", adapter)
    got = log_probabilities(model, some_tokens(), "float32", adapter=1)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    peer.save_pretrained(tmp_path / "again")  # as PEFT writes it now: fused, of twice the rank
    again = log_probabilities(
        with_adapters(tmp_path / "model", tmp_path / "again"), some_tokens(), "float32", adapter=1
    )
    torch.testing.assert_close(again, expected, rtol=1e-3, atol=1e-3)


def two_adapters(family: str, folder: Path) -> Decoder:
    for seed, case in enumerate(name for name in CASES if CASES[name][0] == family):
        base = make_model(family)
        base.save_pretrained(folder / "model")
        peer = peft_model(base, lora_alpha=6, **CASES[case][1])
        randomize(peer, seed)
        peer.save_pretrained(folder / str(seed))
    return with_adapters(folder / "model", folder / "0", folder / "1")


def run(model: Decoder, texts: list[list[int]], adapters: list[int]) -> list[Tensor]:
    """The logits of every token, by text."""
    lengths = [len(text) for text in texts]
    blocks = sum(num_blocks_for(length, BLOCK_SIZE) for length in lengths)
    cache = KVCache.of_model(model.config, [blocks], BLOCK_SIZE, torch.float32, "cpu")
    ids = torch.tensor(adapters, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    hidden = model.forward(replace(Batch.of_texts(texts, BLOCK_SIZE), adapter_ids=ids), cache)
    return list(model.logits(hidden, torch.arange(len(ids)), ids).split(lengths))


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_adapters_in_one_batch_equal_each_alone(family: str, tmp_path: Path) -> None:
    model = two_adapters(family, tmp_path)
    tokens = some_tokens()
    texts, adapters = [tokens[:20], tokens[20:27], tokens[:20], tokens[:20], tokens[40:41]], [1, 2, 2, -1, 1]
    together = run(model, texts, adapters)
    for text, adapter, expected in zip(texts, adapters, together, strict=True):
        assert_bitwise(run(model, [text], [adapter])[0], expected)
    assert len({tuple(logits[-1].tolist()) for logits in (together[0], together[2], together[3])}) == 3


def test_a_recorded_step_of_a_mixture_sees_new_adapters(tmp_path: Path) -> None:
    model = two_adapters("mixtral", tmp_path)
    ids = torch.tensor([0, -1, 0], dtype=torch.int32)
    batch = replace(Batch.of_texts([[5], [6], [7]], BLOCK_SIZE), adapter_ids=ids)
    rows = torch.arange(3)
    cache = KVCache.of_model(model.config, [3], BLOCK_SIZE, torch.float32, "cpu")
    graph = ops.CPUGraph()
    with graph.capture():
        out = model.logits(model.forward(batch, cache), rows, ids)
    plain = out.clone()
    assert model.adapters is not None
    model.adapters.load(0, model.adapters.prepare(read_adapter(tmp_path / "1")))
    graph.replay()
    assert_bitwise(out, model.logits(model.forward(batch, cache), rows, ids))
    assert (out - plain)[[0, 2]].abs().amin(-1).gt(0).all()
    assert_bitwise(out[1], plain[1])


def rename(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def one_expert(expert: int) -> dict[str, Tensor]:
    name = f"base_model.model.model.layers.0.mlp.experts.{expert}.w2"
    return {f"{name}.lora_A.weight": torch.ones(3, 96), f"{name}.lora_B.weight": torch.ones(64, 3)}


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("mixtral", rename(".mlp.gate.", ".mlp.down_proj."), "a layer of the model has no down_proj, only q_proj, "),
        ("mixtral", rename(".mlp.gate.", ".mlp.shared_expert.up_proj."), "has no shared_expert.up_proj, only q_proj, "),
        ("mixtral", lambda _: one_expert(4), "the model has 4 experts only"),
        ("llama2", lambda _: one_expert(0), "the model has 0 experts only"),
        ("gpt2", rename("attn.c_proj", "mlp.gate_proj"), "a layer of the model has no gate_proj, only q_proj, "),
        (
            "gpt2",
            rename(".attn.c_proj", ".self_attn.q_proj"),
            "c_attn and .*q_proj are the same weight|q_proj and .*c_attn",
        ),
        ("phi3", rename("self_attn.o_proj", "mlp.gate"), "a layer of the model has no router"),
        ("mamba-2", rename("mamba.out_proj", "self_attn.o_proj"), "has no o_proj, only in_proj, in_proj_dt, out_proj"),
        ("layers of one part", rename("layers.2.", "layers.12."), "the model has no .*in_proj in a layer 12"),
        ("layers of one part", rename("layers.0.mixer.in_proj", "layers.0.mixer.up_proj"), "no up_proj in a layer 0"),
        ("phi3", rename("self_attn.o_proj", "self_attn.kv_b_proj"), "has no kv_b_proj, only q_proj, k_proj"),
        (
            "latent attention to chosen tokens",
            rename("self_attn.q_b_proj", "self_attn.indexer.wq_b"),
            r"indexer\.wq_b.* is not supported; only",
        ),
    ],
)
def test_weights_that_the_model_lacks(case: str, change: Any, named: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base = make_model(family)
    base.save_pretrained(tmp_path / "model")
    peft_model(base, **(settings | {"rank_pattern": {}})).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(AdapterError, match=named):
        with_adapters(tmp_path / "model", tmp_path, max_rank=64)
