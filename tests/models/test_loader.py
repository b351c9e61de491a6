"""Loading shows its progress on a terminal, if it takes long."""

import io
from pathlib import Path

import pytest

from fastinfer.models import load_model, loader


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "delay", "shown"),
    [(Terminal(), 0.0, True), (Terminal(), 1e9, False), (io.StringIO(), 0.0, False)],
    ids=["slow", "quick", "not a terminal"],
)
def test_progress(
    stream: io.StringIO, delay: float, shown: bool, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "PROGRESS_DELAY", delay)
    monkeypatch.setattr("sys.stderr", stream)
    load_model(model_path)
    text = stream.getvalue()
    assert (f"loading {model_path.name}" in text and "/30" in text) == shown
    assert shown or not text
    assert text.rpartition("\r")[2].strip() == ""  # nothing of it stays
