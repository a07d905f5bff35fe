"""Stages of a pipeline: each rank has a plan of its own, and if one fails, all raise its error."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from autoac.parallel.ranks import together
from autoac.torch_private import ranks_of_stages

P = ParamSpec("P")
Result = TypeVar("Result")

_joined: ContextVar[bool] = ContextVar("_joined", default=False)


def with_all_stages(
    function: Callable[Concatenate[torch.nn.Module, Any, P], Result],
) -> Callable[Concatenate[torch.nn.Module, Any, P], Result]:
    """Make a function of a model and a sample joint work of the ranks of a pipeline, if it runs steps of its schedule.

    A stage whose rank has failed sends nothing, so the others would wait for it.

    Args:
        function: what to decorate. A callable sample runs a step of the schedule; any other one runs the stage alone.
    """

    @functools.wraps(function)
    def run(model: torch.nn.Module, sample: Any, *args: P.args, **kwargs: P.kwargs) -> Result:
        is_stage = isinstance(model, torch.nn.Module) and callable(sample) and not _joined.get()
        members = ranks_of_stages(model) if is_stage else None
        with contextlib.ExitStack() as stack:
            if members is not None:
                stack.enter_context(together("plan for the stages of their pipeline", members=members))
                stack.callback(_joined.reset, _joined.set(True))
            return function(model, sample, *args, **kwargs)

    return run
