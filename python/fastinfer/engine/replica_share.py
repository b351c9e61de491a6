"""Share of an engine in its host, on which other replicas run beside it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaShare:
    """An engine's share of a host on which several replicas of it run, each in a process of its own.

    Attributes:
        num_replicas: number of replicas.
        available_memory: bytes of the host's memory that were available before the first of them was started.
        weights: for the model, and for the draft model if there is one, the descriptor of the memory in which the
            replicas have its weights, see :class:`fastinfer.models.shared_model.SharedWeights`; empty if each replica
            has its own.
    """

    num_replicas: int
    available_memory: int
    weights: tuple[int, ...] = ()

    def memory(self, weight_bytes: int) -> int:
        """Return the number of bytes that a replica may use: its weights, and its part of what all weights leave.

        It is the same for all replicas, also for one that takes the place of another, whenever they start.

        Args:
            weight_bytes: size of all weights of one replica.
        """
        num_copies = 1 if self.weights else self.num_replicas
        return weight_bytes + (self.available_memory - num_copies * weight_bytes) // self.num_replicas
