"""Run steps of a model and leave no trace: parameters, buffers, gradients, random states, attributes are put back."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoac.compat import storage_key
from autoac.engine.geometry import Geometry, geometry_of


@contextlib.contextmanager
def untouched(
    model: torch.nn.Module,
    sample: Any,
    gradient: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: tensor.grad,
) -> Iterator[None]:
    """Put everything a step changes back, also when it fails.

    Args:
        gradient: what a leaf's gradient is to be at the step's start; by default what it is.

    Values that are written in place are not copied here (that would double the parameters' memory): the recording
    copies a storage before its first write and puts it back itself, see `Tape.restore`.
    """
    modules = [(module, _attributes(module)) for module in model.modules()]
    leaves = [*model.parameters(), *(t for t in tensors_of(sample) if t.is_leaf)]
    gradients = [(tensor, tensor.grad) for tensor in leaves]
    states = _random_states(model)
    try:
        for tensor, _ in gradients:
            tensor.grad = gradient(tensor)
        yield
    finally:
        put_back(
            [
                *(functools.partial(_restore, module, attributes) for module, attributes in modules),
                *(functools.partial(setattr, tensor, "grad", gradient) for tensor, gradient in gradients),
                *(functools.partial(set_state, state) for set_state, state in states),
            ]
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """How a tensor saw which storage, and the storage's size: what `resize_` or an op's `out=` may change."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    n_bytes: int
    geometry: Geometry

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Seen:
        """As it is now."""
        storage = tensor.untyped_storage()
        return cls(tensor, storage, storage.nbytes(), geometry_of(tensor))

    def changed(self) -> bool:
        """Whether it is otherwise now."""
        return self.storage.nbytes() != self.n_bytes or self._moved()

    def put_back(self) -> None:
        """Let the tensor be as it was; what is in the storage is another matter."""
        if self.storage.nbytes() != self.n_bytes:
            self.storage.resize_(self.n_bytes)
        if self._moved():
            shape, stride, offset, *_ = self.geometry
            with torch.no_grad():
                self.tensor.set_(self.storage, offset, shape, stride)

    def _moved(self) -> bool:
        there = storage_key(self.tensor) == self.storage._cdata
        return not there or geometry_of(self.tensor) != self.geometry


def put_back(actions: Iterable[Callable[[], Any]]) -> None:
    """Run all of these, whatever happens: one that fails, or into which Ctrl-C comes, is tried once more.

    Raises:
        BaseException: the first one that came, after all of them have had their turn.
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


def _random_states(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    states: list[tuple[Any, Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        states.append((numpy.random.set_state, numpy.random.get_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, torch.Generator):
                states.append((value.set_state, value.get_state()))
    return states


_CONTAINERS = (dict, set, list)


def _attributes(module: torch.nn.Module) -> dict[str, tuple[Any, list[Any] | None]]:
    """The module's attributes, and what is in those that are containers (its parameters, buffers, hooks, ...)."""
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
        if contents is None or _same_items(_contents(value), contents):
            continue  # not to be written without need: some dictionaries are frozen
        if isinstance(value, list):
            value[:] = contents
        else:
            value.clear()
            value.update(contents)


def _same_items(found: list[Any], contents: list[Any]) -> bool:
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
