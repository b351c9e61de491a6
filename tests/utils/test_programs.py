"""Programs that this one starts find modules where it does."""

import subprocess
import sys
from pathlib import Path

import pytest

from fastinfer.utils.programs import python_module


def test_modules_of_the_current_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that of a downloaded checkpoint."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/started_here.py").write_text("import sys, json; print(__name__, sys.argv[1:], json.dumps(1))")
    (tmp_path / "folder").mkdir()
    for name in ("started_here", "json", "runpy"):
        (tmp_path / f"folder/{name}.py").write_text("raise SystemExit('code of the folder')")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "package"), *sys.path])
    monkeypatch.chdir(tmp_path / "folder")
    command = [*python_module("started_here"), "a b", "-c"]
    program = subprocess.run(command, capture_output=True, text=True)
    assert (program.stdout, program.stderr) == ("__main__ ['a b', '-c'] 1\n", "")
