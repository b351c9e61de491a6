"""Placement of a model's layers on several devices of this process, and the memory that is left on several devices."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from fastinfer.engine.cache_sizes import cache_sizes
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.kv_cache_size import Room, available_memory, room_on
from fastinfer.errors import RequestError
from fastinfer.models.checkpoint import Checkpoint, ModelPart
from fastinfer.models.config import ModelConfig
from fastinfer.models.layer_places import LayerPlace, place_layers
from fastinfer.parallel.division import Division
from fastinfer.utils.places import Place


def place_model(checkpoint: Checkpoint, places: Sequence[Place]) -> tuple[LayerPlace, ...]:
    """Divide a model's layers among places.

    Without shares, each place gets layers in proportion to the free memory of its device. Several places of a device
    have equal parts of it, and the first place also needs memory for what is in no layer.

    Args:
        checkpoint: an open checkpoint.
        places: the places, in the order of the layers.

    Raises:
        RequestError: as for :func:`fastinfer.models.layer_places.place_layers`, or the places have no shares and their
            layers are on a CPU and on a GPU.
    """
    shares = [place.share for place in places if place.share is not None]
    if not shares:
        if len({place.device == "cpu" for place in places}) > 1:
            example = ",".join(f"{place.device}=1" for place in places)
            raise RequestError(f"device: layers on a CPU and on a GPU need shares, such as {example}, got none")
        counts = Counter(place.device for place in places)
        shares = [max(1.0, available_memory(place.device) / counts[place.device]) for place in places]
        parts = checkpoint.part_bytes(places[0].device)
        shares[0] = max(1.0, shares[0] - parts[ModelPart(None)])
    return place_layers(checkpoint.config, places, shares)


def common_dtype(dtype: str, devices: Sequence[str]) -> str:
    """Return the name of a dtype that gives the same hidden states on all devices: ``"auto"`` as GPUs have it."""
    is_mixed = "cpu" in devices and any(device != "cpu" for device in devices)
    return "bfloat16" if is_mixed and dtype == "auto" else dtype


def weight_bytes_by_device(checkpoint: Checkpoint, places: Sequence[LayerPlace]) -> dict[str, int]:
    """Estimate the size of the weights on each device."""
    parts = {device: checkpoint.part_bytes(device) for place in places for device in place.devices}
    sizes: dict[str, int] = defaultdict(int)
    sizes[places[0].device] += parts[places[0].device][ModelPart(None)]
    for place in places:
        for layer in place.layers:
            experts = place.experts or place.device
            sizes[place.device] += parts[place.device][ModelPart(layer)]
            sizes[experts] += parts[experts][ModelPart(layer, is_experts=True)]
    return dict(sizes)


def cache_shares(config: EngineConfig, models: Sequence[ModelConfig], places: Sequence[LayerPlace]) -> dict[str, float]:
    """Return the largest share of each device in the caches of a group of layers, or in the states.

    Args:
        config: configuration of the engine.
        models: configurations of the model and of the draft model, if there is one, which is on the first device.
        places: places of the layers.
    """
    devices = [place.device for place in places for _ in place.layers]
    on_device: Counter[tuple[str, int | None]] = Counter()
    totals: Counter[int | None] = Counter()
    for size in cache_sizes(config, models):
        device = devices[0] if size.model else devices[size.layer]
        on_device[device, size.window] += size.num_bytes
        totals[size.window] += size.num_bytes
    shares: dict[str, float] = defaultdict(float)
    for (device, window), num_bytes in on_device.items():
        shares[device] = max(shares[device], num_bytes / totals[window])
    return dict(shares)


def room_on_ranks(config: EngineConfig, model: ModelConfig, weight_bytes: int) -> Room:
    """Return the room for the KV caches of ranks on GPUs, which are taken for as large and as free as the first one.

    Args:
        config: configuration of the engine.
        model: configuration of the whole model.
        weight_bytes: size of the whole model's weights, which are still to be loaded.
    """
    whole, largest = _group_bytes(config, model), 0.0
    for rank in range(config.num_ranks):
        division = Division(model, rank, config.num_ranks, config.tensor_parallel_layout)
        part = _group_bytes(config, division.local_config)
        largest = max(largest, *(part[window] / num_bytes for window, num_bytes in whole.items()))
    room = room_on(config, config.device, -(-weight_bytes // config.num_ranks))
    return Room(free=int(room.free / largest), default=int(room.default / largest))


def _group_bytes(config: EngineConfig, model: ModelConfig) -> Counter[int | None]:
    """Return the bytes of a token in each group of layers, by window, and those of a sequence's states."""
    sizes: Counter[int | None] = Counter()
    for size in cache_sizes(config, [model]):
        sizes[size.window] += size.num_bytes
    return sizes


def room_on_devices(config: EngineConfig, shares: Mapping[str, float], weight_bytes: Mapping[str, int]) -> Room:
    """Return the room for a KV cache that is divided among devices, which the tightest device decides.

    Args:
        config: configuration of the engine.
        shares: share of each device in the cache, see :func:`cache_shares`.
        weight_bytes: size of the weights that are still to be loaded to each device.

    Raises:
        RequestError: a device has too little memory for its weights.
    """
    for device, num_bytes in weight_bytes.items():
        if num_bytes > (available := available_memory(device)):
            raise RequestError(f"device: the weights on {device} need {num_bytes} bytes, got {available} available")
    rooms = {device: room_on(config, device, weight_bytes.get(device, 0)) for device in shares}
    return Room(
        free=min(int(rooms[device].free / share) for device, share in shares.items()),
        default=min(int(rooms[device].default / share) for device, share in shares.items()),
    )
