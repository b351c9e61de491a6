"""Every command that loads a model has the options of loading one."""

import argparse
import subprocess
import sys

import pytest

from fastinfer.cli.commands import COMMANDS
from fastinfer.cli.main import main

OPTIONS = {"--device", "--dtype", "--context", "--kv-cache-dtype", "--max-num-seqs", "--threads"}


@pytest.mark.parametrize(
    "command",
    [
        "generate",
        "chat",
        "bench end-to-end",
        "bench throughput",
        "bench ablation",
        "bench step-cost",
        "eval perplexity",
        "eval compare",
    ],
)
def test_options_of_loading(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")} >= OPTIONS


@pytest.mark.parametrize("command", [["generate", "Why?"], ["chat"], ["serve"]])
def test_options_of_the_engine_are_collected(command: list[str]) -> None:
    name, *rest = command
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    assert parser.parse_args(rest).engine_options == {}
    options = parser.parse_args([*rest, "--deterministic", "--speculate", "3"]).engine_options
    assert options == {"deterministic": True, "num_speculative_tokens": 3}


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "tpu"])
def test_what_is_no_device(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Why?", "--device", name]) == 2
    assert f"argument --device: expected auto, cpu, cuda or cuda:N, got {name!r}" in capsys.readouterr().err


def test_devices_are_checked_without_torch() -> None:
    code = (
        "import argparse, sys; from fastinfer.cli.options import add_engine_options as add;"
        "parser = argparse.ArgumentParser(); add(parser);"
        "print(parser.parse_args(['--device', 'cuda:1']).engine_options, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "{'device': 'cuda:1'} False"
