"""Every command that loads a model has the options of loading one."""

import pytest

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
        "eval perplexity",
        "eval compare",
    ],
)
def test_options_of_loading(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")} >= OPTIONS
