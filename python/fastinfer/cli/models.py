"""``fastinfer models``: list the registered models and the paths of those that are downloaded."""

import argparse

from fastinfer import hub


def run(args: argparse.Namespace) -> int:
    """Print name, description, size and path of each model."""
    for entry in hub.models():
        default = " (default)" if entry.name == hub.DEFAULT_MODEL else ""
        print(f"{entry.name}{default}\n    {entry.description}, {entry.size / 1e6:.0f} MB")
        print(f"    {entry.path or f'not here yet: fastinfer pull {entry.name}'}")
    return 0
