"""Token ids of the texts in tests/data."""

from collections.abc import Iterator

from fastinfer.tokenizers.tokenizer import Tokenizer
from support.paths import DATA

GEMMA_TOKENS = 640  # past Gemma's window of 512
ACCURACY_STRETCH = 512
# Stretches of each text.
ACCURACY_TEXTS = {"license": 4, "python_execution_model": 4, "python_import_system": 4, "project_documents": 4}


def license_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode((DATA / "license.txt").read_text())


def accuracy_stretches(tokenizer: Tokenizer) -> Iterator[list[int]]:
    for name, count in ACCURACY_TEXTS.items():
        ids = tokenizer.encode((DATA / f"{name}.txt").read_text())
        assert len(ids) >= count * ACCURACY_STRETCH
        for start in range(0, count * ACCURACY_STRETCH, ACCURACY_STRETCH):
            yield ids[start : start + ACCURACY_STRETCH]
