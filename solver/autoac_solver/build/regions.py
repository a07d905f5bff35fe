"""Selection of module calls as regions under an engine, and the reasons for refusing others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.step import Step
from autoac_solver.records.profile import NEVER, SHARDED, STREAMS, Profile, Unpack


@dataclass(frozen=True, slots=True)
class RegionRefusal:
    """Why a requested module call cannot be a region."""

    call: int
    reason: str


@dataclass
class Window:
    """The window of a region's replay: positions [first, end) of the axis, before its first unpack in a backward.

    Args:
        begin: tick of that unpack.
        keeps: whether this backward keeps the graph. If not, it releases what it uses.
        uses: saved tensor -> tick at which the last node that uses it in this backward drops it, if it keeps the graph.
        rerun: op that may run again -> its position, in order.
        rerun_ticks: the ticks of these ops.
    """

    begin: int
    keeps: bool = False
    uses: dict[int, int] = field(default_factory=dict)
    first: int = -1
    end: int = -1
    rerun: dict[int, int] = field(default_factory=dict)
    rerun_ticks: list[int] = field(default_factory=list)


class Region:
    """A region while its problem is built: one module call that can be recomputed.

    Args:
        step: the recorded step.
        call: index of its module call.

    Attributes:
        ops, saved: indices of its ops, and of the tensors that autograd saves in it.
        start, end: ticks of the call.
        begin_backward: tick of the first unpack of its saved tensors after its forward; `NEVER` if there is none.
        last_save, last_release: ticks at which autograd saves the last and releases the last of its saved tensors.
        index: index among the problem's regions.
        windows: where its ops run again: the first from `begin_backward` on, the others in further backwards over a
            graph that was kept. `Axis` fills them in.
        spares: whether its ops after the last save need no decision, see `Groups.spared`.
    """

    def __init__(self, step: Step, call: int) -> None:
        profile, record = step.profile, step.profile.spans[call]
        self.call = call
        self.start, self.end = record.start, record.end
        self.ops = step.ops(record.start, record.end)
        self.saved = step.saves(record.start, record.end)
        saved = [profile.saved[index] for index in self.saved]
        self.begin_backward = min((s.unpacked for s in saved if s.unpacked >= self.end), default=NEVER)
        self.last_save = max((s.tick for s in saved), default=NEVER)
        self.last_release = max((s.released for s in saved), default=NEVER)
        self.index = -1
        self.windows = self._windows(step)
        self.spares = False

    @property
    def window(self) -> Window:
        """The first window."""
        return self.windows[0]

    def _windows(self, step: Step) -> list[Window]:
        found = [Window(self.begin_backward)]
        began: Unpack | None = None  # the use that has begun the last window
        for unpack in step.unpacks(self.saved):
            if unpack.tick < self.end:
                continue
            if began is None:
                began = unpack
            elif began.keeps and unpack.backward != began.backward:
                found.append(Window(unpack.tick))
                began = unpack
            found[-1].keeps = began.keeps
            if began.keeps:
                found[-1].uses[unpack.saved] = unpack.dropped
        return found

    def owns(self, tick: int) -> bool:
        """Whether a tick is inside the call."""
        return self.start <= tick < self.end


def choose_regions(
    step: Step, calls: Sequence[int], engine: EngineModel
) -> tuple[list[Region], tuple[RegionRefusal, ...]]:
    """The regions among module calls, in order, and the refusals of the others.

    Args:
        calls: none inside another.
    """
    found, refused = [], []
    for call in calls:
        region = Region(step, call)
        reason = next(_why_no_region(step, region, engine), "")
        if not engine.repeats:
            del region.windows[1:]
        if reason:
            refused.append(RegionRefusal(call, reason))
        else:
            found.append(region)
    found.sort(key=lambda region: region.start)
    for index, region in enumerate(found):
        region.index = index
    return found, tuple(refused)


def cut_calls(step: Step, regions: Sequence[Region]) -> tuple[Region, ...]:
    """The calls that have parts among the regions, in order."""
    profile = step.profile
    parts = range(len(profile.calls), len(profile.calls) + len(profile.parts))
    calls = {profile.spans[region.call].parent for region in regions if region.call in parts}
    return tuple(sorted((Region(step, call) for call in calls), key=lambda region: region.start))


def may_be_region(step: Step, call: int, engine: EngineModel) -> bool:
    """Whether a module call can be a region, not asking whether anything in it can be recomputed."""
    refused = next(_refused(step, Region(step, call), engine), "")
    return step.profile.spans[call].grad and not refused


def _why_no_region(step: Step, region: Region, engine: EngineModel) -> Iterator[str]:
    """Reasons why a module call cannot be a region."""
    yield from _refused(step, region, engine)
    yield from nothing_to_recompute(step.profile, region)


def _refused(step: Step, region: Region, engine: EngineModel) -> Iterator[str]:
    yield from refused_by_all(step.profile, region.call)
    if step.profile.spans[region.call].grad:
        yield from engine.refuses(step, region)


def nothing_to_recompute(profile: Profile, region: Region) -> Iterator[str]:
    """Reasons why no engine can save memory by recomputing a module call."""
    if not profile.spans[region.call].grad:
        yield "it runs with gradients off, so autograd saves nothing in it"
    if not region.ops:
        yield "it runs no op"
    if region.begin_backward == NEVER:
        yield "backward needs nothing that autograd saves in it"


def refused_by_all(profile: Profile, call: int) -> Iterator[str]:
    """Reasons why a call that autograd saves tensors in is no region under any engine, and alternatives."""
    if profile.spans[call].once == STREAMS:
        yield (
            "it runs on more than one stream of the GPU: what is computed again is freed early, while another stream "
            "may still read it. Modules inside of it that keep to one stream can be regions"
        )
    if profile.spans[call].once == SHARDED and call not in profile.tail_spans:
        yield _contains_units(profile, call)


_SHOWN = 3


def _contains_units(profile: Profile, call: int) -> str:
    inside, names = {call}, []
    for index, other in enumerate(profile.calls):
        if other.parent in inside:
            if other.once == SHARDED:
                inside.add(index)
            elif other.grad:
                names.append(index)
    parents = {other.parent for other in profile.calls}
    blocks = [index for index in names if index in parents] or names
    known = list(dict.fromkeys(profile.calls[index].fqn for index in blocks))
    shown = ", ".join(map(repr, known[:_SHOWN]))
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return (
        "it contains units of FSDP2, whose parameters are gathered only around their own forward and backward: regions "
        f"can be {shown}{more}, and modules inside of these"
    )
