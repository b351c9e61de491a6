"""``fastinfer pull``: download a model, print its file or folder."""

import argparse

from fastinfer import hub


def run(args: argparse.Namespace) -> int:
    print(hub.pull(args.name))
    return 0
