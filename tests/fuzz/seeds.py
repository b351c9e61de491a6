"""Valid cases from which the mutations of each target start, made on the spot: a few kilobytes each, random weights."""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save
from support import hf_tokenizers, packed_layers
from support.peft_adapter import write_adapter
from support.tiny_decoder import CONFIG
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel
from torch import Tensor

from fuzz.mutate import Case

HIDDEN, HEADS, WIDTH, VOCAB = 32, 2, 64, 40
LETTERS = "abcdefghijklmnopqrstuvwxyz"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "checkpoint_format": "gptq",
}


def family(name: str, **settings: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()} | settings


CONFIGS: list[dict[str, Any]] = [
    LLAMA,
    family("Llama", rope_scaling=LLAMA3, attention_bias=True, mlp_bias=True),
    family("Llama", rope_scaling=YARN, quantization_config=GPTQ),
    family("Mistral", sliding_window=16, head_dim=32),
    family("Qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1),
    family("Qwen3", head_dim=32),
    family("Gemma2", head_dim=32, sliding_window=16, query_pre_attn_scalar=20, attn_logit_softcapping=5.0)
    | {"final_logit_softcapping": 3.0, "hidden_activation": "gelu_pytorch_tanh"},
    family("Gemma3", model_type="gemma3_text", head_dim=32, sliding_window=16, query_pre_attn_scalar=20)
    | {"hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
    family("Phi3", rope_scaling=LONGROPE, original_max_position_embeddings=32, sliding_window=40),
    family("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    family("Qwen3Moe", model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    | {"head_dim": 32, "norm_topk_prob": True},
    family("GptOss", model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=16, head_dim=32)
    | {"rope_scaling": YARN | {"truncate": False}, "swiglu_limit": 7.0},
    family("HunYuanMoEV1", model_type="hunyuan_v1_moe", num_experts=4, moe_topk=[2], head_dim=32)
    | {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 50.0}},
    family("Cohere2Moe", model_type="cohere2_moe", num_experts=4, num_experts_per_tok=2, head_dim=32)
    | {"first_k_dense_replace": 1, "num_shared_experts": 1, "expert_selection_fn": "sigmoid"},
    {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
    | {"n_positions": 64, "vocab_size": VOCAB, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
]
GENERATION = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 50,
    "repetition_penalty": 1.1,
    "eos_token_id": [2],
    "do_sample": True,
}


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def files_of(write: Callable[[Path], object]) -> Case:
    """What a function writes into a folder."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        return {path.name: path.read_bytes() for path in sorted(Path(name).iterdir())}


def gguf_seeds() -> Iterator[Case]:
    for kind in ("spm", "bpe", "mixture", "iq4_nl"):
        yield files_of(lambda folder, kind=kind: _write_gguf(folder / "model.gguf", kind))


def _write_gguf(path: Path, kind: str) -> None:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    letters = list('abcdefgh{}[]":, 0123456789-<>/xy')
    if kind == "spm":
        tokens = ["<unk>", "<s>", "</s>", "▁", "▁a", "ab", "\n", "A", *letters]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(VOCAB)])
        writer.add_token_types([2, 3, 3] + [1] * (VOCAB - 3))
    else:
        tokens = ["<unk>", "<s>", "</s>", "Ġ", "Ġa", "ab", "Ċ", "A", *letters]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(["Ġ a", "a b"])
        writer.add_token_types([2, 3, 3] + [1] * (VOCAB - 3))
    writer.add_token_list(tokens)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (16, HIDDEN),
        "attn_v": (16, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
    }
    experts: tuple[int, ...] = ()
    if kind == "mixture":
        experts = (4,)
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_tensor("blk.0.ffn_gate_inp.weight", random.standard_normal((4, HIDDEN)).astype(np.float32))
    mlp = {"ffn_gate": (WIDTH, HIDDEN), "ffn_up": (WIDTH, HIDDEN), "ffn_down": (HIDDEN, WIDTH)}
    shapes |= {f"{name}{'_exps' * len(experts)}": (*experts, *shape) for name, shape in mlp.items()}
    if kind == "iq4_nl":
        blocks = random.integers(0, 256, (VOCAB, HIDDEN // 32, 18), np.uint8)
        blocks[..., :2] = np.array([0.01], np.float16).view(np.uint8)  # scales
        writer.add_tensor("token_embd.weight", blocks.reshape(VOCAB, -1), raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
    else:
        writer.add_tensor("token_embd.weight", random.standard_normal((VOCAB, HIDDEN)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(HIDDEN, np.float32))
    kinds = gguf.GGMLQuantizationType
    for name, shape in shapes.items():
        form = kinds.Q4_0 if name.startswith(("ffn_gate", "ffn_up")) else kinds.Q8_0 if name == "attn_q" else kinds.F16
        values = gguf.quants.quantize(random.standard_normal(shape).astype(np.float32), form)
        writer.add_tensor(f"blk.0.{name}.weight", values, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def safetensors_seeds() -> Iterator[Case]:
    tensors = _llama_tensors()
    tokenizer = files_of(lambda folder: hf_tokenizers.save(folder, small_tokenizer()))
    shared = {"config.json": dumps(LLAMA), "tokenizer.json": tokenizer["tokenizer.json"]}
    yield shared | {"model.safetensors": save(tensors)}
    halves = [dict(list(tensors.items())[part::2]) for part in (0, 1)]
    shards = {f"model-0000{i + 1}-of-00002.safetensors": half for i, half in enumerate(halves)}
    index = {"metadata": {}, "weight_map": {name: shard for shard, half in shards.items() for name in half}}
    yield shared | {name: save(half) for name, half in shards.items()} | {"model.safetensors.index.json": dumps(index)}

    for make in QUANTIZED:
        config, packed = _packed_tensors(make)
        yield shared | {"config.json": dumps(config), "model.safetensors": save(packed)}


# A layer of each method, from its numbers of outputs and inputs.
QUANTIZED: list[Callable[[int, int], packed_layers.Layer]] = [
    lambda rows, columns: packed_layers.gptq_layer(4, rows, columns, 32),
    lambda rows, columns: packed_layers.gptq_layer(8, rows, columns, 32, act_order=True),
    lambda rows, columns: packed_layers.awq_layer(rows, columns, 32),
    lambda rows, columns: packed_layers.bitsandbytes_layer("nf4", rows, columns, 32),
    lambda rows, columns: packed_layers.pack_quantized_layer(4, rows, columns, 32, symmetric=False),
    packed_layers.int8_layer,
    packed_layers.int_quantized_layer,
    lambda rows, columns: packed_layers.mlx_layer(3, rows, columns, 32),
    packed_layers.mxfp4_layer,
]


def _packed_tensors(make: Callable[[int, int], packed_layers.Layer]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a model whose linear layers are quantised; as many KV heads as heads."""
    config = dict(LLAMA, num_key_value_heads=HEADS)
    tensors = {}
    for name, tensor in _llama_tensors(HEADS).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        torch.manual_seed(0)  # the tables of gate and up must be the same
        layer = make(*tensor.shape)
        config["quantization_config"] = layer.config
        tensors |= {part.replace(packed_layers.NAME, module): value for part, value in layer.tensors.items()}
    return config, tensors


def _llama_tensors(kv_heads: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        f"self_attn.{name}_proj": (HIDDEN // HEADS * kv_heads if name in "kv" else HIDDEN, HIDDEN) for name in "qkvo"
    }
    shapes |= {"mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH)}
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()}
    for name, shape in shapes.items():
        tensors[f"model.layers.0.{name}.weight"] = torch.randn(shape, generator=generator).bfloat16()
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    return tensors | {f"{name}.weight": torch.ones(HIDDEN) for name in norms}


# Tokenizers of every kind that are not trained: training depends on the order of hash tables.


def ids(words: Iterable[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate([*hf_tokenizers.SPECIAL, *words])}


def small_tokenizer() -> Tokenizer:
    backend = Tokenizer(WordLevel(ids(LETTERS), unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.Metaspace()
    return backend


def byte_level() -> Tokenizer:
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocab = ids([*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)])
    backend = Tokenizer(BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_fallback() -> Tokenizer:
    merges = [("▁", "t"), ("▁t", "h")]
    letters = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, *("".join(pair) for pair in merges)]
    backend = Tokenizer(BPE(ids(letters), merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def unigram() -> Tokenizer:
    pieces = [*hf_tokenizers.SPECIAL, "▁", "▁the", "he", *LETTERS]
    backend = Tokenizer(Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return backend


def config_seeds() -> Iterator[Case]:
    for config in CONFIGS:
        yield {"config.json": dumps(config), "generation_config.json": dumps(GENERATION)}


def tokenizer_seeds() -> Iterator[Case]:
    for make in (small_tokenizer, byte_level, byte_fallback, unigram):
        case = files_of(lambda folder, make=make: hf_tokenizers.save(folder, make()))
        template = dumps({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"})
        yield case | {"chat_template.json": template, "config.json": dumps({"vocab_size": 400, "eos_token_id": 2})}


def peft_seeds() -> Iterator[Case]:
    yield files_of(lambda folder: write_adapter(folder, CONFIG, 2, ("q_proj", "down_proj")))
    patterns: dict[str, Any] = {"rank_pattern": {"k_proj": 3}, "alpha_pattern": {"layers.1.self_attn.k_proj": 9}}
    yield files_of(lambda folder: write_adapter(folder, CONFIG, 3, ("k_proj",), use_rslora=True, **patterns))


SAMPLING: dict[str, Any] = {
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"3": 2.0, "5": -100},
    "allowed_token_ids": [1, 2, 3, 4, 5, 6],
    "bad_words": ["ab", "c"],
    "max_tokens": 5,
    "min_tokens": 1,
    "stop": ["xyz", "q"],
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "ignore_eos": False,
    "seed": 7,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 4,
    "skip_special_tokens": False,
}
STRUCTURED: list[dict[str, Any]] = [
    {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
            "required": ["a"],
        }
    },
    {"regex": "[a-c]{2,4}(d|e)?"},
    {"choice": ["abc", "abd"]},
    {"grammar": 'root ::= "a" [b-d]+'},
    {"json_object": True},
    {
        "structural_tag": {
            "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
            "triggers": ["<"],
        }
    },
]


def parameters_seeds() -> Iterator[Case]:
    prompt = {"prompt_token_ids": [3, 1, 4, 1, 5]}
    request = {"priority": 1, "timeout": 5.0, "queue_timeout": 5.0}
    yield {"request.json": dumps({"prompt": prompt, "sampling": SAMPLING, "request": request})}
    yield {"request.json": dumps({"prompt": {"prompt": "abc", "cache_salt": "a"}, "sampling": {"max_tokens": 3}})}
    beams = {"beam_width": 2, "max_tokens": 3, "length_penalty": 1.0, "ignore_eos": True}
    yield {"request.json": dumps({"prompt": prompt, "beams": beams})}
    for structured in STRUCTURED:
        yield {"request.json": dumps({"prompt": prompt, "sampling": {"max_tokens": 3}, "structured": structured})}


SEEDS: dict[str, Callable[[], Iterator[Case]]] = {
    "gguf": gguf_seeds,
    "safetensors": safetensors_seeds,
    "config": config_seeds,
    "tokenizer": tokenizer_seeds,
    "peft": peft_seeds,
    "parameters": parameters_seeds,
}
