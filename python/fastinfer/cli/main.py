"""The program ``fastinfer``: how Ctrl-C and a reader that has gone end it.

Exit codes: 0 for success, 1 when ``info`` finds the installation broken, 2 for a mistake in the user's input, 130 after
Ctrl-C, 141 when the reader of the output has gone.
"""

from collections.abc import Sequence

from fastinfer.cli.streams import discard_output, prepare_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    try:
        prepare_streams()
        # Here and not above, because Ctrl-C may come while the commands are imported.
        from fastinfer.cli.commands import run

        return run(argv)
    except BrokenPipeError:
        discard_output()
        return 141
    except KeyboardInterrupt:
        return 130
