"""Names of the devices that users can choose."""

import re

DEVICE_NAMES = "auto, cpu, cuda or cuda:N"
_PATTERN = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,3}))?")


def is_device_name(name: object) -> bool:
    """Return whether this is ``auto``, ``cpu``, ``cuda``, or ``cuda:N`` with the number of a GPU that may not exist."""
    return isinstance(name, str) and _PATTERN.fullmatch(name) is not None
