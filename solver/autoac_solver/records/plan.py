"""A plan on disk: the programs that `apply` runs, their predictions and bounds, and the profile.

The programs are complete: `apply` reads no profile. They are the single source of truth: every table and picture of a
plan is made from them and the profile, see `plan.recorded.step`, which also checks that programs, profile and
predictions agree.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from autoac_solver.records.asked import Shown
from autoac_solver.records.compiled import EAGER, PointName
from autoac_solver.records.disk.files import read_json, write_json
from autoac_solver.records.disk.limits import Number, Size, Text, one_of
from autoac_solver.records.disk.schema import checked, document, fields_of
from autoac_solver.records.engines import check_engine, compiles
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.outcome import Outcome
from autoac_solver.records.policies import APPLIED_POLICY, AppliedPolicy
from autoac_solver.records.profile import PROFILE, Profile

SCHEMA = "autoac.plan"
SCHEMA_VERSION = 19  # 17, 18: the profile's thirteenth and fourteenth version; 19: `StepFacts.most_calls`

Steps = tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """The program for one region: a call of a module, or a part of one.

    Args:
        fqn: the module's name in the model, or the part's name, see `Profile.spans`.
        call, calls: index among the module's calls with gradients on in the step, and their number.
        wrapped: anything in it is recomputed; if not, this call is left untouched.
        steps: for every op in order, its overload's name and whether it is recomputed.
        point: the point at which the region is compiled (engine compile), see `records.compiled`.
    """

    fqn: str
    call: Size
    calls: Size
    wrapped: bool
    steps: Steps = field(repr=False)
    point: PointName = EAGER

    @property
    def name(self) -> str:
        """The region's name: the module's, with the call's number if it is not the first."""
        return self.fqn if self.call == 0 else f"{self.fqn}#{self.call}"


@dataclass(frozen=True, slots=True)
class CallProgram:
    """The engine's program for one call of a module: that of its region, or of all its parts and the ops between them.

    Args:
        fqn, call, calls: as for `RegionPlan`, of the module.
        name: the call's name, or that of its only region.
        regions: names of the regions in it: its own, or those of its parts.
        wrapped, steps, point: as for `RegionPlan`.
        inputs: the inputs that a compiled region was measured for, as in `Profile.sample`; "" if it has no points.
        cuts: places among `steps` where another part begins or ends.
        children: for a tail, the modules called before it, see `before_tail`.
    """

    fqn: str
    call: Size
    calls: Size
    name: str
    regions: tuple[str, ...]
    wrapped: bool
    steps: Steps = field(repr=False)
    point: PointName = EAGER
    inputs: str = ""
    cuts: tuple[Size, ...] = ()
    children: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Properties of the profiled step that `apply` needs besides the programs: to check, to compare, to warn.

    Args:
        sample, facts: as in the profile.
        one_call: the step calls the root module once and begins without gradients.
        called: names of the modules that it calls, the root module included.
        most_calls: module -> its most calls within one call of the root module, and the bytes that each saves; of
            those modules that save much.
        compared: the engine recomputes as profiling did, which compared every recomputed value with the first one.
        log_softmax_dtypes: dtypes of the log-softmaxes computed in it.
    """

    sample: str
    facts: tuple[str, ...]
    one_call: bool
    called: tuple[str, ...] = field(repr=False)
    most_calls: Mapping[str, tuple[Size, Size]] = field(repr=False)
    compared: bool
    log_softmax_dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RootCalls:
    """Distribution of the calls of repeatedly called modules over the step's calls of the root module.

    Args:
        before: module -> number of its calls before each call of the root module.
        fresh: number of root calls before the first gradient, see `Profile.calls_below_root`.
        elements: elements that each root call is given, if they are not all equal; else ().
        at_once: calls are alive together, so that each has decisions for its place in the order of backward.
    """

    before: Mapping[str, tuple[int, ...]]
    fresh: Size
    elements: tuple[Size, ...] = ()
    at_once: bool = False


@dataclass(frozen=True)
class PlanRecord(Shown):
    """A plan as data.

    Args:
        model, model_fingerprint, op_fingerprint, device, torch_version: as in the profile.
        root_calls: number of calls of the root module in the profiled step.
        engine, engine_reason: the engine's name, and why it was chosen.
        budget_bytes: limit of the peak; headroom_bytes of it were left free on purpose. A plan whose peak was measured
            or predicted anew can be above it.
        resident_bytes: bytes alive before the step.
        predicted_peak_bytes, unplanned_peak_bytes: peak of the step with the plan, and with nothing recomputed.
        predicted_extra_s, predicted_step_s: seconds that the plan adds, seconds of the step without it.
        bound_s, gap: no plan adds less than bound_s; gap is the difference as a fraction of the step. Both include the
            penalty of hints (hint_s).
        status, solver, solve_s: "optimal" or "feasible", the solver, and its seconds. These and the bounds are the
            solver's proof: no load can check them, as the search is not repeated.
        regions: the decisions, by region.
        calls: the programs that carry them out, by call of a module; `apply` runs these.
        step: what else `apply` needs to know of the profiled step.
        several: calls of planned modules that are called several times per step; None if counting calls modulo their
            number suffices.
        losses: modules that compute cross entropies to be made lean, and the submodules that run last before each, see
            `build.losses.cross_entropy`.
        chunked_losses: these losses are computed over chunks of rows.
        chunk_dtypes: dtypes of their logits, if so.
        profile: the profile it was made from, so that the plan alone suffices for explanations and new budgets.
        policies: the user's policies, and how far they are followed.
        hint_s: penalty in seconds of hints that are not followed, part of the objective.
        budget_of: the kind of memory that the budget limits, "allocated" or "reserved".
        allocator: the options of CUDA's caching allocator that it was planned with, as text; "" on other devices.
        predicted_reserved_bytes: simulated peak of memory reserved by that allocator; None if unknown, and on other
            devices.
        others: outcomes of the other samples that were given.
    """

    model: str
    model_fingerprint: str
    op_fingerprint: str
    device: str
    torch_version: str
    root_calls: Size
    engine: str
    engine_reason: str
    budget_bytes: Size
    headroom_bytes: Size
    resident_bytes: Size
    predicted_peak_bytes: Size
    unplanned_peak_bytes: Size
    predicted_extra_s: Number
    predicted_step_s: Number
    bound_s: Number
    gap: Number
    status: Annotated[str, one_of("optimal", "feasible")]
    solver: str
    solve_s: Number
    regions: tuple[RegionPlan, ...] = field(repr=False)
    calls: tuple[CallProgram, ...] = field(repr=False)
    step: StepFacts = field(repr=False)
    several: RootCalls | None = field(repr=False)
    losses: Mapping[str, tuple[str | None, ...]] = field(repr=False)
    chunked_losses: bool
    chunk_dtypes: tuple[str, ...]
    profile: Profile = field(repr=False)
    policies: tuple[AppliedPolicy, ...] = ()
    hint_s: Number = 0.0
    budget_of: Annotated[str, one_of("allocated", "reserved")] = "allocated"
    allocator: str = ""
    predicted_reserved_bytes: Size | None = None
    others: tuple[Outcome, ...] = ()

    def __str__(self) -> str:
        share = self.predicted_extra_s / self.predicted_step_s if self.predicted_step_s else 0.0
        return (
            f"Plan({self.model}, engine={self.engine!r}, budget={format_bytes(self.budget_bytes)}, "
            f"predicted peak={format_bytes(self.predicted_peak_bytes)}, predicted overhead={share:.1%}, {self.status})"
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. The write is atomic.

        Raises:
            FileNotFoundError, IsADirectoryError, OSError: see `files.check_writable`.
            ProfileError: a name in it is not printable.
        """
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        programs: dict[Steps, int] = {}
        for name in ("regions", "calls"):
            data[name] = [
                {
                    **{f.name: getattr(found, f.name) for f in dataclasses.fields(found)},
                    "steps": programs.setdefault(found.steps, len(programs)),
                }
                for found in getattr(self, name)
            ]
        data["programs"] = list(programs)
        data["step"] = dataclasses.asdict(self.step)
        data["several"] = None if self.several is None else dataclasses.asdict(self.several)
        data["policies"] = [applied.as_data() for applied in self.policies]
        data["profile"] = self.profile.as_data()
        data["others"] = [dataclasses.asdict(outcome) for outcome in self.others]
        write_json(path, SCHEMA, SCHEMA_VERSION, data, _PLAN)

    @classmethod
    def load(cls, path: str | Path) -> PlanRecord:
        """Read a plan.

        Raises:
            ProfileError: the file is damaged, of another kind, or from another version.
        """
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            values = fields_of(checked(data, _PLAN))
            programs = values.pop("programs")
            for name, kind in (("regions", RegionPlan), ("calls", CallProgram)):
                values[name] = tuple(_with_steps(kind, found, programs) for found in values[name])
            values["step"] = StepFacts(**fields_of(values["step"]))
            values["several"] = values["several"] and RootCalls(**fields_of(values["several"]))
            values["profile"] = Profile.of(values["profile"])
            values["policies"] = tuple(map(AppliedPolicy.of, values["policies"]))
            values["others"] = tuple(Outcome(**fields_of(found)) for found in values["others"])
            record = cls(**values)
            _check(record)
        except ValueError as error:
            raise ProfileError(f"{path} is not a valid plan: {error!s:.300}. Make it again.") from error
        return record


_PLAN = document(
    PlanRecord,
    regions=list[document(RegionPlan, steps=Size)],
    calls=list[document(CallProgram, steps=Size)],
    programs=list[tuple[tuple[Text, bool], ...]],  # Regions and calls can share one.
    step=document(StepFacts),
    several=document(RootCalls, before=dict[str, tuple[Size, ...]]) | None,
    losses=dict[Text, tuple[Text | None, ...]],
    profile=PROFILE,
    policies=list[APPLIED_POLICY],
    others=list[document(Outcome)],
)


def _with_steps(kind: type[Any], found: Any, programs: Sequence[Steps]) -> Any:
    values = fields_of(found)
    if values["steps"] >= len(programs):
        raise ValueError(
            f"{kind.__name__} {values['fqn']!r} has program {values['steps']} of {len(programs)}"
        )
    return kind(**{**values, "steps": programs[values["steps"]]})


_OF_THE_PROFILE = (
    "model",
    "model_fingerprint",
    "op_fingerprint",
    "device",
    "torch_version",
    "resident_bytes",
)


def _check(record: PlanRecord) -> None:
    """Check that the plan's programs and names belong to its profile; types are checked already."""
    check_engine(record.engine)
    for name in _OF_THE_PROFILE:
        if getattr(record, name) != getattr(record.profile, name):
            raise ValueError(f"{name} is not that of its profile")
    if record.root_calls != record.profile.n_root_calls:
        raise ValueError("root_calls is not the number of the profile's calls of the model")
    _check_regions(record)
    known = {call.fqn for call in record.profile.calls}
    unknown = names_in(record) - known
    if unknown:
        raise ValueError(f"it is about module {min(unknown)!r:.80}, which the profiled step did not call")
    several = record.several
    counts = [] if several is None else several.before.values()
    sizes = () if several is None else several.elements
    if any(len(before) != record.root_calls for before in counts) or len(sizes) not in (0, record.root_calls):
        raise ValueError("it has counts for other calls of the model than the profiled step's")


def names_in(record: PlanRecord) -> set[str]:
    """Names of the modules that a plan is applied to."""
    names = {program.fqn for program in record.calls}
    names |= {name for fqn, last in record.losses.items() for name in (fqn, *last) if name is not None}
    return names | set(record.several.before if record.several else ())


def _check_regions(record: PlanRecord) -> None:
    """Check that each region is a call or part in the profile with the same ops, none given twice or inside another."""
    calls = {(call.fqn, call.call): call for call in record.profile.spans if call.grad}
    number_of_calls = Counter(fqn for fqn, _ in calls)
    ticks = [op.tick for op in record.profile.tape]
    end = 0
    for region in record.regions:
        call = calls.get((region.fqn, region.call))
        if call is None or region.calls != number_of_calls[region.fqn]:
            raise ValueError(f"region {region.name!r} is no call of the profiled step")
        if call.start < end:
            raise ValueError(f"region {region.name!r} is given twice, out of order or inside another one")
        end = call.end
        ops = record.profile.tape[bisect_left(ticks, call.start) : bisect_left(ticks, call.end)]
        if [name for name, _ in region.steps] != [op.name for op in ops]:
            raise ValueError(f"region {region.name!r} has other ops than the profiled step")
        if not region.wrapped and any(again for _, again in region.steps):
            raise ValueError(f"region {region.name!r} recomputes something, but is not wrapped")
        if region.point != EAGER and not compiles(record.engine):
            raise ValueError(f"region {region.name!r} is compiled, in a plan of engine {record.engine!r}")
        again = any(again for _, again in region.steps)
        if compiles(record.engine) and region.wrapped != (again or region.point != EAGER):
            raise ValueError(
                f"region {region.name!r} is wrapped and neither compiled nor recomputed, or the other way round"
            )
        if again and region.point != EAGER:
            raise ValueError(f"region {region.name!r} is compiled, and has ops that run again")
