"""The optimizers that train the model, and their memory."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from autoac.automatic.report import Once
from autoac.measure import unique_storage_bytes
from autoac.record.optimizer import state_tensors, with_optimizer
from autoac.step.model import device_of, gradient_of
from autoac.torch_private import in_backward, is_profiled, local_part
from autoac_solver.records.devices import kind_of
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import NEVER, Profile, Storage

_LITTLE_MORE = 1.01


class Optimizers:
    """The optimizers of a model, as they are found; referenced weakly, so that a dropped one frees its state.

    Args:
        model: without wrappers.
        known: the optimizer passed by the user, or None.
        warn: warns of memory that cannot be counted.
    """

    def __init__(self, model: torch.nn.Module, known: Any, warn: Once):
        self._model = model
        self._found: list[weakref.ref[Any]] = [] if known is None else [weakref.ref(known)]
        self._in_backward: weakref.WeakSet[Any] = weakref.WeakSet()  # those that step there
        # After its last step: the number of parameters that an optimizer keeps state for.
        self._kept_for: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._held: list[Any] = []  # until the recorded step is planned for
        self._warn = warn

    @property
    def _known(self) -> list[Any]:
        """The optimizers that are still alive."""
        return [found for ref in self._found if (found := ref()) is not None]

    def are_joined_by(self, optimizer: Any) -> bool:
        """Add an optimizer that is about to step; returns whether it is new."""
        if any(known is optimizer for known in self._known):
            return False
        self._found.append(weakref.ref(optimizer))
        return True

    def is_only(self, optimizer: Any) -> bool:
        """Whether there were others, which are gone: a loop makes a new optimizer for each epoch, say."""
        return len(self._found) > 1 and self._known == [optimizer]

    def hold(self, held: bool) -> None:
        """Hold the optimizers strongly, or release them: a recorded step is planned for with its own optimizers."""
        self._held = self._known if held else []

    def are_counted_in(self, profile: Profile) -> bool:
        """Whether a profile counts all states of these optimizers, and all gradients that there are now."""
        kind, counted = kind_of(profile.device), _states_in(profile)
        there = Counter[str]()
        for optimizer in self._known:
            there[type(optimizer).__name__] += unique_storage_bytes(state_tensors(optimizer, kind))
        gradients = [g for p in self._model.parameters() if (g := gradient_of(p)) is not None]
        before = sum(row.bytes for row in profile.storage_table if row.is_gradient_before)
        has_room = unique_storage_bytes(map(local_part, gradients)) <= _LITTLE_MORE * before
        return has_room and all(size <= _LITTLE_MORE * counted[name] for name, size in there.items())

    def trains(self, optimizer: Any) -> bool:
        """Whether an optimizer has a parameter of the model."""
        own = {id(p) for p in self._model.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def states(self) -> list[torch.Tensor]:
        """Tensors of the optimizers' states on the model's device."""
        kind = device_of(self._model).type
        return [state for optimizer in self._known for state in state_tensors(optimizer, kind)]

    def note_step(self, optimizer: Any) -> None:
        """Note whether an optimizer steps in the middle of a backward, with which its state and step are recorded."""
        (self._in_backward.add if in_backward() else self._in_backward.discard)(optimizer)

    def keeps_more(self, optimizer: Any) -> bool:
        """Whether an optimizer keeps state for more parameters than after its last step: one has got a gradient."""
        now = len(optimizer.state)
        before, self._kept_for[optimizer] = self._kept_for.get(optimizer, now), now
        return now > before

    def states_of_backward(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors of the states of the optimizers that step in backward, with their optimizer's name."""
        kind = device_of(self._model).type
        found = [known for known in self._known if known in self._in_backward]
        return [(type(one).__name__, state) for one in found for state in state_tensors(one, kind)]

    def counted(self, profile: Profile) -> Profile:
        """The profile with the optimizers' states and the memory of their steps."""
        if size := unique_storage_bytes(map(local_part, self._swapped_out())):
            own = Storage(size, NEVER, profile.end, "Parameter", "")
            profile = replace(profile, storage_table=(*profile.storage_table, own))
        profile = self._with_unrecorded_states(profile)
        for optimizer in self._known:
            if optimizer in self._in_backward:
                continue
            if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
                # It steps in another phase of training.
                profile = self._with_state(profile, optimizer)
                continue
            try:
                profile = with_optimizer(profile, optimizer, measure=not is_profiled(), model=self._model)
            except ProfilingError as error:
                note = f"of the optimizer only its state is counted, as it is now: {error}"
                self._warn("only its state", note)
                profile = replace(self._with_state(profile, optimizer), notes=(*profile.notes, note))
        return profile

    def _with_unrecorded_states(self, profile: Profile) -> Profile:
        """The profile with the states of optimizers that step in backward, but have not done so in this step."""
        recorded, there = _states_in(profile), dict[str, list[torch.Tensor]]()
        for name, state in self.states_of_backward():
            there.setdefault(name, []).append(state)
        left = {name: unique_storage_bytes(states) - recorded[name] for name, states in there.items()}
        rows = [
            Storage(size, NEVER, profile.end, "Optstate", name) for name, size in left.items() if size > 0
        ]
        return replace(profile, storage_table=(*profile.storage_table, *rows))

    def _with_state(self, profile: Profile, optimizer: Any) -> Profile:
        """The profile with an optimizer's state as it is now."""
        tensors = state_tensors(optimizer, device_of(self._model).type)
        state = Storage(
            unique_storage_bytes(tensors), NEVER, profile.end, "Optstate", type(optimizer).__name__
        )
        return replace(profile, storage_table=(*profile.storage_table, state))

    def _swapped_out(self) -> list[torch.Tensor]:
        """The optimizers' parameters, if the model holds none: `functional_call` has put others in their place."""
        held = set(map(id, self._model.parameters()))
        own = [p for optimizer in self._known for group in optimizer.param_groups for p in group["params"]]
        return [] if any(id(p) in held for p in own) else own


def is_frozen(model: torch.nn.Module) -> bool:
    """Whether the model has parameters, and none of them requires a gradient."""
    parameters = model.parameters()  # most calls look at the first one only
    first = next(parameters, None)
    return first is not None and not first.requires_grad and not any(p.requires_grad for p in parameters)


def counts_optimizer(profile: Profile, optimizer: Any) -> bool:
    """Whether a profile counts the state of an optimizer of this class, and no less of it than there is now.

    The same class keeps more with other options (momentum, amsgrad), or for more parameters.
    """
    counted, name = _states_in(profile), type(optimizer).__name__
    state_bytes = unique_storage_bytes(state_tensors(optimizer, kind_of(profile.device)))
    return name in counted and state_bytes <= _LITTLE_MORE * counted[name]


def _states_in(profile: Profile) -> Counter[str]:
    """Bytes of the optimizers' states that a profile counts, by the names of their classes."""
    counted = Counter[str]()
    for row in profile.storage_table:
        if row.kind == "Optstate":
            counted[row.name] += row.bytes
    return counted


def trained_in(model: torch.nn.Module) -> str:
    """A cheap fingerprint of the parameters, and of which of them require gradients."""
    parameters = list(model.parameters())
    trained = [p.requires_grad for p in parameters]
    return f"{len(trained)} {hash((*trained, *(p.dtype for p in parameters)))}"
