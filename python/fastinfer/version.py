"""The version of the installed package."""

from importlib import metadata

try:
    __version__ = metadata.version("fastinfer")
except metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"
