"""Planning for a callable step that several ranks run together: if one fails, all raise its error."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

from autoac.parallel.met import meeting
from autoac.parallel.ranks import together
from autoac.parallel.session import Session
from autoac.step.step import is_whole_step
from autoac.torch_private import has_other_ranks, ranks_of_stages

P = ParamSpec("P")
Result = TypeVar("Result")

_joined: ContextVar[bool] = ContextVar("_joined", default=False)


def with_all_ranks(function: Callable[P, Result]) -> Callable[P, Result]:
    """Make a function of a model and a sample joint work of the ranks that run the step together.

    A rank that has failed calls no collectives and sends nothing, so the others would wait for it until the process
    group's timeout.

    Args:
        function: what to decorate; its first arguments are `model` and `sample`. A callable sample runs a whole step:
            that of a pipeline's schedule, or one that may use process groups in other ways. Any other sample is the
            model's alone.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        model, sample = (
            args[place] if len(args) > place else kwargs.get(name)
            for place, name in enumerate(("model", "sample"))
        )
        with contextlib.ExitStack() as stack:
            joint = _session(model, sample)
            if joint is not None:
                session = stack.enter_context(joint)
                stack.callback(_joined.reset, _joined.set(True))
                args, kwargs = _with_sample(_in_step(session, sample), args, kwargs)
            return function(*args, **kwargs)

    return run


def _with_sample(sample: Any, args: Any, kwargs: Any) -> Any:
    if "sample" in kwargs:
        return args, {**kwargs, "sample": sample}
    return (args[0], sample, *args[2:]), kwargs


def _in_step(session: Session, sample: Any) -> Callable[..., Any]:
    """The sample with each call told to the session; of the same signature."""

    @functools.wraps(sample)
    def run(*args: Any, **kwargs: Any) -> Any:
        with session.step():
            return sample(*args, **kwargs)

    return run


def _session(model: Any, sample: Any) -> AbstractContextManager[Session] | None:
    """The session of a step that may wait for other ranks; None for any other, and within one."""
    is_step = isinstance(model, torch.nn.Module) and is_whole_step(sample)
    if not is_step or not has_other_ranks() or _joined.get():
        return None
    members = ranks_of_stages(model)
    if members is None:
        return meeting("plan")
    return together("plan for the stages of their pipeline", members=members)
