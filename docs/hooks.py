"""Prepares docstrings and pages for mkdocs.

Docstrings are written to be read with ``help()``: they name other objects as ``:func:`rms_norm```, and have examples
that begin with ``>>>``. The former become links, and the latter blocks of code. In pages, links to files outside docs/
become plain names, and Mermaid blocks become the pictures that ``make figures`` drew of them.
"""

import logging
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from make_figures import DIAGRAM, diagram_mark, diagram_path, diagram_title

LOG = logging.getLogger("mkdocs.hooks")
DOCS = Path(__file__).parent
ROOT = DOCS.parent
ROLE = re.compile(r":(func|class|meth|mod|attr|data):`([\w.]+)`")
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # with its output, to the next empty line
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links that leave the site and blocks that a browser could not draw offline."""
    return DIAGRAM.sub(_picture, _name_files(markdown))


def _picture(match: re.Match[str]) -> str:
    source = match["source"]
    path = diagram_path(source)
    if not path.exists() or diagram_mark(source) not in path.read_text():
        LOG.warning(f"figures/{path.name} was not made from this page's diagram: run `make figures`")
    return f"![{diagram_title(source)}](figures/{path.name})"


def _name_files(markdown: str) -> str:
    """Replace links to files that are not pages by the files' names, because the site does not contain them."""

    def name_file(match: re.Match[str]) -> str:
        text, path = match.groups()
        if (DOCS / path).exists():  # from a page of a folder to one above it
            return match[0]
        if not (ROOT / path).exists():
            LOG.warning(f"a page links to ../{path}, which is not there")
        if path in text:
            return f"`{path}`"
        return f"{text}: `{path}`" if markdown[: match.start()].endswith("(") else f"{text} (`{path}`)"

    return OUTSIDE.sub(name_file, markdown)


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of a package as Markdown, once all of it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for obj in _objects(pkg):
            if obj.docstring is not None:
                text = ROLE.sub(lambda match, obj=obj: _link(obj, *match.groups()), obj.docstring.value)
                obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)


def _objects(obj: griffe.Object) -> list[griffe.Object]:
    own = [member for member in obj.members.values() if not member.is_alias]
    return [obj, *(below for member in own for below in _objects(member))]


def _link(obj: griffe.Object, role: str, name: str) -> str:
    """Return a link to the object that a name means in an object's docstring, or the name if no page has it."""
    around: griffe.Object | None = obj
    scopes = [""]
    while around is not None:
        scopes.append(f"{around.path}.")
        around = around.parent
    for path in (scope + name for scope in scopes):
        found = _find(obj.package, path, role)
        if found:
            return f'<autoref identifier="{found}" optional><code>{name.removeprefix("fastinfer.")}</code></autoref>'
    LOG.warning(f"{obj.path}: there is no {role} {name}")  # an error, with --strict
    return f"`{name}`"


def _find(package: griffe.Module, path: str, role: str) -> str | None:
    """Return the canonical path of an object; ``None`` if the package has no such object."""
    first, _, rest = path.partition(".")
    if first != package.name:
        return None
    try:
        found = package[rest] if rest else package
        found = found.final_target if found.is_alias else found
        # fastinfer.ops.gemm is a function, and the module that it is in.
        return found[found.name].path if found.is_module and role == "func" else found.path
    except (KeyError, griffe.AliasResolutionError):
        return None
