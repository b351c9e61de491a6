"""docs/command-line.md shows what ``fastinfer ... --help`` prints; ``python docs/update_help.py`` updates it."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_update_help() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_help", ROOT / "docs/update_help.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


UPDATE_HELP = load_update_help()
BLOCKS = [(match["command"], match["text"]) for match in UPDATE_HELP.BLOCK.finditer(UPDATE_HELP.PAGE.read_text())]


def words(text: str) -> list[str]:
    """The words after the usage, whose brackets and line breaks depend on the version of Python."""
    return text.partition("\n\n")[2].split()


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command or "fastinfer" for command, _ in BLOCKS])
def test_help_is_up_to_date(command: str, shown: str) -> None:
    assert words(shown) == words(UPDATE_HELP.help_text(command))


def test_every_command_is_shown() -> None:
    commands = re.findall(r"^ {4}([a-z]+)  ", UPDATE_HELP.help_text(""), re.MULTILINE)
    shown = " ".join(command for command, _ in BLOCKS).split()
    assert commands
    assert set(commands) - set(shown) == {"models"}  # which has no options
