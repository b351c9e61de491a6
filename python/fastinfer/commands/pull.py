"""``fastinfer pull``: download a model, print its file."""

import argparse

from fastinfer import hub


def run(args: argparse.Namespace) -> int:
    print(hub.pull(args.name))
    return 0
