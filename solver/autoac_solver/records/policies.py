"""Policies: the user's constraints and hints for some values; they stack.

The decisions are named as torch's `CheckpointPolicy`:

    MUST_SAVE         constraint: not recomputed in backward
    MUST_RECOMPUTE    constraint: not saved in forward, recomputed if backward needs it
    PREFER_SAVE       hint: recomputing costs `weight` times its own time in addition to its time
    PREFER_RECOMPUTE  hint: saving costs `weight` times the time of recomputing
    MAY_RECOMPUTE     permission, not torch's: collectives, which are saved otherwise, may run again, on all ranks alike

Policies stack in any order: a MUST overrides all hints, hints add up, and two conflicting MUSTs are an error. With a
weight of at most 1, hints only choose between values: nothing is recomputed that the budget does not require.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from autoac_solver.records.arguments import is_meant, known_as
from autoac_solver.records.disk.limits import MOST_NUMBER, Size
from autoac_solver.records.disk.schema import checked, document, fields_of
from autoac_solver.records.errors import PolicyError
from autoac_solver.records.profile import Op, Profile

PERMITS = "MAY_RECOMPUTE"
DECISIONS = ("MUST_SAVE", "MUST_RECOMPUTE", "PREFER_SAVE", "PREFER_RECOMPUTE", PERMITS)

DEFAULT_WEIGHT = 0.5


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Policy:
    """One decision for all values that match `op`, `module` and `region`; an omitted argument matches everything.

    Args:
        decision: one of `DECISIONS`, as text or as a member of torch's `CheckpointPolicy`.
        op: the ops that make the values: names such as "aten.mm" (all of its overloads) or "aten.mm.default", globs of
            them, torch's ops themselves (`torch.ops.aten.mm`), or several of these.
        module: modules that make the values, directly or in submodules: names or globs as in `regions=`.
        region: the plan's regions in which the values are made, by name or glob.
        weight: weight of a hint, see the module's docstring; at least 0.
        optional: matching nothing in the profiled step is no error.
        code: with MUST_SAVE and `module`: the module's Python code must not run again either. Engine replay never
            reruns Python code; under sac no region that contains such code is recomputed.
        name: name for messages; without it, messages spell out the policy.

    Raises:
        PolicyError: an argument is invalid.
    """

    decision: str
    op: tuple[str, ...]
    module: tuple[str, ...]
    region: tuple[str, ...]
    weight: float
    optional: bool
    code: bool
    name: str

    def __init__(
        self,
        decision: Any,
        *,
        op: Any = (),
        module: str | Sequence[str] = (),
        region: str | Sequence[str] = (),
        weight: float = DEFAULT_WEIGHT,
        optional: bool = False,
        code: bool = False,
        name: str = "",
    ) -> None:
        put = object.__setattr__
        put(self, "decision", _decision(decision))
        put(self, "op", _patterns(op))
        put(self, "module", _patterns(module))
        put(self, "region", _patterns(region))
        put(self, "weight", weight)
        put(self, "optional", optional)
        put(self, "code", code)
        put(self, "name", name)
        if not (self.op or self.module or self.region):
            raise PolicyError(f'{self!r} names no op, module or region; op="*" means every op.')
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= MOST_NUMBER:
            raise PolicyError(f"weight={weight!r:.80} of {self!r:.300} is not a finite number of at least 0.")
        if code and (self.decision != "MUST_SAVE" or not self.module or self.op or self.region):
            raise PolicyError(
                f"code=True of {self!r} goes with MUST_SAVE and module= alone: it is about a module's Python code."
            )

    @property
    def is_must(self) -> bool:
        """Whether it is a constraint, not a hint."""
        return self.decision.startswith("MUST")

    @property
    def permits(self) -> bool:
        """Whether it is MAY_RECOMPUTE."""
        return self.decision == PERMITS

    @property
    def saves(self) -> bool:
        """Whether it is MUST_SAVE or PREFER_SAVE."""
        return self.decision.endswith("SAVE")

    def __repr__(self) -> str:
        parts = [f'"{self.decision}"']
        for label, patterns in (("op", self.op), ("module", self.module), ("region", self.region)):
            if patterns:
                shown = [f'"{p}"' for p in patterns[:4]] + (["..."] if len(patterns) > 4 else [])
                parts.append(f"{label}={shown[0] if len(shown) == 1 else '(' + ', '.join(shown) + ')'}")
        if not self.is_must and not self.permits and self.weight != DEFAULT_WEIGHT:
            parts.append(f"weight={self.weight!r}")
        return f"Policy({', '.join(parts)}{', code=True' if self.code else ''})"

    def __str__(self) -> str:
        return self.name or repr(self)

    def as_data(self) -> dict[str, Any]:
        """Data for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Policy:
        """The policy from `as_data`, checked.

        Raises:
            ValueError: it is no valid policy.
        """
        return cls.of(checked(data, POLICY))

    @classmethod
    def of(cls, found: msgspec.Struct) -> Policy:
        """The policy from a struct of type `POLICY`."""
        values = fields_of(found)
        return cls(values.pop("decision"), **values)


POLICY = document(Policy)
"""File format of a policy."""


@dataclass(frozen=True, slots=True)
class AppliedPolicy:
    """A policy with its effect in a plan.

    Args:
        policy: the policy.
        values: number of decision groups that it matches.
        followed: number of those decided as it says.
    """

    policy: Policy
    values: Size
    followed: Size

    def as_data(self) -> dict[str, Any]:
        """Data for JSON."""
        return {"policy": self.policy.as_data(), "values": self.values, "followed": self.followed}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> AppliedPolicy:
        """The applied policy from `as_data`, checked.

        Raises:
            ValueError: it is no valid applied policy.
        """
        return cls.of(checked(data, APPLIED_POLICY))

    @classmethod
    def of(cls, found: msgspec.Struct) -> AppliedPolicy:
        """The applied policy from a struct of type `APPLIED_POLICY`."""
        values = fields_of(found)
        if values["followed"] > values["values"]:
            raise ValueError(f"{values['followed']} of {values['values']} values follow a policy")
        return cls(**{**values, "policy": Policy.of(values["policy"])})


APPLIED_POLICY = document(AppliedPolicy, policy=POLICY)
"""File format of an applied policy."""


def _decision(decision: Any) -> str:
    name = decision if isinstance(decision, str) else getattr(decision, "name", repr(decision))
    if name not in DECISIONS:
        raise PolicyError(f"decision={name!r:.80} of a policy: possible are {', '.join(DECISIONS)}.")
    return name


def _patterns(given: Any) -> tuple[str, ...]:
    """Text, an op (whose text is its name), or several of these. A set has another order in each process."""
    if isinstance(given, (set, frozenset)):
        return tuple(sorted(map(str, given)))
    return tuple(map(str, given if isinstance(given, (list, tuple)) else [given]))


def never_recompute(module: str | Sequence[str]) -> Policy:
    """Policy for modules whose code has side effects (counters, logs, random choices in Python): it runs once per step.

    Args:
        module: names or globs of modules.
    """
    return Policy("MUST_SAVE", module=module, code=True)


SAVE_COLLECTIVES = Policy(
    "MUST_SAVE",
    op=("c10d.*", "c10d_functional.*", "_c10d_functional.*", "_c10d_functional_autograd.*", "symm_mem.*"),
    optional=True,
    name="SAVE_COLLECTIVES",
)
"""Save collectives, as torchtitan does: recomputing communication costs more than the memory is worth."""

REPEAT_COLLECTIVES = Policy(
    "MAY_RECOMPUTE", op="_c10d_functional.*", optional=True, name="REPEAT_COLLECTIVES"
)
"""Let a plan run functional collectives (those of tensor parallelism) again, at their time over the ranks' link."""

SAVE_TOP_K = Policy("MUST_SAVE", op="aten.topk", optional=True, name="SAVE_TOP_K")
"""Save the choice of experts, as torchtitan does: it is small, and everything after it depends on it."""

SAVE_ATTENTION = Policy("MUST_SAVE", op="aten._scaled_dot_product_*", optional=True, name="SAVE_ATTENTION")
"""Save attention outputs: much time for little memory."""


class Matcher:
    """Matches the ops of a profile against policies.

    Args:
        profile: not changed.
        regions: module calls that are regions.
    """

    def __init__(self, profile: Profile, regions: Iterable[int]) -> None:
        self._profile = profile
        self._fits: dict[tuple[tuple[str, ...], tuple[str, ...]], bool] = {}
        self._region_names: dict[int, tuple[str, str]] = {}
        for call in regions:
            self._region_names[call] = profile.spans[call].fqn, profile.module_name(call)

    def fits(self, policy: Policy, op: Op, region: int) -> bool:
        """Whether a policy matches an op.

        Args:
            region: the module call that is the op's region, -1 for none.
        """
        if policy.op and not self._any(policy.op, op.name, op.name.rpartition(".")[0]):
            return False
        if policy.region and (region < 0 or not self._any(policy.region, *self._region_names[region])):
            return False
        return not policy.module or self.in_module(policy.module, op.module)

    def in_module(self, patterns: tuple[str, ...], call: int) -> bool:
        """Whether a module call belongs to a matching module, or happened inside one."""
        while call >= 0:
            if self._any(patterns, *known_as(self._profile.calls[call].fqn)):
                return True
            call = self._profile.calls[call].parent
        return False

    def _any(self, patterns: tuple[str, ...], *names: str) -> bool:
        """Whether any pattern matches any of the names."""
        key = patterns, names
        if key not in self._fits:
            self._fits[key] = any(is_meant(name, pattern) for pattern in patterns for name in names)
        return self._fits[key]
