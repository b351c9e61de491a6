"""docs/command-line.md shows what ``fastinfer ... --help`` prints; ``python docs/update_help.py`` updates it."""

import re
import shlex
from collections.abc import Iterator

import pytest
from support.paths import ROOT
from support.scripts import load_script

from fastinfer.cli import commands

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


def documented_commands() -> Iterator[list[str]]:
    """The arguments of each call of fastinfer in the pages' blocks of bash."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                before, name, after = re.sub("#.*", "", line).partition("fastinfer ")
                words = re.sub("^ *cat [^|]*", "", before).split()
                if name and all("=" in word or word in ("|", "numactl") for word in words):
                    yield shlex.split(after.rstrip(" &"))


def test_there_are_documented_commands() -> None:
    assert len([*documented_commands()]) > 50


@pytest.mark.parametrize("argv", [*documented_commands()], ids=shlex.join)
def test_documented_commands_parse(argv: list[str]) -> None:
    """Whether files and models are there is not looked at."""
    assert commands._parser().parse_args(commands._with_benchmark(argv)).command == argv[0]
