"""Stages of a pipeline: each rank has a plan of its own, and if one fails, all raise its error."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

from autoac.parallel.ranks import Ranks, together
from autoac.step.step import is_whole_step
from autoac.torch_private import ranks_of_stages

P = ParamSpec("P")
Result = TypeVar("Result")

_joined: ContextVar[bool] = ContextVar("_joined", default=False)


def with_all_stages(function: Callable[P, Result]) -> Callable[P, Result]:
    """Make a function of a model and a sample joint work of the ranks of a pipeline, if it runs steps of its schedule.

    A stage whose rank has failed sends nothing, so the others would wait for it until the process group's timeout.

    Args:
        function: what to decorate; its first arguments are `model` and `sample`. A callable sample runs a step of the
            schedule; any other one runs the stage alone.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        model, sample = (
            args[place] if len(args) > place else kwargs.get(name)
            for place, name in enumerate(("model", "sample"))
        )
        members = _members(model, sample)
        with contextlib.ExitStack() as stack:
            if members is not None:
                ranks = stack.enter_context(
                    together("plan for the stages of their pipeline", members=members)
                )
                stack.callback(_joined.reset, _joined.set(True))
                args, kwargs = _with_sample(_in_step(ranks, sample), args, kwargs)
            return function(*args, **kwargs)

    return run


def _with_sample(sample: Any, args: Any, kwargs: Any) -> Any:
    if "sample" in kwargs:
        return args, {**kwargs, "sample": sample}
    return (args[0], sample, *args[2:]), kwargs


def _in_step(ranks: Ranks, sample: Any) -> Callable[..., Any]:
    """The sample with each call told to the ranks; of the same signature."""

    @functools.wraps(sample)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ranks.step():
            return sample(*args, **kwargs)

    return run


def _members(model: Any, sample: Any) -> tuple[int, ...] | None:
    if not isinstance(model, torch.nn.Module) or not is_whole_step(sample) or _joined.get():
        return None
    return ranks_of_stages(model)
