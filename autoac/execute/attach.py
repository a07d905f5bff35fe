"""Put a plan's programs on a model's modules, and take them off again; see `forwards` for what a module gets."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from autoac.execute.cross_entropy.lean import Side, run_with_losses, sides
from autoac.execute.engines import ENGINES
from autoac.execute.forwards import original_forward, put_forward
from autoac.execute.program import Program
from autoac.execute.running import in_first_run, in_second_run
from autoac.step.carried import LOSS_KEY, REGION_KEY, planned
from autoac.step.model import has_gradients
from autoac.step.units import some_units, units_inside
from autoac.torch_private.called import called_module
from autoac_solver.records.errors import PlanMismatchError


class PlannedRegion:
    """Carried by a planned module: its programs, and the forward that it had.

    Args:
        programs: one for each call of the module in a step.
        engine: its name.
        forward: the instance's own `forward` attribute if it had one (some libraries put theirs there), else None.
        plan_id: tells which plan it belongs to.
    """

    def __init__(self, programs: Sequence[Program], engine: str, forward: Any, plan_id: str):
        self.programs = tuple(programs)
        self.engine = engine
        self.forward = forward
        self.plan_id = plan_id
        self.calls = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedRegion:
        return PlannedRegion(self.programs, self.engine, copy.deepcopy(self.forward, memo), self.plan_id)

    def __reduce__(self) -> Any:
        return PlannedRegion, (self.programs, self.engine, self.forward, self.plan_id)

    def next_program(self) -> Program:
        """The program for this call. Calls with gradients on are counted per thread, modulo the calls of a step."""
        if len(self.programs) == 1:
            return self.programs[0]
        index = getattr(self.calls, "index", 0)
        self.calls.index = (index + 1) % len(self.programs)
        return self.programs[index]

    def restart(self, index: int) -> None:
        """Let the module's next call in this thread be this one of the step's."""
        self.calls.index = index


def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a planned module."""
    module = called_module(module)
    region: PlannedRegion = module.__dict__[REGION_KEY]
    original = original_forward(region, module)
    if not torch.is_grad_enabled() or in_second_run():
        return original(*args, **kwargs)
    program = region.next_program()
    if not program.wrapped or in_first_run():
        return original(*args, **kwargs)
    if not torch.compiler.is_compiling() and _is_distributed():
        check_no_units(module, program.region)
    return ENGINES[region.engine].run(program, original, args, kwargs, module)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_no_units(module: torch.nn.Module, region: str) -> None:
    """Refuse a region with units of FSDP2 inside. Also asked when a region runs: a model may be sharded under its plan.

    Raises:
        PlanMismatchError: there are some.
    """
    if not (units := units_inside(module)):
        return
    names = some_units(units, region.partition("#")[0])
    raise PlanMismatchError(
        f"region {region!r} contains units of FSDP2 ({names}): where its values are computed again, in the backward of "
        f"its last unit, the parameters of the others are not there, so gradients would be wrong. Regions can be these "
        "units and modules inside of them. Take the plan off (plan.remove(model)) and plan for the model as it is now, "
        "or shard the model otherwise."
    )


def attach(module: torch.nn.Module, programs: Sequence[Program], engine: str, plan_id: str) -> None:
    """Put programs on one module."""
    put_forward(module, forward, PlannedRegion(programs, engine, module.__dict__.get("forward"), plan_id))


class Root:
    """Carried by the root of a model when some module is called several times a step: which of its calls come next.

    Counting modulo the calls of a step would do if every step ran to its end. After an exception, or a forward without
    a backward, the count would be off. So a model that is called once a step starts anew with each call. One that is
    called several times (micro-batches, two views) starts a step where no parameter has a gradient yet, as the
    profiled step did.

    Args:
        offsets: for each module that is called several times, its calls in the step before each call of the root.
        fresh: how many calls of the root come before the first `.grad` is there; a backward by `torch.autograd.grad`
            leaves none.
        forward: the root's own instance attribute `forward` if it had one, else None.
        plan_id: tells which plan it belongs to.
    """

    def __init__(self, offsets: Mapping[str, Sequence[int]], fresh: int, forward: Any, plan_id: str):
        self.offsets = {name: tuple(counts) for name, counts in offsets.items()}
        self.fresh = fresh
        self.forward = forward
        self.plan_id = plan_id
        self.calls = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> Root:
        return Root(self.offsets, self.fresh, copy.deepcopy(self.forward, memo), self.plan_id)

    def __reduce__(self) -> Any:
        return Root, (self.offsets, self.fresh, self.forward, self.plan_id)

    def next_call(self, module: torch.nn.Module) -> int:
        """Which of the step's calls of the root this one is, in this thread."""
        count = len(next(iter(self.offsets.values())))
        index = getattr(self.calls, "index", 0)
        if getattr(self.calls, "is_told", False):
            index = min(index, count - 1)
        elif index >= min(self.fresh, count):
            found = has_gradients(module)
            if (
                index >= count
            ):  # a further micro-batch, where the last one found gradients as well; else a new step
                index = count - 1 if found and self.fresh < count else 0
            elif not found:  # a later call finds gradients, or it is none
                index = 0
        self.calls.index = index + 1
        return index

    def restart(self) -> None:
        """A step begins in this thread: from now on somebody tells of each one."""
        self.calls.index, self.calls.is_told = 0, True


def root_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a root that carries a `Root`."""
    module = called_module(module)
    root: Root = module.__dict__[REGION_KEY]
    if torch.is_grad_enabled() and not in_second_run():
        call = root.next_call(module)
        for name, offsets in root.offsets.items():
            region = planned(module.get_submodule(name))
            if isinstance(region, PlannedRegion):
                region.restart(offsets[call])
    return original_forward(root, module)(*args, **kwargs)


def restart_calls(model: torch.nn.Module) -> None:
    """Let the model's next call in this thread be the first of a step; to be called before each step from then on."""
    for module in model.modules():
        carried = planned(module)
        if isinstance(carried, PlannedRegion):
            carried.restart(0)
        elif isinstance(carried, Root):
            carried.restart()


def attach_root(
    model: torch.nn.Module, offsets: Mapping[str, Sequence[int]], fresh: int, plan_id: str
) -> None:
    """Let a call of the model tell its modules which of their calls come next; arguments as for `Root`."""
    put_forward(model, root_forward, Root(offsets, fresh, model.__dict__.get("forward"), plan_id))


class LossSide:
    """Carried by a module whose own code computes a loss, or that runs last before a loss is computed.

    Its forward is called by that of whatever else the module carries, so it is part of a region's second run.

    Args:
        side: the module's part in computing losses.
        forward: the instance's own attribute `forward` if it had one, else None.
        plan_id: tells which plan it belongs to.
    """

    def __init__(self, side: Side, forward: Any, plan_id: str):
        self.side = side
        self.forward = forward
        self.plan_id = plan_id

    def __deepcopy__(self, memo: dict[int, Any]) -> LossSide:
        return LossSide(self.side, copy.deepcopy(self.forward, memo), self.plan_id)


def loss_side_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that carries a `LossSide`."""
    module = called_module(module)
    carried: LossSide = module.__dict__[LOSS_KEY]
    original = original_forward(carried, module)
    if torch.compiler.is_compiling():
        return original(*args, **kwargs)
    return run_with_losses(carried.side, original, args, kwargs)


def attach_losses(
    model: torch.nn.Module, losses: Mapping[str, Collection[str | None]], chunked: bool, plan_id: str
) -> None:
    """Let a model's cross entropies be lean. Call it before anything else of the plan is attached.

    Args:
        losses, chunked: as for `sides`.
    """
    for fqn, side in sides(losses, chunked).items():
        module = model.get_submodule(fqn)
        put_forward(
            module, loss_side_forward, LossSide(side, module.__dict__.get("forward"), plan_id), LOSS_KEY
        )


def detach(module: torch.nn.Module) -> None:
    """Take the plan off one module, exactly as it was before; the module must not be `covered`."""
    for key in (REGION_KEY, LOSS_KEY):
        carried: PlannedRegion | Root | LossSide | None = module.__dict__.get(key)
        if carried is None:
            continue
        if carried.forward is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = carried.forward
        # Last: until then, the plan's forward needs it, and `detach` can be called again.
        del module.__dict__[key]


def covered(module: torch.nn.Module) -> bool:
    """Whether somebody has given a planned module another `forward`, which perhaps calls the plan's."""
    ours = forward, root_forward, loss_side_forward
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "func", None) not in ours
