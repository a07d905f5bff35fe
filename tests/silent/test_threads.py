"""Another thread draws random numbers while a planned model trains: right gradients, or an error that says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoac.execute import replay
from autoac.execute.program import Program
from autoac.execute.replay import ReplayCall, randoms
from autoac.execute.sac import sac
from autoac.torch_private import TorchDispatchMode
from tests.execute.exact.harness import Case, plan_with
from tests.silent.test_opaque import noisy

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)


@pytest.fixture
def other_thread() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs a function in a thread that lives as long as the test, and waits for what it returns."""
    asked, done = threading.Event(), threading.Event()
    state: dict[str, Any] = {"stop": False}

    def loop() -> None:
        while True:
            asked.wait()
            asked.clear()
            if state["stop"]:
                return
            state["result"] = state["function"]()
            done.set()

    thread = threading.Thread(target=loop)
    thread.start()

    def run(function: Callable[[], Any]) -> Any:
        state["function"] = function
        done.clear()
        asked.set()
        assert done.wait(60)
        return state["result"]

    yield run
    state["stop"] = True
    asked.set()
    thread.join()


def draw() -> torch.Tensor:
    return torch.rand(3)


def region(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "dropout":
        return torch.sin(nn.functional.dropout(torch.tanh(x), 0.5))
    if kind == "rand_like":
        return torch.sin(torch.tanh(x) * torch.rand_like(x))
    return torch.sin(torch.native_dropout(torch.tanh(x), 0.5, True)[0])


OPS = {
    "dropout": ["tanh", "empty_like", "bernoulli_.float", "div_.Scalar", "mul.Tensor", "sin"],
    "rand_like": ["tanh", "rand_like", "mul.Tensor", "sin"],
    "native_dropout": ["tanh", "native_dropout", "sin"],
}
TAKES_A_GENERATOR = {"dropout": True, "rand_like": True, "native_dropout": False}
KINDS = pytest.mark.parametrize("kind", OPS)


def program(kind: str) -> Program:
    names = [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in OPS[kind]]
    return Program("blocks.0", [(name, True) for name in names])


def gradient(kind: str, planned: bool, between: Callable[[], Any] = lambda: None) -> torch.Tensor:
    torch.manual_seed(0)
    x = X.clone().requires_grad_()
    y = replay.run(program(kind), region, (x, kind), {}) if planned else region(x, kind)
    between()
    y.sum().backward()
    assert x.grad is not None
    return x.grad


@KINDS
def test_draws_between_forward_and_backward(kind, other_thread):
    expected = gradient(kind, planned=False)
    assert torch.equal(gradient(kind, planned=True, between=lambda: other_thread(draw)), expected)


@KINDS
def test_draws_while_an_op_is_replayed(kind, other_thread, monkeypatch):
    """The other thread gets the numbers that are its turn, and backward the ones it had."""
    expected = gradient(kind, planned=False)
    after = torch.rand(6)
    drawn: list[torch.Tensor] = []
    check = randoms._check

    def drawing_first(*given: Any) -> None:
        drawn.append(other_thread(draw))
        check(*given)

    monkeypatch.setattr(randoms, "_check", drawing_first)
    if TAKES_A_GENERATOR[kind]:
        assert torch.equal(gradient(kind, planned=True), expected)
        assert torch.equal(torch.cat([*drawn, draw()]), after)
    else:
        with pytest.raises(RuntimeError, match="another thread has drawn from the same generator"):
            gradient(kind, planned=True)
    assert len(drawn) == 1


@KINDS
def test_draws_between_the_stash_and_the_op_are_refused(kind, other_thread, monkeypatch):
    stash = randoms.Stash.__init__

    def drawing_afterwards(self: Any, generator: torch.Generator) -> None:
        stash(self, generator)
        other_thread(draw)

    monkeypatch.setattr(randoms.Stash, "__init__", drawing_afterwards)
    message = r"in region 'blocks.0' must draw .* another thread .* `torch.Generator` of its own"
    with pytest.raises(RuntimeError, match=message):
        gradient(kind, planned=True)


def test_the_guard_finds_draws_of_other_threads_by_itself(other_thread, monkeypatch):
    """Without what the tests above are about: the masks of the profiled steps would not be those of forward."""
    stash = randoms.Stash.__init__

    def drawing_afterwards(self: Any, generator: torch.Generator) -> None:
        stash(self, generator)
        other_thread(draw)

    case = Case(
        build=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(2))),
        forward=lambda model: model(X).square().mean(),
        regions=("0", "1"),
    )
    with monkeypatch.context() as patch:
        patch.setattr(randoms, "_check", lambda *_: None)
        patch.setattr(randoms.Stash, "__init__", drawing_afterwards)
        profile = case.profile()
    (note,) = [note for note in profile.notes if "other bits" in note]
    assert note.startswith("aten.empty_like.default in '0.1', '1.1'")  # which bernoulli_ fills
    assert "another thread" in note
    assert not any(op.replayable for op in profile.tape if op.name == "aten.empty_like.default")


DROPOUTS = Case(
    build=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(3))),
    forward=lambda model: model(X).square().mean(),
    regions=("0", "1", "2"),
)
PAUSE_S = {"replay": 0.0005, "sac": 0.005}
"""Between the other thread's draws: sac refuses a step with one between a region's start and an op that draws."""


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_a_planned_model_beside_a_thread_that_draws_all_the_time(engine: str):
    plan = plan_with(DROPOUTS, engine, lambda region, op, nth: True)
    model = plan.apply(DROPOUTS.model())
    assert _step_is_right(model)
    stop = threading.Event()

    def loop() -> None:
        while not stop.wait(PAUSE_S[engine]):
            draw()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        outcomes = [_step_is_right(model) for _ in range(60)]
    finally:
        stop.set()
        thread.join()
    assert False not in outcomes
    assert True in outcomes


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_a_second_run_that_draws_other_numbers_is_refused(when: str, other_thread):
    """Also where both runs leave the generator in the same state: a draw after the op in forward, before it later."""
    plan = plan_with(DROPOUTS, "sac", lambda region, op, nth: True)
    model = plan.apply(DROPOUTS.model())
    assert _step_is_right(model)
    assert _step_is_right(model)  # beside a thread that draws nothing

    class Disturbing(TorchDispatchMode):
        """Draws around the op, where nothing looks at the generator."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            drawn = func is torch.ops.aten.bernoulli_.float
            again = torch._C._current_graph_task_id() != -1
            if drawn and again and when in ("before", "both"):
                other_thread(draw)
            result = func(*args, **(kwargs or {}))
            if drawn and not again and when in ("after", "both"):
                other_thread(draw)
            return result

    with Disturbing():
        # One op a region: a draw after it changes nothing.
        assert _step_is_right(model) is (True if when == "after" else None)


@pytest.mark.parametrize("draws", [False, True])
def test_a_second_backward_is_compared_as_well(draws: bool, other_thread):
    """Everything is recomputed, so torch allows it; the first one stops before the last draw."""

    def twice_drawn(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        h = h * torch.randn_like(h)
        return h + torch.randn_like(h)

    steps = [
        ("tanh", True),
        ("randn_like", True),
        ("mul.Tensor", True),
        ("randn_like", True),
        ("add.Tensor", True),
    ]
    names = [(f"aten.{name}" if "." in name else f"aten.{name}.default", again) for name, again in steps]
    x = X.clone().requires_grad_()
    y = sac.run(Program("blocks.0", names), twice_drawn, (x,), {}).sum()
    y.backward(retain_graph=True)
    assert x.grad is not None
    expected = 2 * x.grad

    class Disturbing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if draws and func is torch.ops.aten.randn_like.default:
                other_thread(draw)
            return func(*args, **(kwargs or {}))

    with Disturbing():
        if draws:
            with pytest.raises(RuntimeError, match="another thread has drawn"):
                y.backward()
        else:
            y.backward()
            assert torch.equal(x.grad, expected)


def test_an_op_of_a_library_that_draws_is_compared(other_thread):
    """It is not declared random."""
    steps = [("aten.tanh.default", True), ("autoac_silent.noisy.default", True), ("aten.sin.default", True)]
    x = X.clone().requires_grad_()
    y = sac.run(Program("blocks.0", steps), lambda x: torch.sin(noisy(torch.tanh(x))), (x,), {}).sum()

    class Disturbing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.autoac_silent.noisy.default:
                other_thread(draw)
            return func(*args, **(kwargs or {}))

    with Disturbing(), pytest.raises(RuntimeError, match="another thread has drawn"):
        y.backward()


def test_alone_sac_remembers_nothing_of_what_was_drawn(monkeypatch: pytest.MonkeyPatch):
    plan = plan_with(DROPOUTS, "sac", lambda region, op, nth: True)
    model = plan.apply(DROPOUTS.model())
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(sac, "Drawn", lambda: pytest.fail("results were remembered"))
    assert _step_is_right(model)


def _step_is_right(model: Any) -> bool | None:
    """Whether the last layer's gradient is that of the masks of forward; None if backward was refused."""
    model.zero_grad()
    results: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda module, args, output: results.append(output.detach()))
    loss = model(X).square().mean()
    hook.remove()
    try:
        loss.backward()
    except RuntimeError as error:
        if "another thread" not in str(error):
            raise
        return None
    expected = (2 * 2 * results[0] / results[0].numel()).sum(0)  # dropout has doubled what it has kept
    return torch.allclose(model[2][0].bias.grad, expected, atol=1e-6)


def test_alone_nothing_is_remembered_of_the_generator(monkeypatch: pytest.MonkeyPatch):
    planned = program("dropout")
    call = ReplayCall(planned)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # other tests may have left some
    x = X.clone().requires_grad_()
    replay.run(planned, lambda x: region(x, "dropout"), (x,), {}, replay.Recording(call))
    (stash,) = [record.rng for record in call.records if record is not None and record.rng]
    assert stash[0].end is None
