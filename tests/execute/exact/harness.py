"""Hold a training step with a plan against the same step without it: everything a step leaves behind, by bits.

A `Case` is a model, and a step of it in two halves: `forward`, up to the losses, and `backward`. `assert_exact`
profiles it, plans it for several budgets and runs it with each plan, two steps in a row. Nothing of autoac's own
verification is used here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autoac
from autoac.execute.replay import Handle, Record, Recording, ReplayCall, Slot
from autoac.execute.sac.sac import SacPolicy
from autoac.plans import Plan
from autoac.step.modules import select_modules
from autoac.torch_private import function_modes, top_saved_tensors_hooks
from autoac_solver.plan.recorded.programs import with_regions
from autoac_solver.records.profile import Profile

FRACTIONS = (0.0, 0.3, 0.6, 1.0)
"""Budgets to plan for, between the least feasible one (0) and the peak without a plan (1)."""

STEPS = 2
SEED = 1


def backward_from(result: Any) -> None:
    """The usual second half of a step: `backward` of the loss, which is the result or comes first in it."""
    loss = result if isinstance(result, torch.Tensor) else result[0]
    loss.backward()


@dataclass(frozen=True)
class Case:
    """A model and a step of it.

    Args:
        build: makes the model; random numbers are seeded before.
        forward: from the model to the loss, or a nest of tensors that begins with it.
        backward: from what `forward` returned; what it returns is compared as well.
        regions: names or globs of the modules to plan.
        profiled, profiled_backward: the profiled step's, if it is to be another one.
    """

    build: Callable[[], nn.Module]
    forward: Callable[[Any], Any]
    regions: str | Sequence[str]
    backward: Callable[[Any], Any] = backward_from
    profiled: Callable[[Any], Any] | None = None
    profiled_backward: Callable[[Any], Any] | None = None

    def model(self) -> Any:
        """A new model, always the same."""
        torch.manual_seed(SEED)
        return self.build().train()

    def profile(self) -> Profile:
        """The profile of one step."""
        model = self.model()
        forward, backward = self.profiled or self.forward, self.profiled_backward or self.backward
        return autoac.profile(model, lambda: backward(forward(model)), regions=self.regions)


# -- plans -------------------------------------------------------------------------------------------------------------


def least_budget(profile: Profile, engine: str, regions: Sequence[str]) -> int:
    """The least feasible budget in bytes."""
    try:
        autoac.solve(profile, 1, engine=engine, regions=regions)
    except autoac.InfeasibleBudgetError as error:
        return error.minimum_bytes
    raise AssertionError("a budget of one byte was met")


def plans(case: Case, engine: str, fractions: Sequence[float] = FRACTIONS) -> dict[float, Plan]:
    """A plan for each budget, given as a fraction of the way from the least feasible to the unplanned peak."""
    profile = case.profile()
    chosen = select_modules(case.model(), case.regions)
    assert chosen is not None
    names = [name for name in chosen if name in {call.fqn for call in profile.calls}]
    least = least_budget(profile, engine, names)
    ample = autoac.solve(profile, 10**12, engine=engine, regions=names).record.unplanned_peak_bytes
    assert least < ample, "the regions hold nothing at the peak: the case tests nothing"
    budgets = {fraction: least + int(fraction * (ample - least)) for fraction in fractions}
    return {f: autoac.solve(profile, budget, engine=engine, regions=names) for f, budget in budgets.items()}


def plan_with(case: Case, engine: str, choose: Callable[[str, str, int], bool]) -> Plan:
    """A plan with decisions that the solver would never have made, perhaps.

    Args:
        choose: from a region's name, an op's and its number among the ops of that name in the region, to "is it
            recomputed".
    """
    names = select_modules(case.model(), case.regions)
    plan = autoac.solve(case.profile(), 10**12, engine=engine, regions=names)
    regions = []
    for region in plan.regions:
        calls: Counter[str] = Counter()
        steps = []
        for name, _ in region.steps:
            steps.append((name, choose(region.name, name, calls[name])))
            calls[name] += 1
        regions.append(dataclasses.replace(region, wrapped=True, steps=tuple(steps)))
    return Plan(with_regions(plan.record, regions))


def decisions(plan: Plan, op: str) -> list[bool]:
    """For each call of an op in the plan's wrapped regions, in order: is it recomputed?"""
    steps = [step for region in plan.regions if region.wrapped for step in region.steps]
    return [recompute for name, recompute in steps if name == op]


def recomputes(plan: Plan) -> bool:
    """Whether the plan recomputes anything."""
    return any(again for region in plan.regions if region.wrapped for _, again in region.steps)


# -- steps -------------------------------------------------------------------------------------------------------------


def run(case: Case, plan: Plan | None = None, steps: int = STEPS) -> dict[str, Any]:
    """Run some steps of a new model, and return everything they leave behind."""
    model = case.model()
    if plan is not None:
        plan.apply(model)
    left: dict[str, Any] = {}
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        result = case.forward(model)
        returned = case.backward(result)
        for name, value in _leftovers(model, result, returned).items():
            left[f"{name} of step {step}"] = value
    return left


def planned(case: Case, plan: Plan) -> Any:
    """A new model with the plan on it."""
    return plan.apply(case.model())


def assert_gradients_of_a_step(model: nn.Module, case: Case) -> None:
    """The model's gradients are those of one step without a plan."""
    expected = run(case, steps=1)
    found = {f"the gradient of {name} of step 0": p.grad for name, p in model.named_parameters()}
    assert not differences(found, {name: expected[name] for name in found})


def _leftovers(model: nn.Module, result: Any, returned: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for source, nest in (("result", result), ("returned tensor", returned)):
        for index, tensor in enumerate(_tensors(nest)):
            values[f"{source} {index}"] = tensor.detach().clone()
            if tensor.is_leaf:
                values[f"the gradient of {source} {index}"] = tensor.grad
    for name, parameter in model.named_parameters():
        values[f"the gradient of {name}"] = parameter.grad
        values[f"parameter {name}"] = parameter.detach().clone()
    for name, buffer in model.named_buffers():
        values[f"buffer {name}"] = buffer.clone()
    values["the RNG state"] = torch.get_rng_state()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Generator):
                values[f"generator {name}.{attribute}"] = value.get_state()
    return values


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, (list, tuple)):
        for item in nest:
            yield from _tensors(item)
    elif isinstance(nest, dict):
        yield from _tensors(list(nest.values()))


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What is not the same to the bit."""
    assert found.keys() == expected.keys()
    return [name for name in expected if not _same(found[name], expected[name])]


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.layout is torch.sparse_coo or b.layout is torch.sparse_coo:
        return a.layout is b.layout and _same(a._indices(), b._indices()) and _same(a._values(), b._values())
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, so that -0.0 is not 0.0, and a NaN is itself."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8)


def assert_exact(
    case: Case, engine: str, fractions: Sequence[float] = FRACTIONS, compiles: bool = False
) -> dict[float, Plan]:
    """Steps with plans for several budgets, from the least feasible to an ample one, equal those without a plan.

    Args:
        compiles: Whether forward may compile: torch's compiler leaves cycles that hold what it was called with.

    Returns:
        The plans, by fraction, for further assertions.
    """
    made = plans(case, engine, fractions)
    assert recomputes(made[min(made)]), "at the least budget nothing is recomputed: the case tests nothing"
    expected = run(case)
    gradients = [value for name, value in expected.items() if name.startswith(("the gradient", "returned"))]
    assert any(gradient is not None and gradient.abs().sum() for gradient in gradients)
    for fraction, plan in made.items():
        assert_plan_exact(case, plan, expected, f"engine {engine} at {fraction}", compiles)
    if 1.0 in made:
        assert not recomputes(made[1.0])
    return made


def assert_plan_exact(
    case: Case, plan: Plan, expected: dict[str, Any] | None = None, where: str = "", compiles: bool = False
) -> None:
    """Steps with this plan equal those without, and leave no memory behind, with backward and without."""
    expected = expected or run(case)
    with nothing_leaks(compiles):
        found = run(case, plan)
    assert not differences(found, expected), f"{where}: {differences(found, expected)}"
    with nothing_leaks(compiles):
        case.forward(plan.apply(case.model()))
    assert_nothing_active()


# -- what is left behind -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_leaks(collects: bool = False) -> Iterator[None]:
    """Context after which nothing of the engine is alive, with no help from the garbage collector unless said."""
    before = (
        _of_the_engine()
    )  # to freeze it and unfreeze it again would undo `few_objects`, which the ruler needs
    gc.disable()
    try:
        yield
        if collects:
            gc.collect()
        known = set(map(id, before))
        alive = Counter(type(thing).__name__ for thing in _of_the_engine() if id(thing) not in known)
        assert not alive, f"alive after the step: {dict(alive)}"
    finally:
        gc.enable()


def _of_the_engine() -> list[Any]:
    """What engines have made that is alive."""
    kinds = (Handle, Record, Recording, ReplayCall, Slot, SacPolicy)
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def assert_nothing_active() -> None:
    """No mode and no saved-tensor hooks are left on their stacks, and gradients are on."""
    assert torch._C._len_torch_dispatch_stack() == 0
    assert function_modes() == []
    assert top_saved_tensors_hooks() is None
    assert torch.is_grad_enabled()
