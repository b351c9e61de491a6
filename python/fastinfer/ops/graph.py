"""Recording of operator calls on the CPU and replay without Python, the counterpart of ``torch.cuda.CUDAGraph``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastinfer._C import GraphMemory, LaunchGraph
from fastinfer.ops import _library  # noqa: F401  (loads the operators)

__all__ = ["CPUGraph", "GraphCaptureError", "GraphMemory"]

ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class GraphCaptureError(RuntimeError):
    """Error for a call inside a capture that a replay would not repeat.

    >>> import torch, fastinfer.ops as ops
    >>> with ops.CPUGraph().capture():
    ...     torch.ones(2) + 1
    Traceback (most recent call last):
    fastinfer.ops.graph.GraphCaptureError: ... got aten.ones.default: a replay would miss it
    """


class CPUGraph:
    """A sequence of operator calls on CPU tensors, recorded while it runs once and then replayed in one call.

    A replay runs the same kernels on the same memory. Change the inputs in place before it. The results are in the
    tensors that the recorded calls returned, until the next replay of this graph or of one that shares its memory.

    - Shapes, dtypes, strides and Python numbers stay those of the recording. Contents of tensors that operators check
      (token ids, slots, lengths) are checked during the recording only: a replay trusts the caller.
    - Only operators of this library may compute. Views and uninitialised tensors are allowed; anything else
      (``x + y``, ``x.float()`` of bf16, ``.item()``) raises.
    - The graph keeps inputs and weights alive. Intermediate results are in the graph's own memory, which is reused as
      soon as the recorded code has dropped them.
    - Only one thread at a time may use a graph, or graphs that share memory. Operators of other threads are not
      recorded.

    Args:
        memory: ``memory`` of another graph, to share it if the two are never needed at the same time. Together they
            take the memory of the larger one; a recording then overwrites the other graph's results.

    Devices: CPU; on a GPU use ``torch.cuda.CUDAGraph``.

    >>> import torch, fastinfer.ops as ops
    >>> x, graph = torch.tensor([[1.0, 2.0]]), ops.CPUGraph()
    >>> with graph.capture():
    ...     y = ops.silu_and_mul(x)
    >>> x[0, 1] = 3.0
    >>> graph.replay()
    >>> y
    tensor([[2.1932]])
    """

    def __init__(self, memory: GraphMemory | None = None) -> None:
        self.memory = memory or GraphMemory()
        self._launches = LaunchGraph(self.memory)
        self._kept: list[torch.UntypedStorage] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the operator calls inside the ``with`` block, which also run as usual.

        After an exception nothing is recorded.

        Raises:
            GraphCaptureError: a call inside is not an operator of this library, or runs on another device.
            RuntimeError: the graph has been recorded already, or another recording uses this thread or this memory.
        """
        self._launches.begin()
        try:
            with _KeepTensors(self.memory) as mode:
                yield
        except BaseException:
            self._launches.end()
            self._launches.clear()
            raise
        self._launches.end()
        self._kept = list(mode.storages.values())

    def replay(self) -> None:
        """Run all recorded kernels in order.

        Raises:
            RuntimeError: nothing was recorded, a recording runs in this thread, or a kernel raised an error. In the
                last case the launches after it have not run, and the graph can be replayed again.
        """
        self._launches.replay()

    def __len__(self) -> int:
        """Number of recorded kernel launches."""
        return len(self._launches)


class _KeepTensors(TorchDispatchMode):
    """Keeps the tensors of recorded launches alive, and refuses calls that cannot be recorded."""

    def __init__(self, memory: GraphMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch is typed in part
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler on the first call: 800 modules, 2 seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        computes = func.namespace == "fastinfer"
        if not computes and func._schema.is_mutable:
            raise _refused(func)
        result = func(*args, **kwargs)
        inputs, results = _storages((args, kwargs)), _storages(result)
        if computes:
            self._keep(inputs | results)
        elif func.overloadpacket.__name__ not in ALLOCATIONS and not (results and results.keys() <= inputs.keys()):
            raise _refused(func)
        return result

    def _keep(self, storages: dict[int, torch.UntypedStorage]) -> None:
        for address, storage in storages.items():
            if storage.device.type != "cpu":
                raise GraphCaptureError(f"a CPUGraph records operators on the CPU, got a tensor on {storage.device}")
            if not self._memory.owns(address):
                self.storages[address] = storage


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in nested containers, by address."""
    storages = (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor))
    return {storage.data_ptr(): storage for storage in storages}


def _refused(func: Any) -> GraphCaptureError:
    return GraphCaptureError(f"a CPUGraph records operators of fastinfer and views, got {func}: a replay would miss it")
