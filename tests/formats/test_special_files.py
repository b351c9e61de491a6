"""FIFOs, devices, sockets and folders in place of a model's files: one clear error at once, where a read might hang."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.peft_adapter import write_adapter
from support.tiny_decoder import CONFIG
from support.tiny_folder import write_tiny_folder

from fastinfer.utils.regular_file import check_regular, open_regular, read_regular

FILES = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
]
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}

LOAD = """
import json, sys
from pathlib import Path
from fastinfer import LLM, hub
from fastinfer.errors import FastinferError
from fastinfer.formats.peft import read_adapter
messages = []
for kind, path in json.loads(sys.stdin.read()):
    try:
        read_adapter(Path(path)) if kind == "adapter" else LLM(path, max_model_len=32, device="cpu")
        messages.append(None)
    except FastinferError as error:
        messages.append(f"{type(error).__name__}: {error}")
print(json.dumps(messages))
"""


def messages_for(cases: list[tuple[str, Path]]) -> list[str | None]:
    """Load each folder or file in another process, which may hang, and return the errors."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        input=json.dumps([(kind, str(path)) for kind, path in cases]),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    messages: list[str | None] = json.loads(done.stdout)
    return messages


def replace(folder: Path, copy: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Copy a folder, with another kind of file in place of one."""
    copy.mkdir()
    for file in folder.iterdir():
        if file.name != name:
            (copy / file.name).symlink_to(file)
    make(copy / name)
    return copy


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_model(kind: str, tmp_path: Path) -> None:
    single = write_tiny_folder(tmp_path / "single")
    sharded = write_tiny_folder(tmp_path / "sharded", max_shard_size="100KB")
    write_adapter(tmp_path / "adapter", CONFIG)
    shard = sorted(sharded.glob("model-*.safetensors"))[1].name
    cases, expected = [("model", single), ("model", sharded)], ["", ""]
    sources = [(single, FILES), (sharded, ["model.safetensors.index.json", shard]), (tmp_path / "adapter", ADAPTER)]
    for source, names in sources:
        for name in names:
            copy = replace(source, tmp_path / f"{source.name} {name}", name, KINDS[kind])
            cases.append((source.name, copy))
            expected.append(f"{copy / name}: expected a file, got {kind}")
    if kind != "a folder":
        path = tmp_path / "model.gguf"
        KINDS[kind](path)
        cases.append(("model", path))
        expected.append(f"{path}: expected a file, got {kind}")
    (tmp_path / "folder of one").mkdir()
    KINDS[kind](tmp_path / "folder of one" / "model.gguf")
    cases.append(("model", tmp_path / "folder of one"))
    expected.append(f"{tmp_path / 'folder of one' / 'model.gguf'}: expected a file, got {kind}")
    for case, message, wanted in zip(cases, messages_for(cases), expected, strict=True):
        assert (message is None) if not wanted else message is not None and wanted in message, (case, message)


def test_regular_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"some bytes")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        check_regular(tmp_path / name)
        assert read_regular(str(tmp_path / name)) == b"some bytes"
        with open_regular(tmp_path / name) as file:
            assert os.get_blocking(file.fileno()) is False
    (tmp_path / "broken").symlink_to("nowhere")
    for name in ("broken", "missing"):
        with pytest.raises(FileNotFoundError):
            open_regular(tmp_path / name)


def test_a_fifo_that_takes_the_place_of_a_checked_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr("fastinfer.utils.regular_file.check_regular", lambda path: None)
    assert read_regular(tmp_path / "fifo") == b""
