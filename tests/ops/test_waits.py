"""Ops after which a device's host goes on only when they are done, told from their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.ops.info import op_info
from autoac.ops.waits import waits
from autoac_solver.records.profile import Op

aten = torch.ops.aten
X, MASK, AT = torch.randn(4, 3), torch.tensor([True, False, True, False]), torch.tensor([0, 2])
META = X.to("meta")
"""On another device than the CPU, which stands for a GPU."""


def asked(func: Any, *args: Any, **kwargs: Any) -> bool:
    return waits(op_info(func), args, kwargs, func(*args, **kwargs))


def test_results_whose_size_depends_on_values():
    assert asked(aten.nonzero.default, X)
    assert asked(aten.masked_select.default, X, X > 0)
    assert asked(aten.index.Tensor, X, [MASK])
    assert asked(aten.index.Tensor, X, [None, MASK[:3]])
    assert not asked(aten.index.Tensor, X, [AT])
    assert asked(aten.repeat_interleave.Tensor, AT)
    assert not asked(aten.repeat_interleave.Tensor, AT, output_size=2)
    assert not asked(aten.mm.default, X, X.t())


@pytest.mark.parametrize("put", [aten.index_put.default, aten.index_put_.default])
def test_places_of_a_mask(put: Any):
    one = torch.zeros(())
    assert asked(put, X.clone(), [MASK], torch.zeros(2, 3))
    assert not asked(put, X.clone(), [MASK], one)  # filled, without a look at the mask
    assert asked(put, X.clone(), [MASK], one, True)
    assert not asked(put, X.clone(), [AT], torch.zeros(2, 3))


def test_copies_between_host_and_device():
    assert asked(aten._to_copy.default, X, device="meta")
    assert not asked(aten._to_copy.default, X, device="meta", non_blocking=True)
    assert not asked(aten._to_copy.default, X, dtype=torch.float64)
    assert not asked(aten._to_copy.default, META, dtype=torch.float64)
    assert asked(aten.copy_.default, torch.empty_like(META), X)
    assert not asked(aten.copy_.default, torch.empty_like(META), X, True)
    assert not asked(aten.copy_.default, torch.empty_like(X), X)
    # To memory of the host that is not pinned, copies block in any case. (Nothing can be copied from the meta device.)
    copy = op_info(aten.copy_.default)
    assert waits(copy, (torch.empty_like(X), META, True), {}, X)


class Model(nn.Module):
    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.own = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.linear(x)).sum()


def tape_of(forward: Callable[[torch.Tensor], torch.Tensor]) -> list[Op]:
    return list(autoac.profile(Model(forward), X).tape)


def test_what_a_profile_has():
    def masked(y: torch.Tensor) -> torch.Tensor:
        return y[y[:, 0] > -100]

    waiting = [op.name for op in tape_of(masked) if op.waits]
    assert waiting == ["aten.index.Tensor", "aten.index_put.default"]  # the second in backward

    def read(y: torch.Tensor) -> torch.Tensor:
        assert y.abs().sum().item() > 0
        assert not torch.equal(y, y.tanh())
        return y.exp()

    tape = tape_of(read)
    assert [op.name for op in tape if op.read_on_host] == ["aten.sum.default", "aten.tanh.default"]
    assert [op.name for op in tape if op.host_waits] == ["aten.sum.default", "aten.tanh.default"]
    assert not any(op.host_waits for op in tape_of(torch.exp))
