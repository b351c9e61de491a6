"""Writes the output of ``fastinfer ... --help`` into docs/command-line.md: ``python docs/update_help.py``.

A block of the page is a line ``<!-- help: COMMAND -->`` and the fenced text that follows it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("command-line.md")
BLOCK = re.compile(r"<!-- help: (?P<command>[a-z -]*?) ?-->\n```text\n(?P<text>.*?)```\n", re.DOTALL)


def help_text(command: str) -> str:
    """Return what ``fastinfer COMMAND --help`` prints in a terminal of 100 columns."""
    arguments = [sys.executable, "-m", "fastinfer", *command.split(), "--help"]
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment).stdout


def main() -> None:
    def updated(match: re.Match[str]) -> str:
        head = match[0].split("\n", 1)[0]
        return f"{head}\n```text\n{help_text(match['command'])}```\n"

    PAGE.write_text(BLOCK.sub(updated, PAGE.read_text()))


if __name__ == "__main__":
    main()
