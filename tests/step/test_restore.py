"""What a step does to tensors in place is taken back in every respect, and all of it whatever comes in between."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.price.engine_costs import engine_costs
from autoac.step.interrupts import held_back, interruptible
from autoac.step.restore import Graph, Restorer, untouched
from autoac.step.trial import trial
from autoac.torch_private import TorchDispatchMode, modes_entered
from tests.small_models import batch, least_bytes, make

pytestmark = pytest.mark.usefixtures("one_thread")


class InPlace(nn.Module):
    """Writes its input in place, with a weight."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op
        self.weight = nn.Parameter(torch.full((4,), 1.5))
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mul_(self.weight) if self.op == "mul_" else x.add_(self.weight)
        return self.layers(x)


SAMPLES: dict[str, Callable[[], torch.Tensor]] = {
    "a tensor": lambda: torch.ones(8, 4),
    "a view": lambda: torch.ones(16, 4)[4:12],
}


def known(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What autograd and the reader know of a tensor."""
    return (
        tensor.requires_grad,
        tensor.grad_fn,
        tensor.is_leaf,
        tensor._version,
        tensor.tolist(),
        tensor.data_ptr(),
    )


def gradient(model: InPlace, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(x).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.clone()


@pytest.mark.parametrize("call", ["profile", "fake", "verify", "measure_memory"])
@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("op", ["mul_", "add_"])
def test_a_sample_that_the_model_writes_is_as_it_was(op: str, kind: str, call: str):
    torch.manual_seed(0)
    model, x = InPlace(op), SAMPLES[kind]()
    before, expected = known(x), gradient(model, SAMPLES[kind]())
    if call == "profile":
        autoac.profile(model, x)
    elif call == "fake":
        assert autoac.profile(model, x, mode="fake").op_fingerprint
    else:
        profile = autoac.profile(model, x)
        plan = autoac.solve(profile, least_bytes(profile, "replay"))
        if call == "verify":
            assert plan.verify(model, x).equal
        elif call == "measure_memory":
            plan.measure_memory(model, x)
    assert known(x) == before
    assert torch.equal(gradient(model, x), expected)


@pytest.mark.parametrize("op", ["mul_", "add_"])
def test_what_a_step_of_the_users_own_writes_is_as_it_was(op: str):
    model, x = InPlace(op), torch.ones(8, 4)
    before, expected = known(x), gradient(model, torch.ones(8, 4))
    autoac.profile(model, lambda: model(x).sum().backward())
    assert known(x) == before
    assert torch.equal(gradient(model, x), expected)


@pytest.mark.parametrize("op", ["mul_", "add_"])
def test_without_that_it_is_found_out(op: str, monkeypatch: pytest.MonkeyPatch):
    """The graph of a profiled step stays on the sample, so the next one goes through it, too."""
    monkeypatch.setattr(Graph, "put_back", lambda graph: None)
    monkeypatch.setattr("autoac.step.step._fresh", lambda value: value)
    model, x = InPlace(op), torch.ones(8, 4)
    if op == "mul_":
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            autoac.profile(model, x)
    else:
        profile = autoac.profile(model, x)
        assert [note for note in profile.notes if note.startswith("the step varies with its data")]
        assert not autoac.solve(profile, least_bytes(profile, "replay")).verify(model, x).equal


class State(nn.Module):
    """A buffer and a plain tensor that get a graph, and a weight that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.state: torch.Tensor
        self.register_buffer("state", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.state.mul_(self.layer.bias)
        self.plain.add_(y.sum(0))
        y = y + self.state + self.plain
        self.state, self.plain = self.state.detach(), self.plain.detach()
        self.other.weight.requires_grad_(False)
        return y


def test_what_the_model_holds_is_as_it_was():
    model = State()
    held = [model.state, model.plain, *model.parameters()]
    before = [known(tensor) for tensor in held]
    reader = (model.state * torch.ones(4, requires_grad=True)).sum()  # saves the buffer
    autoac.profile(model, torch.ones(2, 4))
    assert [known(tensor) for tensor in held] == before
    assert [id(t) for t in (model.state, model.plain)] == [id(t) for t in held[:2]]
    reader.backward()  # autograd finds the buffer unmodified


# -- whatever comes in between -----------------------------------------------------------------------------------------


def test_a_failure_does_not_keep_the_others_from_their_turn():
    done: list[int] = []

    def fails() -> None:
        done.append(-1)
        raise LookupError("on purpose")

    restorer = Restorer()
    restorer.later(done.append, 1)
    restorer.later(fails)
    restorer.later(done.append, 2)
    with pytest.raises(LookupError, match="on purpose"), restorer:
        assert done == []
    assert done == [2, -1, -1, 1]


def test_an_interrupt_waits_for_the_end():
    done: list[str] = []

    @held_back()
    def run() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("held back")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["held back"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_waits_for_the_step():
    done: list[str] = []

    @held_back()
    def run() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("held back")
        with interruptible():
            done.append("too late")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["held back"]


def test_an_interrupt_comes_at_once_while_the_step_runs():
    done: list[str] = []

    @held_back()
    def run() -> None:
        try:
            with interruptible():
                signal.raise_signal(signal.SIGINT)
                done.append("too late")
        finally:
            signal.raise_signal(signal.SIGINT)  # somebody is impatient
            done.append("put back")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["put back"]


def test_other_handlers_and_other_threads_are_left_alone():
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with held_back(), interruptible():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT] * 2
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_back():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    found: list[Any] = []

    def elsewhere() -> None:
        with held_back(), interruptible():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]


class SignalAtLine:
    """Context in which Ctrl-C comes at the n-th line run in some files: a real signal, handled there and then.

    Args:
        position: of the line, from 0; -1 for never.
    """

    FOLDERS = (
        "/autoac/step/",
        "/autoac/record/",
        "/autoac/execute/replay/",
        "/autoac/check/",
        "python_dispatch.py",
    )

    def __init__(self, position: int) -> None:
        self.position = position
        self.count = 0

    def __enter__(self) -> SignalAtLine:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line if any(part in frame.f_code.co_filename for part in self.FOLDERS) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            position, self.count = self.count, self.count + 1
            if position == self.position:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._line


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


def watched(model: nn.Module) -> list[Any]:
    """What an interrupted profile could leave behind."""
    tensors = [*model.parameters(), *model.buffers()]
    return [
        *([(id(t), known(t), t.grad) for t in tensors]),
        [list(vars(module)) for module in model.modules()],
        torch.get_rng_state,
        torch.get_rng_state().tolist(),
        modes_entered(),
        signal.getsignal(signal.SIGINT),
    ]


def interrupted(call: Callable[[nn.Module], Any], positions: int) -> int:
    """Interrupt a call at so many lines, spread evenly; returns at how many it came as KeyboardInterrupt."""
    model = tiny()
    with SignalAtLine(-1) as lines:
        call(model)
    expected, came = watched(model), 0
    for position in range(0, lines.count, max(1, lines.count // positions)):
        try:
            with SignalAtLine(position):
                call(model)
        except KeyboardInterrupt:
            came += 1
        assert watched(model) == expected, f"line {position} of {lines.count}"
    return came


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # lost in a destructor
def test_profile_interrupted_at_many_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autoac.api.profiling.fitted", lambda profile, *_: profile)
    costs = engine_costs(torch.device("cpu"), 0)
    monkeypatch.setattr("autoac.record.recorder.engine_costs", lambda *_: costs)
    assert interrupted(lambda model: autoac.profile(model, torch.ones(8, 4)), 40) > 15


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # lost in a destructor
def test_profile_and_verify_interrupted_at_more_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autoac.api.profiling.fitted", lambda profile, *_: profile)
    costs = engine_costs(torch.device("cpu"), 0)
    monkeypatch.setattr("autoac.record.recorder.engine_costs", lambda *_: costs)
    assert interrupted(lambda model: autoac.profile(model, torch.ones(8, 4)), 80) > 35
    plan = autoac.plan(tiny(), torch.ones(8, 4), "1GB")
    assert interrupted(lambda model: plan.verify(model, torch.ones(8, 4)), 35) > 9


def test_modes_that_are_left_over_are_left():
    before = modes_entered()
    model = make()
    with untouched(model, [batch()]):
        TorchDispatchMode().__enter__()
        torch.device("cpu").__enter__()
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__()
        torch._C._set_grad_enabled(False)
    assert modes_entered() == before


@pytest.mark.parametrize("restores", [True, False])
def test_a_trial_restores_values_gradients_and_optimizers(restores: bool):
    """Optimizers that the caller restores are left to it."""
    model, x = tiny(), torch.ones(8, 4)
    adam = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(x).sum().backward()
        adam.step()

    step()
    weights = [p.detach().clone() for p in model.parameters()]
    gradients = [gradient_of(p).clone() for p in model.parameters()]
    optimizers = None if restores else contextlib.nullcontext()
    for _ in range(2):
        with trial(
            model,
            [x],
            (*model.parameters(), x),
            gradient=lambda p: gradient_of(p).clone(),
            optimizers=optimizers,
        ):
            step()
            x.zero_()
            assert not any(map(torch.equal, weights, model.parameters()))
        assert all(map(torch.equal, weights, model.parameters()))
        assert all(map(torch.equal, gradients, map(gradient_of, model.parameters())))
        assert torch.equal(x, torch.ones(8, 4))
    assert {int(row["step"]) for row in adam.state.values()} == {1 if restores else 3}


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
