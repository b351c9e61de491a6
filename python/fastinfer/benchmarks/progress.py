"""What a benchmark is doing now."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

# Called with a few words before each run.
Progress = Callable[[str], None]


def silent(text: str) -> None:
    """Show nothing."""


@contextmanager
def shown(name: str) -> Iterator[Progress]:
    """A line on stderr that says what runs now, and for how long all of it has taken."""
    with tqdm(bar_format="{desc} [{elapsed}]", desc=name) as bar:

        def show(text: str) -> None:
            bar.set_description_str(f"{name}: {text}")

        yield show
