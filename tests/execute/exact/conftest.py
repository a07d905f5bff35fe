"""What every test of exactness wants: both engines, one thread (the models are tiny), nothing left behind."""

from collections.abc import Iterator

import pytest
import torch

from tests.execute.exact.harness import assert_nothing_active


@pytest.fixture(params=["replay", "sac"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_active() -> Iterator[None]:
    yield
    assert_nothing_active()
