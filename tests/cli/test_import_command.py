"""The program imports a command's modules, torch among them, without garbage collections."""

import subprocess
import sys

import pytest

SCRIPT = """
import gc
from fastinfer.cli import commands
if {disabled}:
    gc.disable()
runs = [generation["collections"] for generation in gc.get_stats()]
commands._import_command("fastinfer.cli.generate")
assert [generation["collections"] for generation in gc.get_stats()] == runs
assert gc.isenabled() != {disabled}
frozen = gc.get_freeze_count()
assert frozen > 10_000, frozen
commands._import_command("fastinfer.cli.chat")
assert gc.get_freeze_count() <= frozen  # what the program makes later is collected as usual
"""


@pytest.mark.slow
@pytest.mark.parametrize("disabled", [False, True])
def test_import_collects_no_garbage(disabled: bool) -> None:
    script = SCRIPT.format(disabled=disabled)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
