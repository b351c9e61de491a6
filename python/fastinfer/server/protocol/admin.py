"""Requests of the administrative routes."""

from typing import Annotated

from pydantic import Field

from fastinfer.server.protocol.base import RequestModel

AdapterName = Annotated[str, Field(pattern=r"^[\w./:-]{1,128}$")]


class LoadAdapterRequest(RequestModel):
    """A request to load a LoRA adapter."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class ResetResponseCacheRequest(RequestModel):
    """A request to forget stored answers; without fields all of them, also those of other servers on the same Redis.

    Attributes:
        model: name of a model or adapter, as requests give it.
        tenant: the first 16 hexadecimal digits of the SHA-256 of an API key; "" for requests without a key.
    """

    model: Annotated[str, Field(max_length=256)] | None = None
    tenant: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] | None = None


class SleepRequest(RequestModel):
    """A request to sleep, whose options are not in its body."""

    level: None = Field(default=None, description="it is a parameter of the query, /sleep?level=2")


class UnloadAdapterRequest(RequestModel):
    """A request to forget a LoRA adapter."""

    lora_name: AdapterName
    lora_int_id: int | None = None
