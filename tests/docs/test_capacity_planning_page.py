"""docs/capacity-planning.md shows what its commands print, and its files can be read."""

import re
import shlex
from pathlib import Path

import pytest
from support.paths import ROOT

from fastinfer.cli.main import main
from fastinfer.simulation.cost_file import CostFile
from fastinfer.simulation.trace import read_trace

PAGE = (ROOT / "docs/capacity-planning.md").read_text()
FILES = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^<!-- simulated -->\n```console\n\$ fastinfer (.*?)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "h100.json"
    path.write_text(FILES[0])
    return path


@pytest.mark.usefixtures("costs")
@pytest.mark.parametrize(("command", "shown"), COMMANDS)
def test_commands_print_what_is_shown(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 2


def test_what_nobody_measured_says_so(costs: Path) -> None:
    assert CostFile.read(costs).source == "assumed"


def test_the_trace_is_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(FILES[1])
    assert [request.prefix for request in read_trace(path, 8192)] == [None, "manual"]
