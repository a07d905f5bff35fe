"""Restores a model after trial steps: parameters, buffers, gradients, random states, attributes."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoac.device import gpu_random_states
from autoac.ops.generators import set_state, state_of
from autoac.ops.geometry import Geometry, geometry_of
from autoac.step.interrupts import held_back
from autoac.step.units import roots_of_units, settle_units
from autoac.torch_private import (
    is_view,
    key_of_storage,
    leave_modes,
    modes_entered,
    parts_of,
    reset_units,
    set_version,
    storage_key,
    version_of,
)


class Restorer:
    """Context that runs registered restoring actions at its end, the last one first.

    An action that fails or is interrupted is tried once more, and the others run in any case. Ctrl-C is delayed from
    entry to exit, except while the step runs: see `interrupts`.
    """

    def __init__(self) -> None:
        self._actions: list[Callable[[], Any]] = []

    def later(self, action: Callable[..., Any], *args: Any) -> None:
        """Register an action for the end. Do so before the change that it undoes."""
        self._actions.append(functools.partial(action, *args))

    def __enter__(self) -> Restorer:
        self._held_back = held_back()
        self._held_back.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            put_back(reversed(self._actions))
        finally:
            self._actions.clear()
            self._held_back.__exit__(*exception)


def own_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The current gradient of a leaf."""
    return tensor.grad


@contextlib.contextmanager
def untouched(
    model: torch.nn.Module,
    inputs: Iterable[torch.Tensor],
    gradient: Callable[[torch.Tensor], torch.Tensor | None] = own_gradient,
) -> Iterator[Restorer]:
    """Context: restore what a step changes, but for values and the states of optimizers, also when it fails.

    Args:
        inputs: the tensors of the sample.
        gradient: gives a leaf's gradient at the step's start; by default the current one.

    Returns:
        The restorer, to register further actions.

    Values that are written in place are not copied here (that would double the parameters' memory): the recording
    copies a storage before its first write and restores it itself, see `BeforeStep`. Other trial runs restore values
    and optimizers as well: see `trial`.
    """
    inputs = list(inputs)
    settle_units(model)
    with Restorer() as restorer:
        for set_state, state in _random_states(model):
            restorer.later(set_state, state)
        leaves = [t for t in (*model.parameters(), *inputs) if t.is_leaf]
        for tensor in leaves:
            restorer.later(setattr, tensor, "grad", tensor.grad)
        for tensor in _unique((*inputs, *_tensors_in(model))):
            restorer.later(Graph.of(tensor).put_back)
        for tensor in _unique(_tensors_in(model)):
            if is_plain(tensor):
                restorer.later(point_to, tensor, tensor.data)
        for module in model.modules():
            restorer.later(_restore, module, _attributes(module))
        restorer.later(leave_modes, modes_entered())
        for tensor in leaves:
            tensor.grad = gradient(tensor)
        try:
            yield restorer
        except BaseException:
            put_back(functools.partial(reset_units, root) for root in roots_of_units(model))
            raise


_MOST_BYTES = 2**26
"""Most bytes of the copies that `attributes_kept` makes."""


@contextlib.contextmanager
def attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Context after which the tensors that modules have as attributes have the bytes that they had before.

    Of up to `_MOST_BYTES`, the small ones first. Bytes are copied, as many types of tensors have no ops for that.
    """
    found = [t for t in attributes_of_modules(model).values() if is_plain(t) and not t.is_meta]
    storages = {storage_key(t): t.untyped_storage() for t in found if not t.requires_grad}
    left = _MOST_BYTES
    with Restorer() as restorer:
        for storage in sorted(storages.values(), key=lambda storage: storage.nbytes()):
            if (left := left - storage.nbytes()) >= 0:
                restorer.later(_write_bytes, storage, bytes_of(storage).clone())
        yield


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's bytes as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


def _write_bytes(storage: torch.UntypedStorage, values: torch.Tensor) -> None:
    if storage.nbytes() == len(values):
        bytes_of(storage).copy_(values)


@contextlib.contextmanager
def values_kept(tensors: Iterable[torch.Tensor], places: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Context after which these tensors have the values, the shapes and the storages that they had before.

    Args:
        tensors: copied here; of a wrapper subclass, which may have no ops for that, its parts.
        places: not copied; only their shapes and storages are restored.
    """
    tensors = [part for tensor in tensors for part in parts_of(tensor)]
    with Restorer() as restorer:
        for tensor in tensors:
            restorer.later(_write, tensor, tensor.detach().clone())
        for tensor in (*tensors, *places):
            if tensor.layout is torch.strided:
                restorer.later(Seen.of(tensor).put_back)
        yield


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if not torch.equal(tensor, values):
        tensor.data.copy_(values)  # the version stays: a graph that saved it finds the same values


@dataclass(frozen=True, slots=True)
class Graph:
    """Autograd's state of a tensor: whether it requires a gradient, whether it is a leaf, its version.

    The tensor is not held, so a view that the step makes of it lives no longer than without this.
    """

    known: weakref.ref[torch.Tensor]
    requires_grad: bool
    is_leaf: bool
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Graph:
        """The current state."""
        return cls(weakref.ref(tensor), tensor.requires_grad, tensor.is_leaf, version_of(tensor))

    def put_back(self) -> None:
        """Restore the state. The tensor keeps its graph if it had one, or is a view of a tensor that has one."""
        tensor = self.known()
        if tensor is None:
            return
        if self.is_leaf and not tensor.is_leaf and not is_view(tensor):
            tensor.detach_()
        if tensor.is_leaf and tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if self.version >= 0:
            set_version(tensor, self.version)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def point_to(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    """Undo assignments to `tensor.data`."""
    if storage_key(tensor) != storage_key(alias) or geometry_of(tensor) != geometry_of(alias):
        tensor.data = alias


def _tensors_in(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    yield from attributes_of_modules(model).values()


def attributes_of_modules(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that modules have as attributes, or in lists and dictionaries that are attributes, by name.

    Not parameters and buffers.
    """
    others = set(map(id, (*model.parameters(), *model.buffers())))
    found: dict[str, torch.Tensor] = {}
    for fqn, module in model.named_modules():
        path = f"{fqn}." if fqn else ""
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                found[path + name] = value
            elif isinstance(value, _CONTAINERS):
                items = enumerate(value.values() if isinstance(value, dict) else value)
                found |= {f"{path}{name}.{i}": item for i, item in items if isinstance(item, torch.Tensor)}
    return {name: tensor for name, tensor in found.items() if id(tensor) not in others}


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is strided, not nested, and of no subclass but those of torch.nn."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor's storage, that storage's size, and the tensor's geometry, which `resize_` or `out=` may change."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    n_bytes: int
    geometry: Geometry

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Seen:
        """The current state."""
        storage = tensor.untyped_storage()
        return cls(tensor, storage, storage.nbytes(), geometry_of(tensor))

    def changed(self) -> bool:
        """Whether the current state differs."""
        return self.storage.nbytes() != self.n_bytes or self._moved()

    def put_back(self) -> None:
        """Restore the tensor's storage, its size and the geometry, but no values."""
        if self.storage.nbytes() != self.n_bytes:
            self.storage.resize_(self.n_bytes)
        if self._moved():
            shape, stride, offset, *_ = self.geometry
            with torch.no_grad():
                self.tensor.set_(self.storage, offset, shape, stride)

    def _moved(self) -> bool:
        there = storage_key(self.tensor) == key_of_storage(self.storage)
        return not there or geometry_of(self.tensor) != self.geometry


def put_back(actions: Iterable[Callable[[], Any]]) -> None:
    """Run all actions in any case: one that fails or is interrupted is tried once more.

    Raises:
        BaseException: the first one raised, after all actions have run.
    """
    first: BaseException | None = None
    for action in actions:
        for _ in range(2):
            try:
                action()
                break
            except BaseException as error:
                first = first or error
    if first is not None:
        raise first


def random_states(model: torch.nn.Module) -> list[Any]:
    """Every random state that a step of this model may advance, in a fixed order."""
    return [state for _, state in _random_states(model)]


@contextlib.contextmanager
def other_random_numbers(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Context that seeds every generator that a step of this model may draw from, and restores it afterwards."""
    with Restorer() as restorer:
        for set_state, state in _random_states(model):
            restorer.later(set_state, state)
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        for module in model.modules():
            for value in module.__dict__.values():
                if isinstance(value, torch.Generator):
                    value.manual_seed(seed)
        yield


def host_random_states() -> list[tuple[Any, Any]]:
    """The states of Python's `random` and of `numpy.random`, if it is loaded, each behind the function that sets it."""
    states: list[tuple[Any, Any]] = [(random.setstate, random.getstate())]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        states.append((numpy.set_state, numpy.get_state(legacy=False)))
    return states


def same_random_states(before: list[tuple[Any, Any]], now: list[tuple[Any, Any]]) -> bool:
    """Whether two results of `host_random_states` are equal, as far as both have a state."""
    return all(_same_state(one, other) for (_, one), (_, other) in zip(before, now, strict=False))


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, dict):  # numpy's, with arrays
        return all(_same_state(value, other[name]) for name, value in one.items())
    return bool(
        one is other or (one == other if isinstance(one, (tuple, str, int, float)) else (one == other).all())
    )


def _random_states(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    states: list[tuple[Any, Any]] = [_state(torch.default_generator), *host_random_states()]
    states += gpu_random_states()
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, torch.Generator):
                states.append(_state(value))
    return states


def _state(generator: torch.Generator) -> tuple[Any, Any]:
    return functools.partial(set_state, generator), state_of(generator)


_CONTAINERS = (dict, set, list)


def _attributes(module: torch.nn.Module) -> dict[str, tuple[Any, list[Any] | None]]:
    """The module's attributes, with the contents of containers among them (its parameters, buffers, hooks, ...)."""
    return {
        name: (value, _contents(value) if isinstance(value, _CONTAINERS) else None)
        for name, value in module.__dict__.items()
    }


def _contents(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _restore(module: torch.nn.Module, attributes: dict[str, tuple[Any, list[Any] | None]]) -> None:
    module.__dict__.clear()
    for name, (value, contents) in attributes.items():
        module.__dict__[name] = value
        if contents is None or same_items(_contents(value), contents):
            continue  # no needless writes: some dictionaries are frozen
        if isinstance(value, list):
            value[:] = contents
        else:
            value.clear()
            value.update(contents)


def same_items(found: list[Any], contents: list[Any]) -> bool:
    """Whether they are the same objects in the same order; for pairs, their keys and values."""
    return len(found) == len(contents) and all(
        a is b or (type(a) is type(b) is tuple and len(a) == len(b) and all(map(operator.is_, a, b)))
        for a, b in zip(found, contents, strict=True)
    )


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of tuples, lists, mappings and data classes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name, None))
