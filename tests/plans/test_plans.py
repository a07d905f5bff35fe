"""A plan on a model: put on, copied, saved, used from threads, taken off again; and what a plan says of itself."""

import copy
import dataclasses
import functools
import inspect
import io
import json
import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autoac
from autoac.check.equal import same
from autoac.execute import placement
from autoac.execute.engines import ENGINES
from autoac.measure import measure_peak
from autoac.plans import Plan
from autoac_solver.plan.recorded.programs import with_regions
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.errors import PlanMismatchError, ProfileError
from tests.small_models import (
    BLOCKS,
    Blocks,
    assert_same,
    attributes,
    batch,
    least_bytes,
    make,
    step,
    tight_plan,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = [f"blocks.{i}" for i in range(BLOCKS)]


@functools.cache
def plan_for(engine: str, rounds: int = 1, dropout: float = 0.1) -> Plan:
    """The plan with the blocks as regions at the least feasible budget."""
    profile = autoac.profile(make(rounds=rounds, dropout=dropout), batch())
    plan = tight_plan(profile, engine, NAMES)
    assert any(region.wrapped for region in plan.regions)
    return plan


@pytest.fixture(params=["replay", "sac"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def plan(engine: str) -> Plan:
    return plan_for(engine)


def everything_recomputed(plan: Plan) -> Plan:
    """The plan with another decision for every op: recompute."""
    regions = [
        dataclasses.replace(region, wrapped=True, steps=tuple((name, True) for name, _ in region.steps))
        for region in plan.regions
    ]
    return Plan(with_regions(plan.record, regions))


def is_recomputing(model: Blocks) -> bool:
    """Whether a step takes less memory than that of the same model without a plan."""
    return peak_bytes(model) < peak_bytes(make(rounds=model.rounds).train(model.training))


def peak_bytes(model: nn.Module) -> int:
    """Of a step, above what is there before it."""
    step(model)
    model.zero_grad(set_to_none=True)
    return measure_peak(lambda: step(model)).peak_above_start_bytes


# -- copies and states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_deep_copy_is_planned_and_trains_its_own_weights(engine: str, rounds: int):
    plan = plan_for(engine, rounds)
    model = plan.apply(make(rounds=rounds))
    twin = copy.deepcopy(model)
    plain = make(rounds=rounds)
    with torch.no_grad():
        for changed in (twin, plain):
            for parameter in changed.parameters():
                parameter.mul_(1.5)

    assert_same(step(twin), step(plain))
    assert all(p.grad is None for p in model.parameters())
    assert_same(step(model), step(make(rounds=rounds)))
    assert is_recomputing(twin)
    plan.remove(twin)
    assert not is_recomputing(twin)
    assert is_recomputing(model)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_pickled_model_is_planned(engine: str, rounds: int, tmp_path: Path):
    plan = plan_for(engine, rounds)
    model = plan.apply(make(rounds=rounds))
    step(model)  # what the engine has looked up by now is not to stand in the way
    restored = pickle.loads(pickle.dumps(model))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)

    plan.save(tmp_path / "plan.json")
    for other in (restored, loaded):
        expected = step(copy.deepcopy(model))
        assert_same(step(other), expected)
        assert is_recomputing(other)
        Plan.load(tmp_path / "plan.json").remove(other)  # as another process would
        assert [names(module) for module in other.modules()] == [
            names(m) for m in make(rounds=rounds).modules()
        ]


def names(module: nn.Module) -> list[str]:
    return list(vars(module))


def test_state_dict_is_that_of_the_model(plan: Plan):
    model, plain = make(), make()
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    plan.apply(model)
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]


def test_state_goes_through_a_file(plan: Plan):
    model = plan.apply(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    optimizer.step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    planned, plain = plan.apply(make()), make()
    assert (
        str(planned.load_state_dict(state))
        == str(plain.load_state_dict(state))
        == "<All keys matched successfully>"
    )
    assert_same(step(planned), step(plain))


@pytest.mark.filterwarnings("ignore:the model is called while its parameters have gradients")
def test_training_with_a_plan_is_training(plan: Plan):
    """Some steps with an optimizer, gradients accumulated over two batches in each."""
    parameters = []
    for model in (make(), plan.apply(make())):
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            for seed in (1, 2):
                model(batch(seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        parameters.append([p.detach() for p in model.parameters()])
    assert_same(*parameters)


# -- modes -------------------------------------------------------------------------------------------------------------


def test_train_and_eval(plan: Plan):
    planned, plain = plan.apply(make()), make()
    for training in (True, False, True):
        planned.train(training)
        plain.train(training)
        assert planned.blocks[0].training is training
        assert_same(step(planned), step(plain))
    assert is_recomputing(planned.eval())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_original_forward_runs(
    plan: Plan, context: Any, monkeypatch: pytest.MonkeyPatch
):
    def engine_runs(*_: Any) -> None:
        raise AssertionError("the engine ran")

    planned, plain = plan.apply(make()), make()
    for engine in ENGINES.values():
        monkeypatch.setattr(engine, "run", engine_runs)
    with context():
        torch.manual_seed(1)
        expected = plain(batch())
        torch.manual_seed(1)
        assert torch.equal(planned(batch()), expected)
    with pytest.raises(AssertionError, match="the engine ran"):
        planned(batch())


class Recurrent(nn.Module):
    """oneDNN's LSTM makes another set of outputs where gradients are off.

    Args:
        frozen: run the LSTM without gradients.
    """

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        self.lstm = nn.LSTM(16, 16)
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(not self.frozen):
            y, _ = self.lstm(x)
        return x + self.head(y.tanh())


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_on_in_a_replay_where_they_were_in_forward(frozen: bool):
    torch.manual_seed(0)
    model = nn.Sequential(*(Recurrent(frozen) for _ in range(3)))
    x = torch.randn(8, 4, 16)
    plan = everything_recomputed(autoac.solve(autoac.profile(model, x), 10**12, regions=["0", "1", "2"]))
    assert any("lstm" in name or "rnn" in name for name, _ in plan.regions[0].steps)
    expected = step(copy.deepcopy(model), x)
    assert_same(step(plan.apply(model), x), expected)


def test_signature_of_forward_is_kept(engine: str):
    """transformers' Trainer reads it to know which columns of the data set the model takes."""
    plan = plan_for(engine, 2)
    plain, model = make(rounds=2), plan.apply(make(rounds=2))
    assert "forward" in vars(model)  # it starts the count of the blocks' calls
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)


def test_hooks_run_as_without_a_plan(plan: Plan):
    logs = []
    for model in (make(), plan.apply(make())):
        log: list[str] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, n=name, log=log: log.append(f"before {n}"))
            module.register_forward_hook(lambda *_, n=name, log=log: log.append(f"after {n}"))
        model.blocks[1].register_full_backward_hook(lambda *_, log=log: log.append("backward of block 1"))
        model(batch()).mean().backward()
        logs.append(log)
    plain, planned = logs
    if plan.engine == "sac":  # torch's checkpoint calls the hooks of inner modules again in backward
        planned = planned[: len(plain) - 1]
        plain = plain[:-1]
    assert planned == plain


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("one_model", [True, False])
def test_two_threads(engine: str, rounds: int, one_model: bool):
    plan = plan_for(engine, rounds, dropout=0.0)
    first = plan.apply(make(rounds=rounds, dropout=0.0))
    models = [first, first if one_model else plan.apply(make(rounds=rounds, dropout=0.0))]
    plain = make(rounds=rounds, dropout=0.0).eval()
    expected = [gradients(plain, seed) for seed in (1, 2)]
    start = threading.Barrier(2)
    faults: list[str] = []

    def train(index: int) -> None:
        try:
            start.wait()
            for _ in range(20):
                assert_same(gradients(models[index], index + 1), expected[index])
        except BaseException as error:
            faults.append(f"thread {index}: {error!r}")

    for model in models:
        model.eval()  # its buffer would be counted up by both
    threads = [threading.Thread(target=train, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def gradients(model: nn.Module, seed: int) -> list[torch.Tensor]:
    """Without touching `.grad`, which threads that train one model share."""
    return list(torch.autograd.grad(model(batch(seed)).square().mean(), list(model.parameters())))


class SquaredDropout(nn.Module):
    """Of its output one can tell which elements were dropped, and so what the gradient has to be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x, 0.5, train=True).square()


def test_threads_do_not_disturb_recomputed_random_numbers():
    """Under replay; torch's own checkpoint, and so sac, sets the random state without a thought for other threads."""
    model = nn.Sequential(*(SquaredDropout() for _ in range(4)), nn.Linear(1, 1))
    x = torch.rand(50, 1000) + 0.5

    def run(part: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        given = x.clone().requires_grad_()
        output = part(given)
        (gradient,) = torch.autograd.grad(output.sum(), given)
        return gradient, 2 * output.detach().sqrt() * (output.detach() > 0) * 2

    names = ["0", "1", "2", "3"]
    profile = autoac.profile(model, lambda: [run(part) for part in list(model.children())[:4]] and None)
    everything_recomputed(autoac.solve(profile, 10**12, regions=names)).apply(model)
    faults: list[str] = []

    def train(name: str) -> None:
        for _ in range(150):
            found, expected = run(model.get_submodule(name))
            if not torch.allclose(found, expected):
                faults.append(name)

    threads = [threading.Thread(target=train, args=(name,)) for name in names[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_backward_in_another_thread(plan: Plan):
    planned, expected = plan.apply(make()), step(make())
    torch.manual_seed(5)
    loss = planned(batch()).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same([p.grad for p in planned.parameters() if p.grad is not None], expected[1:-2])


def test_reserved_memory_under_other_allocator_options_warns(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    """The options that the plan was simulated with are those of its process."""
    planned = Plan(dataclasses.replace(plan.record, budget_of="reserved", allocator="max_split_size_mb:64"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb: 64")
    planned.apply(model := make())
    planned.remove(model)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.warns(
        UserWarning, match="PYTORCH_CUDA_ALLOC_CONF='max_split_size_mb:64', and here it is 'exp"
    ):
        planned.apply(model)


# -- on and off --------------------------------------------------------------------------------------------------------


def wrapped_by_a_library(module: Any) -> None:
    """As accelerate puts its hooks."""

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        module.library_log.append("called")
        return module._old_forward(*args, **kwargs)

    module.library_log = []
    module._old_forward = module.forward
    module.forward = functools.update_wrapper(functools.partial(new_forward, module), module._old_forward)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("library", [True, False])
def test_remove_restores_exactly(engine: str, rounds: int, library: bool):
    plan = plan_for(engine, rounds)
    model: Any = make(rounds=rounds)
    if library:
        for block in model.blocks:
            wrapped_by_a_library(block)
        wrapped_by_a_library(model)
    before = attributes(model)

    assert plan.apply(model) is model
    assert attributes(model) != before
    assert_same(step(model), step(make(rounds=rounds)))
    assert plan.remove(model) is model
    assert attributes(model) == before
    if library:
        # sac runs the Python code of the region again.
        calls = [len(block.library_log) for block in model.blocks]
        assert calls == [rounds] * BLOCKS if engine == "replay" else min(calls) >= rounds
        assert len(model.library_log) == 1

    with plan.applied(model) as planned:
        assert planned is model
        assert attributes(model) != before
    assert attributes(model) == before
    with pytest.raises(LookupError, match="on purpose"), plan.applied(model):
        raise LookupError("on purpose")
    assert attributes(model) == before


def test_a_forward_put_over_the_plan_is_seen(plan: Plan):
    model: Any = plan.apply(make())
    assert plan.regions[0].wrapped
    wrapped_by_a_library(model.blocks[0])
    assert_same(step(model), step(make()))
    assert model.blocks[0].library_log == ["called"]
    before = attributes(model)

    with pytest.raises(
        PlanMismatchError, match=r"module 'blocks\.0' was given another forward after the plan"
    ):
        plan.remove(model)
    with pytest.raises(PlanMismatchError, match="has a plan applied already"):
        plan.apply(model)
    assert attributes(model) == before

    model.blocks[0].forward = model.blocks[0]._old_forward
    plan.remove(model)
    assert "forward" not in vars(model.blocks[0])


def test_hooks_of_accelerate(plan: Plan):
    """Put on before the plan or over it, they run, and they come off again."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Counts(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

    below, over = Counts(), Counts()
    model = make()
    hooks.add_hook_to_module(model.blocks[0], below)
    before = attributes(model)
    plan.apply(model)
    hooks.add_hook_to_module(model.blocks[1], over)
    assert_same(step(model), step(make()))
    assert below.calls >= 1
    assert over.calls == 1
    assert is_recomputing(model)

    with pytest.raises(PlanMismatchError, match=r"module 'blocks\.1' was given another forward"):
        plan.remove(model)
    hooks.remove_hook_from_module(model.blocks[1])
    plan.remove(model)
    assert attributes(model) == before


def test_what_is_not_recomputed_is_untouched(engine: str):
    profile = autoac.profile(make(), batch())
    ample = autoac.solve(profile, 10**12, engine=engine, regions=NAMES)
    model = make()
    before = attributes(model)
    ample.apply(model)
    assert attributes(model) == before
    ample.remove(model)

    least = least_bytes(profile, engine, NAMES)
    middle = autoac.solve(profile, (least + ample.predicted_peak_bytes) // 2, engine=engine, regions=NAMES)
    middle.apply(model)
    wrapped = {region.fqn for region in middle.regions if region.wrapped}
    assert 0 < len(wrapped) < BLOCKS
    assert {name for name, module in model.named_modules() if "forward" in vars(module)} == wrapped


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuses(plan: Plan, model: nn.Module, message: str) -> None:
    before = attributes(model)
    with pytest.raises(PlanMismatchError, match=message):
        plan.apply(model)
    assert attributes(model) == before


def test_applied_twice(plan: Plan):
    model = plan.apply(make())
    already = r"has a plan applied already: call remove\(model\) on that plan before applying another"
    refuses(plan, model, already)
    refuses(plan_for("sac" if plan.engine == "replay" else "replay"), model, already)
    with pytest.raises(
        autoac.AutoacError, match=r"has a plan applied: call plan\.remove\(model\) before profiling"
    ):
        autoac.profile(model, batch())
    assert_same(step(model), step(make()))


def test_applied_to_another_model(plan: Plan):
    refuses(
        plan, nn.Linear(3, 3), r"was made for Blocks .* this Linear is another one .* no module 'blocks\.0'"
    )
    refuses(plan, make(blocks=BLOCKS - 1), "it has no module 'blocks.2'")


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (nn.DataParallel, "model.module"),
        (lambda model: nn.DataParallel(cast(Any, torch.compile(model))), "model.module._orig_mod"),
        (lambda model: nn.Sequential(nn.Identity(), model), "model.get_submodule('1')"),
        (Wrapper, "model.inner"),
        (lambda model: nn.ModuleDict({"the model": model}), "model.get_submodule('the model')"),
    ],
)
def test_applied_to_what_holds_the_model(plan: Plan, wrap: Any, place: str):
    wrapped = wrap(make())
    refuses(
        plan,
        wrapped,
        f"made for Blocks, which this .* holds as {re.escape(place)}: apply the plan to .* wrapped",
    )
    inner = eval(place, {"model": wrapped})
    plan.apply(inner)
    assert plan.remove(wrapped) is wrapped
    with pytest.raises(PlanMismatchError, match="plan again for the model as it is"):
        plan.apply(wrap(make(blocks=BLOCKS + 1)))


def test_what_is_no_model(plan: Plan):
    anything: Any = "m"
    acts: list[Callable[[], Any]] = [
        lambda: plan.apply(anything),
        lambda: plan.remove(anything),
        lambda: plan.verify(anything, batch()),
        lambda: plan.measure_memory(anything, batch()),
    ]
    for act in acts:
        with pytest.raises(PlanMismatchError, match=r"model is a str, not a torch\.nn\.Module\."):
            act()


def test_saved_to_a_folder(plan: Plan, tmp_path: Path):
    with pytest.raises(
        IsADirectoryError, match=re.escape(f"{tmp_path} cannot be written: it is a folder. Name a")
    ):
        plan.save(tmp_path)
    with pytest.raises(ValueError, match=r"plan\.txt cannot be written: .* has to end in \.json"):
        plan.save(tmp_path / "plan.txt")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        plan.save(tmp_path / "nowhere" / "plan.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["a layer more", "frozen", "dtype", "shape"])
def test_applied_after_the_model_changed(plan: Plan, change: str):
    model = make()
    if change == "a layer more":
        model.blocks[1].dropout = nn.Sequential(model.blocks[1].dropout, nn.Identity())  # type: ignore[assignment]
    elif change == "frozen":
        model.blocks[0].up.weight.requires_grad_(False)
    elif change == "dtype":
        model.double()
    else:
        model.head = nn.Linear(16, 17)
    refuses(plan, model, "another one or has changed since .* plan again for the model as it is")


def test_applied_on_another_kind_of_device(plan: Plan):
    elsewhere = Plan(dataclasses.replace(plan.record, device="cuda:0"))
    refuses(elsewhere, make(), "made for Blocks on cuda:0, and the model is on cpu: .* Move the model before")


def test_removed_where_it_is_not(plan: Plan):
    other = plan_for("sac" if plan.engine == "replay" else "replay")
    model = make()
    for applied in (False, True):
        if applied:
            other.apply(model)
        before = attributes(model)
        with pytest.raises(
            PlanMismatchError, match="not applied to this model, so there is nothing to remove"
        ):
            plan.remove(model)
        assert attributes(model) == before


@pytest.mark.parametrize("fails", ["attach", "attach_root"])
def test_a_failure_halfway_leaves_the_model_as_it_was(
    engine: str, fails: str, monkeypatch: pytest.MonkeyPatch
):
    plan = plan_for(engine, rounds=2)
    model = make(rounds=2)
    before = attributes(model)
    original, calls = getattr(placement, fails), []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2 or fails == "attach_root":
            raise LookupError("on purpose")
        original(*args)

    monkeypatch.setattr(f"autoac.execute.placement.{fails}", failing)
    with pytest.raises(LookupError, match="on purpose"):
        plan.apply(model)
    assert attributes(model) == before


# -- several calls of a module in a step -------------------------------------------------------------------------------


@pytest.fixture
def regions_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The regions that the engine runs, as they come."""
    log: list[str] = []
    for engine in ENGINES.values():

        def logged(program: Any, *args: Any, run: Any = engine.run) -> Any:
            log.append(program.region)
            return run(program, *args)

        monkeypatch.setattr(engine, "run", logged)
    return log


def wrapped_names(plan: Plan) -> list[str]:
    return [region.name for region in plan.regions if region.wrapped]


def test_each_call_has_its_own_decisions(engine: str, regions_run: list[str]):
    plan = plan_for(engine, rounds=2)
    regions_run.clear()  # of what its profile ran
    assert [region.name for region in plan.regions] == [*NAMES, *(f"{name}#1" for name in NAMES)]
    model = plan.apply(make(rounds=2))
    assert_same(step(model), step(make(rounds=2)))
    assert regions_run == wrapped_names(plan)
    regions_run.clear()
    with torch.no_grad():
        model(batch())  # is not counted
    step(model)
    assert regions_run == wrapped_names(plan)


@pytest.mark.parametrize("where", ["blocks.0", "blocks.1", "head"])
def test_after_an_exception_calls_are_counted_anew(engine: str, where: str, regions_run: list[str]):
    plan = plan_for(engine, rounds=2)
    regions_run.clear()  # of what its profile ran
    model = plan.apply(make(rounds=2))

    def fails(*_: Any) -> None:
        raise LookupError("on purpose")

    hook = model.get_submodule(where).register_forward_pre_hook(fails)
    with pytest.raises(LookupError, match="on purpose"):
        step(model)
    hook.remove()
    regions_run.clear()
    model.zero_grad(set_to_none=True)
    peak = measure_peak(lambda: step(model)).peak_above_start_bytes
    assert regions_run == wrapped_names(plan)
    assert peak == peak_bytes(plan.apply(make(rounds=2)))


def accumulate(model: Blocks) -> None:
    model.zero_grad(set_to_none=True)
    for seed in (1, 2):
        model(batch(seed)).square().mean().backward()


@pytest.mark.parametrize("given_up", [False, True])
def test_each_micro_batch_has_its_own_decisions(engine: str, given_up: bool, regions_run: list[str]):
    model = make()
    profile = autoac.profile(model, lambda: accumulate(model))
    names = [*NAMES, *(f"{name}#1" for name in NAMES)]
    plan = tight_plan(profile, engine, NAMES)
    assert [region.name for region in plan.regions] == names
    plan.apply(model)
    if given_up:
        model(batch())
    for _ in range(2):
        regions_run.clear()
        accumulate(model)
        assert regions_run == wrapped_names(plan)


def test_two_forwards_before_backward_have_their_own_decisions(engine: str, regions_run: list[str]):
    """Both find no gradients: the second one is no new step."""
    model = make()

    def both() -> None:
        model.zero_grad(set_to_none=True)
        (model(batch(1)).square().mean() + model(batch(2)).square().mean()).backward()

    plan = tight_plan(autoac.profile(model, both), engine, NAMES)
    plan.apply(model)
    for _ in range(2):
        regions_run.clear()
        both()
        with torch.no_grad():
            model(batch())  # is not counted
        assert regions_run == wrapped_names(plan)


def test_a_first_backward_that_leaves_no_gradients(engine: str, regions_run: list[str]):
    """As in sharpness-aware training: the second call finds no gradients either, and is no new step."""
    model = make()

    def sharpness_aware() -> None:
        model.zero_grad(set_to_none=True)
        trained = [*model.parameters()]
        gradients = torch.autograd.grad(model(batch()).square().mean(), trained)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.add_(gradient, alpha=0.05)
        model(batch()).square().mean().backward()
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.sub_(gradient, alpha=0.05)

    plan = tight_plan(autoac.profile(model, sharpness_aware), engine, NAMES)
    plan.apply(model)
    for _ in range(2):
        regions_run.clear()
        sharpness_aware()
        assert regions_run == wrapped_names(plan)
    assert regions_run


def test_a_copy_of_a_model_called_several_times_is_planned(engine: str, regions_run: list[str]):
    model = make()
    plan = tight_plan(autoac.profile(model, lambda: accumulate(model)), engine, NAMES)
    plan.apply(model)
    model(batch())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        regions_run.clear()
        accumulate(twin)
        assert regions_run == wrapped_names(plan)
    plan.remove(model)
    assert all(not hasattr(module, "_autoac_region") for module in model.modules())


def test_a_forward_that_is_never_followed_by_a_backward(engine: str, regions_run: list[str]):
    plan = plan_for(engine, rounds=2)
    regions_run.clear()  # of what its profile ran
    model = plan.apply(make(rounds=2))
    model(batch())
    regions_run.clear()
    first, second = step(model), step(make(rounds=2))
    assert regions_run == wrapped_names(plan)
    assert_same(first[:-2], second[:-2])  # but for the buffer, which counts forwards


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2])
def test_round_trip_through_a_file(engine: str, rounds: int, tmp_path: Path):
    plan = plan_for(engine, rounds)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    for field in dataclasses.fields(plan.record):
        assert getattr(loaded.record, field.name) == getattr(plan.record, field.name), field.name
    pd.testing.assert_frame_equal(loaded.decisions, plan.decisions)
    pd.testing.assert_frame_equal(loaded.memory_timeline(), plan.memory_timeline())
    assert (repr(loaded), loaded.explain()) == (repr(plan), plan.explain())

    model = loaded.apply(make(rounds=rounds))
    assert_same(step(model), step(make(rounds=rounds)))
    assert is_recomputing(model)
    plan.remove(model)  # the same plan
    assert attributes_names(model) == attributes_names(make(rounds=rounds))
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def attributes_names(model: nn.Module) -> list[list[str]]:
    return [list(vars(module)) for module in model.modules()]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "not readable JSON: it is damaged or truncated"),
        (lambda text: "", "not readable JSON"),
        (lambda text: "[]", "is none of autoac's files, but 'autoac.plan' was expected"),
        (lambda text: text.replace("autoac.plan", "autoac.profile"), "but 'autoac.plan' was expected"),
        (lambda text: changed_json(text, schema_version=99), "schema version 99; .* Update autoac"),
        (lambda text: changed_json(text, engine="magic"), "not a valid plan"),
        (lambda text: changed_json(text, budget_bytes="many"), "not a valid plan"),
        (lambda text: changed_json(text, predicted_extra_s=None), "not a valid plan"),
        (lambda text: changed_json(text, regions=[{"fqn": "a"}]), "not a valid plan"),
        (lambda text: changed_json(text, programs=[]), "not a valid plan"),
        (
            lambda text: changed_json(text, programs=[[["aten.mm.default", 1]]]),
            r"at `\$.programs\[0\]\[0\]\[1\]`",
        ),
        (lambda text: changed_json(text, decision_columns={}), "unknown field `decision_columns`"),
        (lambda text: changed_json(text, losses={"nowhere": [None]}), "is about module 'nowhere'"),
        (
            lambda text: changed_json(text, predicted_peak_bytes=1),
            "do not give its predicted peak: 1 bytes were predicted",
        ),
        (
            lambda text: changed_json(text, unplanned_peak_bytes=10**9),
            "do not give its predicted peak with nothing recomputed: 1000000000 bytes were predicted",
        ),
        (
            lambda text: changed_json(text, predicted_extra_s=0.0),
            "do not give its predicted extra time: 0.0 seconds were predicted",
        ),
        (
            lambda text: changed_json(text, predicted_step_s=2 * json.loads(text)["predicted_step_s"]),
            "do not give its predicted step without the plan: ",
        ),
        (
            lambda text: changed_json(text, root_calls=7),
            "root_calls is not the number of the profile's calls",
        ),
        (lambda text: changed_json(text, resident_bytes=0), "resident_bytes is not that of its profile"),
        (lambda text: changed_json(text, device="cuda:0"), "device is not that of its profile"),
        (
            lambda text: changed_json(text, schema_version=8),
            r"by an older autoac .schema version 8, now \d+.: make it again",
        ),
        (lambda text: re.sub('"budget_bytes": [0-9]+, ', "", text), "not a valid plan"),
    ],
)
def test_a_damaged_plan_is_refused(damage: Any, message: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    plan_for("replay").save(path)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(ProfileError, match=message):
        Plan.load(path)


def test_no_flip_of_one_decision_loads(tmp_path: Path):
    """Whether or not the peak stays the same."""
    path = tmp_path / "plan.json"
    plan_for("replay").save(path)
    text = path.read_text()
    flips = 0
    for program, steps in enumerate(json.loads(text)["programs"]):
        for op in range(len(steps)):
            data = json.loads(text)
            data["programs"][program][op][1] ^= True
            path.write_text(json.dumps(data))
            flips += 1
            with pytest.raises(ProfileError):
                Plan.load(path)
    assert flips > 10


def changed_json(text: str, **values: Any) -> str:
    return json.dumps({**json.loads(text), **values})


# -- with torch's checkpoint, by hand ----------------------------------------------------------------------------------


class ByHand(Blocks):
    """Calls torch's checkpoint itself where the plan has something to recompute.

    Args:
        contexts: by name of the region, what to pass as `context_fn`.
    """

    contexts: dict[str, Any]

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        for index, block in enumerate(self.blocks):
            context_fn = self.contexts.get(f"blocks.{index}")
            if context_fn is None:
                x = block(x, scale=scale)
            else:
                x = checkpoint(block, x, scale=scale, use_reentrant=False, context_fn=context_fn)
        return self.head(x)


@pytest.mark.parametrize("through", ["context_fn", "policy_fn"])
def test_in_a_loop_that_calls_checkpoint_itself(through: str):
    plan = plan_for("sac")

    def from_policy(name: str) -> Any:
        return lambda: create_selective_checkpoint_contexts(
            plan.policy_fn(name), allow_cache_entry_mutation=True
        )

    make_context = plan.context_fn if through == "context_fn" else from_policy
    model: Any = make()
    model.__class__ = ByHand
    model.contexts = {region.name: make_context(region.name) for region in plan.regions if region.wrapped}
    assert model.contexts

    assert_same(step(model), step(make()))
    planned = plan.apply(make())
    step(planned)
    by_hand, by_plan = (measure_peak(lambda m=m: step(m)).peak_above_start_bytes for m in (model, planned))
    assert by_hand == by_plan


def test_refusals_of_policy_fn():
    for name in ("policy_fn", "context_fn"):
        with pytest.raises(
            PlanMismatchError, match=r"has no region 'blocks\.9'; it has 'blocks\.0', 'blocks\.1'"
        ):
            getattr(plan_for("sac"), name)("blocks.9")
        with pytest.raises(PlanMismatchError, match=r"for engine 'replay'.* plan with engine=.sac"):
            getattr(plan_for("replay"), name)("blocks.0")


# -- what a plan says --------------------------------------------------------------------------------------------------


def test_timeline(plan: Plan):
    timeline = plan.memory_timeline()
    kinds = ["Parameter", "Buffer", "Gradient", "Optstate", "Input", "Activation", "Temp"]
    assert list(timeline.columns) == ["op", "module", "phase", "live_bytes", *kinds]
    assert max(timeline["live_bytes"]) == plan.predicted_peak_bytes <= plan.budget_bytes
    assert timeline[kinds].sum(axis=1).tolist() == timeline["live_bytes"].tolist()
    assert set(timeline["phase"]) == {"forward", "recompute", "backward"}
    assert timeline["phase"].iloc[0] == "forward"
    assert timeline["phase"].iloc[-1] == "backward"
    assert min(timeline["live_bytes"]) >= plan.resident_bytes

    model = make()
    n_parameter_bytes = 4 * sum(p.numel() for p in model.parameters())
    assert plan.resident_bytes == n_parameter_bytes + 4 + batch().nbytes  # and the buffer, and the sample
    assert set(timeline["Parameter"]) == {n_parameter_bytes}
    assert timeline["Gradient"].iloc[0] == 0
    assert timeline["Gradient"].iloc[-1] == n_parameter_bytes
    assert set(timeline["Input"]) == {batch().nbytes}
    assert "blocks.0.norm" in set(timeline["module"])


def test_decisions(plan: Plan):
    decisions = plan.decisions
    assert list(decisions.columns) == [
        "region", "module", "op", "bytes", "decision", "time_s", "must_save", "reason", "group", "storage",
    ]  # fmt: skip
    assert set(decisions["region"]) == {region.name for region in plan.regions}
    assert set(decisions["decision"]) <= {"save", "recompute", "skip"}
    assert min(decisions["time_s"]) >= 0
    recomputed = decisions.query("decision == 'recompute'")
    assert not any(recomputed["must_save"])
    assert set(recomputed["region"]) == {region.name for region in plan.regions if region.wrapped}
    norm = decisions.query("region == 'blocks.0' and op == 'aten.native_layer_norm.default'")
    assert list(norm["module"]) == ["blocks.0.norm"] * 3
    assert sorted(norm["bytes"]) == [64 * 4, 64 * 4, 64 * 16 * 4]  # mean, reciprocal deviation, output


def test_decisions_are_those_of_the_regions_steps(plan: Plan):
    """The two tables that a plan has of its decisions say the same."""
    made = plan.decisions.query("op == 'aten.addmm.default'")
    for region in plan.regions:
        in_order = made.query("region == @region.name").sort_values("storage")
        listed = [decision == "recompute" for decision in in_order["decision"]]
        steps = [again for name, again in region.steps if name == "aten.addmm.default"]
        if plan.engine == "replay":  # sac may call recomputed what early stop never reaches
            assert listed == steps


def test_in_words(plan: Plan):
    text = plan.explain()
    assert text.startswith(f"Plan for Blocks on cpu, engine {plan.engine} (asked for).")
    assert f"budget          {autoac_bytes(plan.budget_bytes)}" in text
    assert f"predicted peak  {autoac_bytes(plan.predicted_peak_bytes)}" in text
    assert f"resident before the step {autoac_bytes(plan.resident_bytes)}" in text
    assert f"The peak lies at {step_of(plan.record).peak_where}" in text
    assert f"regions         {BLOCKS}, of which" in text
    assert repr(plan).startswith(f"Plan(Blocks, engine='{plan.engine}', budget=")
    assert repr(plan).endswith(f"{plan.status})")


def autoac_bytes(size: int) -> str:
    return f"{size / 1e3:.4g} KB = {size / 2**10:.4g} KiB"


def test_holders_of_the_peak_add_up(plan: Plan):
    assert sum(size for _, _, size in step_of(plan.record).peak_holders) == plan.predicted_peak_bytes
    sizes = [size for _, _, size in step_of(plan.record).peak_holders]
    assert sizes == sorted(sizes, reverse=True)


def test_unplanned_peak_is_that_of_an_ample_plan(plan: Plan):
    ample = autoac.solve(autoac.profile(make(), batch()), 10**12, engine=plan.engine)
    assert plan.record.unplanned_peak_bytes == ample.predicted_peak_bytes == ample.record.unplanned_peak_bytes
    assert ample.predicted_overhead == 0
    assert ample.status == "optimal"
    assert plan.predicted_overhead > 0


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_finds_nothing(plan: Plan):
    model = make()
    before = attributes(model)
    state = copy.deepcopy(model.state_dict())
    report = plan.verify(model, batch())
    assert report.ok
    assert report.equal
    assert report.first_difference == ""
    assert report.predicted_peak_bytes == plan.predicted_peak_bytes
    assert report.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, abs=100)
    assert report.unplanned_peak_bytes == pytest.approx(plan.record.unplanned_peak_bytes, abs=100)
    assert "gradients, loss, buffers and random states: equal to the bit" in str(report)
    assert attributes(model) == before
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_verify_says_when_the_step_is_larger_than_the_profiled_one(plan: Plan):
    assert "larger" not in str(plan.verify(make(), batch()))
    with pytest.warns(UserWarning, match="may take more than the planned peak of"):
        report = plan.verify(make(), torch.cat([batch()] * 3))
    assert report.equal
    assert report.is_larger_step
    assert "another batch size" in str(report)


def test_verify_of_a_plan_that_is_applied():
    plan = plan_for("replay")
    model = plan.apply(make())
    before = attributes_names(model)
    assert plan.verify(model, batch()).ok
    assert len(plan.measure_memory(model, batch()))
    assert attributes_names(model) == before
    with pytest.raises(PlanMismatchError, match="has a plan applied already"):
        plan_for("sac").verify(model, batch())
    plan.remove(model)


@pytest.mark.parametrize("made", [torch.optim.Adam, functools.partial(torch.optim.SGD, momentum=0.9)])
def test_verify_leaves_the_optimizer_of_a_callable_step_as_it_was(made: Any, engine: str):
    """In the middle of training, and before its first step, when it has no state yet."""
    model = make()
    optimizer = made(model.parameters(), lr=1e-2)

    def train() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    plan = tight_plan(autoac.profile(model, train), engine, NAMES)
    for _ in range(2):
        before = copy.deepcopy(optimizer.state_dict())
        rows = {parameter: id(row) for parameter, row in optimizer.state.items()}
        assert plan.verify(model, train).equal
        plan.measure_memory(model, train)
        found = optimizer.state_dict()
        assert found["param_groups"] == before["param_groups"]
        assert found["state"].keys() == before["state"].keys()
        for index, row in before["state"].items():
            assert all(same(value, found["state"][index][name]) for name, value in row.items())
        assert {parameter: id(row) for parameter, row in optimizer.state.items()} == rows
        train()


def test_verify_of_a_step_that_differs_from_itself():
    model = make()
    model.register_forward_pre_hook(lambda _, args: (args[0] + int.from_bytes(os.urandom(4)),))
    plan = tight_plan(autoac.profile(model, batch()), "replay", NAMES)
    report = plan.verify(model, batch())
    assert report.first_difference == "the loss"
    assert not report.repeats
    assert not report.equal
    assert "cannot be compared: two steps without the plan differ, first in the loss" in str(report)


def broken(engine: str, monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], Any]) -> None:
    """Have this done to what each region returns."""
    run = ENGINES[engine].run

    def wrong(*args: Any) -> Any:
        result = run(*args)
        changed = change(result)
        return result if changed is None else changed

    monkeypatch.setattr(ENGINES[engine], "run", wrong)


def wrong_gradient(result: torch.Tensor) -> None:
    result.register_hook(lambda gradient: gradient * 1.0000002)


def test_verify_names_an_op_of_forward(engine: str, monkeypatch: pytest.MonkeyPatch):
    plan = plan_for(engine)
    broken(engine, monkeypatch, lambda result: result * 1.001)
    report = plan.verify(make(), batch())
    assert report.first_difference.startswith("forward op aten.")
    assert not report.equal


def test_verify_names_a_buffer(engine: str, monkeypatch: pytest.MonkeyPatch):
    plan, model = plan_for(engine), make()
    model.register_buffer("count", torch.zeros(()))
    broken(engine, monkeypatch, lambda _: model.get_buffer("count").add_(1) and None)
    report = plan.verify(model, batch())
    assert report.first_difference == "buffer count"
    assert not report.equal


@pytest.mark.parametrize("made", [torch.optim.Adam, torch.optim.SGD])
def test_verify_sees_wrong_gradients_that_the_step_has_dropped(
    made: Any, engine: str, monkeypatch: pytest.MonkeyPatch
):
    """Adam's first step hardly depends on how large a gradient is; its state does."""
    model = make()
    optimizer = made(model.parameters(), lr=1e-2)

    def train() -> None:
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = tight_plan(autoac.profile(model, train), engine, NAMES)
    assert plan.verify(model, train).equal
    broken(engine, monkeypatch, wrong_gradient)
    report = plan.verify(model, train)
    assert not report.equal
    assert report.first_difference.startswith("backward op aten.")


def test_verify_refuses_a_step_that_leaves_nothing_to_compare(engine: str):
    model = make()

    def forget() -> None:
        model(batch()).square().mean().backward()
        model.zero_grad()

    plan = tight_plan(autoac.profile(model, forget), engine, NAMES)
    with pytest.raises(autoac.AutoacError, match=r"leaves nothing to compare.*return the loss"):
        plan.verify(model, forget)


def test_equal_is_to_the_bit():
    zero, infinite, nan = torch.zeros(2), torch.full((2,), torch.inf), torch.full((2,), torch.nan)
    assert same(nan, nan.clone())
    assert same(zero, zero.clone())
    assert same(torch.ones(2, 3).T, torch.ones(3, 2))
    assert not same(zero, -zero)
    assert not same(infinite, torch.full((2,), torch.finfo().max))
    assert not same(nan, zero)
    assert not same(zero, zero.double())
    assert same(torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj())
    assert same([zero, 1], [zero, 1])
    assert not same([zero], [zero, zero])


def test_verify_names_what_differs(engine: str, monkeypatch: pytest.MonkeyPatch):
    plan = plan_for(engine)
    broken(engine, monkeypatch, wrong_gradient)
    report = plan.verify(make(), batch())
    assert not report.ok
    assert not report.equal
    assert report.first_difference.startswith("backward op aten.")
    assert "DIFFERENT, first in backward op" in str(report)
