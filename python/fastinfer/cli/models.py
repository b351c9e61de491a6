"""``fastinfer models``: the registry, and what of it is here."""

import argparse

from fastinfer import hub


def run(args: argparse.Namespace) -> int:
    for entry in hub.models():
        default = " (default)" if entry.name == hub.DEFAULT_MODEL else ""
        print(f"{entry.name}{default}\n    {entry.description}, {entry.size / 1e6:.0f} MB")
        print(f"    {entry.path or f'not here yet: fastinfer pull {entry.name}'}")
    return 0
