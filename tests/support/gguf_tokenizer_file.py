"""GGUF files that hold a tokenizer and nothing else."""

from pathlib import Path
from typing import Any

import gguf

from fastinfer.formats.gguf import GGUFFile


def write_tokenizer(path: Path, values: dict[str, Any], architecture: str = "llama") -> GGUFFile:
    """A file with these keys of ``tokenizer.ggml``. A value of None leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in values.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_int32(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path)
