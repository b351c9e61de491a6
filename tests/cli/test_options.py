"""Types of arguments."""

import argparse

import pytest

from fastinfer.cli.options import names


def test_names_are_known_and_different() -> None:
    parse = names(("logit", "hidden"))
    assert parse("hidden,logit") == ["hidden", "logit"]
    with pytest.raises(argparse.ArgumentTypeError, match="expected some of logit, hidden, got 'ce'"):
        parse("logit,ce")
    with pytest.raises(argparse.ArgumentTypeError, match="expected different names, got 'logit,logit'"):
        parse("logit,logit")
