"""Parts of module calls: stretches of a forward's ops that can be regions of their own.

NOTE [ Parts ]
  1. A region saves what it is given, and in backward it needs all of its values at once. If one forward calls many
     layers in a row, no module is a good region: recomputing one layer frees nothing, because its input is the output
     of the layer before, and all of them together need everything at once.
  2. So a call is cut in two between two items of its forward's own code (an op, or the call of a module), and the two
     parts again, as long as a part is worth it. If one module's call makes all values that a part saves, the part is
     cut between the items of that module's forward. The cut is where few bytes cross it: values made before it and
     read after it.
  3. A cut has no place in the code, so only an engine can have parts that records ops and runs those again
     (`EngineModel.runs_code_twice` is false).
  4. A part starts at the dispatch of its first op, for recording and for the profile alike. What autograd saves for
     that op before running it belongs to the part before. A module's call as a region begins before that, so regions
     within one call are either all parts or all module calls.
  5. A call with parts is recorded as a whole. So it must not run a backward, nor a cross entropy, which runs in place
     or over chunks of rows outside of all regions (`build.losses`). The outermost calls that may have parts have them.
  6. A step that is known to vary has no parts: if a layer is skipped, the ops after it stand in other places, and a cut
     between them is not found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from autoac_solver.build.losses.cross_entropy import LOG_SOFTMAX
from autoac_solver.plan.following import planned_places
from autoac_solver.records.names import PART
from autoac_solver.records.profile import NEVER, SHARDED, STREAMS, VARYING, Op, Part, Profile

LEAST_SHARE = 1 / 64
"""A part with at most this share of all saved bytes is not cut any more."""

_LEAST_SIDE = 0.25
"""The least share of a part's saved bytes on each side of a cut, if that is possible."""


def with_parts(profile: Profile) -> Profile:
    """The profile with the parts of its calls, in place of those it had; see NOTE [ Parts ]."""
    if VARYING in profile.facts or any(PART in call.fqn for call in profile.calls):
        return replace(profile, parts=())  # In the second case, a part's name could be a module's.
    cuts, parts, inside = _Cuts(profile), list[Part](), set[int]()  # inside: of a call with parts
    for index, call in enumerate(profile.calls):
        found = [] if call.parent in inside else cuts.of(index)
        parts += found
        if found or call.parent in inside:
            inside.add(index)
    return replace(profile, parts=tuple(parts))


def with_parts_of(profile: Profile, other: Profile) -> Profile:
    """The profile of a step, with parts at the same ops as in another one, as the engine finds them.

    A part is left out if it begins or ends at an op that this step does not have.
    """
    there, here = _Cuts(other), _Cuts(profile)
    calls = {(call.fqn, call.call): index for index, call in enumerate(profile.calls) if call.grad}
    found, ops_at = [], dict[int, dict[int, int]]()  # ops_at: call in the other step -> its op -> the op here
    for part in other.parts:
        call = other.calls[part.call]
        index = calls.get((call.fqn, call.call), NEVER)
        if index == NEVER:
            continue
        if part.call not in ops_at:
            planned, own = there.of_call(part.call), here.of_call(index)
            names = (
                [op.name for op in step.tape[slice(*ops)]] for step, ops in ((other, planned), (profile, own))
            )
            ops_at[part.call] = {
                place + planned[0]: own[0] + op
                for op, place in enumerate(planned_places(*names))
                if place != NEVER
            }
            ops_at[part.call] |= {planned[0]: own[0], planned[1]: own[1]}
        first, end = (ops_at[part.call].get(op, NEVER) for op in there.ops(part.start, part.end))
        if NEVER != first < end:
            found.append(here.part(index, part.number, first, end))
    return replace(profile, parts=tuple(found))


def tail_of(profile: Profile, call: int, after: int) -> Part:
    """The part of a call from a tick on, at which it may still save tensors for its first op; there is at least one."""
    cuts = _Cuts(profile)
    _, end = cuts.of_call(call)
    return replace(cuts.part(call, 1, cuts.ops(after, after)[0], end), start=after)


def _may_be_held(op: Op) -> bool:
    """Whether a call with this op may be recorded as a whole, see NOTE [ Parts ] 5."""
    return not op.backward and op.name != LOG_SOFTMAX


class _Cuts:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._ticks = [op.tick for op in profile.tape]
        saved = {s.storage for s in profile.saved}
        sizes = [sum(profile.storage_table[s].bytes for s in op.creates if s in saved) for op in profile.tape]
        self._saved = [0, *accumulate(sizes)]
        self._least = LEAST_SHARE * self._saved[-1]

    def of(self, call: int) -> list[Part]:
        record = self._profile.calls[call]
        if not record.grad or record.once in (SHARDED, STREAMS):
            return []
        first, end = self.of_call(call)
        if self._weight(first, end) <= self._least or not all(
            map(_may_be_held, self._profile.tape[first:end])
        ):
            return []
        crossing = self._crossing(first, end)
        found: list[tuple[int, int]] = []
        waiting = [(first, end)]
        while waiting:
            part = waiting.pop()
            if part != (first, end):
                found.append(part)
            place = self._cut(crossing, call, first, *part)
            if place != NEVER:
                waiting += [(place, part[1]), (part[0], place)]
        return [self.part(call, number, *ops) for number, ops in enumerate(found, 1)]

    def of_call(self, call: int) -> tuple[int, int]:
        """The ops of a call, as [first, end)."""
        record = self._profile.calls[call]
        return self.ops(record.start, record.end)

    def ops(self, start: int, end: int) -> tuple[int, int]:
        """The ops at ticks in [start, end), as [first, end)."""
        return bisect_left(self._ticks, start), bisect_left(self._ticks, end)

    def _weight(self, first: int, end: int) -> int:
        """Bytes that these ops make and autograd saves."""
        return self._saved[end] - self._saved[first]

    def _crossing(self, first: int, end: int) -> list[int]:
        """For each of a call's ops the bytes that are made before it in the call, and read or saved at it or later."""
        profile, tape = self._profile, self._profile.tape
        made = {s: op for op in range(first, end) for s in tape[op].creates}
        last = dict(made)
        for op in range(first, end):
            last |= {s: op for s in tape[op].reads if s in made}
        for saved in profile.saved:
            if saved.storage in made and tape[first].tick <= saved.tick:
                op = min(bisect_left(self._ticks, saved.tick) - 1, end)
                last[saved.storage] = max(last[saved.storage], op)
        changes = [0] * (end - first + 2)
        for storage, op in made.items():
            changes[op + 1 - first] += profile.storage_table[storage].bytes
            changes[last[storage] + 1 - first] -= profile.storage_table[storage].bytes
        return list(accumulate(changes))

    def _places(self, call: int, first: int, end: int) -> list[int]:
        """Where the ops [first, end) of a call may be cut: at ops with which an item of its forward's code begins."""
        while True:
            items = [self._item(call, op) for op in range(first, end)]
            heavy = {item for op, item in enumerate(items, first) if self._weight(op, op + 1)}
            if len(heavy) > 1:
                return [first + i for i in range(1, len(items)) if items[i] != items[i - 1]]
            call = heavy.pop()
            if call < 0:
                return []
            inside = [first + i for i, item in enumerate(items) if item == call]
            first, end = inside[0], inside[-1] + 1

    def _item(self, call: int, op: int) -> int:
        """The call directly in this one that has an op, or a negative number of its own if it is the call's own op."""
        module, calls = self._profile.tape[op].module, self._profile.calls
        while module not in (call, NEVER) and calls[module].parent != call:
            module = calls[module].parent
        return -1 - op if module in (call, NEVER) else module

    def _cut(self, crossing: Sequence[int], call: int, start: int, first: int, end: int) -> int:
        """The best place to cut the ops [first, end) of a call that starts with op `start`; `NEVER` for none."""
        weight = self._weight(first, end)
        if weight <= self._least:
            return NEVER
        found = []
        for place in self._places(call, first, end):
            left = self._weight(first, place)
            side = min(left, weight - left) / weight
            if side > 0:
                balanced = side >= _LEAST_SIDE
                found.append((not balanced, crossing[place - start] if balanced else 0, -side, place))
        return min(found)[-1] if found else NEVER

    def part(self, call: int, number: int, first: int, end: int) -> Part:
        """The part of a call with the ops [first, end)."""
        profile, record = self._profile, self._profile.calls[call]
        own = self.of_call(call)
        start = self._ticks[first]
        until = record.end if end == own[1] else self._ticks[end]
        made = {s for op in profile.tape[first:end] for s in op.creates}
        read = {s for op in profile.tape[first:end] for s in op.reads} - made
        inputs = sorted(s for s in read if profile.storage_table[s].alloc != NEVER)
        views = record.views * (end - first) // max(1, own[1] - own[0])
        return Part(call, number, start, until, tuple(inputs), views)


class PartTree:
    """The spans of a profile as a tree, in which a call's parts take the place of the calls in it.

    Args:
        profile: with parts.
        children: per call the calls directly in it.
    """

    def __init__(self, profile: Profile, children: Sequence[Sequence[int]]) -> None:
        self._profile, self._children = profile, children
        self._parts: dict[int, list[int]] = {}  # span -> the parts directly in it
        around: list[int] = []
        for index, part in enumerate(profile.parts, len(profile.calls)):
            while around and not self._holds(around[-1], index):
                around.pop()
            self._parts.setdefault(around[-1] if around else part.call, []).append(index)
            around.append(index)

    def inside(self, span: int) -> list[int]:
        """The spans directly in this one; empty if there are none."""
        if span in self._parts:
            return self._parts[span]
        return list(self._children[span]) if span < len(self._profile.calls) else []

    def _holds(self, outer: int, inner: int) -> bool:
        outside, inside = self._profile.spans[outer], self._profile.spans[inner]
        return outside.parent == inside.parent and outside.start <= inside.start and inside.end <= outside.end
