"""`autoac.auto` in loops as people write them: nothing of training changes, and peaks are to the byte as predicted."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from autoac.automatic import Auto
from autoac.automatic.measured import StepPeak
from autoac.execute.attach import Root
from autoac.measure import measure_peak
from autoac.torch_private import is_profiled, top_dispatch_mode
from tests.small_models import BATCH, WIDTH, Blocks, make

pytestmark = pytest.mark.usefixtures("one_thread")

ENOUGH = 10**9
Step = Callable[[Blocks, Any, torch.Tensor, torch.Tensor], None]


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        yield x, torch.randint(0, WIDTH, (BATCH,), generator=generator)


def bare(model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulating(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.cross_entropy(model(part), target) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def clearing_late(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def clearing_to_zeros(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def under_autocast(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def autocast_around_forward(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    F.cross_entropy(output.float(), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def autocast_around_all(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def autocast_uncached(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def with_closure(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


def by_hand(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


class Scaled:
    """A step with gradient scaling; infinite gradients skip the optimizer's step."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def __call__(self, model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


def two_views(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """As in R-Drop and contrastive losses: two calls before one backward."""
    one, other = model(x), model(x)
    (F.cross_entropy(one, y) + F.mse_loss(one, other)).backward()
    optimizer.step()
    optimizer.zero_grad()


class LoneCall:
    """A call of which nothing comes, before the third step of two views."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        self.steps += 1
        if self.steps == 3:
            model(x[:4])
        two_views(model, optimizer, x, y)


def perturbed(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """As in SAM: the gradients that count are those of perturbed weights."""
    F.cross_entropy(model(x), y).backward()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=0.05)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data = value
    del kept
    optimizer.step()
    optimizer.zero_grad()


def with_inner_gradient(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """As in MAML: the loss of weights after a step that is differentiated, too."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    inner = torch.autograd.grad(F.cross_entropy(model(x), y), parameters, create_graph=True)
    fast = {n: p - 0.1 * g for n, p, g in zip(names, parameters, inner, strict=True)}
    F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_computed_weights(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """The model does not hold its parameters while it is called."""
    computed = {name: parameter * 0.9 for name, parameter in model.named_parameters()}
    F.cross_entropy(torch.func.functional_call(model, computed, (x,)), y).backward()
    del computed
    optimizer.step()
    optimizer.zero_grad()


def with_a_forward_for_the_step(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """As sentence-transformers' losses look at layers: a forward is put on a module, and taken off before backward."""
    block, calls = model.blocks[0], []
    original = block.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        assert len(calls) == 1
        return original(*args, **kwargs)

    block.forward = noting
    try:
        loss = F.cross_entropy(model(x), y)
    finally:
        block.forward = original
    assert calls
    calls.clear()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def with_a_compiled_optimizer(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the compiler's own
        torch.compile(optimizer.step, backend="eager")()
    optimizer.zero_grad()


LOOPS: dict[str, Callable[[], Step]] = {
    "bare": lambda: bare,
    "accumulating": lambda: accumulating,
    "clearing late": lambda: clearing_late,
    "clearing to zeros": lambda: clearing_to_zeros,
    "under autocast": lambda: under_autocast,
    "autocast around forward": lambda: autocast_around_forward,
    "autocast around all": lambda: autocast_around_all,
    "autocast uncached": lambda: autocast_uncached,
    "closure": lambda: with_closure,
    "by hand": lambda: by_hand,
    "scaled": Scaled,
    "two views": lambda: two_views,
    "two views and a lone call": LoneCall,
    "perturbed weights": lambda: perturbed,
    "computed weights": lambda: with_computed_weights,
    "compiled optimizer": lambda: with_a_compiled_optimizer,
    "a forward for the step": lambda: with_a_forward_for_the_step,
}


class Run:
    """A loop of a few steps from always the same start."""

    def __init__(self, step: Step, budget: int | str | None, steps: int = 5, **options: Any) -> None:
        self.model = make(blocks=6).train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.handle: Auto | None = None
        if budget is not None:
            self.handle = autoac.auto(self.model, budget, **options)
        self.peaks: list[int] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            for n, (x, y) in enumerate(batches(steps)):
                if budget is not None and n == steps - 1:
                    measured = measure_peak(lambda x=x, y=y: step(self.model, optimizer, x, y))
                    self.peaks.append(measured.peak_above_start_bytes)
                else:
                    step(self.model, optimizer, x, y)
            self.random_state = torch.get_rng_state()

    @property
    def plan(self) -> autoac.Plan:
        assert self.handle is not None
        assert self.handle.plan is not None
        return self.handle.plan

    @property
    def measured_peak_bytes(self) -> int:
        return self.plan.resident_bytes + self.peaks[-1]

    def assert_trained_as(self, other: Run) -> None:
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[name]), name
        assert torch.equal(self.random_state, other.random_state)


def budget_of(plan: autoac.Plan, share: float) -> int:
    """Between what is there before the step and the peak without a plan."""
    return int(plan.resident_bytes + share * (plan.record.unplanned_peak_bytes - plan.resident_bytes))


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_trains_as_without_and_keeps_to_its_budget(loop: str):
    without = Run(LOOPS[loop](), None)
    ample = Run(LOOPS[loop](), ENOUGH)
    ample.assert_trained_as(without)
    budget = budget_of(ample.plan, 0.85)
    tight = Run(LOOPS[loop](), budget)
    tight.assert_trained_as(without)
    assert not tight.plan.is_not_followed
    assert any(region.wrapped for region in tight.plan.regions)
    n_bytes = sum(p.nbytes for p in tight.model.parameters())
    # The measured step begins with gradients, which die before forward, or it makes weights that were there before.
    aside = {"closure": n_bytes, "computed weights": -n_bytes}.get(loop, 0)
    assert tight.measured_peak_bytes + aside <= budget
    assert tight.measured_peak_bytes + aside == pytest.approx(tight.plan.predicted_peak_bytes, rel=1e-3)


def test_autocast_around_the_whole_loop_is_warned_of_and_keeps_to_its_budget():
    """Torch keeps the casts of the first step, and backward reaches their nodes last."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        without = Run(bare, None)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.warns(UserWarning, match="autocast was not left since an earlier"),
    ):
        ample = Run(bare, ENOUGH)
    budget = budget_of(ample.plan, 0.7)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.warns(UserWarning, match="Enter torch.autocast anew after each"),
    ):
        tight = Run(bare, budget)
    tight.assert_trained_as(without)
    assert any(region.wrapped for region in tight.plan.regions)
    assert tight.measured_peak_bytes == tight.plan.predicted_peak_bytes <= budget


def test_output_that_the_loop_still_holds_is_counted():
    held: dict[str, torch.Tensor] = {}

    def holding(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        output = model(x)
        held["last"] = output
        F.cross_entropy(output, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = Run(holding, ENOUGH)
    assert run.plan.resident_bytes - Run(bare, ENOUGH).plan.resident_bytes == held["last"].nbytes
    assert run.measured_peak_bytes == run.plan.predicted_peak_bytes


def test_an_output_in_a_list_is_there_until_backward_is_over():
    """A loop that collects outputs drops old ones when it is done with a step."""
    held: list[torch.Tensor] = []

    def collecting(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        output = model(x)
        held.append(output.detach())
        F.cross_entropy(output, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        del held[:-1]

    run = Run(collecting, ENOUGH)
    assert run.plan.resident_bytes - Run(bare, ENOUGH).plan.resident_bytes == held[0].nbytes
    assert run.measured_peak_bytes == run.plan.predicted_peak_bytes


class Several(torch.nn.Module):
    """Its result is a list or a tuple."""

    def __init__(self, kind: Callable[[list[torch.Tensor]], Any]) -> None:
        super().__init__()
        self.net, self.kind = make(dropout=0.0), kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind([self.net(x), x.sin()])


class Unmeasured(tuple[Any, ...]):
    """As e3nn's `Irreps`: a tuple that has no length."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_without_a_length_in_the_model_and_in_the_loop():
    kinds = Unmeasured((1, 2))

    def step(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        model.kinds = mine = kinds  # type: ignore[assignment]
        bare(model, optimizer, x, y)
        assert mine is model.kinds

    run = Run(step, ENOUGH)
    assert run.measured_peak_bytes == run.plan.predicted_peak_bytes


def test_a_list_that_the_model_returns_is_replaced_by_its_next_result():
    predicted = []
    for kind in (list, tuple):
        torch.manual_seed(0)
        model = Several(kind).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = autoac.auto(model, ENOUGH, optimizer=optimizer)
        for x, y in batches(2):
            outputs = model(x)
            F.cross_entropy(outputs[0], y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handle.plan is not None
        predicted.append(
            [(s.alloc, s.free) for s in handle.plan.record.profile.storage_table if s.alloc == 0]
        )
        handle.remove()
    assert predicted[0] == predicted[1]
    assert len(predicted[0]) >= 2


def test_results_that_are_replaced_after_the_whole_step_are_counted():
    """As by `loss, output = train_step(batch)`: the earlier output is alive in backward, too."""
    results: dict[str, Any] = {}

    def train_step(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, output

    def returning(*args: Any) -> None:
        results["last"] = train_step(*args)

    run = Run(returning, ENOUGH)
    assert run.measured_peak_bytes == run.plan.predicted_peak_bytes


def test_two_calls_of_a_step_are_measured_and_planned_for_together():
    handle = Run(two_views, ENOUGH, measure=True).handle
    assert handle is not None
    assert handle.plan is not None
    assert handle.measured_peak_bytes == handle.plan.predicted_peak_bytes


def test_a_larger_second_call_of_a_step_is_planned_for_with_the_first():
    model = make(dropout=0.0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, ENOUGH, on_larger="replan")
    for number, size in enumerate((16, 16, 32, 32, 32)):
        short = model(torch.randn(8, WIDTH))
        with pytest.warns(UserWarning, match="next step is") if number == 2 else contextlib.nullcontext():
            long = model(torch.randn(size, WIDTH))
        (short.mean() + long.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.plan is not None
    assert sum(call.fqn == "" for call in handle.plan.record.profile.calls) == 2
    handle.remove()


def test_an_inner_gradient_ends_no_step():
    run = Run(with_inner_gradient, ENOUGH, steps=4)
    assert sum(call.fqn == "" for call in run.plan.record.profile.calls) == 2
    assert run.measured_peak_bytes == pytest.approx(run.plan.predicted_peak_bytes, rel=1e-3)
    run.assert_trained_as(Run(with_inner_gradient, None, steps=4))


def test_what_a_loop_has_from_locals_stays_as_it_was():
    def main(budget: int) -> None:
        config = locals()
        model = make()
        handle = autoac.auto(model, budget, measure=True)
        for x, y in batches(3):
            output = model(x)
            F.cross_entropy(output, y).backward()
            model.zero_grad()
        assert set(config) == {"budget"}
        assert handle.measured_peak_bytes is not None
        assert handle.plan is not None
        assert handle.measured_peak_bytes <= handle.plan.predicted_peak_bytes

    main(ENOUGH)


def test_what_the_loop_keeps_of_the_output_is_no_batch_of_a_loader():
    """As large as the batch, which dies in the step; a loader that is one batch ahead leaves such a storage, too."""
    held: list[torch.Tensor] = []

    def keeping(model: Blocks, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        box = [x.clone()]

        def loss() -> torch.Tensor:
            given = box.pop()
            output = model(given)
            held[:] = [output.detach() - 1]
            return F.cross_entropy(output, y)

        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = Run(keeping, ENOUGH)
    assert run.plan.resident_bytes - Run(bare, ENOUGH).plan.resident_bytes >= held[0].nbytes


def test_bad_arguments_are_refused_at_once(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        autoac.auto(make(), ENOUGH, path=tmp_path / "nowhere" / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.txt.*has to end in \.json"):
        autoac.auto(make(), ENOUGH, path=tmp_path / "plan.txt")
    with pytest.raises(autoac.ProfilingError, match="str"):
        autoac.auto("model", ENOUGH)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"budget_of='reserved' is for CUDA"):
        autoac.auto(make(), ENOUGH, budget_of="reserved")


def test_nothing_runs_before_the_first_step():
    model = make().eval()
    handle = autoac.auto(model, ENOUGH)
    assert handle.plan is None
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    model(torch.randn(4, WIDTH))  # not in train mode
    assert handle.plan is None
    assert "waiting" in repr(handle)


def test_plan_is_there_after_the_first_step():
    run = Run(bare, ENOUGH, steps=1)
    assert run.plan.predicted_peak_bytes == Run(bare, ENOUGH).plan.predicted_peak_bytes


def test_remove_leaves_the_model_as_it_was():
    model = make().train()
    before = dict(model.__dict__)
    handle = autoac.auto(model, ENOUGH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(batches(1))
    for stop_after in ("call", "step", "planned step"):
        model(x) if stop_after == "call" else bare(model, optimizer, x, y)
    handle.remove()
    assert model.__dict__ == before
    assert all("forward" not in module.__dict__ for module in model.modules())
    bare(model, optimizer, x, y)


def test_removed_while_it_records():
    model = make().train()
    handle = autoac.auto(model, ENOUGH)
    output = model(next(batches(1))[0])
    handle.remove()
    assert top_dispatch_mode() is None
    output.sum().backward()


def test_a_model_that_is_called_in_backward_only_is_told():
    """As by losses that cache gradients."""
    model = make(blocks=2).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, ENOUGH)

    def step(x: torch.Tensor) -> None:
        with torch.no_grad():
            output = model(x).requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(output.square().mean(), output)
        loss = torch.zeros((), requires_grad=True)

        def again(_: torch.Tensor) -> None:
            with torch.enable_grad():
                model(x).backward(gradient)

        loss.register_hook(again)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    *_, (x, _) = batches(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):
            step(x)
    assert ["in backward only" in str(warning.message) for warning in told] == [True]
    assert handle.plan is None


def test_gradients_by_torch_func_are_refused_with_advice():
    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make(blocks=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).mean() * torch.func.grad(torch.cos)(x[0, 0].detach())

    model = Weighted().train()
    handle = autoac.auto(model, ENOUGH)
    with pytest.raises(autoac.ProfilingError, match=r"torch\.func .*torch\.autograd\.grad"):
        model(torch.randn(BATCH, WIDTH))
    handle.remove()
    model(torch.randn(BATCH, WIDTH)).backward()


def test_failed_step_is_not_recorded():
    model = make().train()
    handle = autoac.auto(model, ENOUGH)
    with pytest.raises(RuntimeError):
        model(torch.randn(4, WIDTH + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(3):
        bare(model, optimizer, x, y)
    assert handle.plan is not None
    assert f"[{BATCH},{WIDTH}]" in handle.plan.record.profile.sample


def test_forward_without_backward_is_not_the_step():
    model = make().train()
    handle = autoac.auto(model, ENOUGH)
    model(torch.randn(4, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(3):
        bare(model, optimizer, x, y)
    assert handle.plan is not None
    assert len([call for call in handle.plan.record.profile.calls if call.fqn == ""]) == 1


def test_a_plan_that_came_on_over_a_forward_for_the_step_stays_on():
    model = make(blocks=4).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = Run(bare, ENOUGH).plan.record.profile
    handle = autoac.auto(model, (profile.least_peak_bytes + profile.peak_bytes) // 2, regions=["blocks.0"])
    for x, y in batches(3):
        with_a_forward_for_the_step(model, optimizer, x, y)
    plan = handle.plan
    assert plan is not None
    assert plan.placement.can_detach(model)
    assert "forward" in vars(model.blocks[0])
    handle.remove()
    assert model.blocks[0].forward == type(model.blocks[0]).forward.__get__(model.blocks[0])


def test_a_recurrent_state_counts_once():
    """It is an input of the next step, as the one that it replaces was of the recorded step."""
    torch.manual_seed(0)
    model = nn.LSTM(32, 64, num_layers=2).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, ENOUGH, measure=True)
    state = (torch.zeros(2, 16, 64), torch.zeros(2, 16, 64))
    for _ in range(4):
        output, state = model(torch.randn(12, 16, 32), state)
        output.square().mean().backward()
        del output
        state = tuple(one.detach() for one in state)
        optimizer.step()
        optimizer.zero_grad()
    plan = handle.plan
    assert plan is not None
    assert "left by the step before" not in {s.name for s in plan.record.profile.storage_table}
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= plan.predicted_peak_bytes


def test_memory_that_numpy_has_made_in_the_step_is_not_taken_for_older():
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.table = make(blocks=2), np.ones((BATCH, WIDTH), np.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * torch.from_numpy(self.table)[:1].clone()

    torch.manual_seed(0)
    model = Table().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, ENOUGH, measure=True)
    for x, _ in batches(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.plan is not None
    assert handle.measured_peak_bytes == handle.plan.predicted_peak_bytes


def test_impossible_budget_is_told_in_the_second_step_and_the_model_is_free():
    model = make().train()
    autoac.auto(model, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(batches(1))
    bare(model, optimizer, x, y)
    with pytest.raises(autoac.InfeasibleBudgetError):
        bare(model, optimizer, x, y)
    assert "forward" not in model.__dict__
    bare(model, optimizer, x, y)


def test_what_cannot_be_taken_off_does_not_hide_why_it_was_to_be(monkeypatch: pytest.MonkeyPatch):
    model = make().train()
    handle = autoac.auto(model, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(batches(1))
    bare(model, optimizer, x, y)

    def fails() -> None:
        raise autoac.PlanMismatchError("other code has replaced a forward")

    monkeypatch.setattr(handle, "_take_plan_off", fails)
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        bare(model, optimizer, x, y)
    assert caught.value.__notes__ == ["autoac: other code has replaced a forward"]
    assert "forward" not in model.__dict__


def larger(model: Blocks, optimizer: Any) -> None:
    bare(model, optimizer, torch.randn(2 * BATCH, WIDTH), torch.zeros(2 * BATCH, dtype=torch.int64))


def test_larger_batch_warns_once():
    run = Run(bare, ENOUGH, steps=2)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"float32\[128,16\].*made for float32\[64,16\].*on_larger='replan'"):
        larger(run.model, optimizer)
    larger(run.model, optimizer)


@pytest.mark.parametrize("on_larger", ["warn", "replan", "error"])
def test_longer_rows_warn_once(on_larger: Any):
    """No step is recorded for them: there may be as many elements in every batch of the loop."""
    run = Run(bare, ENOUGH, steps=2, on_larger=on_larger)
    plan = run.plan
    run.model.zero_grad(set_to_none=True)
    longer = torch.randn(2, BATCH // 2, WIDTH)
    with pytest.warns(UserWarning, match=r"float32\[2,32,16\].*made for float32\[64,16\].*but longer"):
        run.model(longer).mean().backward()
    run.model.zero_grad(set_to_none=True)
    run.model(longer).mean().backward()
    assert run.plan is plan


def micro_batches(model: Blocks, optimizer: Any, *sizes: int) -> None:
    """A step of several micro-batches."""
    for size in sizes:
        model(torch.randn(size, WIDTH)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_micro_batches_of_drawn_sizes_stay_within_the_budget(engine: Any):
    """In any order and number; the largest three times take what was predicted."""
    steps = [(64, 16, 32)] * 2 + [(16, 64), (64,), (32, 64, 16, 8), (16, 16, 16), (64, 64, 64)]

    def train(budget: int | None) -> tuple[Blocks, autoac.Auto | None, list[int]]:
        torch.manual_seed(0)
        model = make(blocks=4).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = budget and autoac.auto(model, budget, engine=engine)
        peaks = []
        for sizes in steps:
            measured = measure_peak(partial(micro_batches, model, optimizer, *sizes))
            peaks.append(measured.peak_above_start_bytes)
        return model, handle or None, peaks[2:]

    _, handle, _ = train(ENOUGH)
    assert handle is not None
    assert handle.plan is not None
    profile = handle.plan.record.profile
    assert profile.any_order
    assert profile.call_elements == (64 * WIDTH, 16 * WIDTH, 32 * WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, handle, peaks = train((2 * profile.least_peak_bytes + profile.peak_bytes) // 3)
    assert handle is not None
    plan = handle.plan
    assert plan is not None
    inputs = 64 * WIDTH * 4  # there before the recorded step, and made within the measured ones
    measured_bytes = plan.resident_bytes - inputs + max(peaks)
    bias_bytes = WIDTH * 4  # its gradient counts for one op longer than it lives
    assert 0 <= plan.predicted_peak_bytes - measured_bytes <= bias_bytes
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    unplanned, _, _ = train(None)
    assert all(map(torch.equal, model.parameters(), unplanned.parameters()))


def test_a_call_runs_under_the_decisions_for_the_smallest_that_is_no_smaller():
    root = Root({}, 1, (8, 4, 8, 2), False, None, "")
    places = {8: [0, 0, 2, 0], 4: [1] * 4, 2: [3] * 4, 1: [3] * 4, 3: [1] * 4, 9: [0] * 4}
    for elements, expected in places.items():
        assert [root.fitting(place, elements) for place in range(4)] == expected
    root = Root({}, 1, (8, 4, 8, 2), True, None, "")
    places = {8: [0, 0, 2, 0], 4: [1] * 4, 2: [3] * 4, 3: [0, 1, 2, 3], 9: [0, 1, 2, 3]}
    for elements, expected in places.items():
        assert [root.fitting(place, elements) for place in range(4)] == expected


def both_then_backward(model: Blocks, optimizer: Any, *sizes: int) -> None:
    """A step whose calls are all alive at once."""
    sum(model(torch.randn(size, WIDTH)).mean() for size in sizes).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def test_calls_before_one_backward_are_planned_for_in_their_order():
    model = make(blocks=4).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, ENOUGH, on_larger="replan")
    for _ in range(2):
        both_then_backward(model, optimizer, 64, 16)
    plan = handle.plan
    assert plan is not None
    assert not plan.record.profile.any_order
    assert any("calls of different sizes in the step" in note for note in plan.notes)
    both_then_backward(model, optimizer, 32, 8)
    with pytest.warns(UserWarning, match=r"call 2 of this step is with float32\[64,16\].*it had 256"):
        both_then_backward(model, optimizer, 16, 64)
    both_then_backward(model, optimizer, 16, 64)
    assert handle.plan is plan
    handle.remove()
    handle = autoac.auto(model, ENOUGH, on_larger="error")
    for _ in range(2):
        both_then_backward(model, optimizer, 16, 64)
    with pytest.raises(ValueError, match="The call was not run"):
        both_then_backward(model, optimizer, 64, 16)
    handle.remove()


def test_a_larger_call_before_one_backward_keeps_the_decisions_of_its_place():
    """The call that goes backward first saves the most, and is no model for the others."""
    model = make(blocks=4).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(66, WIDTH)

    def step(*sizes: int) -> None:
        sum(model(x[:size]).mean() for size in sizes).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    handle = autoac.auto(model, ENOUGH)
    for _ in range(2):
        step(32, 64)
    assert handle.plan is not None
    profile = handle.plan.record.profile
    handle.remove()
    with autoac.solve(profile, profile.least_peak_bytes).applied(model) as planned:
        step(32, 64)
        as_planned, larger = (measure_peak(partial(step, n, 64)).peak_above_start_bytes for n in (32, 33))
        assert larger < 1.05 * as_planned
        assert planned is model


def test_recording_for_larger_later_micro_batches_ends():
    """Where they come at growing distances, so that none is recorded."""
    model = make(blocks=2).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    handle = autoac.auto(model, ENOUGH, on_larger="replan")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for distance in range(2, 9):
            for _ in range(distance):
                micro_batches(model, optimizer, 16, 16)
            micro_batches(model, optimizer, 16, 64)
    words = [str(warning.message) for warning in told]
    assert len(words) == 2
    assert "the next step is recorded for that" in words[0]
    assert "no more are recorded" in words[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = handle.plan
        micro_batches(model, optimizer, 16, 16)
        assert handle.plan is plan
    handle.remove()


@pytest.mark.filterwarnings("ignore:the model is called with float32.64,16., and its plan was made for")
def test_a_larger_micro_batch_in_every_third_step_is_planned_for():
    """The step after the first one is recorded, and then the one that is due."""
    model = make(blocks=2).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, ENOUGH, on_larger="replan")
    plans = []
    for step in range(14):
        micro_batches(model, optimizer, 16, 64 if step % 3 == 2 else 16)
        plans.append(handle.plan)
    assert plans[4] is not None
    assert plans[4].record.profile.call_elements == (16 * 16, 16 * 16)
    assert plans[-1] is not None
    assert plans[-1].record.profile.call_elements == (16 * 16, 64 * 16)
    handle.remove()


def test_equal_micro_batches_have_no_places():
    run = Run(accumulating, ENOUGH, steps=2)
    assert not any("calls of different sizes" in note for note in run.plan.record.profile.notes)
    assert not run.plan.record.profile.any_order


def test_larger_batch_is_an_error_before_it_runs():
    run = Run(bare, ENOUGH, steps=2, on_larger="error")
    seen = run.model.seen.clone()
    with pytest.raises(ValueError, match="Nothing was run"):
        larger(run.model, torch.optim.SGD(run.model.parameters(), lr=0.1))
    assert torch.equal(run.model.seen, seen)


def test_workspaces_of_cublas_are_added_to_the_first_recorded_step_only(monkeypatch: pytest.MonkeyPatch):
    """Later ones begin with them, on a GPU; here is none, so only a note tells."""
    noting = lambda profile, _: replace(profile, notes=(*profile.notes, "workspaces"))  # noqa: E731
    monkeypatch.setattr(autoac.automatic.recording, "with_workspaces", noting)
    run = Run(bare, ENOUGH, steps=2, on_larger="replan")
    assert "workspaces" in run.plan.record.profile.notes
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    larger(run.model, optimizer)
    larger(run.model, optimizer)
    assert "[128,16]" in run.plan.record.profile.sample
    assert "workspaces" not in run.plan.record.profile.notes


def test_larger_batch_is_planned_for_and_measured():
    run = Run(bare, ENOUGH, steps=2, on_larger="replan", measure=True)
    assert run.handle is not None
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    first = run.plan
    larger(run.model, optimizer)
    larger(run.model, optimizer)
    assert "[128,16]" in run.plan.record.profile.sample
    assert run.handle.measured_plan is run.plan
    assert run.handle.measured_peak_bytes == run.plan.predicted_peak_bytes > first.predicted_peak_bytes


def test_saved_plan_is_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "plan.json"
    first = Run(bare, ENOUGH, steps=2, path=path)
    budget = budget_of(first.plan, 0.85)
    with caplog.at_level(logging.INFO, "autoac"):
        tight = Run(bare, budget, path=path)
        assert "planning anew" in caplog.text
        caplog.clear()
        again = Run(bare, budget, path=path)
    assert "took up" in caplog.text
    assert len(caplog.records) == 1
    assert again.plan.predicted_peak_bytes == tight.plan.predicted_peak_bytes
    again.assert_trained_as(Run(bare, None))


def test_saved_plan_is_for_the_arguments_that_it_was_made_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "plan.json"
    budget = budget_of(Run(bare, ENOUGH, steps=2).plan, 0.9)
    policies = [autoac.Policy("PREFER_SAVE", op="aten.addmm*")]
    arguments = {}, {"regions": ["blocks.0", "blocks.1"]}, {"policies": policies}, {"headroom": 10}
    for options in arguments:
        caplog.clear()
        with caplog.at_level(logging.INFO, "autoac"):
            Run(bare, budget, steps=2, path=path, **options)
            assert ("planning anew" in caplog.text) == bool(options)
            caplog.clear()
            Run(bare, budget, steps=1, path=path, **options)
        assert "took up" in caplog.text
    again = Run(bare, budget, steps=2, path=path, verify=True, **arguments[-1])
    assert again.handle is not None
    assert again.handle.report.ok, again.handle.report


def test_verified_plan_and_measured_peak():
    run = Run(bare, budget_of(Run(bare, ENOUGH, steps=2).plan, 0.85), verify=True, steps=4)
    assert run.handle is not None
    assert run.handle.report.ok, run.handle.report
    assert run.handle.measured_peak_bytes == run.plan.predicted_peak_bytes
    run.assert_trained_as(Run(bare, None, steps=4))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_compiled_modules_are_measured_and_planned_again_with_room(monkeypatch: pytest.MonkeyPatch):
    """Under sac; what the compiler takes beyond the ops is made up here, for aot_eager takes as much as these."""
    more = [60_000, 0]
    end = StepPeak.end

    def with_more(self: StepPeak) -> int | None:
        found = end(self)
        return None if found is None else found + more.pop(0)

    profile = Run(bare, ENOUGH).plan.record.profile
    least_bytes = autoac.solve(profile, ENOUGH, engine="sac").predicted_peak_bytes
    monkeypatch.setattr(StepPeak, "end", with_more)
    model = make(blocks=6).train()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = autoac.auto(model, int(0.9 * least_bytes))
    plans = []
    for x, y in batches(8):
        bare(model, optimizer, x, y)
        plans.append(handle.plan)
    torch._dynamo.reset()
    first, last = plans[1], plans[-1]
    assert first is not None
    assert last is not None
    assert last.engine == "sac"
    assert not more
    assert last.predicted_peak_bytes < first.predicted_peak_bytes - 20_000


def test_peak_without_an_optimizer_is_that_of_one_step():
    handle = autoac.auto(model := make().train(), ENOUGH, measure=True)
    for x, y in batches(2):
        by_hand(model, None, x, y)
        assert handle.measured_peak_bytes is None
    by_hand(model, None, *next(batches(1)))
    assert not is_profiled()
    assert handle.plan is not None
    assert handle.measured_peak_bytes == handle.plan.predicted_peak_bytes


def test_measuring_ends_with_the_handle():
    peak = StepPeak(make(), wanted=True)
    peak.begin()
    assert is_profiled()
    del peak
    assert not is_profiled()


def test_copy_of_the_model_trains_by_itself():
    run = Run(bare, ENOUGH, steps=1)
    other = copy.deepcopy(run.model)
    x, y = next(batches(1))
    bare(other, torch.optim.SGD(other.parameters(), lr=0.1), x, y)
    assert other.blocks[0].up.weight is not run.model.blocks[0].up.weight


def test_under_saved_tensor_hooks_nothing_is_recorded():
    model = make().train()
    handle = autoac.auto(model, ENOUGH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(batches(1))
    with pytest.warns(UserWarning, match="saved-tensor hooks"), torch.autograd.graph.save_on_cpu():
        bare(model, optimizer, x, y)
    assert handle.plan is None
    bare(model, optimizer, x, y)
    assert handle.plan is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_default_types(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        models = []
        for planned in (False, True):
            torch.manual_seed(1)
            model = Blocks(blocks=4).train()
            handle = autoac.auto(model, ENOUGH) if planned else None
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for x, y in batches(4):
                bare(model, optimizer, x.to(dtype), y)
            models.append(model)
        assert handle is not None
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        x, y = next(batches(1))
        x = x.to(dtype)
        measured = measure_peak(lambda: bare(models[1], optimizer, x, y))
        plan = handle.plan
        assert plan is not None
        predicted = plan.predicted_peak_bytes
        assert plan.resident_bytes + measured.peak_above_start_bytes == pytest.approx(predicted, rel=1e-3)
    finally:
        torch.set_default_dtype(before)


def test_arguments_are_refused_at_once():
    model = make()
    with pytest.raises(ValueError, match="on_larger"):
        autoac.auto(model, ENOUGH, on_larger="stop")  # type: ignore[arg-type]
    with pytest.raises(autoac.ProfilingError, match="a ModuleList is not called as a whole"):
        autoac.auto(torch.nn.ModuleList([model]), ENOUGH)
    with pytest.raises(autoac.ProfilingError, match="no parameter of this model"):
        autoac.auto(model, ENOUGH, optimizer=torch.optim.SGD(make().parameters(), lr=1))
    handle = autoac.auto(model, ENOUGH)
    with pytest.raises(autoac.ProfilingError, match="on this model already"):
        autoac.auto(model, ENOUGH)
    handle.remove()
    model.compile(backend="eager")
    with pytest.raises(autoac.ProfilingError, match=r"compiled in place.* compiled = torch.compile\(model\)"):
        autoac.auto(model, ENOUGH)


def test_applied_plan_warns_of_a_larger_batch():
    model, x = make().train(), torch.randn(BATCH, WIDTH)
    profile = autoac.profile(model, x)
    assert profile.sample == f"float32[{BATCH},{WIDTH}]"
    ample = autoac.solve(profile, ENOUGH)
    plan = autoac.solve(profile, budget_of(ample, 0.85))
    assert "sample          float32[64,16]" in plan.explain()
    with plan.applied(model), contextlib.ExitStack() as stack:
        model(x)
        with pytest.warns(UserWarning, match=r"called with float32\[128,16\], and its plan was made for"):
            model(torch.cat([x, x]))
        stack.enter_context(torch.no_grad())
        model(torch.cat([x, x]))
    model(torch.cat([x, x]))
    assert not model._forward_pre_hooks


class Dropping(Blocks):
    """Skips a block now and then."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                x = block(x, scale)
        return self.head(x)


def dropping(
    budget: int | None, kind: type[Dropping] = Dropping, peaks: list[int] | None = None
) -> tuple[Dropping, Auto | None]:
    """The trained model, and the handle; `peaks` gets the peak of each step above its start."""
    torch.manual_seed(0)
    model = kind(blocks=5).train()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = None if budget is None else autoac.auto(model, budget)
    for x, y in batches(25):
        step = partial(with_own_loss if kind is DroppingWithLoss else bare, model, optimizer, x, y)
        if peaks is None:
            step()
        else:
            peaks.append(measure_peak(step).peak_above_start_bytes)
    return model, handle


class DroppingWithLoss(Dropping):
    """Its output is the loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y)


def with_own_loss(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    model(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_random_numbers_leave_out_is_planned_for(caplog: pytest.LogCaptureFixture):
    """The recorded step skips blocks by chance: one that calls all of them is run beside the loop's, and undone."""
    with caplog.at_level(logging.INFO, logger="autoac"):
        ample, handle = dropping(ENOUGH, DroppingWithLoss)
    assert handle is not None
    plan = handle.plan
    assert plan is not None
    assert sum("planning for one that calls all modules" in text for text in caplog.messages) == 1
    assert {f"blocks.{i}" for i in range(5)} <= {call.fqn for call in plan.record.profile.calls}
    full = plan.record.unplanned_peak_bytes
    peaks: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tight, tight_handle = dropping(
            int(plan.resident_bytes + 0.7 * (full - plan.resident_bytes)), DroppingWithLoss, peaks
        )
    assert tight_handle is not None
    tight_plan = tight_handle.plan
    assert tight_plan is not None
    assert any(region.wrapped for region in tight_plan.regions)
    planned = [tight_plan.resident_bytes + peak for peak in peaks[1:]]
    assert 0.95 * tight_plan.predicted_peak_bytes < max(planned) <= tight_plan.predicted_peak_bytes
    without, _ = dropping(None, DroppingWithLoss)
    for model in (ample, tight):
        assert all(map(torch.equal, model.state_dict().values(), without.state_dict().values()))
    handle.remove()
    tight_handle.remove()
    assert not any(module._forward_pre_hooks for module in [*ample.modules(), *tight.modules()])


def test_a_step_beside_the_loops_that_fails_does_not_end_training(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr("autoac.automatic.beside.profile", full)
    with pytest.warns(UserWarning, match="could not be recorded beside it .*no more"):
        model, handle = dropping(ENOUGH, DroppingWithLoss)
    assert handle is not None
    assert handle.plan is not None
    without, _ = dropping(None, DroppingWithLoss)
    assert all(map(torch.equal, model.state_dict().values(), without.state_dict().values()))
    handle.remove()


@pytest.mark.filterwarnings("ignore:the steps of this loop vary")
def test_no_step_is_run_beside_the_loops_on_a_graph_of_the_loop(caplog: pytest.LogCaptureFixture):
    """Its backward would run through the encoder that made the input."""

    def trained(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        encoder, model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), DroppingWithLoss(blocks=5).train()
        optimizer = torch.optim.SGD([*encoder.parameters(), *model.parameters()], lr=0.1)
        handle = autoac.auto(model, ENOUGH) if planned else None
        for x, y in batches(8):
            with_own_loss(model, optimizer, encoder(x), y)
        if handle is not None:
            assert handle.plan is not None
            handle.remove()
        return [*encoder.parameters(), *model.parameters()]

    with caplog.at_level(logging.INFO, logger="autoac"):
        assert all(map(torch.equal, trained(True), trained(False)))
    assert not any("planning for one that calls all modules" in text for text in caplog.messages)


class DroppingAtOnce(Dropping):
    """Its draws are one tensor, in which no number can be chosen."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block, kept in zip(self.blocks, torch.rand(len(self.blocks)) > 0.5, strict=True):
            if kept:
                x = block(x, scale)
        return self.head(x)


@pytest.mark.parametrize("kind", [Dropping, DroppingAtOnce])
def test_steps_that_call_other_modules_are_recorded_until_none_calls_more(
    kind: type[Dropping], caplog: pytest.LogCaptureFixture
):
    """Where the loop computes the loss, or draws all numbers at once, no step beside the loop's can stand for it."""
    with caplog.at_level(logging.INFO, logger="autoac"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, handle = dropping(ENOUGH, kind)
    assert handle is not None
    assert handle.plan is not None
    recorded = [record for record in caplog.messages if "which the recorded one had not" in record]
    assert 1 <= len(recorded) <= 2
    called = {call.fqn for call in handle.plan.record.profile.calls}
    missing = {f"blocks.{i}" for i in range(5)} - called
    assert sum("the steps of this loop vary" in str(one.message) for one in told) == bool(missing)
    handle.remove()


def test_a_forward_that_is_put_over_ours_later_is_left_alone():
    """As accelerate's `prepare` does, if it comes after `autoac.auto`."""

    def trained(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = make().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = autoac.auto(model, ENOUGH, optimizer=optimizer) if planned else None
        below = model.forward
        model.forward = lambda *args, **kwargs: below(*args, **kwargs)
        for x, y in batches(3):
            bare(model, optimizer, x, y)
        if handle is not None:
            assert handle.plan is not None
            handle.remove()
            assert model.forward(torch.randn(BATCH, WIDTH)).shape == (BATCH, WIDTH)
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, trained(False), trained(True)))


class Losing(torch.nn.Module):
    """Computes its loss, in which a plan replaces the cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = make(dropout=0.0), torch.nn.Linear(WIDTH, 512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


def test_under_a_forward_that_is_put_over_ours_the_step_is_the_same(caplog: pytest.LogCaptureFixture):
    """Recorded calls and the plan's forwards are below it: the first step under the plan has all of the plan."""

    def trained(budget: int | None) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model = Losing().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = None if budget is None else autoac.auto(model, budget, optimizer=optimizer, measure=True)
        below = model.forward

        def above(*args: Any, **kwargs: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return below(*args, **kwargs).float()

        model.forward = above
        for x, y in batches(6):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
        assert model.forward is above
        return [parameter.detach() for parameter in model.parameters()], handle

    weights, _ = trained(None)
    _, first = trained(10**12)
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        autoac.solve(first.measured_plan.record.profile, 1)
    with caplog.at_level("INFO", "autoac"):
        found, handle = trained(int(1.05 * least.value.minimum_bytes))
    assert all(map(torch.equal, weights, found))
    assert "" in {call.fqn for call in handle.measured_plan.record.profile.calls}
    assert any(region.wrapped for region in handle.measured_plan.regions)
    assert handle.measured_peak_bytes == handle.measured_plan.predicted_peak_bytes
    assert "recording this step" not in caplog.text


def test_what_is_put_aside_in_a_context_within_another_is_below_ours():
    model = make(dropout=0.0).train()
    handle = autoac.auto(model, ENOUGH)
    below = model.forward

    def above(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return below(x, scale)

    model.forward = above
    with handle._on_top.aside():
        assert "forward" not in vars(model)
        with handle._on_top.aside():
            pass
        assert model(torch.zeros(BATCH, WIDTH)).shape == (BATCH, WIDTH)
        assert above(torch.zeros(BATCH, WIDTH)).shape == (BATCH, WIDTH)
    assert model.forward is above
    assert model(torch.zeros(BATCH, WIDTH)).shape == (BATCH, WIDTH)
    del model.forward  # by other code
    handle.remove()
    assert model(torch.zeros(BATCH, WIDTH)).shape == (BATCH, WIDTH)


def test_one_first_step_without_gradients_is_not_measured():
    """Where later ones have none either, as with gradients that are views of DDP's buckets, the second is."""
    model = make(dropout=0.0)
    step = StepPeak(model, wanted=True, gradients=True)
    step.begin()
    assert not step.is_running
    step.begin()
    assert step.is_running
    assert step.end() == 0


def test_a_compiled_module_is_no_newcomer(caplog: pytest.LogCaptureFixture):
    """Its wrapper is called in each step, and what is recorded are the calls of the module in it."""
    torch.manual_seed(0)
    net: Any = torch.compile(make(), backend="eager")
    model = torch.nn.Sequential(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, ENOUGH)
    with caplog.at_level("INFO", "autoac"):
        for x, y in batches(4):
            bare(model, optimizer, x, y)
    assert handle.plan is not None
    assert "recording this step" not in caplog.text
    handle.remove()


def test_a_shallow_copy_runs_its_own_weights():
    torch.manual_seed(0)
    model = make(dropout=0.0).train()
    handle = autoac.auto(model, ENOUGH)
    other = copy.copy(model)
    other._modules = {name: copy.deepcopy(module) for name, module in model._modules.items()}
    for parameter in other.parameters():
        parameter.data.zero_()
    x = torch.randn(BATCH, WIDTH)
    assert not other(x).any()
    assert model(x).any()
    handle.remove()


# -- what changes while the loop runs ----------------------------------------------------------------------------------


class Teacher(torch.nn.Module):
    """Makes its teacher as a copy of the student when it is first called, as BYOL and mean teachers do."""

    def __init__(self) -> None:
        super().__init__()
        self.student = make(dropout=0.0)
        self.teacher: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.teacher is None:
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        return F.mse_loss(self.student(x), self.teacher(x + 0.1).detach())


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_copies_made_in_the_recorded_step_run_their_own_weights(engine: Any):
    def losses(planned: bool) -> list[float]:
        model = Teacher().train()
        optimizer = torch.optim.SGD(model.student.parameters(), lr=0.5)
        handle = autoac.auto(model, ENOUGH, engine=engine) if planned else None
        found = []
        for x, _ in batches(4):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if handle is not None:
            handle.remove()
        teacher = pickle.loads(pickle.dumps(model.teacher))
        assert teacher(torch.randn(BATCH, WIDTH)).shape == (BATCH, WIDTH)
        return found

    assert losses(True) == losses(False)


def test_an_optimizer_that_steps_later_is_counted():
    """As where gradient scaling skips the first steps."""
    model = make(dropout=0.0).train()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = autoac.auto(model, ENOUGH)
    states = []
    for number, (x, y) in enumerate(batches(6)):
        F.cross_entropy(model(x), y).backward()
        if number > 1:
            optimizer.step()
        optimizer.zero_grad()
        if handle.known_plan is not None:
            table = handle.known_plan.record.profile.storage_table
            states.append(sum(storage.bytes for storage in table if storage.kind == "Optstate"))
    handle.remove()
    size = sum(p.nbytes for p in model.parameters())
    assert states[0] == 0
    assert states[-1] >= 2 * size


def test_an_optimizer_that_is_dropped_takes_its_state_along():
    model, (x, y) = make(dropout=0.0).train(), next(batches(1))
    handle = autoac.auto(model, ENOUGH)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        bare(model, optimizer, x, y)
    dropped, optimizer = weakref.ref(optimizer), torch.optim.SGD(model.parameters(), lr=0.1)
    assert dropped() is None
    for _ in range(3):
        bare(model, optimizer, x, y)
    assert handle.plan is not None
    assert "Optstate" not in {
        storage.kind for storage in handle.plan.record.profile.storage_table if storage.bytes
    }
    handle.remove()


def test_a_step_that_begins_with_gradients_is_recorded():
    """As under Lightning, which clears them after the forward, but before it validates."""

    def predicted(loops: list[Step]) -> int:
        model = make(dropout=0.0).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = autoac.auto(model, ENOUGH)
        for loop, (x, y) in zip(loops, batches(len(loops)), strict=True):
            loop(model, optimizer, x, y)
        assert handle.plan is not None
        peak = handle.plan.predicted_peak_bytes
        handle.remove()
        return peak

    late = [clearing_late] * 4
    assert predicted([bare] * 3 + late) == predicted(late) > predicted([bare] * 3)


@pytest.mark.parametrize("later", ["frozen", "unfrozen"])
def test_other_parameters_are_trained(later: str):
    model = make(dropout=0.0).train()
    model.blocks[0].requires_grad_(later == "frozen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, ENOUGH)
    for number, (x, y) in enumerate(batches(6)):
        if number == 3:
            model.blocks[0].requires_grad_(later != "frozen")
        bare(model, optimizer, x, y)
    assert handle.plan is not None
    handle.plan.check(bare_model(model))  # it is for what is trained now
    handle.remove()


def bare_model(model: Blocks) -> Blocks:
    """The same one without a plan."""
    other = make(dropout=0.0).train()
    for own, parameter in zip(other.parameters(), model.parameters(), strict=True):
        own.requires_grad_(parameter.requires_grad)
    return other


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_more_micro_batches_than_recorded_keep_to_the_budget(engine: Any):
    def peaks(budget: int, counts: tuple[int, ...]) -> tuple[list[int], autoac.Plan]:
        model = make(blocks=4, dropout=0.0).train()
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(BATCH, WIDTH)
        handle = autoac.auto(model, budget, engine=engine)
        found = []
        for count in counts:

            def step(count: int = count) -> None:
                for _ in range(count):
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            taken = measure_peak(step) if len(found) else step()
            found.append(0 if taken is None else taken.peak_above_start_bytes)
        plan = handle.plan
        assert plan is not None
        handle.remove()
        return [plan.resident_bytes + peak for peak in found[2:]], plan

    _, ample = peaks(ENOUGH, (2, 2))
    found, plan = peaks(budget_of(ample, 0.8), (2, 2, 2, 4, 4))
    assert any(region.wrapped for region in plan.regions)
    assert max(found) <= plan.budget_bytes


@pytest.mark.parametrize("budget", [ENOUGH, 1.0])
def test_more_micro_batches_than_in_the_recorded_step_are_planned_for(budget: float):
    """As in loops that step where `step % n == 0`, so at the first batch already."""

    def trained(budget: int | None) -> tuple[Blocks, Auto | None, int]:
        model = make(dropout=0.0).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = None if budget is None else autoac.auto(model, budget)
        parts = list(batches(9))

        def step(last: int) -> None:
            for x, y in parts[max(0, last - 1) : last + 1]:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        for last in (0, 2, 4, 6):
            step(last)
        return model, handle, measure_peak(lambda: step(8)).peak_above_start_bytes

    without, _, _ = trained(None)
    if budget != ENOUGH:
        _, ample, _ = trained(ENOUGH)
        assert ample is not None
        assert ample.plan is not None
        budget = budget_of(ample.plan, 0.9)
    model, handle, peak = trained(int(budget))
    assert all(map(torch.equal, model.parameters(), without.parameters()))
    assert handle is not None
    assert handle.plan is not None
    assert sum(not call.fqn for call in handle.plan.record.profile.calls) == 2
    assert handle.plan.resident_bytes + peak == handle.plan.predicted_peak_bytes


def test_a_larger_later_micro_batch_is_planned_for():
    model = make(dropout=0.0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, ENOUGH, on_larger="replan")
    for number, sizes in enumerate(((8, 8), (8, 8), (8, 32), (8, 32), (8, 8), (8, 8))):
        model(torch.randn(sizes[0], WIDTH)).mean().backward()
        with pytest.warns(UserWarning, match="next step is") if number == 2 else contextlib.nullcontext():
            model(torch.randn(sizes[1], WIDTH)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.plan is not None
    assert handle.plan.record.profile.sample == f"float32[32,{WIDTH}]"
    handle.remove()


def test_largest_batch_stays_planned_for_where_a_smaller_one_runs_other_ops(caplog: pytest.LogCaptureFixture):
    """As with padding: a mask that is all ones is dropped, and attention runs other ops."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.has_mask = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            return x + self.down((h.sin() if self.has_mask else h.cos()).exp())

    def train(budget: int) -> Auto:
        torch.manual_seed(0)
        blocks = [Masked() for _ in range(4)]
        model = nn.Sequential(*blocks).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        handle = autoac.auto(model, budget)
        for size, has_mask in ((64, False), (64, False), (32, True), (32, True), (64, True), (64, True)):
            for block in blocks:
                block.has_mask = has_mask
            model(torch.randn(size, WIDTH)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return handle

    ample = train(ENOUGH).plan
    assert ample is not None
    with caplog.at_level("INFO", "autoac"), pytest.warns(UserWarning, match="the plan is not followed"):
        handle = train(budget_of(ample, 0.7))
    assert handle.plan is not None
    assert handle.plan.record.profile.sample == f"float32[64,{WIDTH}]"
    assert not handle.plan.is_not_followed
    assert "recording this larger one" in caplog.text
    handle.remove()


def test_a_model_whose_calls_are_not_seen_is_told():
    model, x = make(dropout=0.0).train(), torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, ENOUGH)

    def step() -> None:
        model.blocks[0](x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with pytest.warns(UserWarning, match="has no plan for Blocks, which is trained: it was not called"):
        step()
    assert handle.plan is None
    for _ in range(2):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.plan is not None
    for _ in range(2):  # after the one of the call
        step()
    with pytest.warns(UserWarning, match="SGD has stepped 4 times since the module that autoac.auto was"):
        step()
    handle.remove()
