"""Streams of a GPU and capture into a CUDA graph: with a stand-in for the streams on CPU, and where there is a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.device import Streams
from autoac.execute.streams import as_blocking, comes_to_host
from autoac_solver.records.profile import STREAMS
from tests.execute.exact.harness import Case, differences, plan_with, planned, plans, run

MAIN, SIDE = 7, 8
X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
_ATEN = torch.ops.aten
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class StandIn(Streams):
    """A GPU's streams, as if all CPU tensors were on it; all work is done as it is given."""

    def __init__(self) -> None:
        self.now = MAIN
        self.is_capturing = False
        self.entered: list[int] = []
        self.handed: list[tuple[int, int]] = []
        self.settled = 0

    def key(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        return 0, self.now

    def current(self, index: int) -> Any:
        return self.now

    def is_current(self, index: int, raw: int) -> bool:
        return raw == self.now

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.entered.append(stream)
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def hand_over(self, tensor: torch.Tensor, stream: Any) -> None:
        self.handed.append((stream, self.now))

    def settle(self, indices: Any) -> None:
        self.settled += len(list(indices))

    def has(self, generator: torch.Generator) -> bool:
        return True

    def capturing(self) -> bool:
        return self.is_capturing


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    for module in ("autoac.execute.streams", "autoac.execute.sac.sac", "autoac.record.tape.tape"):
        monkeypatch.setattr(f"{module}.streams", lambda: stand_in)
    return stand_in


class Block(nn.Module):
    """Runs its second half on another stream where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.side: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(torch.tanh(self.first(x)))
        with self.side():
            x = torch.sigmoid(torch.cos(self.second(x)))
        return torch.sin(x)


def mean_square(model: nn.Module) -> torch.Tensor:
    return model(X).square().mean()


CASE = Case(lambda: nn.Sequential(Block(), Block()), mean_square, ("0", "1"))


def test_a_replay_runs_on_forwards_stream_and_who_reads_elsewhere_waits(gpu: StandIn):
    plan = plans(CASE, "replay", [0.0])[0.0]

    def backward(loss: torch.Tensor) -> None:
        gpu.entered.clear()
        gpu.handed.clear()
        with gpu.on(SIDE):
            loss.backward()

    case = Case(CASE.build, CASE.forward, CASE.regions, backward)
    assert not differences(run(case, plan), run(case))
    assert gpu.entered == [SIDE]  # the second run, which is the one without a plan
    run(case, plan)
    assert gpu.entered == [SIDE, MAIN, MAIN]  # each region's replay
    assert set(gpu.handed) == {(MAIN, SIDE)}
    run(CASE, plan)
    gpu.handed.clear()
    run(CASE, plan)
    assert not gpu.handed  # on one stream nobody waits


def test_a_second_stream_in_a_region_is_an_error_where_the_profile_had_none(gpu: StandIn, engine: str):
    plan = plans(CASE, engine, [0.0])[0.0]
    model = planned(CASE, plan)
    model[1].side = lambda: gpu.on(SIDE)
    with pytest.raises(RuntimeError, match="region '1' runs on a second stream of the GPU"):
        mean_square(model)


def test_a_module_that_ran_on_two_streams_is_no_region(gpu: StandIn, engine: str):
    model = CASE.model()
    model[1].side = lambda: gpu.on(SIDE)
    profile = autoac.profile(model, lambda: CASE.backward(mean_square(model)))
    assert {call.fqn for call in profile.calls if call.once == STREAMS} == {"", "1"}
    assert gpu.settled  # what is recomputed while it is recorded has not been written over
    plan = autoac.solve(profile, 10**12, engine=engine, regions=["0", "1"])
    assert "more than one stream of the GPU" in plan.why("1")
    assert "more than one stream of the GPU" in plan.refused[""]
    assert "no region       the model itself: it runs on more than one stream of the GPU" in plan.explain()


@pytest.mark.parametrize("draws", [False, True])
def test_a_captured_step(gpu: StandIn, engine: str, draws: bool):
    """What is recomputed is captured as it comes, but for random numbers, whose generator cannot be set back."""

    def build() -> nn.Module:
        return nn.Sequential(Block(), nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5 * draws), nn.Tanh()))

    case = Case(build, mean_square, ("0", "1"))
    plan = plan_with(case, engine, lambda region, op, nth: True)
    expected = run(case)
    gpu.is_capturing = True
    if not draws:
        assert not differences(run(case, plan), expected)
        return
    with pytest.raises(RuntimeError, match=r"draws random numbers, .* while a CUDA graph is captured"):
        run(case, plan)


def test_the_first_step_of_a_plan_made_on_fake_tensors_is_not_captured(gpu: StandIn):
    model = CASE.model()
    profile = autoac.profile(model, X, mode="fake")
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, 1, engine="replay")
    plan = autoac.solve(profile, caught.value.minimum_bytes, engine="replay")
    gpu.is_capturing = True
    with plan.applied(model), pytest.raises(RuntimeError, match="Run one step under the plan before"):
        mean_square(model)
    gpu.is_capturing = False
    with plan.applied(model):
        mean_square(model).backward()
        model.zero_grad()
        gpu.is_capturing = True
        mean_square(model).backward()


def test_a_copy_to_the_host_is_replayed_as_one_that_blocks():
    x = torch.ones(3)
    assert as_blocking(_ATEN.copy_.default, (x, x, True), {}) == ((x, x, False), {})
    keywords = {"device": torch.device("cpu"), "non_blocking": True}
    assert as_blocking(_ATEN._to_copy.default, (x,), keywords) == ((x,), {**keywords, "non_blocking": False})
    assert as_blocking(_ATEN._to_copy.default, (x,), {}) == ((x,), {})
    assert as_blocking(_ATEN.mul.Tensor, (x, x), {}) == ((x, x), {})
    assert comes_to_host((torch.ones(3, device="meta"),), x)
    assert not comes_to_host((x,), x)
    assert not comes_to_host((x,), torch.ones(3, device="meta"))


# -- where there is a GPU ----------------------------------------------------------------------------------------------


def on_gpu(case: Case) -> Case:
    x = X.cuda() if torch.cuda.is_available() else X
    return Case(lambda: case.build().cuda(), lambda model: model(x).square().mean(), case.regions)


@needs_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # with or without a plan
def test_backward_of_a_step_that_ran_on_a_side_stream(engine: str):
    case = on_gpu(CASE)

    def forward(model: nn.Module) -> torch.Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = case.forward(model)
        torch.cuda.current_stream().wait_stream(side)
        return loss

    beside = Case(case.build, forward, case.regions)
    for plan in plans(beside, engine).values():
        assert not differences(run(beside, plan), run(beside))


@needs_gpu
def test_a_region_with_a_side_stream_on_a_gpu(engine: str):
    case = on_gpu(CASE)
    model: Any = case.model()
    plan = plans(case, engine, [0.0])[0.0]
    side = torch.cuda.Stream()
    model[1].side = lambda: torch.cuda.stream(side)
    profile = autoac.profile(model, lambda: case.backward(case.forward(model)))
    assert {call.fqn for call in profile.calls if call.once == STREAMS} == {"", "1"}
    with plan.applied(model), pytest.raises(RuntimeError, match="a second stream"):
        case.forward(model)


@needs_gpu
def test_a_copy_to_the_host_that_does_not_block():
    class ToHost(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            on_host = torch.tanh(x).to("cpu", non_blocking=True)
            torch.cuda.current_stream().synchronize()
            return torch.sin(torch.cos(on_host * 2)).to("cuda", non_blocking=True) * torch.sigmoid(x)

    case = on_gpu(Case(lambda: nn.Sequential(nn.Linear(64, 64), ToHost()), mean_square, ("1",)))
    for plan in plans(case, "replay").values():
        assert not differences(run(case, plan), run(case))


@needs_gpu
def test_a_planned_step_as_a_cuda_graph(engine: str):
    """Captured after some steps on a side stream, as torch's notes have it; the graph's gradients are the step's."""
    case = on_gpu(CASE)
    plan = plans(case, engine, [0.0])[0.0]
    model: Any = case.model()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        case.forward(model).backward()

    step()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    with plan.applied(model):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        torch.cuda.synchronize()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@needs_gpu
def test_a_captured_dropout_is_refused_and_one_that_is_kept_is_not(engine: str):
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.GELU()))

    case = on_gpu(Case(build, mean_square, ("1",)))
    again, kept = (
        plan_with(case, engine, lambda region, op, nth, draws=draws: draws or "dropout" not in op)
        for draws in (True, False)
    )
    model: Any = case.model()
    for plan in (again, kept):
        with plan.applied(model):
            case.forward(model).backward()  # sets up what torch sets up once
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                if plan is again:
                    with pytest.raises(RuntimeError, match="draws random numbers"):
                        case.forward(model)
                else:
                    case.forward(model).backward()
