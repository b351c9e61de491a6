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


class UnloadAdapterRequest(RequestModel):
    """A request to forget a LoRA adapter."""

    lora_name: AdapterName
    lora_int_id: int | None = None
