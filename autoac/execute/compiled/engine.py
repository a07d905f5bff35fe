"""Engine compile: how a compiled region runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoac.execute.chains import Chains
from autoac.execute.compiled.code import TailRun, compiled, run_tail
from autoac.execute.compiled.idle_hooks import busy_hooks_inside, is_recording, without_idle_hooks
from autoac.execute.cross_entropy.lean import loss_may_follow
from autoac.execute.program import Program
from autoac.execute.replay.engine import ReplayEngine
from autoac.step.carried import LOSS_KEY, REGION_KEY
from autoac.step.inputs import described, number_in
from autoac.torch_private import (
    disable_dynamo,
    first_line,
    graphs_translated,
    is_of_compiler,
    is_recompile_limit,
)
from autoac.warned import warn
from autoac_solver.build.engines import engine_model
from autoac_solver.build.engines.compile import CompileCosts
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.engines import COMPILE

_CANNOT = "cannot be compiled for these inputs"
NOT_COMPILED = f"region .* {_CANNOT}"
"""Pattern of the warning about a region that the compiler fails on."""


_MOST_IN_A_ROW = 8
"""So many calls of a region in a row may each need other code. Torch's own limit is as high."""

_UNCOMPILED = (
    "runs uncompiled from now on, as torch would compile it anew at every step: the budget may not hold. Keep what "
    "changes from step to step (a list that grows, other modules each time) out of the model's forward, pad batches "
    "to a few lengths, or plan with engine='replay'."
)


class CompileEngine:
    """See `Engine`. Modules that the user has compiled run eagerly, because the regions are compiled.

    Regions that are not compiled have no point: engine replay runs them.
    """

    model = engine_model(COMPILE)
    eager_only = True
    is_policy = False
    refused = ""

    def __init__(self) -> None:
        self._replay = ReplayEngine()

    def run(
        self,
        program: Program,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: torch.nn.Module,
    ) -> Any:
        if program.point == EAGER:
            return self._replay.run(program, forward, args, kwargs, module)
        if torch.compiler.is_compiling():  # traced by an outer torch.compile, the region would lose its point
            return _run_by_itself(program, forward, args, kwargs, module)
        return _run(program, forward, args, kwargs, module)

    def measure(self, chains: Chains) -> CompileCosts:
        return CompileCosts()


def _run(
    program: Program,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: torch.nn.Module,
) -> Any:
    why = _why_never(module, program.children)
    inputs = described(args, kwargs)
    if program.inputs and number_in(inputs) > number_in(program.inputs):  # a mask, say, that was None
        came = f"a call with {inputs}"
        program.following.deviates(program.region, f"one with {program.inputs}", came, came)
    given = inputs, module.training
    if not why and program.not_compiled.keys().isdisjoint((given, _kind(program, given))):
        try:
            before = graphs_translated()
            with without_idle_hooks(module):
                result, tail = _run_compiled(program, inputs, args, kwargs, module)
            if tail is not None:
                why = _why_not_tail(program, given, tail)
            elif _compiles_in_a_row(program, given, graphs_translated() != before):
                why = _UNCOMPILED
        except Exception as error:
            if not is_of_compiler(error):
                raise
            result = forward(*args, **kwargs)  # its own error comes first
            why = _why_not(error)
            program.not_compiled[given] = first_line(error)
    else:
        result = forward(*args, **kwargs)
    if why and not program.warned:
        program.warned = True
        warn(f"region {program.region!r} {why}")
    return result


_run_by_itself = disable_dynamo(
    _run,
    "this model has a plan of autoac's engine 'compile', which compiles regions by themselves, so fullgraph=True "
    "cannot be met. Leave out the outer torch.compile, or plan with engine='sac'",
)


def _run_compiled(
    program: Program, inputs: str, args: tuple[Any, ...], kwargs: dict[str, Any], module: torch.nn.Module
) -> tuple[Any, TailRun | None]:
    """The call's result; and of a tail, what came of it."""
    others = bool(program.inputs) and inputs != program.inputs
    is_tail = bool(program.children)
    code = compiled(type(module), program.point, program.inputs, others, is_tail)
    result, tail = run_tail(code, module, args, kwargs) if is_tail else (code(module, args, kwargs), None)
    if (losses := module.__dict__.get(LOSS_KEY)) is not None:
        loss_may_follow(losses.side)
    return result, tail


def _why_never(module: torch.nn.Module, children: Sequence[str]) -> str:
    """Why compiled code would not do what the module's call does, whatever its inputs; "" if it would.

    Args:
        children: of a tail.
    """
    if hooked := busy_hooks_inside(module, children):
        if is_recording():
            return (
                f"runs uncompiled in calls that record what module {hooked!r} in it returns (output_attentions=True, "
                "for example): the budget may not hold."
            )
        return (
            f"has hooks on module {hooked!r} since it was planned, which compiled code may not run, so it runs "
            "uncompiled: the budget may not hold. Plan again with the hooks."
        )
    carried = module.__dict__.get(LOSS_KEY) or module.__dict__.get(REGION_KEY)
    if getattr(carried, "forward", None) is not None:  # below the plan's
        return (
            "was given another forward since it was planned (some libraries wrap it), which compiled code would "
            "leave out, so it runs uncompiled: the budget may not hold. Plan again for the model as it is."
        )
    return ""


def _why_not_tail(program: Program, given: tuple[str, bool], tail: TailRun) -> str:
    """Why a tail that has run was not compiled, or will not be from now on; "" if it was."""
    if tail.failure is not None:
        program.not_compiled[given] = first_line(tail.failure)
        return _why_not(tail.failure)
    # With other inputs it may have no loss to compile.
    ran_uncompiled = not tail.was_compiled and given[0] == program.inputs
    return _UNCOMPILED if _compiles_in_a_row(program, given, tail.compiles, ran_uncompiled) else ""


def _compiles_in_a_row(
    program: Program, given: tuple[str, bool], compiles: bool, is_given_up: bool = False
) -> bool:
    """Note whether a call was compiled for; returns whether so many in a row were that the region is left uncompiled.

    Args:
        is_given_up: torch has left it uncompiled itself.
    """
    kind, in_a_row = _kind(program, given), program.compiled_in_a_row
    program.following.times_compiled += compiles and kind == given
    in_a_row[kind] = in_a_row[kind] + 1 if compiles else 0
    if in_a_row[kind] <= _MOST_IN_A_ROW and not is_given_up:
        return False
    del in_a_row[kind]  # plans that are put on another model begin anew
    program.not_compiled[kind] = "torch compiles it anew at every step"
    return True


def _kind(program: Program, given: tuple[str, bool]) -> tuple[str, bool]:
    """The inputs and mode, "" for all inputs that were not planned for: one code is for all of them."""
    inputs, mode = given
    return given if inputs == program.inputs or not program.inputs else ("", mode)


def _why_not(error: Exception) -> str:
    if is_recompile_limit(error):
        return (
            "was called with more kinds of arguments than torch compiles code for, so it runs uncompiled for this "
            "one: the budget may not hold. Pad batches to a few lengths, or raise torch._dynamo.config.recompile_limit."
        )
    return (
        f"{_CANNOT}, so it runs uncompiled for them: the budget may not hold. The compiler's "
        f"error is {first_line(error)}"
    )
