"""Signs of life of a rank before a session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from autoac.ranks import session
from autoac.ranks.session import Presence
from autoac.torch_private import default_store

KEY = "autoac/present/0"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def present() -> Presence:
    found, until = Presence(), time.monotonic() + 10
    while not default_store().check([KEY]):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


@pytest.mark.usefixtures("alone")
def test_a_rank_that_is_due_no_more_is_only_late():
    """Its key stays: another rank may have seen it just before, and a store waits for a key that is not there."""
    present().end()
    assert default_store().check([KEY])
    assert not default_store().get(KEY)


@pytest.mark.usefixtures("alone")
def test_a_handle_that_is_gone_is_only_late():
    found = present()
    del found
    assert not default_store().get(KEY)


@pytest.mark.usefixtures("alone")
def test_a_process_that_ends_looks_dead():
    """Its last sign of life stays, and changes no more."""
    found = present()
    session.leave_with_process()
    last = default_store().get(KEY)
    time.sleep(1.5)
    assert default_store().get(KEY) == last
    session._process_ends.clear()
    found.end()
