"""Operator calls recorded once and replayed without Python: what ``torch.cuda.CUDAGraph`` is on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastinfer._C import GraphMemory, LaunchGraph
from fastinfer.ops import _library  # noqa: F401  (the operators must exist first)

ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class GraphCaptureError(RuntimeError):
    """A call that a replay would miss.

    >>> import torch, fastinfer.ops as ops
    >>> with ops.CPUGraph().capture():
    ...     torch.ones(2) + 1
    Traceback (most recent call last):
    fastinfer.ops.graph.GraphCaptureError: ... got aten.ones.default: a replay would miss it
    """


class CPUGraph:
    """A sequence of operator calls on CPU tensors, recorded while it runs once and then replayed in one call.

    A replay repeats the kernels on the same memory. Inputs are changed in place beforehand; results stand in the
    tensors that the recorded calls returned, until the next replay of this graph or of one that shares its memory. So:

    - Shapes, dtypes, strides and Python numbers are those of the recording. What the operators check of a tensor's
      contents (token ids, slots, lengths) was checked then: a replay trusts the caller.
    - Everything must be computed by operators of this library. Views and uninitialised tensors are allowed, anything
      else (``x + y``, ``x.float()`` of bf16, ``.item()``) raises.
    - Inputs and weights are kept alive. Intermediate results lie in the graph's own memory, which is used again as soon
      as the recorded code has dropped them.
    - One thread at a time may use a graph, or graphs that share memory. Other threads' operators are not recorded.

    Args:
        memory: ``memory`` of another graph, if the two are never needed at the same time: together they take the
            memory of the larger one. A recording then overwrites the other's results.

    Devices: CPU; a GPU has ``torch.cuda.CUDAGraph``.

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
        """Record what runs inside, which computes as always. After an exception nothing is recorded.

        Raises:
            GraphCaptureError: a call inside computes outside this library, or on another device.
            RuntimeError: the graph has been recorded already, or a recording runs in this thread or on this memory.
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
        """Run all recorded kernels in their order.

        Raises:
            RuntimeError: nothing was recorded, a recording runs in this thread, or what a kernel raises; the launches
                after it have not run then, and the graph can be replayed again.
        """
        self._launches.replay()

    def __len__(self) -> int:
        """Number of recorded kernel launches."""
        return len(self._launches)


class _KeepTensors(TorchDispatchMode):
    """Sees all operator calls: keeps what launches point to alive, and refuses what is not a launch."""

    def __init__(self, memory: GraphMemory) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler at the first call: 800 modules, 2 seconds

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
    """The storages of all tensors in a nest of lists, by address."""
    storages = (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor))
    return {storage.data_ptr(): storage for storage in storages}


def _refused(func: Any) -> GraphCaptureError:
    return GraphCaptureError(f"a CPUGraph records operators of fastinfer and views, got {func}: a replay would miss it")
