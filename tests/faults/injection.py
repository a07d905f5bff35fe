"""Faults on purpose: an exception at the n-th op, and what must be as before after it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from autoac.torch_private import in_backward
from tests.execute.exact.harness import assert_nothing_active

KINDS: tuple[Callable[[], BaseException], ...] = (
    lambda: LookupError("on purpose"),
    lambda: KeyboardInterrupt("on purpose"),
    lambda: torch.OutOfMemoryError("on purpose"),
)


class FailAt(TorchDispatchMode):
    """Raises instead of running the n-th op, views and metadata counted; below all other modes.

    Args:
        position: of the op, from 0; -1 for never.
        after: raise after the op has run, as an interrupt would.

    Attributes:
        count: ops seen so far.
        state: the random state when it was raised, or, in a backward, the last one before that.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, position: int, error: Callable[[], BaseException], after: bool = False) -> None:
        super().__init__()
        self.position = position
        self.error = error
        self.after = after
        self.count = 0
        self.in_backward = False
        self.state = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        position, self.count = self.count, self.count + 1
        fails = position == self.position
        if fails and not self.after:
            self._note()
            raise self.error()
        result = func(*args, **(kwargs or {}))
        if not in_backward():
            self._note()
        if fails:
            self._note()
            raise self.error()
        return result

    def _note(self) -> None:
        self.in_backward = in_backward()
        if not self.in_backward:
            self.state = torch.get_rng_state()


def count_ops(call: Callable[[], Any]) -> int:
    """How many ops a call runs."""
    with FailAt(-1, KINDS[0]) as mode:
        call()
    return mode.count


def faults(positions: int) -> Iterator[tuple[int, Callable[[], BaseException], bool]]:
    """Every position, with each kind of fault in turn, before the op and after it."""
    kinds = itertools.cycle(itertools.product(KINDS, (False, True)))
    for position, (error, after) in zip(range(positions), kinds, strict=False):
        yield position, error, after


def fail(call: Callable[[], Any], mode: FailAt, may_end: bool = False) -> None:
    """Run a call that fails, and let go of the exception, whose traceback holds every frame it passed.

    Args:
        may_end: the call may run fewer ops (profiling repeats some as often as time allows).
    """
    try:
        with mode:
            call()
    except BaseException as error:
        if "on purpose" not in str(error):
            raise
        error.__traceback__ = error.__context__ = error.__cause__ = None
    else:
        assert may_end, f"op {mode.position} never came"


@contextmanager
def unchanged(model: nn.Module, random_state: bool = True) -> Iterator[None]:
    """Context after which the model, its hooks, the random state and torch's own stacks are as before, to the bit."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    values = [tensor.detach().clone() for _, tensor in tensors]
    gradients = [parameter.grad for parameter in model.parameters()]
    attributes = [_attributes(module) for module in model.modules()]
    state, get_state = torch.get_rng_state(), torch.get_rng_state
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
    yield
    assert_nothing_active()
    assert torch.get_rng_state is get_state
    assert modes == (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    assert not random_state or torch.equal(torch.get_rng_state(), state)
    assert [_attributes(module) for module in model.modules()] == attributes
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    for (name, tensor), value in zip(tensors, values, strict=True):
        assert torch.equal(tensor, value), name


def _attributes(module: nn.Module) -> list[Any]:
    """Which objects a module's attributes are, and what is in its dictionaries (parameters, hooks, ...)."""
    found: list[Any] = []
    for name, value in vars(module).items():
        inside = [(key, id(item)) for key, item in value.items()] if isinstance(value, dict) else None
        found.append((name, value if isinstance(value, bool) else id(value), inside))
    return found


def live_storages() -> int:
    """How many storages tensors known to Python stand on."""
    gc.collect()
    found = gc.get_objects()
    tensors = [thing for thing in found if issubclass(type(thing), torch.Tensor) and not is_lazy(thing)]
    return len({tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided})
