"""Sparse, wrapped and keyword arguments, and ops whose schemas do not say what they do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torchs

import autoac
from autoac.execute.checksums import checksum_in_little_memory, checksum_of
from autoac.ops.info import op_info, written_tensors
from autoac.torch_private import tree_leaves, tree_map_only

WIDTH = 16
ENGINES = ("replay", "sac")

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def state_after(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients and buffers after a step."""
    model.zero_grad()
    torch.manual_seed(0)
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())


def assert_planned_as_without(model: nn.Module, engine: Any, x: torch.Tensor) -> autoac.Plan:
    """At the least budget, and nothing is left of planning."""
    before = copy.deepcopy(model.state_dict())
    profile = autoac.profile(model, x)
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_dense(), before[name].to_dense()), name
    plan = autoac.tradeoff(profile, points=2, engine=engine).plans[0]
    expected = [t.clone() for t in state_after(model, x)]
    model.load_state_dict(before)
    with plan.applied(model):
        found = state_after(model, x)
    for ours, others in zip(found, expected, strict=True):
        assert torch.equal(ours.to_dense(), others.to_dense())
    return plan


class Graph(nn.Module):
    """A graph layer with a running mean that it writes in place."""

    adjacency: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("adjacency", torch.eye(8).roll(1, 0).to_sparse())
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sparse.mm(self.adjacency, torch.tanh(self.linear(x)))
        hidden = torch.sigmoid(hidden - self.mean)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return hidden


@pytest.mark.parametrize("engine", ENGINES)
def test_a_buffer_is_written_in_a_region_that_reads_a_sparse_one(engine: str):
    assert_planned_as_without(Model(Graph(), Graph()), engine, torch.randn(8, WIDTH))


class Statistics(nn.Module):
    """Updates running statistics by the op that `SyncBatchNorm` takes; its schema declares no write."""

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x))
        mean, variance = torch.batch_norm_update_stats(hidden.detach(), self.mean, self.variance, 0.1)
        return (hidden - mean) * torch.rsqrt(variance + 1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_running_statistics_of_sync_batch_norm_are_updated_once(engine: str):
    assert_planned_as_without(Model(Statistics(), Statistics()), engine, torch.randn(8, WIDTH))


def test_what_sync_batch_norm_writes_is_known():
    info = op_info(torch.ops.aten.batch_norm_gather_stats_with_counts.default)
    args = tuple(torch.ones(2) for _ in range(5))
    assert not info.replayable
    assert [id(t) for t in written_tensors(info, args, {})] == [id(args[3]), id(args[4])]


def test_telling_the_allocator_of_a_stream_is_no_write():
    info = op_info(torch.ops.aten.record_stream.default)
    assert info.ignored
    assert op_info(torch.ops.aten.add_.Tensor).writes == (0,)


class Wrapped(torch.Tensor):
    """Has no memory of its own, as quantised weights: its parts have it."""

    @staticmethod
    def __new__(cls, part: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype, device=part.device)

    def __init__(self, part: torch.Tensor) -> None:
        self.part = part

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["part"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(cls, lambda t: t.part, args)
        result = func(*plain, **(kwargs or {}))
        same = func in (torch.ops.aten.detach.default, torch.ops.aten.t.default)
        return Wrapped(result) if same else result


def test_what_has_no_memory_of_its_own_has_no_checksum():
    emptied = torch.ones(1000)
    emptied.untyped_storage().resize_(0)
    for tensor in (Wrapped(torch.ones(1000)), emptied):
        assert checksum_of(tensor) is None
        assert checksum_in_little_memory(tensor) is None
    assert checksum_of(torch.ones(1000)[10:20]) == checksum_of(torch.ones(10))


class Multiplies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Wrapped(torch.randn(WIDTH, WIDTH)), requires_grad=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.mm(self.linear(x), self.weight.t()))


def test_a_weight_without_memory_of_its_own_under_sac():
    model, x = Model(Multiplies(), Multiplies()), torch.randn(8, WIDTH)
    plan = autoac.tradeoff(autoac.profile(model, x), points=2, engine="sac").plans[0]
    expected = [t.clone() for t in state_after(model, x)[:4]]
    with plan.applied(model):
        for ours, others in zip(state_after(model, x)[:4], expected, strict=True):
            assert torch.equal(ours, others)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: torch.Tensor, scales: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.dropout(torch.tanh(self.linear(x)), 0.5, True) * scales[0]


class CallsByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([ByName(), ByName()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x=x, scales=(torch.full((WIDTH,), 0.5),))
        return x


def test_keyword_arguments_tell_torch_the_devices_whose_random_states_it_stashes(
    monkeypatch: pytest.MonkeyPatch,
):
    """It looks for devices among positional arguments only."""
    seen: list[list[torch.Size]] = []
    infer = torchs._infer_device_type

    def looking(*args: Any) -> Any:
        seen.append([t.shape for t in tree_leaves(args) if isinstance(t, torch.Tensor)])
        return infer(*args)

    model, x = CallsByName(), torch.randn(2048, WIDTH)
    plan = assert_planned_as_without(model, "sac", x)
    monkeypatch.setattr(torchs, "_infer_device_type", looking)
    with plan.applied(model):
        state_after(model, x)
    assert sum(region.wrapped for region in plan.regions) > 0
    assert seen == [[x.shape, (WIDTH,)]] * len(seen)
    assert seen
