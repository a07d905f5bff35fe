"""Compiled regions: one code object per module class, point and planned inputs, and one for all other inputs.

Dynamo caches compiled code per traced code object, and counts recompilations there. So equal blocks of one class share
the code compiled at a point, and points share neither cache entries nor recompile limits. Planned inputs always get the
code that was measured: on a shared code object, code for dynamic shapes, made after a batch of another size, would
serve them as well. Each code object has a name of its own: Dynamo remembers by a function's name which of its sizes
have changed, and a second plan's sizes would be symbols.

NOTE [ Tails ]
  1. Fusing saves most in what a model computes after its blocks: head, casts and cross entropy work on the logits,
     often the largest tensors of a step. That is code of a module that also calls the blocks, so it is no call of one.
  2. The module's forward is compiled with graph breaks allowed. The modules that hold the blocks tell the compiler to
     leave them out (`attach.apart_forward`), so it breaks there, and what comes after the last of them is one graph
     (`torch_dynamo_resume_in_forward` in torch/_dynamo/resume_execution.py). Within a loop over blocks it breaks, too
     (`breaks_in_loops`), and each turn is a frame of its own, so all of Python runs as it does uncompiled. Of the
     graphs only that with the cross entropy is compiled; what comes before the blocks and between them runs as it
     is. So does a head whose logits the model returns (`before_tail`): as an output of compiled code they would be
     held for backward, and their gradient, of zeros, be made. The compiled code lies with functions of the model's own,
     beside that for other points and sizes, each of which is its own to Dynamo by the compiler that it is for.
  3. It is measured in isolation, like other regions: the modules before it return what they did in the user's step
     (`Captured.results` in autoac/calibrate/compiled/capture.py), and bytes count from the return of the last of them
     on: what the model's own code holds by then is on the tape.
  4. For the solver it is a part of a call (`Profile.tails`), with what autograd saves for its first op.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoac.torch_private import (
    COMPILE_OPTION,
    breaks_in_loops,
    compiled_by_inductor,
    frames_translated,
    graphs_translated,
    is_of_compiler,
    numbers_as_inputs,
    recompile_limit,
)

RECOMPILATIONS = 64
"""Most recompilations of one code object, if the user allows no more. Blocks of one class may differ in numbers that
the compiler takes for constants (a rate of layer drop that grows with depth)."""

MOST_TURNS = 4096
"""Most compiled turns of loops in a model's forward, for all that it is compiled for; each is a frame of its own."""


def run_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the forward of the module's class, ignoring a `forward` attribute of the instance."""
    return type(module).forward(module, *args, **kwargs)


@functools.cache
def compiled(
    kind: type[torch.nn.Module], point: str, inputs: str, others: bool = False, tail: bool = False
) -> Callable[..., Any]:
    """`run_module` for modules of a class, compiled at a point.

    Cached for the life of the process, as compiled code is.

    Args:
        inputs: the planned inputs, as `described` tells them; "" if not known.
        others: for all other inputs: sizes are dynamic from the first call on, so that it is compiled once.
        tail: modules that it calls are not to be compiled with it (they say so themselves); it is what comes after.
    """
    from autoac.execute.compiled.partitioner import PointPartitioner

    name = hashlib.sha256(repr((kind.__module__, kind.__qualname__, point, inputs, others, tail)).encode())
    return _compiled(PointPartitioner(point), name.hexdigest()[:16], True if others else None, tail)


def surveying(most: int, never: frozenset[str] = frozenset(), tail: bool = False) -> Callable[..., Any]:
    """`run_module` whose first call raises the survey of its graph; see `partitioner.Surveyor`.

    Args:
        tail: as for `compiled`.
    """
    from autoac.execute.compiled.partitioner import Surveyor

    return _compiled(Surveyor(most, never), "survey", False, tail)


def graphs_of(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], counts: Callable[[], bool]
) -> list[bool]:
    """Call `run_module` traced as a tail.

    Args:
        counts: whether a graph that is made now is part of the tail.

    Returns:
        For each graph of the tail that needs a backward, whether a cross entropy is in it.
    """
    found = list[bool]()

    def taken(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if counts() and any(isinstance(given, torch.Tensor) and given.requires_grad for given in inputs):
            found.append(_has_loss(graph))
        return graph.forward

    _with_breaks("traced", taken, False)(module, args, kwargs)
    return found


def _has_loss(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's computes a cross entropy."""
    names = (getattr(node.target, "__name__", node.target) for node in graph.graph.nodes)
    return any(str(name) in _LOSSES for name in names)


_LOSSES = frozenset({"cross_entropy", "cross_entropy_loss", "log_softmax", "special_log_softmax"})
"""Names of the functions and methods of torch that run the op `LOG_SOFTMAX`, with which a tail begins to pay."""


def _with_breaks(name: str, backend: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    """`run_module` compiled with graph breaks allowed.

    The code of the model that it is compiled with keeps apart from what its user compiles, where torch can do that.
    """
    apart: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in _parameters() else {}
    if "recompile_limit" in _parameters():
        apart["recompile_limit"] = MOST_TURNS
    code = torch.compile(_named(name), backend=backend, dynamic=dynamic, **apart)

    def run(*args: Any) -> Any:
        before = frames_translated()
        with breaks_in_loops(MOST_TURNS):
            result = code(*args)
        if _here.run is not None:
            _here.run.compiles = frames_translated() != before
        return result

    return run


@dataclass
class TailRun:
    """One call of a tail, and what came of it.

    Attributes:
        failure: the compiler's error, if it has failed on a graph: that ran uncompiled, as the blocks had run already.
        compiles: whether torch has translated any code of the forward anew.
        was_compiled: whether compiled code ran. Torch leaves code uncompiled that it has compiled too often.
    """

    failure: Exception | None = None
    compiles: bool = False
    was_compiled: bool = False


class _Here(threading.local):
    run: TailRun | None = None


_here = _Here()


def run_tail(function: Callable[..., Any], *args: Any) -> tuple[Any, TailRun]:
    """Call what `compiled` has returned for a tail; its result, and what came of it."""
    before, _here.run = _here.run, (own := TailRun())
    try:
        return function(*args), own
    finally:
        _here.run = before


def _by_inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """The code of a tail's graph with the loss."""
    try:
        code = compiled_by_inductor(graph, inputs, options)
    except Exception as error:
        if _here.run is None or is_of_compiler(error):  # Dynamo is to trace it anew
            raise
        _here.run.failure = error
        return graph.forward

    def run(*inputs: Any) -> Any:
        if _here.run is not None:
            _here.run.was_compiled = True
        return code(*inputs)

    return run


def _limit() -> dict[str, Any]:
    return (
        {"recompile_limit": max(RECOMPILATIONS, recompile_limit())}
        if "recompile_limit" in _parameters()
        else {}
    )


@functools.cache
def _parameters() -> frozenset[str]:
    """Those of `torch.compile`, which other versions of torch have fewer of."""
    return frozenset(inspect.signature(torch.compile).parameters)


class _Counting:
    """Compiled code of modules, which gets their integers as inputs if they change.

    A counter of calls would otherwise have the code compiled anew at every call. Modules of one class may well differ
    in integers (their place in the model), which stay constants: code has to be translated anew for one module.

    Args:
        patience: so many times in a row; of code for other sizes, some may be for these.
    """

    def __init__(self, code: Callable[..., Any], patience: int):
        self._code, self._patience = code, patience
        self._translated: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._changes = False

    def __call__(self, module: torch.nn.Module, *args: Any) -> Any:
        if self._changes:  # the context takes ten microseconds
            with numbers_as_inputs():
                return self._code(module, *args)
        before = graphs_translated()
        result = self._code(module, *args)
        if graphs_translated() != before:
            self._translated[module] = self._translated.get(module, 0) + 1
            self._changes = self._translated[module] > self._patience
        elif module in self._translated:
            self._translated[module] = 1
        return result


def _named(name: str) -> Callable[..., Any]:
    """`run_module` as a function of its own, with its own compiled code."""
    name = f"{run_module.__name__}_{name}"
    return types.FunctionType(run_module.__code__.replace(co_name=name), run_module.__globals__, name)


def _compiled(partitioner: Any, name: str, dynamic: bool | None, tail: bool) -> Callable[..., Any]:
    # Memory of CUDA graphs' pools is seen by neither the allocator's peak nor the plan.
    options: dict[str, Any] = {COMPILE_OPTION: partitioner, "triton.cudagraphs": False}
    if not tail:
        code = torch.compile(_named(name), fullgraph=True, dynamic=dynamic, options=options, **_limit())
        return _Counting(code, 3 if dynamic else 1)

    def only_with_loss(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return _by_inductor(graph, inputs, options) if _has_loss(graph) else graph.forward

    return _with_breaks(name, only_with_loss, dynamic)
