"""Standard output and standard error of the program."""

import io
import os
import sys


def prepare_streams() -> None:
    """Make stdout and stderr take any text, also where the program was started with one of them closed."""
    # Python has no stream then, and print would write errors to the other one.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - until the program ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark


def discard_output() -> None:
    """Redirect stdout to nothing, because Python flushes it at exit and would print a traceback if that fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
