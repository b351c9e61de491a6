"""An engine as Ray makes it, without Ray."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fastinfer.errors import FastinferError
from fastinfer.ray_serve.call import Call
from fastinfer.ray_serve.engine import Engine
from fastinfer.ray_serve.options import parse_options
from fastinfer.server.host_state import HostState

# Ray awaits this method, which Python itself calls again.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine 'Engine.__del__' was never awaited:RuntimeWarning")

OPTIONS = {"context": 128, "max-num-seqs": 1, "response-cache": "off"}


async def make(**options: Any) -> Engine:
    engine = Engine.__new__(Engine)
    await Engine.__init__(engine, parse_options({**OPTIONS, "threads": torch.get_num_threads(), **options}))  # type: ignore[misc]
    return engine


def test_the_life_of_an_engine(model_path: Path) -> None:
    async def run() -> None:
        engine = await make(model=str(model_path))
        body = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
        call = Call("POST", "/v1/completions", ((b"content-type", b"application/json"),), json.dumps(body).encode())
        [answer] = [piece async for piece in engine.answer(call)]
        assert json.loads(answer.body)["choices"][0]["text"].startswith(" Paris")
        engine.check_health()
        engine._host.state = HostState.FAILED
        with pytest.raises(RuntimeError, match="the model could not be loaded"):
            engine.check_health()
        await engine.__del__()
        assert engine._host.loaded is not None
        assert engine._host.loaded.health().refusal

    asyncio.run(run())


def test_an_engine_that_cannot_load_its_model(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(FastinferError, match=r"broken\.gguf"):
        asyncio.run(make(model=str(path)))
