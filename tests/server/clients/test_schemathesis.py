"""schemathesis: requests made from /openapi.json, fitting and not, are never an error of the server.

FASTINFER_SCHEMATHESIS is the number of examples for each operation.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.toy_server import toy_server

pytest.importorskip("schemathesis")


def test_no_request_is_an_error_of_the_server(tmp_path: Path) -> None:
    """Without /sleep, after which every request has to be refused with 503."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", "--checks", "not_a_server_error"]
    command += ["--max-examples", os.environ.get("FASTINFER_SCHEMATHESIS", "30"), "--seed", "1"]
    command += ["--request-timeout", "30", "--exclude-path", "/sleep", "-H", "X-Api-Key: boss"]
    with toy_server(admin_keys=("boss",)) as (_, address):
        command.append(f"{address}/openapi.json")
        # It keeps what it finds in the current folder.
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
