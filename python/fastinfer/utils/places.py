"""Lists of devices that a model is placed on, such as ``cuda:0=24,cuda:1=8`` or ``cuda+cpu``."""

import re
from dataclasses import dataclass

from fastinfer.errors import RequestError
from fastinfer.utils.checks import show

_DEVICE = r"cpu|cuda(?::(?:0|[1-9][0-9]{0,3}))?"
_PATTERN = re.compile(rf"({_DEVICE})(?:\+({_DEVICE}))?(?:=([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?))?")


@dataclass(frozen=True)
class Place:
    """Device of consecutive layers.

    Attributes:
        device: device of the layers.
        experts: device of the weights of their routed experts; ``None`` if it is that of the layers.
        share: number of layers relative to that of the other places; ``None`` to follow the free memory.
    """

    device: str
    experts: str | None = None
    share: float | None = None

    @property
    def devices(self) -> list[str]:
        """Both devices, that of the layers first."""
        return [self.device] if self.experts is None else [self.device, self.experts]


def is_list_of_places(text: object) -> bool:
    """Return whether this has the form of a list of places, in which a sign stands beside the names of devices."""
    return isinstance(text, str) and any(sign in text for sign in ",+=")


def parse_places(text: str) -> tuple[Place, ...]:
    """Read a list of places: devices separated by commas, each perhaps with a device of experts and with a share.

    Raises:
        RequestError: the text is no such list, a share is 0, or some places have a share and others have none.
    """
    places = []
    for part in text.split(","):
        match = _PATTERN.fullmatch(part)
        if match is None:
            raise RequestError(f"device: expected a list like cuda:0=24,cuda:1=8 or cuda+cpu, got {show(part)} in it")
        device, experts, share = match.groups()
        places.append(Place(device, experts, None if share is None else float(share)))
        if places[-1].share == 0:
            raise RequestError(f"device: shares must be above 0, got {show(part)}")
    if len({place.share is None for place in places}) > 1:
        raise RequestError(f"device: all places must have a share, or none, got {show(text)}")
    return tuple(places)
