"""Instruments a model for recording: its modules report their calls to the tape."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from autoac.execute.cross_entropy.lean import EVERYWHERE, run_with_losses, sides
from autoac.ops.arguments import held_in
from autoac.record.tape.lean import LeanRecording
from autoac.record.tape.tape import Tape
from autoac.step.restore import Restorer
from autoac.torch_private import (
    disable_dynamo,
    is_compiled_wrapper,
    resizes_seen,
    top_saved_tensors_hooks,
    untraced,
)
from autoac.torch_private.called import called_module

_DEEPER, _DEEPEST = 3, 30_000
"""Factor and upper limit of the raised recursion limit.

A module call takes three Python frames or more, and recording adds four; the C stack is finite.
"""


class _Stack:
    """Raises Python's recursion limit, which all threads share, while any thread records a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = self._raised = 0

    def enter(self) -> None:
        """A recording begins."""
        with self._lock:
            if self._count == 0:
                self._before = sys.getrecursionlimit()
                self._raised = max(self._before, min(_DEEPER * self._before, _DEEPEST))
                sys.setrecursionlimit(self._raised)
            self._count += 1

    def leave(self) -> None:
        """A recording ends; the last one restores the limit, unless other code has changed it since."""
        with self._lock:
            self._count -= 1
            if self._count == 0 and sys.getrecursionlimit() == self._raised:
                sys.setrecursionlimit(self._before)


stack = _Stack()


class _Watch:
    """The recording forward of a module. It is dropped when the module is copied or pickled.

    Attributes:
        is_over: the recording has ended. Code that has put a forward of its own over this one may still call it.
    """

    def __init__(self, run: Callable[..., Any]):
        self.run = run
        self.is_over = False
        # For modules that a compiled function calls: the compiler must not trace the recording.
        self.run_eagerly = disable_dynamo(run, "autoac records this step as eager mode runs it")

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


@untraced
def _recorded_forward(
    bound: torch.nn.Module, own: Any, watch: _Watch | None, *args: Any, **kwargs: Any
) -> Any:
    """The forward of a module while it is recorded.

    Args:
        bound: the module.
        own: the instance's own attribute `forward` if it had one, else None.
        watch: None in a copy of the module.
    """
    module = called_module(bound)
    if watch is None or watch.is_over or module is not bound:
        return (own or functools.partial(type(module).forward, module))(*args, **kwargs)
    return (watch.run_eagerly if torch.compiler.is_compiling() else watch.run)(*args, **kwargs)


class Instrumented:
    """Context: every module's forward reports its calls to the tape, and the lean modules run under the engine.

    Args:
        lean: the modules to run with everything recomputed.
        losses: modules whose losses run as lean losses, as for `sides`; None for all losses.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tape: Tape,
        lean: set[torch.nn.Module],
        losses: Mapping[str, Collection[str | None]] | None,
    ):
        self.tape = tape
        self.lean = lean
        self.sides = None if losses is None else sides(losses)
        self.counts: Counter[torch.nn.Module] = Counter()
        self.modules = [
            (name, module)
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule) and not is_compiled_wrapper(module)
        ]
        self.depth = 0  # of lean modules

    def __enter__(self) -> None:
        self.get_rng_state = torch.get_rng_state
        self._patched = self._patches()
        self._patched.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._patched.__exit__(*exception)

    @contextlib.contextmanager
    def _patches(self) -> Iterator[None]:
        with Restorer() as restorer:
            stack.enter()
            restorer.later(stack.leave)
            restorer.later(setattr, torch, "get_rng_state", self.get_rng_state)
            torch.get_rng_state = self._seen_rng_state
            seen = resizes_seen(self.tape.storages.resized)
            seen.__enter__()
            restorer.later(seen.__exit__, None, None, None)
            for name, module in self.modules:
                own = module.__dict__.get("forward")
                watch = _Watch(self._wrapper(name, module, own))
                restorer.later(_put_forward, module, own, watch)
                # As a partial, whose arguments a copy of the module copies; see `execute.forwards`.
                module.__dict__["forward"] = functools.partial(_recorded_forward, module, own, watch)
            yield

    def _seen_rng_state(self) -> torch.Tensor:
        """Record the allocation of a CPU state: no dispatch mode sees it, and the user's checkpoints make many."""
        state = self.get_rng_state()
        self.tape.storages.made_outside(state)
        return state

    def _wrapper(self, name: str, module: torch.nn.Module, own: Any) -> Callable[..., Any]:
        original = own or types.MethodType(type(module).forward, module)

        def run(*args: Any, **kwargs: Any) -> Any:
            number = self.counts[module]
            self.counts[module] += torch.is_grad_enabled()
            held = held_in((args, kwargs))
            self.tape.enter(name, number, module, (args, kwargs))
            try:
                outermost = not self.depth and torch.is_grad_enabled()
                ours = outermost and self._hooks_are_ours()
                if outermost and not ours:
                    self.tape.calls.runs_under_hooks()
                run = self._run_lean if ours and module in self.lean else self._run
                result = run(name, original, args, kwargs)
                if torch.is_grad_enabled():
                    self.tape.returns(result)
                if not name:
                    self.tape.calls.root_returned(result)
                return result
            finally:
                self.tape.leave(held_in((args, kwargs)).entries != held.entries)

        return run

    def _hooks_are_ours(self) -> bool:
        """Whether the tape's saved-tensor hooks are on top; not so inside the user's checkpoint or `save_on_cpu`.

        There the user has decided already: such code is recorded as it runs, and nothing in it becomes a region.
        """
        return top_saved_tensors_hooks() == (self.tape.saved.pack, self.tape.saved.unpack)

    def _run(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the module's own forward, with its losses as in a planned model."""
        side = EVERYWHERE if self.sides is None else self.sides.get(name)
        return original(*args, **kwargs) if side is None else run_with_losses(side, original, args, kwargs)

    def _run_lean(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        recording = LeanRecording(self.tape, name)
        self.depth += 1
        try:
            with torch.autograd.graph.saved_tensors_hooks(recording.pack, self.tape.saved.unpack), recording:
                result = self._run(name, original, args, kwargs)
        finally:
            self.depth -= 1
        recording.finish()
        self.tape.left_lean(result)
        return result


def _put_forward(module: torch.nn.Module, original: Any, watch: _Watch) -> None:
    """Restore a module's own attribute `forward`; None if it had none. One put on by other code since stays."""
    watch.is_over = True
    current = module.__dict__.get("forward")
    if not isinstance(current, functools.partial) or watch not in current.args:
        return
    if original is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = original
