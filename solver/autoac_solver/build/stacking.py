"""The problem under a stack of policies: their matches, their combined effect, and conflicts.

A value that must be recomputed is recomputed if its own region's backward needs it. Engine replay keeps no unneeded
values, so a value that only other ops of its region read is tied to them: recomputing any of them requires recomputing
it. Engine sac keeps everything that is not recomputed, so there the value is simply recomputed.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoac_solver.build.build import build
from autoac_solver.build.built import Built
from autoac_solver.build.engines import check_supported, engine_model
from autoac_solver.build.groups import TIED
from autoac_solver.optimise.algebra import brought_along
from autoac_solver.problem.problem import RECOMPUTE, SAVE, DecisionGroup, Literal
from autoac_solver.records.collectives import may_repeat, ranks_in
from autoac_solver.records.errors import PolicyConflictError, PolicyError
from autoac_solver.records.policies import AppliedPolicy, Matcher, Policy
from autoac_solver.records.profile import Op, Profile


@dataclass(frozen=True)
class Stacked:
    """A problem with policies as constraints and hints.

    Args:
        built: the problem.
        policies: as passed by the caller.
        groups: per policy the groups that it matches.
    """

    built: Built
    policies: tuple[Policy, ...]
    groups: tuple[frozenset[int], ...]

    def applied(self, decisions: Sequence[int]) -> tuple[AppliedPolicy, ...]:
        """The policies, each with the number of groups that it matches and of those decided as it says."""
        recomputed = self.built.is_recomputed
        return tuple(
            AppliedPolicy(
                policy, len(groups), sum(recomputed(decisions, g) is not policy.saves for g in groups)
            )
            for policy, groups in zip(self.policies, self.groups, strict=True)
        )


def stacked(
    profile: Profile, calls: Sequence[int], engine: str, policies: Sequence[Policy], must_match: bool = True
) -> Stacked:
    """Build the problem for these regions under this engine and these policies.

    Args:
        calls, engine: as for `build`.
        must_match: whether a policy without matches is an error; False if a plan is made again.

    Raises:
        PolicyConflictError: two policies cannot both be followed; it names both.
        PolicyError: a policy matches no value of the profiled step, or must recompute a value in no region; or the
            engine does not support policies; or a collective may run again, and its time is not known.
    """
    policies = tuple(policies)
    if not policies:
        return Stacked(build(profile, calls, engine), (), ())
    check_supported(engine, "policies")
    matches = _matches(profile, calls, policies, must_match)
    pinned: dict[int, Policy] = {}
    for policy, ops in zip(policies, matches, strict=True):
        if policy.decision == "MUST_SAVE":
            also = (
                _code(profile, calls, policy)
                if policy.code and engine_model(engine).runs_code_twice
                else frozenset()
            )
            pinned |= dict.fromkeys((ops | also) - pinned.keys(), policy)
    built = build(
        profile, calls, engine, pinned.keys(), _repeated(profile, policies, matches) - pinned.keys()
    )
    group_of = {
        op: group for tape in built.regions for op, group in zip(tape.ops, tape.group_of, strict=True)
    }
    if built.loss >= 0:
        group_of |= dict.fromkeys(built.problem.groups[built.loss].ops, built.loss)
    groups = tuple(frozenset(group_of[op] for op in ops if group_of.get(op, -1) >= 0) for ops in matches)
    for policy, ops, found in zip(policies, matches, groups, strict=True):
        if ops and not found and policy.decision == "MUST_RECOMPUTE":
            raise PolicyError(
                f"{policy} cannot be followed: what it is about is in no region of the plan, and only what a region "
                "computes can be recomputed, and some losses. Choose regions that hold it (regions=)."
            )
    return Stacked(_constrained(profile, built, policies, groups, pinned), policies, groups)


def _matches(
    profile: Profile, calls: Sequence[int], policies: Sequence[Policy], must_match: bool
) -> list[frozenset[int]]:
    """Per policy the forward ops that it matches."""
    matcher = Matcher(profile, calls)
    region_of = _region_of(profile, calls)
    forward = [index for index, op in enumerate(profile.tape) if not op.backward]
    found = []
    for policy in policies:
        ops = frozenset(i for i in forward if matcher.fits(policy, profile.tape[i], region_of[i]))
        if not ops and must_match and not policy.optional:
            raise PolicyError(_nothing(profile, calls, policy))
        found.append(ops)
    return found


def _repeated(
    profile: Profile, policies: Sequence[Policy], matches: Sequence[frozenset[int]]
) -> frozenset[int]:
    """The collectives that may run again.

    Raises:
        PolicyError: a policy permits nothing, or the time of a collective is not known.
    """
    found: set[int] = set()
    for policy, ops in zip(policies, matches, strict=True):
        if not policy.permits:
            continue
        own = {op for op in ops if may_repeat(profile.tape[op].name)}
        if ops and not own and not policy.optional:
            raise PolicyError(
                f"{policy} permits nothing: {profile.tape[min(ops)].name} is no functional collective, which alone is "
                "saved unless it is permitted to run again."
            )
        for op in own:
            if not profile.tape[op].rerun_s:
                raise PolicyError(_no_price(profile, policy, profile.tape[op]))
        found |= own
    return frozenset(found)


def _no_price(profile: Profile, policy: Policy, op: Op) -> str:
    """Error message for a collective whose time is not known."""
    signature = profile.signatures[op.signature] if op.signature >= 0 else op.name
    ranks = ranks_in(signature)
    return (
        f"{policy} lets {op.name} run again, and how long that takes between {ranks or 'these'} ranks is not known: it "
        "was recorded on fake tensors, without a link's bandwidth. Record the step on the ranks, or give device= a "
        f"table (a name, or a file) with a link that joins {ranks or 'so many'} ranks: in its file "
        f'"links": [{{"name": "...", "ranks": {ranks or 8}, "bandwidth": <bytes/s of one device>}}].'
    )


def _region_of(profile: Profile, calls: Sequence[int]) -> list[int]:
    """Per op the module call or part among `calls` in which it ran, -1 for none."""
    chosen, region_of = set(calls), []
    for op in profile.tape:
        call = -1 if op.backward else op.module
        while call >= 0 and call not in chosen:
            call = profile.calls[call].parent
        region_of.append(call)
    ticks = [op.tick for op in profile.tape]
    for part in (call for call in calls if call >= len(profile.calls)):
        span = profile.spans[part]
        for op in range(bisect_left(ticks, span.start), bisect_left(ticks, span.end)):
            region_of[op] = part
    return region_of


def _code(profile: Profile, calls: Sequence[int], policy: Policy) -> frozenset[int]:
    """All ops of the regions that contain calls of the policy's modules, or are inside such calls."""
    matcher = Matcher(profile, calls)
    region_of = _region_of(profile, calls)
    regions = set()
    for index, record in enumerate(profile.calls):
        if not matcher.in_module(policy.module, index):
            continue
        regions |= {call for call in calls if record.start <= profile.spans[call].start < record.end}
        regions |= {
            call for call in calls if profile.spans[call].start <= record.start < profile.spans[call].end
        }
    return frozenset(op for op, region in enumerate(region_of) if region in regions)


def _constrained(
    profile: Profile,
    built: Built,
    policies: Sequence[Policy],
    matched: Sequence[frozenset[int]],
    pinned: Mapping[int, Policy],
) -> Built:
    """Apply the policies to the problem's groups; pinned groups must be saved already."""
    recompute: dict[int, Policy] = {}
    hints: dict[int, float] = {}
    needed = _needed(profile, built)
    groups = list(built.problem.groups)
    for policy, found in zip(policies, matched, strict=True):
        for group in found:
            if policy.decision == "MUST_RECOMPUTE":
                recompute.setdefault(group, policy)
            elif policy.is_must or policy.permits:
                continue
            elif policy.saves or group in needed:
                share = policy.weight if policy.saves else -policy.weight
                again_s = groups[group].options[RECOMPUTE].time_s
                if group == built.loss:  # Its measured price can be 0, and would leave a hint without weight.
                    again_s = max(again_s, sum(profile.tape[op].again_s for op in groups[group].ops))
                hints[group] = hints.get(group, 0.0) + share * again_s
    for group, hint_s in hints.items():
        if group not in recompute and not groups[group].must_save:
            groups[group] = groups[group].hinted(hint_s)
    readers = _readers(profile, built)
    for group, policy in recompute.items():
        if group in needed:
            groups[group] = groups[group].refusing(SAVE, str(policy))
        else:
            for reader in readers.get(group, ()):
                groups[reader] = groups[reader].requiring(RECOMPUTE, [Literal(group, RECOMPUTE)])
    _refuse_clashes(profile, built, groups, recompute, pinned)
    return replace(built, problem=replace(built.problem, groups=tuple(groups)))


def _needed(profile: Profile, built: Built) -> set[int]:
    """The groups that their own region's backward needs, and the group of the losses.

    Under sac: the groups that the region's second run would read from saved values.
    """
    needed = {built.loss} - {-1}
    return needed.union(*(built.model.needed(profile, built, tape) for tape in built.regions))


def _readers(profile: Profile, built: Built) -> dict[int, set[int]]:
    """Per group the other groups of its region that read its values."""
    home = {s: group for group, storages in enumerate(built.group_storages) for s in storages}
    groups = built.problem.groups
    readers: dict[int, set[int]] = {}
    for reader, group in enumerate(groups):
        for source in {home.get(s, reader) for op in group.ops for s in profile.tape[op].reads} - {reader}:
            if groups[source].region == group.region:
                readers.setdefault(source, set()).add(reader)
    return readers


def _refuse_clashes(
    profile: Profile,
    built: Built,
    groups: Sequence[DecisionGroup],
    recompute: Mapping[int, Policy],
    pinned: Mapping[int, Policy],
) -> None:
    """Raise an error for the first group that must be recomputed while it, or one that it requires, must be saved."""

    def about(group: int) -> str:
        op = profile.tape[groups[group].ops[0]]
        module = profile.module_name(op.module)
        return f"the value of {op.name}" + (f" in module {module!r}" if module else "")

    def why_saved(brought: set[int], first: int) -> str:
        for other in sorted(brought, key=lambda g: (g != first, g)):
            policies = [pinned[op] for op in groups[other].ops if op in pinned]
            if policies:
                return str(policies[0])
            if groups[other].must_save and not groups[other].reason.startswith(TIED):
                return f"the value's nature ({groups[other].reason})"
        raise AssertionError("a group must be saved without a reason")

    brings = brought_along(groups)
    for group, policy in sorted(recompute.items()):
        for other in sorted(brings[group], key=lambda g: (g != group, g)):
            if groups[other].must_save:
                link = "" if other == group else f", which cannot be recomputed without {about(other)}"
                raise PolicyConflictError(
                    f"{policy} and {why_saved(brings[other], other)} clash over {about(group)}{link}: it cannot be "
                    "both recomputed and saved (what several ops write is one value). Take one of them back, name "
                    "fewer values, or make it a preference (PREFER_SAVE, PREFER_RECOMPUTE)."
                )


def _nothing(profile: Profile, calls: Sequence[int], policy: Policy) -> str:
    """Error message for a policy without matches, with close names."""
    known = (
        ("ops", policy.op, {op.name for op in profile.tape if not op.backward}),
        ("modules", policy.module, {call.fqn for call in profile.calls}),
        ("regions", policy.region, {profile.module_name(call) for call in calls}),
    )
    parts = []
    for what, patterns, names in known:
        near = [n for p in patterns for n in difflib.get_close_matches(p, names, n=3, cutoff=0.4)]
        shown = list(dict.fromkeys(near)) or sorted(names)
        if patterns:
            parts.append(
                f"its {what} are {', '.join(map(repr, shown[:6]))}" + (", ..." if len(names) > 6 else "")
            )
    return (
        f"{policy} is about nothing in the profiled step: {'; '.join(parts)}. "
        "Pass optional=True if it need not be there."
    )
