"""``fastinfer pull``: download a model."""

import argparse

from fastinfer import hub


def run(args: argparse.Namespace) -> int:
    """Download the model if necessary, and print the path of its file or folder."""
    print(hub.pull(args.name))
    return 0
