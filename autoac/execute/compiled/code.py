"""Compiled regions: one code object per module class, point and planned inputs, and one for all other inputs.

Dynamo caches compiled code per traced code object, and counts recompilations there. So equal blocks of one class share
the code compiled at a point, and points share neither cache entries nor recompile limits. Planned inputs always get the
code that was measured: on a shared code object, code for dynamic shapes, made after a batch of another size, would
serve them as well. Their sizes are constants (`dynamic=False`): Dynamo remembers by a function's name which sizes have
changed, so otherwise a second plan's sizes would be symbols.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from autoac.torch_private import COMPILE_OPTION

_RECOMPILATIONS: dict[str, Any] = (
    {"recompile_limit": 64} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
)
"""Blocks of one class may differ in numbers that the compiler takes for constants (a rate of layer drop that grows with
depth). Each is compiled on the same code object; torch's default limit there is 8."""


def run_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the forward of the module's class, ignoring a `forward` attribute of the instance."""
    return type(module).forward(module, *args, **kwargs)


@functools.cache
def compiled(
    kind: type[torch.nn.Module], point: str, inputs: str, others: bool = False
) -> Callable[..., Any]:
    """`run_module` for modules of a class, compiled at a point.

    Cached for the life of the process, as compiled code is.

    Args:
        inputs: the planned inputs, as `described` tells them; "" if not known.
        others: for all other inputs: sizes are dynamic from the first call on, so that it is compiled once.
    """
    from autoac.execute.compiled.partitioner import PointPartitioner

    return _compiled(PointPartitioner(point), dynamic=others if inputs else None)


def surveying(most: int, never: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """`run_module` whose first call raises the survey of its graph; see `partitioner.Surveyor`."""
    from autoac.execute.compiled.partitioner import Surveyor

    return _compiled(Surveyor(most, never), dynamic=False)


def _compiled(partitioner: Any, dynamic: bool | None = None) -> Callable[..., Any]:
    code = run_module.__code__.replace(co_name=run_module.__name__)
    own = types.FunctionType(code, run_module.__globals__, run_module.__name__)
    return torch.compile(
        own, fullgraph=True, dynamic=dynamic, options={COMPILE_OPTION: partitioner}, **_RECOMPILATIONS
    )
