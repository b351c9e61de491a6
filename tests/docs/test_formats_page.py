"""docs/formats.md names what the loaders' tables name."""

import re

import pytest
from support.paths import ROOT

from fastinfer.cli.models import supported

# Kinds whose names are written as words of the text, in any case.
AS_WORDS = ("GGUF types", "Hugging Face quantisation methods")


@pytest.mark.parametrize("kind", supported())
def test_the_page_names_everything_that_is_supported(kind: str) -> None:
    page = (ROOT / "docs" / "formats.md").read_text()
    names = supported()[kind]
    assert names
    if kind in AS_WORDS:
        missing = [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", page, re.I)]
    else:
        missing = [name for name in names if f"`{name}`" not in page]
    assert not missing


def test_the_page_names_no_other_architectures() -> None:
    page = (ROOT / "docs" / "formats.md").read_text()
    named = set(re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", page))
    assert named <= {*supported()["Hugging Face architectures"]}
