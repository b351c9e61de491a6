"""A tensor that a test has made without its ``device`` is refused by the emulated operators."""

from collections.abc import Callable

import pytest
import torch
from support.helpers import device_fixture
from torch import Tensor

from fastinfer import ops

device = device_fixture("emulated")

ON_HOST: dict[str, Callable[[Tensor], Tensor]] = {
    "made": lambda x: torch.randn(3, 64),
    "computed": lambda x: torch.zeros(3, 64).half().float() + 1,
    "stacked": lambda x: torch.stack([torch.ones(64)] * 3),
    "split": lambda x: torch.ones(6, 64).split(3)[0],
    "named so": lambda x: torch.ones(3, 64, device="cpu"),
}
ON_DEVICE: dict[str, Callable[[Tensor], Tensor]] = {
    "like another": torch.randn_like,
    "on another's": lambda x: torch.randn(3, 64, device=x.device),
    "computed": lambda x: (x[:, :1] * torch.tensor(2.0)).expand(3, 64).contiguous(),
    "moved to another": lambda x: torch.ones(3, 64).to(x),
}


@pytest.mark.parametrize("how", ON_HOST)
def test_on_the_host(how: str, device: str) -> None:
    x, weight = torch.ones(3, 64, device=device), torch.ones(64, device=device)
    for arguments in ((ON_HOST[how](x), weight), (x, ON_HOST[how](x)[0])):
        with pytest.raises(AssertionError, match="made without the test's device"):
            ops.rms_norm(*arguments, 1e-6)


@pytest.mark.parametrize("how", ON_DEVICE)
def test_on_the_device(how: str, device: str) -> None:
    x, weight = torch.ones(3, 64, device=device), torch.ones(64, device=device)
    assert ops.rms_norm(ON_DEVICE[how](x), weight, 1e-6).shape == x.shape


def test_moved(device: str) -> None:
    host = torch.ones(3, 64)
    weight = torch.ones(64).to(device)
    assert ops.rms_norm(host.to(device), weight, 1e-6).shape == host.shape
    with pytest.raises(AssertionError, match=r"argument 0 of .*rms_norm"):
        ops.rms_norm(host, weight, 1e-6)
