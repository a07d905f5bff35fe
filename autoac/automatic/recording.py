"""Steps of the loop, recorded one at a time as they run."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from autoac.automatic.optimizers import Optimizers
from autoac.automatic.report import Once
from autoac.execute.on_top import OnTop
from autoac.parallel.ddp import with_new_buckets_only
from autoac.parallel.wrapped import found_on
from autoac.progress import LOGGER
from autoac.record.cuda.cublas import with_workspaces
from autoac.record.live import InUse, LiveStep, with_leftovers
from autoac.step.model import number_of_gradients, runs_compiled, unwrapped
from autoac.step.restore import tensors_of
from autoac.torch_private import any_autocast, behind_transforms, in_backward, local_part, storage_key
from autoac_solver.records.errors import InfeasibleBudgetError, ProfilingError
from autoac_solver.records.profile import Profile

MOST_RECORDINGS = 3
"""At most this many steps are recorded for a loop whose later steps differ from the recorded one."""


_BETWEEN = ("autoac", "torch", "accelerate", "contextlib")
"""Packages whose code stands between a loop and its model's forward."""

_NAMES_OF_LOCALS = frozenset({"locals", "vars", "eval", "exec", "f_locals"})
"""Names that code uses to read its own local variables."""

_OF_NOBODY_ELSE = 3
"""References to a dictionary held by its frame, one variable, and the call that counts them."""

_MOST_NESTED, _MOST_ITEMS = 3, 1000
"""Limits for results that are searched for tensors."""

_NOT_LEFT = (
    "autocast was not left since an earlier optimizer step: torch keeps its casts of the weights until then, so this "
    "step computes with those of the weights before the update. That is so without autoac, too. Enter torch.autocast "
    "anew after each step of an optimizer."
)

_MOST_INNER = 16
"""After so many calls of the model in a recorded step that leave no gradients, each is taken to be a step."""
_MOST_UNPLANNED = 3
"""After this many steps without a plan we warn; gradient scaling may have skipped the first ones."""


class StepRecording:
    """Records a step, and keeps its profile until the next step begins.

    Args:
        given: the model as the loop calls it.
        on_top: our forward on it, which stands aside while the model is prepared.
        warn: warns if a step cannot be recorded.

    Attributes:
        profile: profile of a recorded step that has no plan yet.
        ended_early: whether the last recorded step ended without an optimizer, which may step yet.
        count: number of recordings begun; reset by changes that do not mean the loop's steps vary.
        skipped: the model's calls in the recorded step before those in the profile: nothing came of them.
        returned: `id` of the last result of the model's forward.
        is_late: the recorded step began within a call, so another one is recorded before there is a plan.
    """

    def __init__(self, given: torch.nn.Module, on_top: OnTop, optimizers: Optimizers, warn: Once):
        self.profile: Profile | None = None
        self.count = 0
        self.ended_early = False
        self.skipped = self.returned = 0
        self.is_late = False
        self._ends_with_optimizer = False
        self._given_up = 0  # calls of the recording that was given up last, in this step
        self._given = given
        self._model = unwrapped(given)
        self._on_top = on_top
        self._optimizers = optimizers
        self._warn = warn
        self._live: LiveStep | None = None
        self._left_on: LiveStep | None = None  # given up in a compiled function's call
        self._survivors: dict[int, Any] = {}
        self._workspaces: dict[Any, int] = {}
        self._is_paused = False
        self._failures = 0  # recorded steps whose backward has failed
        self._unseen_steps = 0  # optimizer steps while nothing is recorded and there is no plan
        self._gradients = 0  # parameters that had one when the step began
        self._has_recorded = False  # a step, to its end
        self._ends_with_calls = False  # whether each call that follows a backward begins a step
        self.is_called_in_backward = False  # which counts as no call of a step
        self.began = 0  # recordings begun since there is this object
        # The step that no plan fits, by its ops, and why; another one was recorded then.
        self.refused: tuple[str, InfeasibleBudgetError] | None = None

    @property
    def is_on(self) -> bool:
        """Whether a step is being recorded."""
        return self._live is not None

    @property
    def went_backward(self) -> bool:
        """Whether the step that is being recorded has begun its backward."""
        return self._live is not None and self._live.tape.went_backward

    @property
    def has_step(self) -> bool:
        """Whether a recorded step is over that has no plan yet."""
        return self.profile is not None or (self._live is not None and self._live.has_stopped)

    @property
    def may_begin_again(self) -> bool:
        """Whether one more step may be recorded."""
        return self.count < MOST_RECORDINGS

    @property
    def began_otherwise(self) -> bool:
        """Whether the recorded step began unlike the next one.

        It was late; or more parameters have gradients than when it began, or none do and some did; or its casts of
        weights are still there when the next one begins.
        """
        if self.is_late or self._left_casts():
            return True
        found = number_of_gradients(self._model)
        return found > self._gradients or (not found and self._gradients > 0)

    def _left_casts(self) -> bool:
        """Whether autocast was not left since the recorded step, and kept its casts of weights; warns of it.

        Besides their bytes, what they change is backward: it reaches nodes of an earlier forward last, so the gradients
        of all casts are alive together.
        """
        if self.profile is None or not any_autocast():
            return False
        table = self.profile.storage_table
        made = {storage for op in self.profile.tape if op.cached_cast for storage in op.creates}
        casts = {storage for storage in made if table[storage].bytes}
        alive = {storage for storage, ref in self._survivors.items() if ref() is not None}
        left = bool(casts) and casts <= alive  # a graph that the loop holds may save some of them
        if left:
            self._warn("autocast was not left", _NOT_LEFT)
        return left

    def begin(self, args: Any, kwargs: Any, ends_with_optimizer: bool) -> bool:
        """Start recording; returns whether that is possible.

        Args:
            args, kwargs: arguments of the model's call.
            ends_with_optimizer: whether an optimizer ends the step, and nothing else does.
        """
        lean_losses = not runs_compiled(self._given)
        live = LiveStep(self._model, lean_losses, self._workspaces, ends_with_optimizer)
        with self._on_top.aside():
            try:
                live.begin((args, kwargs), self._optimizers.states())
            except InUse:
                self._unseen_steps = 0
                return False  # the next step is tried
            except ProfilingError as error:
                self._warn("cannot record", f"autoac: no plan yet. {error}")
                return False
        self._live, self._is_paused, self.is_late = live, False, False
        self._ends_with_optimizer = ends_with_optimizer
        self.count += 1
        self.began += 1
        self._gradients = number_of_gradients(self._model)
        return True

    def end_if_over(self, begins: bool, is_announced: bool) -> bool:
        """Handle a call of the model: end the recording if it begins the next step, or if no backward can follow.

        Args:
            begins: whether the call begins a step, provided that the recorded one has gone backward, and has left
                gradients: gradients of inputs, as for adversarial examples, are a part of a step.
            is_announced: whether a trainer says that it does.

        Returns:
            Whether the recording was given up: nothing came of its calls, and this call begins a step.
        """
        if self.end_if_stopped() or self._live is None:
            return False
        self.pause(False)  # an optimizer's step may have failed
        tape = self._live.tape
        if tape.is_given_up:
            calls = self._given_up + sum(not row["fqn"] for row in tape.calls.rows)
            if tape.went_backward:
                self._backward_has_failed()
                return True
            self.give_up()
            # Before the first optimizer's step it may be no part of the loop, but a trial.
            self._given_up = calls if self._ends_with_optimizer else 0
            return True
        is_trained = is_announced or self._ends_with_calls or self._live.is_trained
        if tape.went_backward and begins and not is_trained and len(tape.root_calls) >= _MOST_INNER:
            self._ends_with_calls = (
                True  # the loop keeps gradients elsewhere, and calls other functions to step
            )
            self.give_up()
            return True
        if tape.is_over or (tape.went_backward and begins and is_trained):
            self.end()
            self.ended_early = not self.is_on
        return False

    def end(self) -> None:
        """End the recording and make the step's profile; only at the next call if the optimizer's step is compiled."""
        live = self._live
        assert live is not None
        # The loop has caught an error in backward, and its optimizer steps all the same.
        if live.tape.is_given_up:
            self._backward_has_failed()
            return
        if not live.can_end:
            self._warn(
                "cannot end", "autoac: the step cannot be recorded: a mode or hooks were put on in it."
            )
            live.tape.clock.suspended += 1
            return
        if live.must_stay_on:
            if not live.has_stopped:
                live.stop(self._optimizers.states_of_backward())
            return
        self._live = None
        self.skipped, self._given_up = self._given_up, 0
        with self._on_top.aside():
            profile = live.finish(self._optimizers.states_of_backward())
        if not self._model.training:
            profile = replace(profile, notes=(*profile.notes, "the model was put in eval mode in the step"))
        profile = with_new_buckets_only(profile, found_on(self._given))
        if not self._has_recorded:
            # Later steps begin with cuBLAS's workspaces, and count them with the rest that is there.
            profile = with_workspaces(profile, None)
        self.profile, self._has_recorded = profile, True
        self._survivors, self._workspaces = live.survivors, live.workspaces

    def _backward_has_failed(self) -> None:
        self.give_up()
        self._failures += 1
        if self._failures <= MOST_RECORDINGS:
            self.count -= 1  # it says nothing of steps that vary
            LOGGER.info("the backward of the recorded step has failed: recording another step")
        else:
            self._warn(
                "backward fails", "autoac: no plan yet: the backward of every recorded step has failed."
            )

    def pause(self, paused: bool) -> None:
        """Pause recording (during an optimizer step in the middle of a longer step), or resume it."""
        if self._live is not None and paused != self._is_paused:
            self._is_paused = paused
            self._live.tape.clock.suspended += 1 if paused else -1

    def give_up(self) -> None:
        """Stop recording, without a profile."""
        self._take_off_what_is_left_on()
        live, self._live = self._live, None
        self._given_up = 0
        if live is not None and live.must_stay_on:
            live.tape.clock.suspended += 1
            self._left_on = live
        elif live is not None:
            with self._on_top.aside():
                live.give_up()

    def end_if_stopped(self) -> bool:
        """End what could not end within a compiled optimizer's step; returns whether that is a recording."""
        self._take_off_what_is_left_on()
        if self._live is None or not self._live.has_stopped or self._live.must_stay_on:
            return False
        self.end()
        return True

    def _take_off_what_is_left_on(self) -> None:
        """Take off the modes of a step that was given up where they had to stay on."""
        if self._left_on is not None and not self._left_on.must_stay_on and self._left_on.can_end:
            left, self._left_on = self._left_on, None
            with self._on_top.aside():
                left.give_up()

    def taken(self, given: Any) -> Profile:
        """The profile, with the tensors of its step that the loop still holds; drops it here.

        To be called within the model's call that begins the next step.

        Args:
            given: what that call is given.
        """
        assert self.profile is not None
        profile = with_leftovers(
            self.profile,
            self._survivors,
            storages_of_caller(self.returned),
            storages_of_modules(self._model),
            _keys(tensors_of(given)),
        )
        self.forget()
        return profile

    def began_late(self) -> None:
        """Note that the model was sharded since its last call: parameters were gathered when this one began.

        The step is recorded for the sake of its peak, and the next one for the plan.
        """
        self.is_late = True
        self.count -= 1

    def is_in_backward(self) -> bool:
        """Whether a call of the model comes in backward; notes it."""
        is_second_run = in_backward()
        self.is_called_in_backward |= is_second_run
        return is_second_run

    def drop(self) -> None:
        """Drop the profile, as if that step had not been recorded."""
        self.forget()
        self.count = max(0, self.count - 1)
        self.ended_early = False

    def forget(self) -> None:
        """Drop the profile."""
        self.profile, self._survivors = None, {}

    def tell_if_nothing_is_seen(self) -> None:
        """On an optimizer step without a plan: warn if no call of the model, or no backward from it, was seen."""
        if self.profile is not None or self.went_backward:
            return
        self._unseen_steps += 1
        if self._unseen_steps < _MOST_UNPLANNED:
            return
        if not self.is_on and not self.count and self.is_called_in_backward:
            why = (
                "it is called with gradients on in backward only (by a loss that caches gradients, or in a checkpoint "
                "around it), where no step can be recorded: use the loss without that, and the plan saves the memory"
            )
        elif not self.is_on and not self.count:
            why = (
                "it was not called in train mode and with gradients on since (compiled later, or by its parts?): call "
                "autoac.auto for the module that the loop calls, after torch.compile"
            )
        else:
            why = "no backward from its calls was seen (in another thread, or a reentrant checkpoint around it?)"
        self._warn(
            "nothing planned",
            f"autoac.auto has no plan for {type(self._model).__name__}, which is trained: {why}.",
        )


def storages_of_caller(returned: int) -> frozenset[int]:
    """Keys of the storages in local variables of the code that calls the model; not those of attributes.

    Nor those in lists, to which a loop adds the results of its steps, and drops old ones when it is done with a step.

    Args:
        returned: `id` of the model's last result, which may be a list.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    values = [] if frame is None else _locals_of(frame)
    return _keys(tensor for value in values for tensor in _tensors_in(value, _MOST_NESTED, returned))


def storages_of_modules(model: torch.nn.Module) -> dict[int, str]:
    """Keys of the storages in attributes of modules, with the module's name."""
    found = {}
    for name, module in model.named_modules():
        own = vars(module).values()
        keys = _keys(tensor for value in own for tensor in _tensors_in(value, _MOST_NESTED, 0))
        found |= dict.fromkeys(keys, name)
    return found


def _keys(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Keys of the storages of these."""
    parts = map(local_part, map(behind_transforms, tensors))
    return frozenset(storage_key(part) for part in parts if part.layout is torch.strided)


def _locals_of(frame: types.FrameType) -> list[Any]:
    """The values of a frame's local variables; none if reading them would change what its code has from `locals()`.

    Before Python 3.13, reading a function's variables updates one dictionary, which the frame keeps. `locals()` returns
    the same one, and a debugger may hold it, too.
    """
    code = frame.f_code
    is_shared = sys.version_info < (3, 13) and bool(code.co_flags & inspect.CO_OPTIMIZED)
    if is_shared and not _NAMES_OF_LOCALS.isdisjoint(code.co_names):
        return []
    found = frame.f_locals
    values = list(found.values())
    if is_shared and sys.getrefcount(found) <= _OF_NOBODY_ELSE:
        found.clear()  # else the tensors in it would stay alive
    return values


def _tensors_in(value: Any, depth: int, result: int) -> Iterator[torch.Tensor]:
    """The tensors in a variable: itself, or in results such as tuples, mappings and records of moderate size.

    Args:
        result: `id` of the list to search; other lists are left out.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, list) and id(value) != result:
        return
    inside: Collection[Any]
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (list, tuple)):
        inside = value
    elif isinstance(value, types.SimpleNamespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        inside = getattr(value, "__dict__", {}).values()
    else:
        return
    # A tuple, and the result itself, are replaced with all that is in them.
    is_whole = isinstance(value, tuple) or id(value) == result
    for item in _items_of(inside) if depth else ():
        yield from _tensors_in(item, depth - 1, id(item) if is_whole else result)


def _items_of(values: Collection[Any]) -> list[Any]:
    """The items, unless there are many of them."""
    try:
        return list(values) if len(values) <= _MOST_ITEMS else []
    except Exception:
        return []  # an error of the object's own code (e3nn's tuples have no length), which the loop may never run
