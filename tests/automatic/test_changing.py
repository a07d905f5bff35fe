"""`autoac.auto` in loops whose model changes or whose steps fail: what is planned for, and what is said."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import warnings
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autoac
from autoac.measure import OneAtATime, measure_peak, unique_storage_bytes
from autoac.torch_private import top_dispatch_mode
from autoac_solver.records.profile import GRAPH_OF_BACKWARD
from tests.small_models import BATCH, WIDTH, Block, Blocks, make

pytestmark = pytest.mark.usefixtures("one_thread")

ENOUGH = 10**9


def batch(seed: int, rows: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(0, WIDTH, (rows,), generator=generator)


def train(model: Blocks, optimizer: torch.optim.Optimizer, seed: int, rows: int = BATCH) -> None:
    x, y = batch(seed, rows)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def test_a_model_that_is_frozen_for_a_while():
    """A discriminator in its generator's step: gradients go through it, and it takes no step."""
    plain, model = make(), make()
    handle = autoac.auto(model, ENOUGH)
    ends = []
    for one in (plain, model):
        optimizer = adam(one)
        for seed in range(4):
            torch.manual_seed(seed)
            train(one, optimizer, seed)
            one.requires_grad_(False)
            x = batch(seed + 50)[0].requires_grad_()
            one(x).sum().backward()
            assert x.grad is not None
            one.requires_grad_(True)
            ends.append(x.grad)
    assert handle.plan is not None
    for ours, others in zip(ends[4:], ends[:4], strict=True):
        assert torch.equal(ours, others)
    for ours, others in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, others)


def test_a_frozen_model_before_its_first_step():
    model = make()
    handle = autoac.auto(model, ENOUGH)
    model.requires_grad_(False)
    model(batch(0)[0].requires_grad_()).sum().backward()
    assert handle.plan is None
    model.requires_grad_(True)
    optimizer = adam(model)
    for seed in range(2):
        train(model, optimizer, seed)
    assert handle.plan is not None


def test_auto_for_a_copy_of_a_model_that_has_a_handle():
    model = make()
    first = autoac.auto(model, ENOUGH)
    other = copy.deepcopy(model)
    second = autoac.auto(other, ENOUGH)
    for one in (model, other):
        optimizer = adam(one)
        for seed in range(2):
            torch.manual_seed(seed)
            train(one, optimizer, seed)
    assert first.plan is not None
    assert second.plan is not None
    for ours, others in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, others)
    second.remove()
    assert "forward" not in vars(other)


def test_auto_again_where_another_forward_was_put_over_the_first():
    """As accelerate's `prepare` does under mixed precision."""
    model = make()
    first = autoac.auto(model, ENOUGH)
    ours = model.forward

    @functools.wraps(ours)
    def over(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * ours(*args, **kwargs)

    model.forward = over
    first.remove()
    handle = autoac.auto(model, ENOUGH)
    optimizer = adam(model)
    for seed in range(3):
        train(model, optimizer, seed)
    assert handle.plan is not None
    assert first.plan is None


def test_where_a_recorded_step_fails_the_plan_from_before_stays():
    """A larger batch is recorded, runs out of memory and is skipped: the others go on."""
    model = make()
    handle = autoac.auto(model, ENOUGH, on_larger="replan")
    optimizer = adam(model)
    for seed in range(3):
        train(model, optimizer, seed)
    plan = handle.plan
    assert plan is not None

    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no more")

    model.blocks[1].register_forward_pre_hook(fails)
    hook = next(reversed(model.blocks[1]._forward_pre_hooks))
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, 3, 4 * BATCH)
    optimizer.zero_grad()
    del model.blocks[1]._forward_pre_hooks[hook]
    train(model, optimizer, 4)
    assert handle.plan is plan
    train(model, optimizer, 5, 4 * BATCH)
    train(model, optimizer, 6)
    assert handle.plan is not None
    assert handle.plan.record.profile.sample != plan.record.profile.sample  # planned for, once it runs


@pytest.mark.parametrize("step", [0, 1])
def test_a_backward_that_fails_is_no_recorded_step(step: int, caplog: pytest.LogCaptureFixture):
    """The loop catches the error, as out of memory, clears the gradients, and goes on."""
    model, plain = make(), make()
    plain_handle = autoac.auto(plain, ENOUGH)
    handle = autoac.auto(model, ENOUGH)

    def fails(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no more")

    optimizer, other = adam(model), adam(plain)
    with caplog.at_level("INFO", "autoac"):
        for seed in range(4):
            if seed == step:
                hook = next(model.blocks[1].parameters()).register_hook(fails)
                with pytest.raises(torch.OutOfMemoryError):
                    train(model, optimizer, seed)
                optimizer.zero_grad()
                hook.remove()
            train(model, optimizer, seed)
            train(plain, other, seed)
    assert ("the backward of the recorded step has failed" in caplog.text) == (step == 0)
    assert handle.plan is not None
    assert plain_handle.plan is not None
    assert handle.plan.record.profile.peak_bytes == plain_handle.plan.record.profile.peak_bytes


def test_a_plan_is_not_refused_for_a_part_of_a_step():
    """A gradient penalty goes backward before the step does. What that part takes says nothing of the step."""
    model = make()
    handle = autoac.auto(model, 1000)
    optimizer = adam(model)

    def step() -> None:
        x = batch(0)[0].requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        F.cross_entropy(model(x.detach()), batch(0)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with pytest.raises(autoac.InfeasibleBudgetError) as refused:
        step()
    assert handle.plan is None
    model = make()
    handle = autoac.auto(model, refused.value.minimum_bytes)
    optimizer = adam(model)
    for _ in range(4):
        step()
    assert handle.plan is not None


def without_dropout(model: Blocks) -> Blocks:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def test_threads_that_record_at_once():
    """Memory is measured in one at a time; others record a later step."""
    models = [without_dropout(make()) for _ in range(3)]  # threads share the generator
    handles = [autoac.auto(model, ENOUGH) for model in models]

    def loop(model: Blocks) -> None:
        optimizer = adam(model)
        for seed in range(6):
            train(model, optimizer, seed)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(loop, models))
    expected = without_dropout(make())
    loop(expected)
    assert all(handle.plan is not None for handle in handles)
    for model in models:
        for ours, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, other)


def test_more_calls_before_a_backward_than_recorded_are_told():
    """As of an ODE's solver, or a cell that is unrolled to a batch's length. A call without use does not count."""
    model = make()
    handle = autoac.auto(model, ENOUGH)
    optimizer = adam(model)

    def step(calls: int) -> None:
        x = batch(0)[0]
        for _ in range(calls):
            x = model(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for calls in (2, 2, 2):
        step(calls)
    model(batch(0)[0])
    step(2)
    with pytest.warns(
        UserWarning, match="called 3 times before a backward, and in the recorded step 2 times"
    ):
        step(5)
    assert handle.plan is not None


def test_a_later_step_that_keeps_its_graph_is_recorded_and_planned_for():
    """What it recomputes for one of its losses, it recomputes for the other."""
    torch.manual_seed(0)
    model = make(blocks=4).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, 10**9)
    x = torch.randn(BATCH, WIDTH)

    def step(keeps: bool) -> None:
        output = model(x)
        if keeps:
            output.abs().mean().backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    seen = []
    for keeps in (False, False, True, True, True):
        step(keeps)
        seen.append(handle.plan is not None and bool(handle.plan.record.profile.unpacks))
    assert seen == [False, False, False, False, True]


@pytest.mark.filterwarnings("ignore:this step goes backward with create_graph=True")
def test_a_second_derivative_in_every_third_step_is_planned_for():
    """As of a gradient penalty. The step after the first one is recorded, and then the one that is due."""
    model, expected = without_dropout(make()), without_dropout(make())
    handle = autoac.auto(model, ENOUGH)
    peaks = []
    for trained in (model, expected):
        optimizer = adam(trained)
        for step in range(12):
            x = batch(step)[0].requires_grad_(step % 3 == 2)
            y = trained(x).square().mean()
            if x.requires_grad:
                (gradient,) = torch.autograd.grad(y, x, create_graph=True)
                y = y + gradient.square().sum()
            y.backward()
            optimizer.step()
            optimizer.zero_grad()
            if trained is model and handle.plan is not None:
                peaks.append((step, GRAPH_OF_BACKWARD in handle.plan.record.profile.facts))
    assert dict(peaks)[7] is False
    assert dict(peaks)[9] is True
    for ours, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, other)


class TwoTasks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.other = make(), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, task: int = 0) -> torch.Tensor:
        x = self.body(x)
        return self.other(x) if task else x


@pytest.mark.filterwarnings("ignore:the model is called 2 times before a backward")
def test_steps_that_are_unlike_the_plan_in_two_ways_are_recorded_when_due():
    """Every third step has a second call, of another head."""
    model = TwoTasks().train()
    handle = autoac.auto(model, ENOUGH, on_larger="replan")
    optimizer = adam(model)
    plans = []
    for step in range(12):
        loss = model(batch(step)[0]).square().mean()
        if step % 3 == 2:
            loss = loss + model(batch(step)[0], 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(handle.plan)
    calls = [plan and plan.record.profile.n_root_calls for plan in plans]
    assert calls[7:] == [1, 1, 2, 2, 2]


def test_a_step_that_is_skipped_is_no_further_call():
    """As by gradient scaling or a norm that is too large: backward has run, and gradients are cleared."""
    model = make()
    handle = autoac.auto(model, ENOUGH, on_larger="error")
    optimizer = adam(model)
    for seed in range(8):
        x, y = batch(seed)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if seed not in (4, 5):
            optimizer.step()
        optimizer.zero_grad()
    assert handle.plan is not None


def test_one_thread_at_a_time():
    turns = OneAtATime()
    with turns, turns, ThreadPoolExecutor(1) as pool:
        assert pool.submit(turns.begin, waits=False).result() is None
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(turns.begin, waits=False).result()
        assert turn is not None
        assert turns.begin(waits=False) is None
        turn.end()  # in another thread
        with turns:
            pass
        assert pool.submit(turns.begin).result() is not None
    with turns:  # the thread whose turn it is has ended
        pass
    assert turns.begin(waits=False) is not None


def test_a_handle_on_a_part_of_a_model_that_has_one_is_refused():
    model = make()
    handle = autoac.auto(model, ENOUGH)
    with pytest.raises(autoac.ProfilingError, match="is a part of it or holds it"):
        autoac.auto(model.blocks[0], ENOUGH)
    with pytest.raises(autoac.ProfilingError, match="is a part of it or holds it"):
        autoac.auto(torch.nn.Sequential(model), ENOUGH)
    optimizer = adam(model)
    for seed in range(3):
        train(model, optimizer, seed)
    assert handle.plan is not None
    with pytest.raises(autoac.AutoacError, match=r"call remove\(\) on its handle first"):
        handle.plan.verify(model, batch(0)[0])
    plan = handle.plan
    handle.remove()
    assert plan.verify(model, batch(0)[0], lambda output: output.sum()).equal
    autoac.auto(model.blocks[0], ENOUGH).remove()


def test_a_step_that_was_never_over_does_not_keep_another_model_from_its_plan():
    """The cell of a notebook, run again after an error in the loss."""
    first = make()
    handle = autoac.auto(first, ENOUGH)
    with pytest.raises(IndexError):
        F.cross_entropy(first(batch(0)[0]), torch.full((BATCH,), 10**6))
    second = make()
    handle_of_second = autoac.auto(second, ENOUGH)
    assert top_dispatch_mode() is None
    optimizer = adam(second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            train(second, optimizer, seed)
    assert handle_of_second.plan is not None
    assert handle.plan is None
    optimizer = adam(first)
    for seed in range(2):
        train(first, optimizer, seed)
    assert handle.plan is not None


def test_phases_with_an_optimizer_each_have_a_plan_each(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="autoac")
    model, expected = without_dropout(make()), without_dropout(make())
    handle = autoac.auto(model, ENOUGH)
    plans = []
    for trained in (model, expected):
        parameters = list(trained.parameters())
        halves = parameters[:6], parameters[6:]
        optimizers = [torch.optim.AdamW(half) for half in halves]
        for step in range(30):
            phase = step // 5 % 2
            for half in (0, 1):
                for parameter in halves[half]:
                    parameter.requires_grad_(half == phase)
            train(trained, optimizers[phase], step)
            if trained is model:
                plans.append(handle.plan)
    assert plans[15] is plans[19] is plans[25] is plans[29]
    assert plans[20] is plans[24] is plans[14]
    assert plans[20] is not plans[25]
    states = [row for row in plans[20].record.profile.storage_table if row.kind == "Optstate"]
    assert len(states) >= 2  # of both
    assert sum("recording this step" in record.message for record in caplog.records) == 2
    for ours, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("change", ["a module", "gradients that stay"])
def test_the_plan_of_an_earlier_phase_is_not_put_on_where_it_does_not_hold(change: str):
    model = without_dropout(make())
    handle = autoac.auto(model, ENOUGH)
    parameters = list(model.parameters())
    halves = parameters[:6], parameters[6:]
    optimizers = [torch.optim.SGD(half, lr=0.01) for half in halves]
    plans = []
    for step in range(15):
        phase = step // 5 % 2
        for half in (0, 1):
            for parameter in halves[half]:
                parameter.requires_grad_(half == phase)
        if step == 10 and change == "a module":
            model.add_module("another", torch.nn.Identity())
        if change == "a module":
            model.zero_grad()
        else:
            optimizers[phase].zero_grad()  # those of the other half stay
        F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        optimizers[phase].step()
        plans.append(handle.plan)
    assert plans[4] is not plans[14] is not None
    assert handle.plan is not None
    assert handle.plan.predicted_peak_bytes >= plans[4].predicted_peak_bytes


def test_what_a_loop_holds_does_not_keep_a_removed_handle_alive():
    model = make()
    handle = autoac.auto(model, ENOUGH)
    optimizer, loss = adam(model), torch.zeros(())
    for seed in range(3):
        loss = F.cross_entropy(model(batch(seed)[0]), batch(seed)[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    frozen = weakref.ref(model)
    handle.remove()
    del model, optimizer, handle
    gc.collect()
    assert loss.grad_fn is not None
    assert frozen() is None


def test_parameters_that_are_trained_in_turns_have_a_plan_each(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="autoac")
    model = make()
    handle = autoac.auto(model, ENOUGH)
    optimizer = adam(model)
    plans = []
    for seed in range(8):
        model.blocks[0].requires_grad_(seed % 2 == 0)
        train(model, optimizer, seed)
        plans.append(handle.plan)
    assert plans[4] is plans[6] is not plans[5]
    assert plans[5] is plans[7] is not None

    def another_each_step() -> None:
        for seed in range(8):
            for index, parameter in enumerate(model.parameters()):
                parameter.requires_grad_(index >= 6 or index == seed % 6)
            train(model, optimizer, seed)

    with pytest.warns(UserWarning, match="the parameters that are trained change from step to step"):
        another_each_step()
    another_each_step()
    caplog.clear()
    another_each_step()  # each of the six has come back, and has a plan by now
    assert not [record for record in caplog.records if "recording this step" in record.message]
    assert handle.plan is not None


def test_a_saved_plan_for_another_optimizer_is_not_kept(tmp_path: Path):
    """The state of Adam is twice the parameters; that of SGD is nothing."""
    path, peaks = tmp_path / "plan.json", []
    for make_optimizer in (functools.partial(torch.optim.SGD, lr=0.1), torch.optim.Adam, torch.optim.Adam):
        model = make()
        handle = autoac.auto(model, ENOUGH, path=path)
        optimizer = make_optimizer(model.parameters())
        for seed in range(4):
            train(model, optimizer, seed)
        assert handle.plan is not None
        peaks.append(handle.plan.predicted_peak_bytes)
    assert peaks[1] == peaks[2]
    assert peaks[1] - peaks[0] >= 2 * 4 * sum(p.numel() for p in make().parameters())


def test_a_saved_plan_for_less_state_of_the_same_optimizer_is_not_kept(tmp_path: Path):
    peaks = []
    for momentum in (0.0, 0.9, 0.9):
        model = make()
        handle = autoac.auto(model, ENOUGH, path=tmp_path / "plan.json")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        for seed in range(4):
            train(model, optimizer, seed)
        assert handle.plan is not None
        peaks.append(handle.plan.predicted_peak_bytes)
    assert peaks[1] == peaks[2]
    assert peaks[1] - peaks[0] >= 4 * sum(p.numel() for p in make().parameters())


def trained_on(model: Blocks, optimizer: torch.optim.Optimizer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        train(model, optimizer, seed)


@pytest.mark.parametrize("change", ["parameters", "optimizer", "autocast"])
def test_where_no_plan_fits_a_later_change_training_goes_on_with_the_least_peak(change: str):
    rows = 20 * BATCH

    def loop(model: Blocks, steps: int) -> None:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            if change == "parameters":
                model.blocks[0].requires_grad_(step >= 2)
            if change == "optimizer" and step == 2:
                optimizer = adam(model)
            x, y = batch(step, rows)
            with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast" and step < 2):
                output = model(x)
            F.cross_entropy(output.float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = make()
    handle = autoac.auto(model, 1000)
    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        loop(model, 2)
    assert handle.plan is None
    budget = error.value.minimum_bytes
    plain, model = make(), make()
    torch.manual_seed(0)
    loop(plain, 5)
    torch.manual_seed(0)
    handle = autoac.auto(model, budget, measure=True)
    with pytest.warns(UserWarning, match="takes more than the budget under any plan"):
        loop(model, 5)
    assert handle.plan is not None
    assert handle.plan.predicted_peak_bytes > budget
    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        autoac.solve(handle.plan.record.profile, 1000)
    assert handle.plan.predicted_peak_bytes == error.value.minimum_bytes
    for ours, others in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, others)


def test_optimizers_that_step_in_backward_are_counted_once():
    model = make(dropout=0.0)
    optimizers: dict[torch.Tensor, Any] = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def steps(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(steps)
    handle = autoac.auto(model, ENOUGH, measure=True)
    for seed in range(4):
        model(batch(seed)[0]).square().mean().backward()
    assert handle.plan is not None
    state = [value for one in optimizers.values() for row in one.state.values() for value in row.values()]
    rows = handle.plan.record.profile.storage_table
    assert sum(row.bytes for row in rows if row.kind == "Optstate") == unique_storage_bytes(state)
    assert {row.name for row in rows if row.kind == "Optstate"} == {"AdamW"}
    assert handle.measured_peak_bytes is not None
    assert abs(handle.measured_peak_bytes - handle.plan.predicted_peak_bytes) < 1000
    own = unique_storage_bytes([*model.parameters(), *model.buffers(), batch(0)[0]])
    assert handle.plan.resident_bytes == own + unique_storage_bytes(state)
    model.blocks[0].requires_grad_(False)  # its state is there, and no step reads it
    for seed in range(3):
        model(batch(seed)[0]).square().mean().backward()
    assert handle.plan.resident_bytes == own + unique_storage_bytes(state)
    assert abs(handle.measured_peak_bytes - handle.plan.predicted_peak_bytes) < 1000


def test_the_plan_of_a_first_step_that_no_plan_fits_is_none():
    model = make()
    optimizer, handle = adam(model), autoac.auto(model, 1000)
    train(model, optimizer, 0)
    assert handle.plan is None
    with pytest.raises(autoac.InfeasibleBudgetError):
        train(model, optimizer, 1)


def test_a_step_above_the_budget_is_told():
    """The second batch is as large as the first; what the model keeps besides is not."""
    model = make()
    first = autoac.auto(model, ENOUGH)
    optimizer = adam(model)
    for seed in range(2):
        train(model, optimizer, seed)
    assert first.plan is not None
    budget = first.plan.predicted_peak_bytes
    first.remove()
    handle = autoac.auto(model, budget, measure=True)
    kept: list[torch.Tensor] = []
    train(model, optimizer, 2)
    model.register_forward_hook(lambda *_: kept.append(torch.zeros(10**6)))
    with pytest.warns(UserWarning, match="a step under the plan took more than the budget: measured peak"):
        trained_on(model, optimizer, range(3, 6))
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes > budget


def test_a_plan_that_cannot_be_taken_off_stays_on_and_is_told():
    model = make()
    handle = autoac.auto(model, ENOUGH // 10**3, on_larger="replan")
    optimizer = adam(model)
    train(model, optimizer, 0)
    x, y = batch(0)
    least = autoac.solve(handle.plan.record.profile, 10**12).predicted_peak_bytes  # type: ignore[union-attr]
    handle.remove()
    handle = autoac.auto(model, int(0.9 * least), on_larger="replan")
    for seed in range(2):
        train(model, optimizer, seed)
    plan = handle.plan
    assert plan is not None
    name = next(region.fqn for region in plan.regions if region.wrapped)
    module = model.get_submodule(name)
    ours = module.forward
    module.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.warns(UserWarning, match="other code has replaced the forward of a planned module"):
        train(model, optimizer, 3, 2 * BATCH)
    assert handle.plan is plan
    train(model, optimizer, 4)
    module.forward = ours
    handle.remove()
    assert "forward" not in vars(module)
    assert x.shape[0] == y.shape[0]


class Lazy(Blocks):
    """Makes one of its modules in its first forward."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = torch.nn.Linear(WIDTH, WIDTH)
        return super().forward(torch.tanh(self.late(x)), scale)


def test_a_model_that_changes_in_the_recorded_step():
    model = Lazy()
    handle = autoac.auto(model, ENOUGH)
    for seed in range(3):
        x, y = batch(seed)
        F.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
    assert handle.plan is not None


def test_gradients_of_parameters_unfrozen_later_are_there_when_the_next_step_begins():
    """Cleared after forward: the step recorded on unfreezing begins without those gradients, all later ones with."""
    torch.manual_seed(0)
    model = make(blocks=4)
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    handle = autoac.auto(model, ENOUGH, measure=True)
    for seed in range(7):
        if seed == 3:
            late = [parameter for block in model.blocks[:3] for parameter in block.parameters()]
            for parameter in late:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": late})
        x, y = batch(seed)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert handle.plan is not None
    assert handle.measured_peak_bytes == pytest.approx(handle.plan.predicted_peak_bytes, rel=1e-3)
    handle.remove()


def test_a_new_optimizer_for_each_epoch_is_counted_as_the_one_before():
    """It is planned for: no step is recorded again, and there is nothing to warn of."""
    torch.manual_seed(0)
    model = make()
    handle = autoac.auto(model, ENOUGH)
    plans = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stepped for the first time.*")
        for epoch in range(5):
            optimizer = adam(model)
            for seed in range(3):
                train(model, optimizer, 3 * epoch + seed)
            plans.append(handle.plan)
    assert plans[0] is not None
    assert all(plan is plans[0] for plan in plans)


def test_a_new_optimizer_that_keeps_more_is_counted_anew():
    model = make()
    handle = autoac.auto(model, ENOUGH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        train(model, optimizer, seed)
    before = handle.plan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        train(model, optimizer, seed)
    assert before is not None
    assert handle.plan is not None
    momenta = sum(parameter.nbytes for parameter in model.parameters())
    assert handle.plan.resident_bytes == before.resident_bytes + momenta


def test_another_modules_forward_before_the_call_that_ends_the_step():
    """Without an optimizer a step is over at the next call: by then an encoder's next forward has run within it."""
    ends = []
    for budget in (None, ENOUGH):
        torch.manual_seed(0)
        model, encoder = make(), torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        handle = None if budget is None else autoac.auto(model, budget)
        for seed in range(4):
            x, y = batch(seed)
            F.cross_entropy(model(encoder(x)), y).backward()
            parameters = (*model.parameters(), *encoder.parameters())
            ends.append([parameter.grad for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None
    assert handle is not None
    assert handle.plan is not None
    handle.remove()
    for ours, others in zip(ends[4:], ends[:4], strict=True):
        assert all(map(torch.equal, ours, others))


def test_gradients_of_inputs_are_a_part_of_the_first_step():
    """Adversarial examples: until an optimizer steps, nothing but the missing gradients tells."""

    def trained(budget: int | None) -> tuple[Blocks, autoac.Auto | None]:
        torch.manual_seed(0)
        model = make(dropout=0.0)
        handle = None if budget is None else autoac.auto(model, budget, measure=True)
        optimizer = adam(model)
        for seed in range(4):
            x, y = batch(seed, 4 * BATCH)
            for _ in range(3):
                x.requires_grad_()
                [slope] = torch.autograd.grad(F.cross_entropy(model(x), y), x)
                x = x.detach() + 0.01 * slope.sign()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, handle

    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        trained(1000)
    model, handle = trained(error.value.minimum_bytes)
    plain, _ = trained(None)
    assert handle is not None
    assert handle.plan is not None
    assert sum(not call.fqn for call in handle.plan.record.profile.calls) == 4
    assert handle.measured_peak_bytes == handle.plan.predicted_peak_bytes == error.value.minimum_bytes
    for ours, others in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, others)


def mlp(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, width), torch.nn.GELU(), torch.nn.Linear(width, WIDTH))


def test_the_only_module_with_a_plan_is_replaced():
    model = torch.nn.Sequential(mlp(8 * WIDTH), mlp(8 * WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    autoac.auto(model, 1000, regions=["0"])
    step()
    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        step()
    handle = autoac.auto(model, error.value.minimum_bytes, regions=["0"])
    for index in range(6):
        if index == 3:
            assert handle.plan is not None
            assert [region.fqn for region in handle.plan.regions if region.wrapped] == ["0"]
            model[0] = mlp(4 * WIDTH)
        step()
    assert handle.plan is not None
    handle.remove()
    profile = autoac.profile(model, x)
    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        autoac.solve(profile, 1000, regions=["0"])
    plan = autoac.solve(profile, error.value.minimum_bytes, regions=["0"])
    plan.apply(model)
    model[0] = mlp(WIDTH)
    plan.remove(model)
    assert "forward" not in vars(model[0])
    with pytest.raises(autoac.PlanMismatchError, match="nothing to remove"):
        plan.remove(model)


class SetUpByData(torch.nn.Module):
    """Sets its scale by its first input, as the layers of normalizing flows do."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.shift, self.scale = (torch.nn.Parameter(torch.zeros(1, WIDTH)) for _ in range(2))
        if reads:  # as codebooks that are initialised by k-means do
            self.register_buffer("is_set_up", torch.tensor(False))
        else:
            self.is_set_up = False
        self.mlp = mlp(4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set_up:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0, keepdim=True))
                self.scale.copy_(-torch.log(x.std(0, keepdim=True) + 1e-6))
            self.is_set_up |= True
        x = (x + self.shift) * self.scale.exp()
        return x + self.mlp(x)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_what_the_first_step_alone_sets_up_is_not_planned_for(engine: Any, reads: bool):
    peak = 0

    def trained(budget: int | None) -> tuple[torch.nn.Module, autoac.Auto | None]:
        nonlocal peak
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(SetUpByData(reads) for _ in range(4)), torch.nn.Linear(WIDTH, WIDTH))
        handle = None if budget is None else autoac.auto(model, budget, engine=engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for seed in range(7):
            x, y = batch(seed, 8 * BATCH)
            measured = measure_peak(lambda x=x, y=y: F.cross_entropy(model(x), y).backward())
            peak = measured.peak_above_start_bytes
            optimizer.step()
            optimizer.zero_grad()
        return model, handle

    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        trained(1000)
    model, handle = trained(error.value.minimum_bytes)
    assert handle is not None
    assert handle.plan is not None
    assert not any(op.name == "aten.copy_.default" for op in handle.plan.record.profile.tape)
    assert handle.plan.resident_bytes + peak == handle.plan.predicted_peak_bytes <= error.value.minimum_bytes
    plain, _ = trained(None)
    for ours, others in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, others)


class Codebook(torch.nn.Module):
    """Trained by averages, not by gradients, so it has no parameters."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.codes[torch.cdist(x.detach(), self.codes).argmin(1)]
        return x.sigmoid() * (codes - x).square()


class Quantized(torch.nn.Module):
    """As a residual vector quantizer, of which a drawn number of codebooks is used."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp(4 * WIDTH)
        self.codebooks = torch.nn.ModuleList(Codebook() for _ in range(3))
        self.used = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mlp(x)
        for codebook in list(self.codebooks)[: self.used]:
            x = x + codebook(x)
        return x


def test_modules_without_parameters_that_later_steps_call():
    torch.manual_seed(0)
    model = Quantized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = autoac.auto(model, ENOUGH, engine="replay")
    peak_bytes = 0
    for used in (1, 1, 3, 3, 3):
        model.used = used
        x, _ = batch(used, 8 * BATCH)
        peak_bytes = measure_peak(lambda x=x: model(x).square().mean().backward()).peak_above_start_bytes
        optimizer.step()
        optimizer.zero_grad()
    plan = handle.plan
    assert plan is not None
    handle.remove()
    assert {call.fqn for call in plan.record.profile.calls} >= {f"codebooks.{i}" for i in range(3)}
    assert plan.resident_bytes + peak_bytes == plan.predicted_peak_bytes


class Keeping(torch.nn.Module):
    """Keeps its last output in an attribute, in a dictionary or by itself."""

    def __init__(self, in_dictionary: bool) -> None:
        super().__init__()
        self.mlp = mlp(4 * WIDTH)
        self.in_dictionary = in_dictionary
        self.kept: Any = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(x)
        if self.in_dictionary:
            self.kept["last"] = y
        else:
            self.kept = y
        return x + y


@pytest.mark.parametrize("in_dictionary", [True, False])
def test_what_modules_keep_until_their_next_call_counts_once(in_dictionary: bool):
    blocks = [Keeping(in_dictionary) for _ in range(4)]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = autoac.auto(model, ENOUGH, measure=True)
    for seed in range(4):
        loss = model(batch(seed, 8 * BATCH)[0]).square().mean()
        for block in blocks:
            loss = loss + (block.kept["last"] if in_dictionary else block.kept).square().mean()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    assert handle.plan is not None
    assert handle.measured_peak_bytes == handle.plan.predicted_peak_bytes


class Taught(torch.nn.Module):
    """Has its teacher in it, which the optimizer is given as well, and a layer that is used later."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))) for _ in "st"
        )
        self.unused = torch.nn.Linear(64, 64)
        self.uses_all = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        if self.uses_all:
            x = F.linear(x, self.unused.weight, self.unused.bias)
        return (self.student(x) - taught).square().mean()


def test_parameters_without_gradients_have_no_state_until_they_get_some(caplog: pytest.LogCaptureFixture):
    model = Taught()
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(8, 64)
    handle = autoac.auto(model, ENOUGH)

    def step() -> int:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert handle.plan is not None
        return sum(row.bytes for row in handle.plan.record.profile.storage_table if row.kind == "Optstate")

    def state_bytes() -> int:
        return unique_storage_bytes(v for entry in optimizer.state.values() for v in entry.values())

    found = [step() for _ in range(3)]
    assert found[-1] == state_bytes() == 3 * (2 * (64 * 64 + 64) * 4 + 2 * 4)
    model.uses_all = True
    with caplog.at_level("INFO", "autoac"):
        for _ in range(3):
            step()
    assert "or trained more parameters: recording this step" in caplog.text
    assert step() == state_bytes() > found[-1]


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [head(x) for head in self.heads]


def test_heads_whose_losses_take_turns_have_state_from_the_start():
    model = Heads()
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(8, 64)
    handle = autoac.auto(model, ENOUGH)
    plans = []
    for index in range(6):
        model(x)[index % 2].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(handle.plan)
    assert plans[1] is not None
    state = sum(row.bytes for row in plans[1].record.profile.storage_table if row.kind == "Optstate")
    assert state == unique_storage_bytes(v for entry in optimizer.state.values() for v in entry.values())


class Chosen(torch.nn.Module):
    """Reads the rows that it is told to, and no more of the other indices than their number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block(0.0) for _ in range(6)))

    def forward(self, x: torch.Tensor, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return self.blocks(x[rows]).square().mean() + 0 * others.sum()


def test_a_step_with_more_elements_that_takes_less_leaves_the_plan():
    """As in I-JEPA: fewer tokens of context, and more targets."""

    def run(budget: int) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        model = Chosen()
        handle = autoac.auto(model, budget, on_larger="replan", measure=True)
        optimizer, plans = torch.optim.SGD(model.parameters(), lr=0.01), []
        for index in range(12):
            rows, others = (32, 2000) if index in (4, 8) else (128, 10)
            data = torch.randn(128, WIDTH), torch.arange(rows), torch.ones(others)
            model(*data).backward()
            optimizer.step()
            optimizer.zero_grad()
            plans.append(handle.plan)
        return handle, plans

    _, plans = run(ENOUGH)
    budget = int(0.8 * plans[-1].predicted_peak_bytes)
    handle, plans = run(budget)
    assert all(plan is plans[2] for plan in plans[2:])
    assert handle.measured_peak_bytes <= budget
