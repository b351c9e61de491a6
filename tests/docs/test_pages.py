"""The hook that makes pages of docstrings; ``make docs`` builds them."""

import doctest
import re
from typing import Any

import pytest
from support.paths import ROOT
from support.scripts import load_script

griffe = pytest.importorskip("griffe")  # of the extra "docs"


@pytest.fixture(scope="module")
def hooks() -> Any:
    return load_script("docs/hooks.py")


def docstrings(hooks: Any, *extensions: Any) -> dict[str, str]:
    loaded = griffe.load("fastinfer", search_paths=[ROOT / "python"], extensions=griffe.load_extensions(*extensions))
    return {obj.path: obj.docstring.value for obj in hooks._objects(loaded) if obj.docstring}


def examples(text: str) -> list[tuple[str, str]]:
    return [(example.source, example.want) for example in doctest.DocTestParser().get_examples(text)]


def test_docstrings_become_markdown(hooks: Any) -> None:
    before, after = docstrings(hooks), docstrings(hooks, hooks.Docstrings)
    assert after.keys() == before.keys()
    for path, text in after.items():
        blocks = re.findall(r"^```pycon\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert [pair for block in blocks for pair in examples(block)] == examples(before[path]), path
        assert not hooks.ROLE.search(text), path
    gemm = after["fastinfer.ops.gemm.int8_gemm"]
    assert '<autoref identifier="fastinfer.ops.gemm.gemm" optional><code>gemm</code></autoref>' in gemm


def test_a_role_that_leads_nowhere_is_a_warning(hooks: Any, caplog: pytest.LogCaptureFixture) -> None:
    with griffe.temporary_visited_module('"""See :func:`missing`, :func:`there`."""\ndef there(): ...') as module:
        hooks.Docstrings().on_package(pkg=module)
    assert "there is no func missing" in caplog.text
    assert caplog.text.count("there is no") == 1


def test_files_outside_the_pages_are_named(hooks: Any, caplog: pytest.LogCaptureFixture) -> None:
    text = "[how](../CONTRIBUTING.md), [`Makefile`](../Makefile), ![](../docs/demo.svg), [formats](formats.md)"
    named = hooks.on_page_markdown(text)
    assert named == "how (`CONTRIBUTING.md`), `Makefile`, ![](../docs/demo.svg), [formats](formats.md)"
    assert not caplog.text
    hooks.on_page_markdown("[gone](../gone.md)")
    assert "../gone.md, which is not there" in caplog.text
