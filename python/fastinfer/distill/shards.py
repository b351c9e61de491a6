"""Records of the teacher in safetensors files, one per shard of texts: a run that was stopped need not repeat them."""

import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastinfer.distill.teacher import Teacher
from fastinfer.distill.texts import SHARD_SECTIONS, Texts
from fastinfer.errors import RequestError
from fastinfer.utils.safetensors_file import write_tensors


class Shards:
    """The shards of a run, which are recorded when they are first wanted.

    A shard has ``ids`` [texts, length] int32, and for each position but the last what
    :meth:`fastinfer.distill.recorder.Recorder.take` returns, as [texts, length - 1, ...].

    Args:
        folder: folder of the files; created if necessary.
        teacher: the teacher.
        texts: texts of the run.
        options: further settings on which the records depend.
        with_records: whether the teacher's records are wanted; without, a shard has ``ids`` alone and no file.

    Attributes:
        num_recorded, num_read: number of tokens that the teacher has recorded, and that were read from files.
    """

    def __init__(
        self, folder: Path, teacher: Teacher, texts: Texts, options: dict[str, object], with_records: bool = True
    ) -> None:
        self._folder = folder
        self._teacher = teacher
        self._texts = texts
        settings = [teacher.fingerprint, texts.digest, teacher.hidden_layers, teacher.attention_layer, options]
        self._key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        self._with_records = with_records
        self.num_recorded = self.num_read = 0
        folder.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a shard; after the last one of a file the first one follows.

        Raises:
            RequestError: a file of the folder belongs to another run, is damaged, or cannot be written.
        """
        count = self._texts.num_shards
        index = index if count is None else index % count
        if not self._with_records:
            return {"ids": torch.tensor(self._texts.shard(index) or self._write(index), dtype=torch.int32)}
        path = self._folder / f"{index:05}.safetensors"
        if path.exists():
            shard = self._read(path)
            self.num_read += shard["ids"].numel()
            return shard
        shard = self._record(index)
        self.num_recorded += shard["ids"].numel()
        unfinished = path.with_suffix(f".{os.getpid()}")
        write_tensors(shard, unfinished, {"key": self._key})
        unfinished.rename(path)
        return shard

    def _read(self, path: Path) -> dict[str, Tensor]:
        try:
            with safe_open(path, "pt") as file:
                if (file.metadata() or {}).get("key") == self._key:
                    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, as it is no dict
        except SafetensorError as error:
            raise RequestError(f"{path}: expected the teacher's records, got a damaged file ({error})") from None
        raise RequestError(f"{path}: expected records of this teacher, data and losses, got others; remove the folder")

    def _write(self, index: int) -> list[list[int]]:
        """Let the teacher write the texts of a shard."""
        texts = self._texts
        return self._teacher.write(texts.prompt, SHARD_SECTIONS, texts.length, index * SHARD_SECTIONS)

    def _record(self, index: int) -> dict[str, Tensor]:
        texts = self._texts
        sections = texts.shard(index)
        if sections is None:
            first = index * SHARD_SECTIONS
            sections, records = self._teacher.write_and_record(texts.prompt, SHARD_SECTIONS, texts.length, first)
        else:
            records = self._teacher.record(sections)
        last = texts.length - 1
        shard = {name: torch.stack([record[name][:last] for record in records]) for name in records[0]}
        return {"ids": torch.tensor(sections, dtype=torch.int32), **shard}
