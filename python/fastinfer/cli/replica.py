"""A replica of ``fastinfer serve --data-parallel-size``: a process that only the router starts.

It reads the command's arguments as a JSON object from standard input, and serves on a socket that it has inherited.
"""

import argparse
import json
import socket
import sys

from fastinfer.errors import FastinferError
from fastinfer.utils.parent import end_with_parent


def main() -> int:
    """Serve until a signal comes or the router dies; returns the exit code."""
    args = argparse.Namespace(**json.load(sys.stdin))
    end_with_parent(args.parent)
    try:
        # Only here, so that the router's death ends the process even while torch is imported.
        from fastinfer.cli import serve
        from fastinfer.engine.replica_share import ReplicaShare
        from fastinfer.utils.torch_threads import set_num_threads

        set_num_threads(args.threads)
        if args.share is not None:
            args.engine_options["share"] = ReplicaShare(**args.share)
        return serve.run(args, [socket.socket(fileno=args.socket)])
    except (FastinferError, ImportError, OSError) as error:
        print(f"fastinfer: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
