"""Hugging Face folders: shards, dtypes and names, and one clear error for whatever is wrong with a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import expected, load, make_model, save_model, some_tokens
from support.teacher_forcing import log_probabilities
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from fastinfer import LLM, SamplingParams
from fastinfer.errors import CheckpointFormatError, FastinferError, RequestError, UnsupportedModelError
from fastinfer.formats.safetensors_folder import INDEX, SINGLE, SafetensorsFolder
from fastinfer.models.config import Precision
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder

NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path, "llama3")
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def test_shards(tmp_path: Path) -> None:
    model = make_model("qwen3")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    ids = some_tokens()
    one, many = (log_probabilities(load(tmp_path / name), ids, "float32") for name in ("one", "many"))
    assert torch.equal(one, many)
    # A model that was saved beside the shards of another one is read, as transformers does.
    other = save_model(tmp_path / "many", "qwen3", {"tie_word_embeddings": False})
    assert (tmp_path / "many" / INDEX).exists()
    got = log_probabilities(load(tmp_path / "many"), ids, "float32")
    assert (got - expected(other, ids)).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("model.language_model.", ""), ("language_model.model.", "language_model."), ("language_model.model.", "")],
)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_the_text_part_of_a_model_with_images(family: str, prefix: str, head: str, tmp_path: Path) -> None:
    """Its tensors have one of two prefixes, and other tensors lie beside them."""
    reference = expected(save_model(tmp_path, family), some_tokens())
    config = json.loads((tmp_path / "config.json").read_text())
    name = {"qwen3": "Qwen3VLForConditionalGeneration", "gemma3": "Gemma3ForConditionalGeneration"}[family]
    outer = {"architectures": [name], "text_config": config, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(outer))

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            inner = name.removeprefix("model.")
            tensors[f"{prefix}{inner}" if inner != name else f"{head}{name}"] = tensors.pop(name)
        tensors["model.visual.blocks.0.norm.weight"] = torch.full((8,), torch.nan)

    edit_tensors(tmp_path, rename)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - reference).abs().max() < 1e-3


def test_an_output_layer_that_is_missing(tmp_path: Path) -> None:
    """The embedding takes its place only if the model ties the two."""
    save_model(tmp_path, "qwen3")
    edit_tensors(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointFormatError, match=r"'lm_head\.weight' is missing, and config\.json says"):
        HFCheckpoint(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    decoder = load(tmp_path)
    assert decoder.lm_head is decoder.embedding
    # What the configuration of the text says counts, too.
    edit_config(tmp_path, tie_word_embeddings=False, text_config=json.loads((tmp_path / "config.json").read_text()))
    HFCheckpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype: str, tmp_path: Path) -> None:
    """Weights of 16 bits are used as they are, by fp32 arithmetic."""
    make_model("gemma2").to(getattr(torch, dtype)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert (
        log_probabilities(load(tmp_path), some_tokens(), "float32") - expected(model, some_tokens())
    ).abs().max() < 1e-3


def test_names_without_their_prefix(tmp_path: Path) -> None:
    """As GPT-2's own files are written."""
    save_model(tmp_path, "gpt2")
    prefixed = log_probabilities(load(tmp_path), some_tokens(), "float32")
    tensors = load_file(tmp_path / SINGLE)
    save_file({name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}, tmp_path / SINGLE)
    assert torch.equal(log_probabilities(load(tmp_path), some_tokens(), "float32"), prefixed)


def test_more_rows_of_logits_than_tokens(folder: Path) -> None:
    """Models pad their vocabulary; an id that no token has is no text when it is drawn, or looked at."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    llm = LLM(str(folder), max_model_len=32)
    params = SamplingParams(max_tokens=3, logit_bias={300: 100.0}, logprobs=1, ignore_eos=True)
    [output] = llm.generate("ab", params)[0].outputs
    assert (output.token_ids, output.text, output.finish_reason) == ([300, 300, 300], "", "length")
    assert output.logprobs is not None
    assert output.logprobs[0][300].decoded_token == ""
    with pytest.raises(RequestError, match="expected 0 to 319, got 320"):
        llm.tokenizer.decode([320])


def test_code_in_a_folder_is_never_run(folder: Path) -> None:
    before = log_probabilities(load(folder), some_tokens(), "float32")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (folder / "modeling_evil.py").write_text("raise SystemExit('was run')")
    assert torch.equal(log_probabilities(load(folder), some_tokens(), "float32"), before)


BAD_CONFIGS: dict[str, tuple[type[FastinferError], str, dict[str, Any]]] = {
    "unknown architecture": (
        UnsupportedModelError,
        "MambaForCausalLM is not implemented; supported are LlamaForCausalLM, Mistral",
        {"architectures": ["MambaForCausalLM"]},
    ),
    "no architecture": (UnsupportedModelError, "model_type 'llama'", {"architectures": None}),
    "a size is text": (CheckpointFormatError, "hidden_size: expected int, got '64'", {"hidden_size": "64"}),
    "a size is missing": (CheckpointFormatError, "num_hidden_layers is missing", {"num_hidden_layers": None}),
    "a huge size": (CheckpointFormatError, "intermediate_size: expected 1 to", {"intermediate_size": 2**40}),
    "heads do not divide": (
        CheckpointFormatError,
        "expected a multiple of 3 query heads, got 4",
        {"num_key_value_heads": 3},
    ),
    "epsilon is infinite": (CheckpointFormatError, "rms_norm_eps", {"rms_norm_eps": float("inf")}),
    "unknown activation": (UnsupportedModelError, "hidden_act 'relu'", {"hidden_act": "relu"}),
    "unknown scaling": (
        UnsupportedModelError,
        "'dynamic'",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    ),
    "odd rotary size": (CheckpointFormatError, "rotated size", {"partial_rotary_factor": 0.45}),
    "more layers than there are": (CheckpointFormatError, r"layers\.4\..*missing", {"num_hidden_layers": 5}),
    "another width": (CheckpointFormatError, r"must have the shape \[320, 80\], got \[320, 64\]", {"hidden_size": 80}),
    "unknown quantisation": (
        UnsupportedModelError,
        "quant_method 'hqq' is not implemented",
        {"quantization_config": {"quant_method": "hqq"}},
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config(case: str, folder: Path) -> None:
    error, message, changes = BAD_CONFIGS[case]
    edit_config(folder, **changes)
    with pytest.raises(error, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"{NORM}' is missing"),
        (lambda tensors: tensors.update({NORM: torch.zeros(65)}), rf"{NORM}' must have the shape \[64\], got \[65\]"),
        (lambda tensors: tensors.update({DOWN: torch.zeros(64, 95)}), r"down_proj must have the shape \[64, 96\]"),
        (lambda tensors: tensors.update({DOWN: torch.zeros(64, 96, dtype=torch.int32)}), "down_proj.*int32"),
        (lambda tensors: tensors.update({DOWN: torch.zeros(64)}), "down_proj"),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.zeros(64)}),
            r"lm_head.weight': expected the shape \[any, any\], got \[64\]",
        ),
        (
            lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(())}),
            r"embed_tokens.weight' must have two dimensions, got the shape \[\]",
        ),
    ],
)
def test_bad_tensors(change: Callable[[dict[str, torch.Tensor]], object], message: str, folder: Path) -> None:
    edit_tensors(folder, change)
    with pytest.raises(CheckpointFormatError, match=message):
        load(folder)


def test_bad_folders(tmp_path: Path) -> None:
    model = make_model("llama2")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / INDEX).read_text())

    shards[1].rename(tmp_path / "hidden")
    with pytest.raises(CheckpointFormatError, match=f"1 shards are missing, the first is {shards[1].name}"):
        load(tmp_path)
    (tmp_path / "hidden").rename(shards[1])

    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointFormatError, match=f"{shards[0].name}: not a valid safetensors file"):
        load(tmp_path)
    shards[0].write_bytes(whole)

    for shard in (
        "../model.safetensors",
        "/etc/passwd",
        "model.bin",
        7,
        "x" * 244 + ".safetensors",
        "\ud800.safetensors",
    ):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {"lm_head.weight": shard}}))
        with pytest.raises(CheckpointFormatError, match=r"expected a \.safetensors file beside it for 'lm_head"):
            load(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {"extra": shards[0].name}}))
    with pytest.raises(CheckpointFormatError, match=f"{shards[0].name}: tensor 'extra' is missing"):
        SafetensorsFolder(tmp_path)
    (tmp_path / INDEX).write_text("[1, 2")
    with pytest.raises(CheckpointFormatError, match="not JSON"):
        load(tmp_path)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointFormatError, match=r"pytorch_model.bin, a pickle, which can run any code"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointFormatError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        HFCheckpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointFormatError, match=r"config\.json: No such file"):
        HFCheckpoint(folder)


def test_only_what_is_loaded_counts_as_weights(folder: Path) -> None:
    """Not a second copy of the weights, nor layers for images, nor for tokens after the next one."""
    tensors = load_file(folder / SINGLE)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert HFCheckpoint(folder).weight_bytes("cpu") == size
    save_file(tensors, folder / "consolidated.safetensors")
    other = ("visual.blocks.0.weight", f"model.layers.{HFCheckpoint(folder).config.num_layers}.eh_proj.weight")
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(100, 100) for name in other}))
    assert HFCheckpoint(folder).weight_bytes("cpu") == size


@pytest.mark.parametrize(("family", "options"), [("llama3", {}), ("qwen3-moe", {"moe_intermediate_size": 64})])
def test_fp8_as_transformers_reads_it(family: str, options: dict[str, int], tmp_path: Path) -> None:
    """Matrices of the layers, each expert's too, in blocks of 16 x 32."""
    make_model(family, **options).save_pretrained(tmp_path)

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            blocks = tensors[name].unflatten(1, (-1, 32)).unflatten(0, (-1, 16))
            scales = blocks.abs().amax((1, 3)) / 448
            numbers = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
            tensors |= {name: numbers.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    edit_tensors(tmp_path, quantise)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 32]})
    dense = FineGrainedFP8Config(weight_block_size=(16, 32), dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=dense, dtype=torch.float32)
    reference = expected(model, some_tokens())
    exact = load_decoder(HFCheckpoint(tmp_path, exact=True), Precision.of("float32"), None)
    assert (log_probabilities(exact, some_tokens(), "float32") - reference).abs().max() < 1e-3
    fast = log_probabilities(load(tmp_path, "auto"), some_tokens(), "auto")
    assert 0 < (reference.exp() * (reference - fast)).sum(-1).mean() < 1e-2  # inputs of products are int8, too
