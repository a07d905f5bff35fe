"""Policies for `autoac.plan(..., policies=...)`: ready-made ones, and torch's policy functions as policies.

For the meaning of policies and how they stack see `autoac_solver.records.policies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from autoac.execute.program import find_overload
from autoac_solver.records.arguments import is_meant, known_as, some
from autoac_solver.records.errors import PolicyError
from autoac_solver.records.policies import (
    DEFAULT_WEIGHT,
    REPEAT_COLLECTIVES,
    SAVE_ATTENTION,
    SAVE_COLLECTIVES,
    SAVE_TOP_K,
    Policy,
    never_recompute,
)
from autoac_solver.records.profile import Profile

__all__ = [
    "Policies",
    "Policy",
    "REPEAT_COLLECTIVES",
    "SAVE_ATTENTION",
    "SAVE_COLLECTIVES",
    "SAVE_TOP_K",
    "from_function",
    "never_recompute",
]

PolicyFunction = Callable[..., Any]
"""A policy function of torch's selective checkpointing: `(ctx, op, *args, **kwargs) -> CheckpointPolicy`."""

Policies = Policy | PolicyFunction | Iterable[Policy | PolicyFunction]

_ASKED = 4
"""Calls of a function per op, to see whether it always gives the same answer."""


def listed(given: Any) -> list[Policy | PolicyFunction]:
    """The user's policies and policy functions, one or several, as a list.

    Raises:
        PolicyError: something else was given.
    """
    found: list[Any]
    if isinstance(given, (str, Policy)) or callable(given) or not isinstance(given, Iterable):
        verb, found = "is", [given]
    else:
        verb, found = "holds", list(given)
    for item in found:
        if not isinstance(item, Policy) and not callable(item):
            raise PolicyError(
                f"policies= {verb} a {type(item).__name__}; it takes autoac.Policy objects and "
                "functions (ctx, op, *args, **kwargs) -> CheckpointPolicy."
            )
    return found


def check_modules(policies: Iterable[Policy | PolicyFunction], model: torch.nn.Module) -> None:
    """Refuse a policy for modules that the model does not have. Ops cannot be checked here: only the profile has them.

    Raises:
        PolicyError: a policy that is not optional is about no module of the model.
    """
    names = [known for name, _ in model.named_modules(remove_duplicate=False) for known in known_as(name)]
    for policy in policies:
        if not isinstance(policy, Policy) or policy.optional or not policy.module:
            continue
        if not any(is_meant(name, pattern) for pattern in policy.module for name in names):
            raise PolicyError(
                f"{policy} is about no module of this model. Modules are: {some(names)}. Pass optional=True if it need "
                "not be there."
            )


def as_policies(given: Policies, profile: Profile) -> tuple[Policy, ...]:
    """The user's policies; policy functions are asked about every forward op of the profiled step.

    Raises:
        PolicyError: something else was given, or a function cannot be asked.
    """
    found: list[Policy] = []
    for item in listed(given):
        if isinstance(item, Policy):
            found.append(item)
        else:
            found += from_function(item, {op.name for op in profile.tape if not op.backward})
    return tuple(found)


def from_function(
    function: PolicyFunction, ops: Iterable[str], weight: float = DEFAULT_WEIGHT
) -> list[Policy]:
    """A policy function of torch's selective checkpointing as policies.

    It is asked about each op alone, without the op's arguments and output. (Torch asks it for each call; here the plan
    decides which calls to recompute.) A PREFER_RECOMPUTE for all ops that it does not name is a hint like any other.

    Args:
        function: `(ctx, op, *args, **kwargs) -> CheckpointPolicy` (or bool, as in torch).
        ops: names of overloads to ask about.
        weight: of its hints.

    Returns:
        At most one policy for each decision.

    Raises:
        PolicyError: it needs arguments or outputs, does not always give the same answer (it counts calls), or answers
            something else.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    groups: dict[str, list[str]] = {}
    for op in sorted(ops):
        groups.setdefault(_answer(function, name, op), []).append(op)
    return [
        Policy(decision, op=names, weight=weight, name=f"{name}: {decision} of {len(names)} ops")
        for decision, names in sorted(groups.items())
    ]


def _answer(function: PolicyFunction, name: str, op: str) -> str:
    overload = find_overload(op)
    if overload is None:
        raise PolicyError(
            f"the profiled step runs {op}, which is not registered here, so {name} cannot be asked about it: import "
            "the library that it is from."
        )
    answers = []
    for _ in range(_ASKED):
        context = SelectiveCheckpointContext(is_recompute=False)
        try:
            answers.append(function(context, overload))
        except Exception as error:
            raise PolicyError(
                f"the policy function {name} fails when it is asked about {op} without arguments ({error!r:.200}): a "
                "plan takes functions of (ctx, op) alone; for more use autoac.Policy."
            ) from error
    if any(answer != answers[0] for answer in answers):
        raise PolicyError(
            f"the policy function {name} does not always say the same about {op} (it says "
            f"{', '.join(map(str, answers))}): which calls of an op to recompute is what the plan finds out. Use "
            "autoac.Policy, with PREFER_SAVE for what you would rather keep."
        )
    answer = answers[0]
    if isinstance(answer, bool):  # as torch reads it
        answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    if not isinstance(answer, CheckpointPolicy):
        raise PolicyError(
            f"the policy function {name} answers {answer!r:.80} about {op}, not a CheckpointPolicy."
        )
    return answer.name
