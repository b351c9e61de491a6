"""Progress line of a benchmark."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

# Function that is called before each run with a short description of it.
Progress = Callable[[str], None]


def silent(text: str) -> None:
    """Show nothing."""


@contextmanager
def show_progress(name: str) -> Iterator[Progress]:
    """Show a line on stderr with the current run and the total time."""
    with tqdm(bar_format="{desc} [{elapsed}]", desc=name) as bar:

        def show(text: str) -> None:
            bar.set_description_str(f"{name}: {text}")

        yield show
