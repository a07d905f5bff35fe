"""What goes wrong in a step: clear errors instead of wrong gradients, and a next step that is right."""

import contextlib
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoac
from autoac.api.choosing import engine_to_plan_with
from autoac.execute import replay
from autoac.execute.chains import Chains
from autoac.execute.engines import ENGINES
from autoac.execute.program import Program
from autoac.execute.sac import sac
from autoac_solver.build.engines import engine_model
from tests.execute.exact.harness import (
    Case,
    assert_exact,
    assert_gradients_of_a_step,
    assert_nothing_active,
    assert_plan_exact,
    differences,
    nothing_leaks,
    plan_with,
    planned,
    plans,
    run,
)

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.broken = ""

    def forward(self, x):
        y = torch.tanh(self.norm(F.dropout(self.first(x), 0.1)))
        if self.broken == "forward":
            raise LookupError("on purpose, in forward")
        if self.broken == "backward":
            y.register_hook(_fail)
        return x + self.second(torch.sin(y))


def _fail(gradient):
    raise LookupError("on purpose, in backward")


def mean_square(model: nn.Module) -> torch.Tensor:
    return model(X).square().mean()


CASE = Case(lambda: nn.Sequential(Block(), Block(), Block()), mean_square, regions=("0", "1", "2"))


# -- exceptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_next_step_after_an_exception(engine, where, which, fraction):
    plan = plans(CASE, engine, [fraction])[fraction]

    def forward(model):
        """A step that fails, with its traces wiped off, and then the one that counts."""
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        state = torch.get_rng_state()
        model[which].broken = where
        with pytest.raises(LookupError, match=f"on purpose, in {where}"):
            mean_square(model).backward()
        assert_nothing_active()
        model[which].broken = ""
        model.zero_grad(set_to_none=True)
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        torch.set_rng_state(state)
        return mean_square(model)

    failing = Case(CASE.build, forward, CASE.regions)
    found = run(failing, plan)
    assert not differences(found, run(CASE))


def test_exception_in_forward_leaves_no_memory(engine):
    """What was recorded up to the exception goes with it."""
    plan = plans(CASE, engine, [0.0])[0.0]
    model = planned(CASE, plan)
    model[1].broken = "forward"

    def fail():
        with pytest.raises(LookupError):
            model(X)

    with nothing_leaks():
        fail()


def test_exception_in_backward_leaves_no_memory(engine):
    """Torch's own queue holds on to the rest of that backward, up to the next one in this thread."""
    plan = plans(CASE, engine, [0.0])[0.0]
    model = planned(CASE, plan)
    with nothing_leaks():
        model[1].broken = "backward"
        with pytest.raises(LookupError):
            mean_square(model).backward()
        model[1].broken = ""
        model.zero_grad(set_to_none=True)
        mean_square(model).backward()
        torch.ones(1, requires_grad=True).backward()


# -- saved tensors modified by the user --------------------------------------------------------------------------------


class Squared(nn.Module):
    """Autograd saves its first value, an intermediate one, and its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        self.inner = torch.sigmoid(self.linear(x))
        return torch.exp(torch.sin(self.inner))


SQUARED = Case(
    lambda: nn.Sequential(nn.Linear(64, 64), Squared()), lambda model: model(X).mean(), regions="1"
)


def everything(region: str, op: str, nth: int) -> bool:
    return True


SAME_AS_AUTOGRAD = "modified by an in-?place operation"


def modified_step(model, what):
    """A step of the model in which the user changes what backward needs."""
    values = {"weight": model[1].linear.weight, "input": model[0](X)}
    values["output"] = model[1](values["input"])
    values["inner"] = model[1].inner
    loss = values["output"].mean()
    with torch.no_grad():
        values[what].mul_(2)
    loss.backward()


@pytest.mark.parametrize("what", ["input", "inner", "output", "weight"])
@pytest.mark.parametrize("saved", ["all", "some"])
def test_saved_tensors_modified_by_the_user(what, saved):
    """An error as without a plan, where the tensor or what it is recomputed from is the one that was saved."""
    with pytest.raises(RuntimeError, match=SAME_AS_AUTOGRAD):
        modified_step(SQUARED.model(), what)
    recomputed = {"all": "", "some": "aten.sin.default"}[saved]
    model = planned(SQUARED, plan_with(SQUARED, "replay", lambda region, op, nth: op == recomputed))
    with pytest.raises(RuntimeError, match=SAME_AS_AUTOGRAD):
        modified_step(model, what)
    assert_nothing_active()


@pytest.mark.parametrize("what", ["input", "weight"])
def test_inputs_of_recomputed_values_modified_by_the_user(what):
    model = planned(SQUARED, plan_with(SQUARED, "replay", everything))
    with pytest.raises(RuntimeError, match=SAME_AS_AUTOGRAD):
        modified_step(model, what)


class Doubled(nn.Module):
    """Autograd does not save its input, but what it saves is recomputed from it."""

    def forward(self, x):
        return torch.exp(torch.sin(x * 2))


def test_what_only_the_plan_needs_modified_by_the_user():
    """Without a plan that is allowed. With one it is an error, unless the profiled step did it."""

    def forward(model):
        x = model[0](X)
        y = model[1](x)
        x.mul_(2)
        return y.mean() + x.mean()

    def unmodified(model):
        return model(X).mean()

    def build():
        return nn.Sequential(nn.Linear(64, 64), Doubled())

    plan = plan_with(Case(build, unmodified, regions="1"), "replay", everything)
    with pytest.raises(
        RuntimeError, match=r"aten.mul.Tensor in region '1' must be run again .* plan the step as you"
    ):
        run(Case(build, forward, regions="1"), plan)
    assert_exact(Case(build, forward, regions="1"), "replay")


@pytest.mark.parametrize("what", ["inner", "output"])
def test_recomputed_values_modified_by_the_user(what):
    """The value that backward needs is recomputed as it was: the gradients are those of the step without the change."""
    model = planned(SQUARED, plan_with(SQUARED, "replay", everything))
    modified_step(model, what)
    assert_gradients_of_a_step(model, SQUARED)


def modifies_what_it_saved(x: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x)
    z = y * y
    y.add_(1)
    return z + y


@pytest.mark.parametrize("recompute", [True, False])
def test_saved_tensor_modified_inside_its_region(recompute):
    """Whether it is recomputed or not, autograd would refuse it."""
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=SAME_AS_AUTOGRAD):
        modifies_what_it_saved(x).sum().backward()
    names = ["sigmoid.default", "mul.Tensor", "add_.Tensor", "add.Tensor"]
    program = Program("it", [(f"aten.{name}", recompute) for name in names])
    with pytest.raises(RuntimeError, match=SAME_AS_AUTOGRAD):
        replay.run(program, modifies_what_it_saved, (x,), {}).sum().backward()
    assert x.grad is None


def test_torch_whose_policies_see_no_results_is_refused_by_sac(monkeypatch):
    """As that of older releases, which also ask the policy a second time. Profiles and other engines are possible."""
    case = Case(
        build=lambda: nn.Sequential(Block(), nn.Linear(64, 1)),
        forward=lambda model: model(X).square().mean(),
        regions=("0",),
    )
    made = plan_with(case, "sac", lambda region, op, nth: op == "aten.tanh.default")
    assert not ENGINES["sac"].refused
    reason = "engine sac needs another torch"
    monkeypatch.setattr(type(ENGINES["sac"]), "refused", reason)
    with pytest.raises(RuntimeError, match=reason):
        made.apply(case.model())
    with pytest.raises(RuntimeError, match=reason):
        made.context_fn("0")
    with pytest.raises(RuntimeError, match=reason):
        autoac.plan(case.model(), X, "1GB", engine="sac")
    compiled: Any = torch.compile(case.model())
    with pytest.raises(RuntimeError, match=reason):
        autoac.auto(compiled, "1GB")
    assert engine_to_plan_with(compiled, "auto", {})[0] == "compile"
    with pytest.raises(RuntimeError, match=reason):
        engine_to_plan_with(compiled, "auto", {"policies": "policies"})
    replayed = plan_with(case, "replay", lambda region, op, nth: op == "aten.tanh.default")
    assert not differences(run(case, replayed), run(case))
    assert ENGINES["sac"].measure(Chains(X.device)) == engine_model("sac").costs()


def test_a_view_that_a_record_keeps_does_not_keep_the_graph_of_its_base():
    """Made with gradients off it has no graph of its own, but its base has one."""

    def region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rows = x[1:]
        return (rows + weight).sin()

    program = Program("region", [("aten.add.Tensor", True), ("aten.sin.default", False)])
    weight = torch.randn(3, requires_grad=True)
    saved_before = torch.randn(4, 3) * 1.0
    freed = weakref.ref(saved_before.untyped_storage())
    x = saved_before.requires_grad_().sin()
    result = replay.run(program, region, (x, weight), {})
    del x, saved_before
    assert freed() is None
    result.sum().backward()
    assert weight.grad is not None


# -- ops that raise where forward catches that -------------------------------------------------------------------------


class Falls(nn.Module):
    """Tries an op that raises, and goes on with another."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.linear = way, nn.Linear(64, 64)
        self.register_buffer("small", torch.ones(3, 3))
        self.register_buffer("large", torch.full((64, 64), 0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).tanh()
        return (getattr(self, self.way)(h) * h).sin().exp()

    def to_the_same_op(self, h: torch.Tensor) -> torch.Tensor:
        try:
            return h @ self.get_buffer("small")
        except RuntimeError:
            return h @ self.get_buffer("large")

    def to_another_op(self, h: torch.Tensor) -> torch.Tensor:
        """The same op comes later, with a result of the shape that the one that raises would have had."""
        try:
            h = h @ self.get_buffer("small")
        except RuntimeError:
            h = h.cos()
        return h.sin() @ self.get_buffer("large")

    def of_views(self, h: torch.Tensor) -> torch.Tensor:
        try:
            return h.view(7, -1)
        except RuntimeError:
            return h.view(-1, 64) * 2

    def in_place(self, h: torch.Tensor) -> torch.Tensor:
        h = h * 0.5
        try:
            return h.add_(self.get_buffer("small"))
        except RuntimeError:
            return h.add_(self.get_buffer("large")).sin()

    def in_place_on_what_is_saved(self, h: torch.Tensor) -> torch.Tensor:
        try:
            return h.add_(self.get_buffer("small"))
        except RuntimeError:
            return h.cos()

    def several_times(self, h: torch.Tensor) -> torch.Tensor:
        for name in ("small", "small", "large"):
            with contextlib.suppress(RuntimeError):
                return h.exp() @ self.get_buffer(name)
        raise AssertionError


WAYS = [
    "to_the_same_op",
    "to_another_op",
    "of_views",
    "in_place",
    "in_place_on_what_is_saved",
    "several_times",
]


def falling(way: str) -> Case:
    return Case(lambda: nn.Sequential(Falls(way), Falls(way), Falls(way)), mean_square, ("0", "1"))


@pytest.mark.parametrize("way", WAYS)
def test_ops_that_raise_where_forward_catches_that(engine, way):
    assert_exact(falling(way), engine, [0.0, 0.5])


@pytest.mark.parametrize("saved", ["aten.mm.default", "aten.sin.default"])
@pytest.mark.parametrize("way", WAYS)
def test_ops_that_raise_whatever_is_saved(engine, way, saved):
    assert_plan_exact(falling(way), plan_with(falling(way), engine, lambda region, op, nth: op != saved))


def test_ops_that_raise_in_some_steps_only():
    """The plan is made from a step in which none does."""

    def forward(model: nn.Module) -> torch.Tensor:
        for block in model.children():
            assert isinstance(block, Falls)
            block.way = "to_another_op"
        return mean_square(model)

    case = falling("of_views")
    plan = plan_with(case, "sac", lambda region, op, nth: op != "aten.mm.default")
    with pytest.warns(UserWarning, match="the plan is not followed"):
        found = run(Case(case.build, forward, case.regions), plan)
    assert not differences(found, run(Case(case.build, forward, case.regions)))


def test_an_op_that_raises_in_forward_only():
    """As for want of memory: the second run would go on with its result, which forward did not have."""
    free: list[int] = []

    class Wants(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.cos.default and not free:
                raise MemoryError("on purpose")
            return func(*args, **(kwargs or {}))

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return x.cos().exp()
            except MemoryError:
                return x.sin().exp()

    program = Program("it", [("aten.sin.default", True), ("aten.exp.default", False)])
    x = X.clone().requires_grad_()
    with Wants():
        loss = sac.run(program, Model(), (x,), {}).sum()
        free.append(1)
        with pytest.raises(RuntimeError, match=r"'it', aten.cos.default raised in forward.*did not raise"):
            loss.backward()


def test_ops_that_raise_in_checkpoint_debugging():
    plan = plan_with(falling("to_another_op"), "sac", lambda region, op, nth: op != "aten.mm.default")
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        found = run(falling("to_another_op"), plan)
    assert not differences(found, run(falling("to_another_op")))
