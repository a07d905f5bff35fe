"""Functions that run a step which several ranks run together: if one of them fails, all raise its error."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

from autoac.ranks.all_or_none import Ranks, together
from autoac.ranks.met import meeting
from autoac.ranks.session import Session
from autoac.step.model import unwrapped
from autoac.step.step import is_whole_step
from autoac.step.units import holds_shards
from autoac.torch_private import has_other_ranks, ranks_of, ranks_of_stages
from autoac_solver.records.errors import ParallelError

P = ParamSpec("P")
Result = TypeVar("Result")
AnySession = TypeVar("AnySession", bound=Session)

_joined: ContextVar[bool] = ContextVar("_joined", default=False)


def with_all_ranks(
    what: str, of_shards: bool = False
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Decorator that makes a function joint work of the ranks that run a step together.

    The function's first arguments are `model` and `sample`.

    Args:
        what, of_shards: as for `step_of_all_ranks`.
    """

    def decorated(function: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> Result:
            model, sample = (
                args[place] if len(args) > place else kwargs.get(name)
                for place, name in enumerate(("model", "sample"))
            )
            with step_of_all_ranks(what, model, sample, of_shards) as joint:
                if joint is not sample:
                    args, kwargs = _with_sample(joint, args, kwargs)
                return function(*args, **kwargs)

        return run

    return decorated


@contextlib.contextmanager
def step_of_all_ranks(what: str, model: Any, sample: Any, of_shards: bool = True) -> Iterator[Any]:
    """Context in which steps with a sample are joint work of the ranks that run them; yields the sample to run.

    A rank that has failed calls no collectives and sends nothing, so the others would wait for it until the process
    group's timeout.

    Args:
        what: what the ranks do, in words; the same on all of them.
        sample: a callable runs a whole step: that of a pipeline's schedule, or one that may use process groups in other
            ways. With any other sample a step is the model's alone, and concerns others if the model is sharded.
        of_shards: whether the ranks of a sharded model all enter this.

    Raises:
        ParallelError: a rank has failed, or has not come.
    """
    is_model = isinstance(model, torch.nn.Module) and has_other_ranks() and not _joined.get()
    if is_model and is_whole_step(sample):
        members = ranks_of_stages(model)
        stages = f"{what} for the stages of their pipeline"
        with within(meeting(what) if members is None else together(stages, members=members)) as session:
            yield _in_step(session, sample)
    elif is_model and of_shards and holds_shards(unwrapped(model)):
        with within(together(what, members=ranks_of(model))) as ranks:
            same_wish(ranks, what)
            with ranks.step():
                yield sample
    else:
        yield sample


def same_wish(ranks: Ranks, what: str) -> None:
    """Check that all ranks are to do the same; in a collective, nothing would tell which rank does something else.

    Raises:
        ParallelError: they are not.
    """
    wanted = ranks.all(what)
    if odd := next((i for i, other in enumerate(wanted) if other != wanted[0]), 0):
        first, other = ranks.members[0], ranks.members[odd]
        words = f"rank {first} is to {wanted[0]}, and rank {other} to {wanted[odd]}"
        raise ParallelError(f"the ranks have called different things: {words}.", other)


@contextlib.contextmanager
def within(session: AbstractContextManager[AnySession]) -> Iterator[AnySession]:
    """Context of a session, in which functions of this file open no other."""
    with session as found:
        token = _joined.set(True)
        try:
            yield found
        finally:
            _joined.reset(token)


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
