"""Mistakes in arguments are found before torch is imported, which takes longer than all the rest of a short command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastinfer.cli import serve_arguments
from fastinfer.cli.options import MAX_RANKS, MAX_SPECULATIVE_TOKENS
from fastinfer.engine import config
from fastinfer.server.cache import semantic

# Runs command lines where torch cannot be imported; prints the exit code and the message of each.
PROGRAM = """
import contextlib, io, json, sys
sys.modules["torch"] = None
from fastinfer.cli.main import main

found = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        found.append((main(arguments), stderr.getvalue()))
print(json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "binary.txt").write_bytes(b"\xff")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "not.json").write_text('{"not": {}}')
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    return tmp_path


CASES = {
    "generate x --nonsense": "--nonsense",
    "generate x --max-tokens many": "--max-tokens",
    "generate x --top-p 2": "top_p must be",
    "generate x --speculate 16": "--speculate: expected an integer in 0..15",
    "generate x --draft-model mtp": "--draft-model: expected --speculate of at least 1 with it, got none",
    "serve --model model --speculate 2 --draft-model /no/such.gguf": "model '/no/such.gguf'",
    "generate x --model model --mmproj /no/such.gguf": "model '/no/such.gguf'",
    "generate x --model model --mmproj binary.txt": "binary.txt: expected a GGUF file",
    "generate x --regex=": "regex must be",
    "generate x --json-schema list.json": "--json-schema: list.json: json must be a JSON schema",
    "generate x --json-schema nowhere.json": "--json-schema: nowhere.json: No such file",
    "generate x --model /no/such.gguf": "model '/no/such.gguf'",
    "generate x --adapter model": "--adapter: expected a folder with adapter_config.json, got 'model'",
    "chat --temperature -1": "temperature must be",
    "chat --model empty": "model 'empty'",
    "chat --url localhost:8000": "url: expected http://HOST:PORT",
    "serve --tool-call-parser hermes3": "--tool-call-parser: expected one of auto, none, hermes, qwen3_coder,",
    "serve --reasoning-parser x": "--reasoning-parser: expected one of auto, none, qwen3, deepseek_r1,",
    "serve --model model --lora model=empty": "--lora: expected a name that is not the model's, got 'model'",
    "serve --served-model-name a --served-model-name b --lora b=empty": "--lora: expected a name that is not the model",
    "generate hello --regex (": "regex cannot be enforced: unclosed group, got '('",
    "chat --json-schema not.json": 'json cannot be enforced: Unimplemented keys: ["not"], got \'{',
    "bench serve --url localhost:8000": "url: expected http://HOST:PORT",
    "serve --data-parallel-size 0": "--data-parallel-size: expected an integer in 1..256",
    "serve --beta 0.5": "--beta: expected --data-parallel-size of at least 2 with it, got 1",
    "serve --metadata-url http://h": "--metadata-url: expected --spot-notice with it, got none",
    "router http://h:1 --metadata-url http://h": "--metadata-url: expected --spot-notice with it, got none",
    "router": "the following arguments are required: URL",
    "router localhost:8000": "url: expected http://HOST:PORT or https://HOST/PATH, got 'localhost:8000'",
    "router http://h:0": "url: expected http://HOST:PORT or https://HOST/PATH, got 'http://h:0'",
    "router http://h:1 http://h:1/": "url: expected each server once, got http://h:1/ twice",
    "router http://h:1 --prefill-url http://h:1": "url: expected each server once, got http://h:1 twice",
    "router http://h:1 --beta 0": "--beta: expected a number above 0",
    "generate --sparse-attention 512 hi": "--sparse-attention: expected a number above 0 and at most 1, got '512'",
    "router http://h:1 --ssl-keyfile x": "--ssl-certfile and --ssl-keyfile: expected both or none",
    "serve --response-cache nowhere": "--response-cache: expected 'off', 'memory' or the URL of a Redis",
    "serve --response-cache http://h:1": "--response-cache: Redis URL must specify one of the following schemes",
    "serve --response-cache redis://h:port": "--response-cache: Port could not be cast",
    "serve --semantic-cache 0.5": "--semantic-cache: expected 0.8 to 1, got 0.5",
    "serve --response-cache off --semantic-cache 0.9": "--semantic-cache: expected a --response-cache",
    "serve --otlp-traces-endpoint collector:4318": "--otlp-traces-endpoint: expected http://HOST:PORT, got collector",
    "serve --otlp-traces-endpoint http://h:port": "--otlp-traces-endpoint: expected http://HOST:PORT, got http://h:port",
    "simulate nowhere.json": "nowhere.json: No such file",
    "bench step-cost --model nowhere": "model 'nowhere'",
    "info --memory nowhere": "model 'nowhere'",
    "info --draft-model mtp": "--draft-model: expected --memory with it, got none",
    "info --speculate 2": "--speculate: expected --memory with it, got none",
    "info --memory model --speculate 2": "--speculate: expected --draft-model with it, got none",
    "info --batch 1": "--batch: expected --memory with it, got none",
    "info --memory model --arch 80": "--arch: expected --plan with it, got none",
    "bench --model nowhere": "model 'nowhere'",
    "bench throughput --model nowhere": "model 'nowhere'",
    "bench ablation --model nowhere": "model 'nowhere'",
    "quantize nowhere.gguf --method nf4 --out new": "model 'nowhere.gguf'",
    "quantize model --method gptq --out new": "--calibration: gptq needs a text, got none",
    "quantize model --method rtn --calibration nowhere.txt --out new": "--calibration: nowhere.txt: No such file",
    "quantize model --method rtn --evaluation binary.txt --out new": "--evaluation: binary.txt: expected text in UTF-8",
    "train-head --data nowhere.txt --out new": "--data: nowhere.txt: No such file",
    "distill --teacher model --data nowhere.txt --stages 1 --minutes 1 --out new": "--data: nowhere.txt: No such file",
    "distill --teacher model --data self --evaluation nowhere.txt --stages 1 --minutes 1 --out new": "--evaluation: no",
    "distill --teacher model --data self --stages 1 --out text.txt": "--out: expected a folder, got 'text.txt': File",
    "train-head --model model --data self --out text.txt/new": "--out: expected a folder, got 'text.txt/new': Not a",
    "bench --model model --out text.txt": "--out: expected a folder, got 'text.txt': File",
    "bench serve --url http://h:1 --out text.txt/new": "--out: expected a folder, got 'text.txt/new': Not a",
    "eval compare model --text text.txt --out text.txt": "--out: expected a folder, got 'text.txt': File",
    "eval perplexity model --text nowhere.txt": "--text: nowhere.txt: No such file",
    "eval perplexity nowhere --text text.txt": "model 'nowhere'",
    "eval compare model.gguf model nowhere --text text.txt": "model 'nowhere'",
    "eval compare model.gguf nowhere --text nowhere.txt": "nowhere.txt: No such file",
}


def test_mistakes_are_found_without_torch(folder: Path) -> None:
    arguments = json.dumps([line.split() for line in CASES])
    command = [sys.executable, "-c", PROGRAM, arguments]
    program = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found = json.loads(program.stdout)
    wrong = {
        line: (code, message)
        for (line, expected), (code, message) in zip(CASES.items(), found, strict=True)
        if code != 2 or expected not in message or len(message.splitlines()) != 1
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("package", "line", "extra"),
    [
        ("redis", "serve --response-cache redis://h", "redis"),
        ("opentelemetry.sdk", "serve --otlp-traces-endpoint http://h", "otel"),
        ("opentelemetry.exporter", "serve --otlp-traces-endpoint http://h", "otel"),
        ("orjson", "serve", "server"),
        ("prometheus_client", "router http://h:1", "server"),
    ],
)
def test_a_missing_package_is_found_without_torch(package: str, line: str, extra: str) -> None:
    program = f"""
import importlib.util
find = importlib.util.find_spec
def find_spec(name, *rest):
    if name.startswith({package + "."!r}):
        raise ModuleNotFoundError(name)
    return None if name == {package!r} else find(name, *rest)
importlib.util.find_spec = find_spec
{PROGRAM}"""
    command = [sys.executable, "-c", program, json.dumps([line.split()])]
    [(code, message)] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert code == 2
    assert f"pip install 'fastinfer[{extra}]'" in message


def test_limits_are_those_of_the_engine() -> None:
    assert MAX_SPECULATIVE_TOKENS == config.MAX_SPECULATIVE_TOKENS
    assert MAX_RANKS == config.MAX_RANKS
    assert serve_arguments.MIN_THRESHOLD == semantic.MIN_THRESHOLD
