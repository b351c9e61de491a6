"""Progress bar of a work in stages."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

DELAY_S = 2.0  # shorter stages show nothing

Item = TypeVar("Item")


def with_progress(stage: str, items: Sequence[Item], progress: bool) -> Iterator[Item]:
    """Yield the items of a stage, with a bar on stderr if ``progress`` is set and the stage takes long."""
    bar: Iterable[Item] = tqdm(items, desc=stage, unit="module", delay=DELAY_S, leave=False, disable=not progress)
    return iter(bar)
