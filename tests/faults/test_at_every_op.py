"""An exception, Ctrl-C or running out of memory at any op of a step, or while a step is profiled or verified."""

import functools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from autoac.plans import Plan
from autoac_solver.plan.recorded.programs import with_regions
from tests.execute.exact.harness import assert_nothing_active, differences, nothing_leaks
from tests.faults.injection import KINDS, FailAt, count_ops, fail, faults, unchanged

pytestmark = pytest.mark.usefixtures("one_thread")

ENGINES = ["replay", "sac"]
WIDTH = 16


class Block(nn.Module):
    """Random numbers, statistics, a write in place, a view, and a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.norm(self.first(x)).sin().sigmoid_(), 0.2)
        return x + self.second(y.t().contiguous().t().tanh())


def make() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block())


X = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))


@functools.cache
def plan_for(engine: str) -> Plan:
    """Everything is recomputed under sac, two ops of three under replay."""
    plan = autoac.solve(autoac.profile(make(), X), 10**9, engine=engine, regions=["0", "1"])
    regions = [
        replace(
            region,
            wrapped=True,
            steps=tuple(
                (name, engine == "sac" or index % 3 != 0) for index, (name, _) in enumerate(region.steps)
            ),
        )
        for region in plan.regions
    ]
    return Plan(with_regions(plan.record, regions))


def run(model: nn.Module) -> torch.Tensor:
    loss = model(X).square().mean()
    loss.backward()
    return loss.detach()


def left_by_step(model: nn.Module) -> dict[str, Any]:
    """One step from a fixed random state and zeroed gradients, and what it leaves behind."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    left: dict[str, Any] = {"loss": run(model), "RNG": torch.get_rng_state()}
    left |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return left | {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("engine", ENGINES)
def test_in_a_training_step(engine: str):
    """The model is as a step without a plan would have left it; the next step is right, and nothing leaks."""
    model, state = plan_for(engine).apply(make()), make().state_dict()
    forwards = [vars(module).get("forward") for module in model.modules()]
    expected = left_by_step(make())
    total = count_ops(lambda: run(model))
    assert total > 120
    in_backward = 0
    for position, error, after in faults(total):
        model.load_state_dict(state)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        mode = FailAt(position, error, after)
        with nothing_leaks():
            fail(lambda: run(model), mode)
            assert_nothing_active()
            assert torch.equal(torch.get_rng_state(), mode.state), (
                f"random state after a fault at op {position}"
            )
            assert [vars(module).get("forward") for module in model.modules()] == forwards
            model.load_state_dict(state)
            found = left_by_step(
                model
            )  # torch's own queue holds on to the rest of a backward up to the next one
            torch.ones(1, requires_grad=True).backward()
        assert not differences(found, expected), f"op {position}: {differences(found, expected)}"
        in_backward += mode.in_backward
    assert in_backward > total // 3


def test_in_profile():
    model = make()
    total = count_ops(lambda: autoac.profile(model, X, mode="real"))
    model.register_forward_hook(lambda *_: None)
    for position, error, after in faults(total):
        if position % 37:
            continue
        with unchanged(model), nothing_leaks():
            fail(lambda: autoac.profile(model, X, mode="real"), FailAt(position, error, after), may_end=True)
            torch.ones(
                1, requires_grad=True
            ).backward()  # torch's queue holds on to the rest of that backward
    expected, found = left_by_step(make()), left_by_step(model)
    assert not differences(found, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_in_plan(engine: str):
    """What comes after the profile runs no op, so few positions do."""
    model = make()
    call = lambda: autoac.plan(model, X, 10**9, engine=engine)  # noqa: E731
    for position, error, after in faults(count_ops(call)):
        if position % 127 == 0:
            with unchanged(model):
                fail(call, FailAt(position, error, after), may_end=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_in_verify(engine: str):
    model, plan = make(), plan_for(engine)
    total = count_ops(lambda: plan.verify(model, X))
    for position, error, after in faults(total):
        if position % 151 == 0:
            with unchanged(model):
                fail(lambda: plan.verify(model, X), FailAt(position, error, after))
    assert plan.verify(model, X).equal


class InterruptAtLine:
    """Context in which the n-th line run in some of autoac's files is not run: Ctrl-C comes there.

    Args:
        position: of the line, from 0; -1 for never.
        files: ends of the names of the files.
    """

    def __init__(self, position: int, files: tuple[str, ...]) -> None:
        self.position = position
        self.files = files
        self.count = 0

    def __enter__(self) -> "InterruptAtLine":
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.endswith(self.files) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            position, self.count = self.count, self.count + 1
            if position == self.position:
                sys.settrace(None)
                raise KeyboardInterrupt("on purpose")
        return self._line


PLAN_FILES = (
    "autoac/plans/plan.py",
    "autoac/execute/placement.py",
    "autoac/execute/attach.py",
    "autoac/execute/program.py",
)


@pytest.mark.parametrize("engine", ENGINES)
def test_interrupted_at_any_line_of_apply(engine: str):
    """The plan is on the model as a whole or not at all."""
    plan = plan_for(engine)
    plan.apply(make())  # what a plan works out once is not to count
    with InterruptAtLine(-1, PLAN_FILES) as lines:
        plan.apply(make())
    assert lines.count > 40
    outcomes = set()
    for position in range(lines.count):
        model = make()
        names = [list(vars(module)) for module in model.modules()]
        with pytest.raises(KeyboardInterrupt, match="on purpose"), InterruptAtLine(position, PLAN_FILES):
            plan.apply(model)
        applied = [list(vars(module)) for module in model.modules()] != names
        outcomes.add(applied)
        if applied:
            plan.remove(model)
        assert [list(vars(module)) for module in model.modules()] == names, f"line {position}"
        assert not differences(left_by_step(plan.apply(model)), left_by_step(make()))
    assert False in outcomes


@pytest.mark.filterwarnings("ignore:.* replaced after the plan was applied")
@pytest.mark.parametrize("engine", ENGINES)
def test_interrupted_at_any_line_of_remove(engine: str):
    """Afterwards the model trains, and the plan can be removed from what is left."""
    plan = plan_for(engine)
    plan.remove(plan.apply(make()))
    with InterruptAtLine(-1, PLAN_FILES) as lines:
        plan.remove(plan.apply(make()))
    expected, plain = left_by_step(make()), [list(vars(module)) for module in make().modules()]
    for position in range(lines.count):
        model = make()
        try:
            with InterruptAtLine(position, PLAN_FILES):
                plan.remove(plan.apply(model))
        except KeyboardInterrupt:
            pass
        assert not differences(left_by_step(model), expected), f"line {position}"
        model = make()
        model.load_state_dict(make().state_dict())
        with pytest.raises(KeyboardInterrupt, match="on purpose"), InterruptAtLine(position, PLAN_FILES):
            plan.remove(plan.apply(model))
        if [list(vars(module)) for module in model.modules()] != plain:
            plan.remove(model)
        assert [list(vars(module)) for module in model.modules()] == plain, f"line {position}"


def test_kinds_of_faults():
    assert [type(kind()).__name__ for kind in KINDS] == [
        "LookupError",
        "KeyboardInterrupt",
        "OutOfMemoryError",
    ]
