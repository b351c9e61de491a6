"""A model in memory that replicas share: loaded once, the same objects, and one copy of each tensor."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import load, save_model
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams
from fastinfer.engine.replica_share import ReplicaShare
from fastinfer.errors import RequestError
from fastinfer.models import open_checkpoint, shared_model
from fastinfer.models.offload import tensors_of
from fastinfer.models.shared_model import SharedWeights, read_model, write_model
from fastinfer.utils.sealed_memory import PAGE, SealedMemory

MIB = 2**20


def test_each_tensor_once(tmp_path: Path) -> None:
    save_model(tmp_path, "llama3", tie_word_embeddings=True)
    model = load(tmp_path)
    assert model.lm_head is model.embedding
    config, values = model.config, [tensor.clone() for tensor in tensors_of(model)]
    memory = SealedMemory.create()
    write_model(model, "its identity", memory)
    assert not any(tensor.numel() for tensor in tensors_of(model)), "there are two copies"

    shared, identity = read_model(memory)
    assert identity == "its identity"
    assert shared.config == config
    assert shared.lm_head is shared.embedding
    tensors = list(tensors_of(shared))
    assert all(map(torch.equal, tensors, values))
    assert sum(tensor.nbytes for tensor in tensors) < len(memory.read()) < sum(t.nbytes for t in tensors) + 2 * PAGE
    [storage] = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert all(tensor.data_ptr() % 64 == storage % 64 == 0 for tensor in tensors)


def test_what_cannot_be_described() -> None:
    @dataclass
    class Other:
        value: Any

    for value, message in (
        (Other(1), "dataclasses of fastinfer"),
        ({}, "dataclasses of fastinfer"),
        ((torch.ones(2, 3).t(),), "contiguous"),
    ):
        memory = SealedMemory.create()
        with pytest.raises(TypeError, match=message):
            write_model(value, "", memory)  # type: ignore[arg-type]
        assert not memory.is_sealed


def test_replicas_load_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_folder(tmp_path)
    loaded = []

    def counted(*args: Any) -> Any:
        loaded.append(args)
        if len(loaded) == 1:
            raise ZeroDivisionError
        return load_weights(*args)

    load_weights = shared_model.load_weights
    monkeypatch.setattr(shared_model, "load_weights", counted)
    memory = SealedMemory.create()
    share = ReplicaShare(2, 2048 * MIB, (memory.descriptor,))
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    with pytest.raises(ZeroDivisionError):
        LLM(str(tmp_path), share=share, max_num_seqs=4)
    replicas = [LLM(str(tmp_path), share=share, max_num_seqs=4) for _ in range(2)]
    assert len(loaded) == 2
    alone = LLM(str(tmp_path), max_num_seqs=4)
    texts = {llm.generate("once", params)[0].outputs[0].text for llm in (*replicas, alone)}
    assert len(texts) == 1
    with pytest.raises(RequestError, match="cannot load its models again, got 2"):
        replicas[0].sleep(2)
    replicas[0].sleep(1)
    replicas[0].wake_up()
    assert replicas[0].generate("once", params)[0].outputs[0].text in texts

    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(RequestError, match="the files have changed since the first replica loaded them"):
        SharedWeights(memory.descriptor)(checkpoint, "bfloat16", "cpu", None)


def test_replicas_divide_what_the_weights_leave(tmp_path: Path) -> None:
    share = ReplicaShare(4, 100, (3,))
    assert share.memory(20) == 20 + (100 - 20) // 4
    assert replace(share, weights=()).memory(20) == 20 + (100 - 80) // 4
    assert share.memory(200) < 200, "there is no room for a KV cache"
    write_tiny_folder(tmp_path, sizes={"max_position_embeddings": 4096})
    shares = [ReplicaShare(count, count * MIB * 4) for count in (1, 3)]
    sizes = {LLM(str(tmp_path), share=share).engine.stats().num_free_blocks for share in shares}
    assert len(sizes) == 1
    assert max(sizes) * 32 < 4096, "there is too much memory to tell"
