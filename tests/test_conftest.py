"""Hooks of tests/conftest.py around each test."""

from pathlib import Path

import pytest
import torch

from fastinfer import _C
from fastinfer.utils.torch_threads import set_num_threads


def test_each_test_leaves_the_numbers_of_threads_as_they_were(request: pytest.FixtureRequest) -> None:
    before = _C.get_num_threads(), torch.get_num_threads()
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    around = conftest.pytest_runtest_protocol()
    next(around)
    set_num_threads(before[1] + 1)  # as the option --threads of a command does
    with pytest.raises(StopIteration):
        next(around)
    assert (_C.get_num_threads(), torch.get_num_threads()) == before
