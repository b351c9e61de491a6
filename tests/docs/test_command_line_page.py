"""docs/command-line.md shows what ``fastinfer ... --help`` prints; ``python docs/update_help.py`` updates it."""

import re

import pytest
from support.scripts import load_script

UPDATE_HELP = load_script("docs/update_help.py")
BLOCKS = [(match["command"], match["text"]) for match in UPDATE_HELP.BLOCK.finditer(UPDATE_HELP.PAGE.read_text())]


def words(text: str) -> list[str]:
    """The words after the usage, whose brackets and line breaks depend on the version of Python."""
    return text.partition("\n\n")[2].split()


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command or "fastinfer" for command, _ in BLOCKS])
def test_help_is_up_to_date(command: str, shown: str) -> None:
    assert words(shown) == words(UPDATE_HELP.help_text(command))


def test_every_command_is_shown() -> None:
    shown = dict(BLOCKS)
    commands: list[str] = []
    for parent in ("", "bench", "eval"):
        names = re.findall(r"^ {4}([a-z-]+)(?:  |$)", UPDATE_HELP.help_text(parent), re.MULTILINE)
        assert names
        commands += [f"{parent} {name}".strip() for name in names]
    assert sorted(shown) == sorted(["", *commands])
