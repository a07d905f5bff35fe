"""Attach a plan's programs to a model's modules, and detach them; see `forwards` for the replaced `forward`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from autoac.execute.cross_entropy.lean import Side, run_with_losses, sides
from autoac.execute.engines import ENGINES
from autoac.execute.forwards import original_forward, planned_forward, put_forward
from autoac.execute.program import Program
from autoac.execute.running import in_first_run, in_second_run
from autoac.step.carried import LOSS_KEY, REGION_KEY, ROOT_KEY
from autoac.step.inputs import elements_of
from autoac.step.model import has_gradients
from autoac.step.units import some_units, units_inside
from autoac.torch_private import disable_dynamo, has_process_group, in_stage_setup
from autoac.torch_private.called import called_module
from autoac_solver.records.errors import PlanMismatchError
from autoac_solver.records.names import region_in_words
from autoac_solver.records.plan import RootCalls


class PlannedRegion:
    """Stored on a planned module: its programs and its original `forward`.

    Args:
        programs: one for each call of the module in a step.
        engine: the engine's name.
        forward: the instance's own `forward` attribute if it had one (some libraries put theirs there), else None.
        plan_id: identifies the plan.
    """

    def __init__(self, programs: Sequence[Program], engine: str, forward: Any, plan_id: str):
        self.programs = tuple(programs)
        self.engine = engine
        self.forward = forward
        self.plan_id = plan_id
        self.calls = threading.local()
        self._of_further_calls = max(self.programs, key=_recomputed_ops)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedRegion:
        return PlannedRegion(self.programs, self.engine, copy.deepcopy(self.forward, memo), self.plan_id)

    def __reduce__(self) -> Any:
        return PlannedRegion, (self.programs, self.engine, self.forward, self.plan_id)

    def next_program(self) -> Program:
        """The program for this call. Calls with gradients enabled are counted per thread.

        A step that calls the module more often than was planned for has the program that recomputes most for the
        further calls. Without a `Root` that tells where steps begin, they are counted modulo the planned ones.
        """
        if len(self.programs) == 1:
            return self.programs[0]
        index = getattr(self.calls, "index", 0)
        if index >= len(self.programs):
            return self._of_further_calls
        is_told = getattr(self.calls, "is_told", False)
        self.calls.index = index + 1 if is_told else (index + 1) % len(self.programs)
        return self.programs[index]

    def restart(self, index: int) -> None:
        """Make the module's next call in this thread count as the step's call number `index`."""
        self.calls.index, self.calls.is_told = index, True


def _recomputed_ops(program: Program) -> int:
    return sum(recompute for _, recompute in program.names) if program.wrapped else -1


@planned_forward
def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a planned module."""
    module = called_module(module)
    region: PlannedRegion = module.__dict__[REGION_KEY]
    original = original_forward(region, module)
    if not torch.is_grad_enabled() or in_second_run():
        return original(*args, **kwargs)
    if len(region.programs) > 1 and in_stage_setup():
        return original(*args, **kwargs)  # no call of the step
    program = region.next_program()
    if not program.wrapped or in_first_run():
        return original(*args, **kwargs)
    if not torch.compiler.is_compiling() and has_process_group():
        check_no_units(module, program.region, program.children)
    return ENGINES[region.engine].run(program, original, args, kwargs, module)


apart_forward = planned_forward(
    disable_dynamo(
        forward,
        "this model has a plan of autoac's engine 'compile', which compiles regions by themselves, so fullgraph=True "
        "cannot be met. Leave out the outer torch.compile, or plan with engine='sac'",
    )
)
"""The forward of a planned module that code compiled around it leaves out, see `Program.apart`."""
apart_forward.__name__ = apart_forward.__qualname__ = "apart_forward"  # by which it is pickled


def check_no_units(module: torch.nn.Module, region: str, children: Collection[str]) -> None:
    """Refuse a region that contains FSDP2 units. Also checked when a region runs: a planned model may be sharded later.

    Args:
        children: of a tail, which they are no part of.

    Raises:
        PlanMismatchError: the region contains some.
    """
    if not (units := units_inside(module, children)):
        return
    names = some_units(units, region.partition("#")[0])
    raise PlanMismatchError(
        f"{region_in_words(region)} contains units of FSDP2 ({names}): where its values are computed again, in the "
        "backward of its last unit, the parameters of the others are not there, so gradients would be wrong. Regions "
        "can be these units and modules inside of them. Take the plan off (plan.remove(model)) and plan for the "
        "model as it is now, or shard the model otherwise."
    )


def attach(module: torch.nn.Module, programs: Sequence[Program], engine: str, plan_id: str) -> None:
    """Attach programs to one module."""
    function = apart_forward if any(program.apart for program in programs) else forward
    put_forward(module, function, PlannedRegion(programs, engine, module.__dict__.get("forward"), plan_id))


class Root:
    """Stored on a model's root if some module is called several times a step: resets the modules' call counts.

    Counting modulo the calls per step works only if every step runs to its end; an exception, or a forward without
    backward, shifts the count. So if the root is called once a step, each of its calls resets the counts. If it is
    called several times (micro-batches, two views), a step begins where no parameter has a gradient yet, as in the
    profiled step.

    Args:
        offsets: for each module that is called several times, the number of its calls in the step before each root
            call.
        fresh: number of root calls before the first `.grad` exists; a backward by `torch.autograd.grad` leaves none.
        elements, at_once: as for `RootCalls`.
        forward: the root's own instance attribute `forward` if it had one, else None.
        plan_id: identifies the plan.
    """

    def __init__(
        self,
        offsets: Mapping[str, Sequence[int]],
        fresh: int,
        elements: Sequence[int],
        at_once: bool,
        forward: Any,
        plan_id: str,
    ):
        self.offsets = {name: tuple(counts) for name, counts in offsets.items()}
        self.fresh = fresh
        self.elements = tuple(elements)
        self.at_once = at_once
        self.forward = forward
        self.plan_id = plan_id
        self.calls = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> Root:
        forward = copy.deepcopy(self.forward, memo)
        return Root(self.offsets, self.fresh, self.elements, self.at_once, forward, self.plan_id)

    def __reduce__(self) -> Any:
        return Root, (self.offsets, self.fresh, self.elements, self.at_once, self.forward, self.plan_id)

    def next_call(self, module: torch.nn.Module) -> int:
        """Index within the step of this root call, in this thread."""
        count = len(next(iter(self.offsets.values())))
        index = getattr(self.calls, "index", 0)
        if getattr(self.calls, "is_told", False):
            index = min(index, count - 1)
        elif index >= min(self.fresh, count):
            found = has_gradients(module)
            if index >= count:
                # A further micro-batch if the last planned one finds gradients, too; else a new step.
                index = count - 1 if found and self.fresh < count else 0
            elif not found:  # a later call of the step would find gradients
                index = 0
        self.calls.index = index + 1
        return max(index, 0)

    def fitting(self, place: int, elements: int) -> int:
        """Index of the planned root call whose programs a call of this size uses.

        The smallest planned size of at least `elements`; among equal ones the call's own place; else the largest. Of
        calls that are alive together, the call's own place, unless just this size was planned at another one.
        """
        if not self.elements or self.elements[place] == elements:
            return place
        if self.at_once:
            return self.elements.index(elements) if elements in self.elements else place
        fits = [call for call, planned in enumerate(self.elements) if planned >= elements]
        if not fits:
            return max(range(len(self.elements)), key=self.elements.__getitem__)
        least = min(self.elements[call] for call in fits)
        return place if self.elements[place] == least else self.elements.index(least)

    def restart(self, told: bool, skipped: int) -> None:
        """Begin a step in this thread.

        Args:
            told: the caller announces every step from now on.
            skipped: calls of this step before the first planned one.
        """
        self.calls.index, self.calls.is_told = -skipped, told


@planned_forward
def root_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a root that carries a `Root`."""
    module = called_module(module)
    root: Root = module.__dict__[ROOT_KEY]
    if torch.is_grad_enabled() and not in_second_run() and not in_stage_setup():
        call = root.next_call(module)
        if root.elements:
            call = root.fitting(call, elements_of(args, kwargs))
        for name, offsets in root.offsets.items():
            region = module.get_submodule(name).__dict__.get(REGION_KEY)
            if region is not None:
                region.restart(offsets[call])
    return original_forward(root, module)(*args, **kwargs)


def restart_calls(model: torch.nn.Module, told: bool, skipped: int = 0) -> None:
    """Begin a step with the model's next call in this thread.

    Args:
        told: it is called before every step from now on. Else steps that are not announced are found by gradients, too.
        skipped: calls of the step before the first planned one, such as one whose output is detached.
    """
    for module in model.modules():
        region: PlannedRegion | None = module.__dict__.get(REGION_KEY)
        root: Root | None = module.__dict__.get(ROOT_KEY)
        if region is not None:
            region.restart(0)
        if root is not None:
            root.restart(told, skipped)


def attach_root(model: torch.nn.Module, calls: RootCalls, plan_id: str) -> None:
    """Make each call of the model reset its modules' call counts. Call it last."""
    own = model.__dict__.get("forward")
    root = Root(calls.before, calls.fresh, calls.elements, calls.at_once, own, plan_id)
    put_forward(model, root_forward, root, ROOT_KEY)


class LossSide:
    """Stored on a module whose own code computes a loss, or that runs last before a loss is computed.

    The forward of a `PlannedRegion` or `Root` on the same module calls this one, so it is part of a region's second
    run.

    Args:
        side: the module's part in computing losses.
        eager_only: whether an outer `torch.compile` leaves the module out, as it does the plan's regions.
        forward: the instance's own attribute `forward` if it had one, else None.
        plan_id: identifies the plan.
    """

    def __init__(self, side: Side, eager_only: bool, forward: Any, plan_id: str):
        self.side = side
        self.eager_only = eager_only
        self.forward = forward
        self.plan_id = plan_id

    def __deepcopy__(self, memo: dict[int, Any]) -> LossSide:
        return LossSide(self.side, self.eager_only, copy.deepcopy(self.forward, memo), self.plan_id)


@planned_forward
def loss_side_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that carries a `LossSide`."""
    module = called_module(module)
    carried: LossSide = module.__dict__[LOSS_KEY]
    original = original_forward(carried, module)
    if not torch.compiler.is_compiling():
        return run_with_losses(carried.side, original, args, kwargs)
    if carried.eager_only and torch.is_grad_enabled():
        return _run_by_itself(carried.side, original, args, kwargs)
    return original(*args, **kwargs)


_run_by_itself = disable_dynamo(
    run_with_losses,
    "this model has a plan of autoac's engine 'replay' or 'compile', which computes its loss in place, so "
    "fullgraph=True cannot be met. Plan with engine='sac', or compile without fullgraph",
)


def attach_losses(
    model: torch.nn.Module,
    losses: Mapping[str, Collection[str | None]],
    chunked: bool,
    eager_only: bool,
    plan_id: str,
) -> None:
    """Make a model's cross entropies lean. Call it before attaching anything else of the plan.

    Args:
        losses, chunked: as for `sides`.
        eager_only: as for `LossSide`.
    """
    for fqn, side in sides(losses, chunked).items():
        module = model.get_submodule(fqn)
        put_forward(
            module,
            loss_side_forward,
            LossSide(side, eager_only, module.__dict__.get("forward"), plan_id),
            LOSS_KEY,
        )


def detach(module: torch.nn.Module) -> None:
    """Restore one module to its exact state before the plan; the module must not be `covered`."""
    for key in (ROOT_KEY, REGION_KEY, LOSS_KEY):  # the outermost first
        carried: PlannedRegion | Root | LossSide | None = module.__dict__.get(key)
        if carried is None:
            continue
        if carried.forward is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = carried.forward
        # Last: the plan's forward needs the entry until then, and an interrupted `detach` can be called again.
        del module.__dict__[key]


def put_on_again(module: torch.nn.Module) -> None:
    """Put a plan's forward on a module again if it is gone, and nothing but the class's own forward is there.

    A loop may put a forward of its own on a module for a part of its step. If the plan comes on in that part, its
    forward goes with the loop's.
    """
    own = module.__dict__.get("forward")
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return
    region: PlannedRegion | None = module.__dict__.get(REGION_KEY)
    side: LossSide | None = module.__dict__.get(LOSS_KEY)
    root: Root | None = module.__dict__.get(ROOT_KEY)
    if side is not None:  # the innermost first
        side.forward = own
        put_forward(module, loss_side_forward, side, LOSS_KEY)
    if region is not None:
        region.forward = module.__dict__.get("forward")
        function = apart_forward if any(program.apart for program in region.programs) else forward
        put_forward(module, function, region)
    if root is not None:
        root.forward = module.__dict__.get("forward")
        put_forward(module, root_forward, root, ROOT_KEY)


def covered(module: torch.nn.Module) -> bool:
    """Whether other code has replaced a planned module's `forward`; the new one may call the plan's."""
    ours = forward, apart_forward, root_forward, loss_side_forward
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "func", None) not in ours
