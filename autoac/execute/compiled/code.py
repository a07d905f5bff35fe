"""Compiled regions: one code object for each class of module and point.

Dynamo keeps what it compiles with the code object that it traced, and counts there how often it compiles anew. So all
blocks of a class that are alike share what is compiled at a point, and points are not in each other's way.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from autoac.torch_private import COMPILE_OPTION


def run_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's forward as its class has it, whatever was put on the instance."""
    return type(module).forward(module, *args, **kwargs)


@functools.cache
def compiled(kind: type[torch.nn.Module], point: str) -> Callable[..., Any]:
    """`run_module` for modules of a class, compiled at a point.

    The result is the same object for as long as the process lives, as compiled code is.
    """
    from autoac.execute.compiled.partitioner import PointPartitioner

    return _compiled(PointPartitioner(point))


def surveying(most: int) -> Callable[..., Any]:
    """`run_module`, of which the first call raises what it finds; see `partitioner.Surveyor`."""
    from autoac.execute.compiled.partitioner import Surveyor

    return _compiled(Surveyor(most))


def _compiled(partitioner: Any) -> Callable[..., Any]:
    code = run_module.__code__.replace(co_name=run_module.__name__)
    own = types.FunctionType(code, run_module.__globals__, run_module.__name__)
    return torch.compile(own, fullgraph=True, options={COMPILE_OPTION: partitioner})
