"""Put a plan's programs on a model's modules, and take them off again.

A planned module gets an instance attribute `forward`; parameters, buffers, hooks and `state_dict` stay as they are.
It is a `functools.partial`, which survives `copy.deepcopy` (a closure would make the copy share the original's
weights) and pickling (a `types.MethodType` is pickled by the function's name, and comes back as another function).
"""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from autoac.compat import disable_dynamo
from autoac.engine import replay, sac
from autoac.engine.losses import Side, run_with_losses, sides
from autoac.engine.program import Program

Runner = Callable[[Program, Callable[..., Any], tuple[Any, ...], dict[str, Any], torch.nn.Module], Any]


def _replay(
    program: Program, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
) -> Any:
    return replay.run(
        program, original, args, kwargs
    )  # runs no code twice, so the module is no concern of it


ENGINES: dict[str, Runner] = {"replay": _replay, "sac": sac.run}

_replay_eagerly = disable_dynamo(replay.run)
"""Replay needs the ops of eager mode: under `torch.compile` its regions are left out of the graph."""

_KEY = "_autoac_region"
_LOSS_KEY = "_autoac_loss"


class PlannedRegion:
    """What a planned module carries.

    Args:
        programs: one for each call of the module in a step.
        engine: "replay" or "sac".
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
        """The program for this call: calls are counted with gradients on, per thread, round and round."""
        if len(self.programs) == 1:
            return self.programs[0]
        index = getattr(self.calls, "index", 0)
        self.calls.index = (index + 1) % len(self.programs)
        return self.programs[index]

    def restart(self, index: int) -> None:
        """The next call of the module in this thread is this one of the step."""
        self.calls.index = index


def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a planned module."""
    region: PlannedRegion = module.__dict__[_KEY]
    original = region.forward or functools.partial(type(module).forward, module)
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    program = region.next_program()
    if not program.wrapped:
        return original(*args, **kwargs)
    if region.engine == "replay" and torch.compiler.is_compiling():
        return _replay_eagerly(program, original, args, kwargs)
    return ENGINES[region.engine](program, original, args, kwargs, module)


def attach(module: torch.nn.Module, programs: Sequence[Program], engine: str, plan_id: str) -> None:
    """Plan one module."""
    _put(module, forward, PlannedRegion(programs, engine, module.__dict__.get("forward"), plan_id))


def _put(
    module: torch.nn.Module,
    function: Callable[..., Any],
    carried: PlannedRegion | Root | Pausing | LossSide,
    key: str = _KEY,
) -> None:
    bound = functools.partial(function, module)
    # For `inspect.signature`: transformers' Trainer asks a model's forward which columns of the data it takes.
    bound.__wrapped__ = carried.forward or types.MethodType(type(module).forward, module)  # type: ignore[attr-defined]
    module.__dict__[key] = carried
    module.__dict__["forward"] = bound


class Root:
    """What the root of a model carries when some module is called several times a step: where its calls stand.

    Counting round and round would do if every step ran to its end; after an exception, or a forward that nobody
    goes backward from, it would be off. A model that is called once a step starts anew with each call. One that is
    called several times (micro-batches, two views) starts a step where no parameter has a gradient yet, as the
    profiled step did.

    Args:
        offsets: for each module that is called several times, its calls in the step before each call of the root.
        fresh: how many calls of the root come before the first gradient, which a backward may leave to
            `torch.autograd.grad`.
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
        index = getattr(self.calls, "index", 0) % count
        # A later call finds gradients, or it is none.
        if index and index >= self.fresh and all(p.grad is None for p in module.parameters()):
            index = 0
        self.calls.index = index + 1
        return index


def root_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a root that carries a `Root`."""
    root: Root = module.__dict__[_KEY]
    if torch.is_grad_enabled():
        call = root.next_call(module)
        for name, offsets in root.offsets.items():
            region = planned(module.get_submodule(name))
            if isinstance(region, PlannedRegion):
                region.restart(offsets[call])
    return (root.forward or functools.partial(type(module).forward, module))(*args, **kwargs)


def attach_root(
    model: torch.nn.Module, offsets: Mapping[str, Sequence[int]], fresh: int, plan_id: str
) -> None:
    """Let a call of the model tell its modules which of their calls come next; arguments as for `Root`."""
    _put(model, root_forward, Root(offsets, fresh, model.__dict__.get("forward"), plan_id))


class Pausing:
    """What a module inside of a region carries that may pause the recording.

    Args:
        fqn: its name, as in the programs' pauses.
        plan_id: tells which plan it belongs to.
    """

    forward = None  # a module with one of its own may do anything, and does not pause

    def __init__(self, fqn: str, plan_id: str):
        self.fqn = fqn
        self.plan_id = plan_id


def pausing_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that carries a `Pausing`."""
    pausing: Pausing = module.__dict__[_KEY]
    recording = None if torch.compiler.is_compiling() else replay.running.recording
    pauses = recording is not None and recording.pause(pausing.fqn)
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        if recording is not None and pauses:
            recording.resume()


def attach_pausing(module: torch.nn.Module, fqn: str, plan_id: str) -> None:
    """Let a module inside of regions pause their recording, unless its forward has been replaced; see `Pausing`."""
    if "forward" not in module.__dict__:
        _put(module, pausing_forward, Pausing(fqn, plan_id))


class LossSide:
    """What a module carries in whose own code a loss is computed, or after which that is done.

    It is below whatever else the module carries, so that it is part of a region's second run.

    Args:
        side: what it has to do with losses.
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
    carried: LossSide = module.__dict__[_LOSS_KEY]
    original = carried.forward or functools.partial(type(module).forward, module)
    if torch.compiler.is_compiling():
        return original(*args, **kwargs)
    return run_with_losses(carried.side, original, args, kwargs)


def attach_losses(
    model: torch.nn.Module, losses: Mapping[str, Collection[str | None]], chunked: bool, plan_id: str
) -> None:
    """Let a model's cross entropies be lean; before anything else of the plan is attached.

    Args:
        losses, chunked: as for `sides`.
    """
    for fqn, side in sides(losses, chunked).items():
        module = model.get_submodule(fqn)
        _put(module, loss_side_forward, LossSide(side, module.__dict__.get("forward"), plan_id), _LOSS_KEY)


def detach(module: torch.nn.Module) -> None:
    """Take the plan off one module, exactly as it was before; the module must not be `covered`."""
    for key in (_KEY, _LOSS_KEY):
        carried: PlannedRegion | Root | Pausing | LossSide | None = module.__dict__.get(key)
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
    ours = forward, root_forward, pausing_forward, loss_side_forward
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "func", None) not in ours


def planned(module: torch.nn.Module) -> PlannedRegion | Root | Pausing | LossSide | None:
    """What the module carries, None if no plan is on it."""
    return module.__dict__.get(_KEY) or module.__dict__.get(_LOSS_KEY)
