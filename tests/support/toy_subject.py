"""The toy model as what a benchmark measures."""

from typing import Any

import torch

from fastinfer.benchmarks.subject import Subject
from fastinfer.engine.engine import Engine
from support.toy import MAX_POSITION, ToyModel, ToyTokenizer


class ToySubject(Subject):
    """Remembers the engines that were made."""

    def make_engine(self, *, max_num_seqs: int = 8, max_model_len: int = MAX_POSITION, **options: Any) -> Engine:
        # The toy computes with torch, which no graph records.
        options |= {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "enforce_eager": True}
        engine = super().make_engine(**options)
        self.engines.append(engine)
        return engine


def toy_subject() -> ToySubject:
    subject = ToySubject(ToyModel(), ToyTokenizer(), torch.float32)  # type: ignore[arg-type]
    object.__setattr__(subject, "engines", [])
    return subject
