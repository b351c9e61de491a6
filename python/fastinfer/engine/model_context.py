"""The context in which a model must run, whichever thread calls."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fastinfer import ops
from fastinfer.utils.device import use_device


def model_context(device: str, deterministic: bool) -> AbstractContextManager[None]:
    """Return the context.

    Args:
        device: device of the model.
        deterministic: see :class:`fastinfer.engine.config.EngineConfig`.
    """
    # To enter a context right after a step, when the CPU's caches are cold, is 5 % of Python's share of the step.
    return _context(device, deterministic) if deterministic or device != "cpu" else nullcontext()


@contextmanager
def _context(device: str, deterministic: bool) -> Iterator[None]:
    """Enter the context.

    The model's weights are constant: models are loaded and woken up by copies, adapters are written to their slots by
    copies, and no step begins with a product.
    """
    with use_device(device), ops.constant_weights(), ops.batch_invariant() if deterministic else nullcontext():
        yield
