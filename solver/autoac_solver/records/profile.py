"""The record of one training step: ops, storages, what autograd saved and when, and the modules they belong to.

Times are *ticks* of one clock that advances with every op and every event between ops, so that the order of an
allocation, a release and the start of a region's backward is never ambiguous. Storages, ops, module calls and saved
tensors refer to each other by index.

On disk a profile is JSON, in columns, with a schema version. Loading one runs no code from it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pandas as pd

from autoac_solver.records.asked import Shown, ask
from autoac_solver.records.clocks import WAITING_OPS, Lanes, run
from autoac_solver.records.compiled import MOST_POINTS, CompiledPoint, CompiledRegion, CompiledTable
from autoac_solver.records.disk.files import read_json, write_json
from autoac_solver.records.disk.limits import MOST_BYTES, Seconds, Size, one_of
from autoac_solver.records.disk.schema import checked, columns, document, fields_of, rows, table
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.format import format_bytes, format_seconds

SCHEMA = "autoac.profile"
SCHEMA_VERSION = 7  # 6: costs by the engines' names; 7: host's time, compiled points, sources

NEVER = -1

SCALAR_BYTES = 8
"""Size of a number that autograd saves as a tensor of its own, which no op makes."""

TIMES_FROM = ("measured", "table", "interpolated", "estimated")
"""An op's time was measured when the profile was made; looked up in a device's cost table, which holds measurements;
interpolated between entries of such a table; or estimated from a device's rates."""

UNSTEADY = "times are unsteady"
"""How a profile's note begins that its measured times should not be relied on."""

VARIES = "the step varies"
"""How a profile's note begins on a step that does not run the same ops every time."""

INFERENCE = "inference mode"
CACHED = "cached parametrizations"
SHARDED = "sharded units"
FOREIGN = "writes of code that torch does not see"
"""Kinds of code that does not do the same a second time, see `ModuleCall.once`."""

GATHERED = "(gathered)"
"""The name of parameters that are gathered from their shards and given up in the step, see `Storage.is_gathered`."""

KINDS = ("Parameter", "Buffer", "Gradient", "Optstate", "Input", "Activation", "Temp")
"""Kinds of memory, named as torch's MemTracker does; Input is the sample and whatever else was there before."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the step that made or changed a storage.

    Args:
        name: its overload, such as "aten.mm.default".
        tick: when it ran.
        module: index of the innermost module call it ran in, -1 for none.
        backward: whether it ran inside a backward pass.
        time_s: seconds it takes.
        reads, writes, creates: storages it reads (those it writes in place too), writes in place, allocates.
        workspace_bytes: bytes that are alive inside the op on top of its inputs and outputs.
        random_bytes: size of the generator state that must be stashed to run it again, 0 if it is not random.
        replayable: it may be run again.
        side_effect: it updates statistics outside of its region or draws from a generator of the model's own, which
            `replay` leaves out or puts back, and `sac` cannot.
        uninitialised: its output holds no values yet.
        spread_s: distance between the quartiles of what was measured.
        rerun_s: seconds it takes to run it again in backward, 0 if that is not known to differ from `time_s`.
        time_from: how `time_s` was found, see `TIMES_FROM`.
        signature: index of its signature's text, -1 for none.
        dtype: the floating type it computes in, "" for none.
        flops: floating-point operations of a matrix product, convolution or attention, 0 for what only moves memory.
        moved_bytes: bytes read and written if every element of its arguments and results is touched once.
        cached_cast: autocast keeps its result, a cast of a parameter, and hands it to all that read the parameter; code
            that runs a second time (`sac`) makes it anew.
        host_s: seconds that the host takes to launch it, 0 where ops run as they are called, or that is not known.
    """

    name: str
    tick: int
    module: int
    backward: bool
    time_s: Seconds
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    creates: tuple[int, ...]
    workspace_bytes: Size = 0
    random_bytes: Size = 0
    replayable: bool = True
    side_effect: bool = False
    uninitialised: bool = False
    spread_s: Seconds = 0.0
    rerun_s: Seconds = 0.0
    time_from: Annotated[str, one_of(*TIMES_FROM)] = "measured"
    signature: int = NEVER
    dtype: str = ""
    flops: Size = 0
    moved_bytes: Size = 0
    cached_cast: bool = False
    host_s: Seconds = 0.0

    @property
    def waits(self) -> bool:
        """Whether the host waits until it is done."""
        return self.name in WAITING_OPS

    @property
    def again_s(self) -> float:
        """Seconds it takes to run it again in backward."""
        return self.rerun_s or self.time_s


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage.

    Args:
        bytes: what it occupies on the device.
        alloc: tick of its allocation, -1 if it was there before the step; 0 if it was, and dies in the step, for which
            nobody but the loop is to blame (ops begin at 1).
        free: tick of its death where neither autograd nor a plan holds it; the end of the step if it survives.
        kind: "Parameter", "Buffer", "Gradient", "Optstate", "Input", "Activation" or "Temp".
        name: name of the parameter or buffer, else "".
    """

    bytes: Size
    alloc: int
    free: int
    kind: Annotated[str, one_of(*KINDS)]
    name: str = ""

    @property
    def is_gathered(self) -> bool:
        """Whether whoever shards parameters gathered it and gives it up, whatever autograd and plans still hold."""
        return self.kind == "Parameter" and self.name == GATHERED


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd saved for backward.

    Args:
        storage: the storage it stands on.
        module: the module call it was saved in, -1 for none.
        tick: when it was saved.
        unpacked: tick of its first use in backward, -1 for never.
        released: tick at which autograd let go of it.
        dropped: tick at which nobody holds what autograd unpacked, where that is another tensor on another storage:
            before `released` if autograd still had to bring gradients to the shapes or types of their inputs.
    """

    storage: int
    module: int
    tick: int
    unpacked: int
    released: int
    dropped: int


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module's forward.

    Args:
        fqn: the module's name in the model, "" for the model itself.
        call: how many calls of this module with gradients on came before it in the step.
        parent: index of the call it happened in, -1 for none.
        class_name: the module's class.
        grad: whether gradients were on.
        start, end: ticks.
        inputs: storages of the tensors among its arguments.
        views: how many ops that only make views or metadata ran directly in it or below.
        plain: the module is one of `torch.nn`, as it is there: what its forward runs does not depend on data.
        changes_arguments: an object among its arguments holds something else afterwards, as a cache of keys and values
            does; so its code cannot be run twice.
        once: why else its code cannot be run twice, "" if nothing is known: `INFERENCE`, it makes or is given
            tensors of `torch.inference_mode`; `CACHED`, a `parametrize.cached` around it is over when its code would
            run again; `FOREIGN`, code that torch does not see writes a tensor of it; `SHARDED`, there are units of
            FSDP2 inside of it, whose parameters are gathered only around their own forward and backward.
    """

    fqn: str
    call: int
    parent: int
    class_name: str
    grad: bool
    start: int
    end: int
    inputs: tuple[int, ...] = ()
    views: Size = 0
    plain: bool = False
    changes_arguments: bool = False
    once: Annotated[str, one_of("", INFERENCE, CACHED, FOREIGN, SHARDED)] = ""


EngineCosts = dict[str, dict[str, Seconds]]
"""Seconds that the engines' own bookkeeping takes on the profile's machine: by the engine's name, then by its part.

Each engine says what its parts are (`build.engines`), and what they take where they were not measured.
"""


@dataclass(frozen=True)
class Profile(Shown):
    """One recorded training step.

    Args:
        model: class name of the model.
        model_fingerprint: tells this model's structure (module names and classes, parameter shapes) from others.
        op_fingerprint: tells this sequence of ops from others.
        device: device type and what is known of it, such as "cpu".
        device_bytes: the device's total memory, 0 if unknown.
        torch_version: the torch it was recorded with.
        end: the last tick plus one.
        tape: the ops in order.
        storage_table, saved, calls: see there.
        signatures: overload, shapes, types and scalars of the distinct ops, as text.
        mode: "real" if the step was run, "fake" if only its shapes were.
        device_name: what the device is, in words, where that is known.
        costs: what the engines cost on this machine, see there.
        measured_step_s: wall-clock seconds of the recorded step (with everything recomputed, under recording).
        views_s: seconds of all ops that only make views.
        outside_s: seconds of the step that belong to no op (the optimizer's, if it was given).
        notes: what the reader should know about how it was made.
        sample: names, types and shapes of what the model was called with, in the call with the most elements; "" where
            that is not known.
        compiled: what compiled regions take, None where none was compiled (`engine="compile"`).
        sources: for each class of modules but torch's own, where its forward is: a file's name, without its folder, and
            a line, such as "modeling_llama.py:312".
    """

    model: str
    model_fingerprint: str
    op_fingerprint: str
    device: str
    device_bytes: Size
    torch_version: str
    end: Size
    tape: tuple[Op, ...] = field(repr=False)
    storage_table: tuple[Storage, ...] = field(repr=False)
    saved: tuple[Saved, ...] = field(repr=False)
    calls: tuple[ModuleCall, ...] = field(repr=False)
    signatures: tuple[str, ...] = field(default=(), repr=False)
    costs: EngineCosts = field(default_factory=dict, repr=False)
    mode: str = "real"
    device_name: str = ""
    measured_step_s: Seconds = 0.0
    views_s: Seconds = 0.0
    outside_s: Seconds = 0.0
    notes: tuple[str, ...] = ()
    sample: str = ""
    compiled: CompiledTable | None = field(default=None, repr=False)
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def resident_bytes(self) -> int:
        """Bytes alive before the step, those included that die in it."""
        return sum(storage.bytes for storage in self.storage_table if storage.alloc <= 0)

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Predicted peak of the step as it runs without autoac, resident bytes included."""
        return ask("peak_bytes", self)

    @functools.cached_property
    def least_peak_bytes(self) -> int:
        """The least predicted peak of any plan (engine replay): a smaller budget is infeasible. It takes solving."""
        return ask("least_peak_bytes", self)

    def source_of(self, module: str) -> str:
        """Where the forward of a module, or of a call of it, is: its class, and the place in `sources` where known."""
        found = self._class_of.get(module.partition("#")[0], "")
        return f"{found}, {self.sources[found]}" if found in self.sources else found

    @property
    def is_one_call(self) -> bool:
        """Whether the step calls the model once, and begins without gradients."""
        gradients = any(s.kind == "Gradient" and s.alloc == NEVER for s in self.storage_table)
        return not gradients and sum(call.grad and not call.fqn for call in self.calls) == 1

    @functools.cached_property
    def _class_of(self) -> dict[str, str]:
        return {call.fqn: call.class_name for call in self.calls}

    @property
    def has_two_clocks(self) -> bool:
        """Whether the host only launches ops, which a device then computes, and both times are known."""
        return any(op.host_s for op in self.tape)

    @functools.cached_property
    def lanes(self) -> Lanes:
        """Host and device over the step with nothing recomputed, where it `has_two_clocks`."""
        host_s = np.array([self.views_s, *(op.host_s for op in self.tape), 0.0])
        device_s = np.array([0.0, *(op.time_s for op in self.tape), self.outside_s])
        return run(host_s, device_s, np.array([False, *(op.waits for op in self.tape), False]))

    @functools.cached_property
    def step_s(self) -> float:
        """Predicted seconds of the step with nothing recomputed."""
        if self.has_two_clocks:
            return self.lanes.end_s
        return sum(op.time_s for op in self.tape) + self.views_s + self.outside_s

    @property
    def time_shares(self) -> dict[str, float]:
        """Share of the step's time that was measured, looked up, interpolated and estimated; see `TIMES_FROM`."""
        total = sum(op.time_s for op in self.tape)
        parts = {kind: sum(op.time_s for op in self.tape if op.time_from == kind) for kind in TIMES_FROM}
        return {kind: part / total for kind, part in parts.items() if part}

    @property
    def ops(self) -> pd.DataFrame:
        """The tape, one row an op."""
        frame = pd.DataFrame(columns(self.tape, Op))
        frame["module"] = [self.module_name(index) for index in frame["module"]]
        return frame

    @property
    def storages(self) -> pd.DataFrame:
        """The storages, one row each."""
        return pd.DataFrame(columns(self.storage_table, Storage))

    def module_name(self, call: int) -> str:
        """Name of a module call for people: its fqn, with the call's number if it is not the first."""
        if call < 0:
            return ""
        record = self.calls[call]
        return record.fqn if record.call == 0 else f"{record.fqn}#{record.call}"

    def calls_below_root(self, names: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], int] | None:
        """How the calls of some modules are spread over the step's calls of the model itself.

        Returns:
            For each module how often it was called, with gradients on, before each call of the model, and how many
            calls of the model there are before the first gradient that is there at the step's end: a backward before it
            leaves none. None if a module was also called from elsewhere.
        """
        roots = [call for call in self.calls if call.fqn == "" and call.grad]
        offsets = {}
        for name in names:
            starts = [call.start for call in self.calls if call.fqn == name and call.grad]
            if any(not any(root.start < start < root.end for root in roots) for start in starts):
                return None
            offsets[name] = tuple(sum(start < root.start for start in starts) for root in roots)
        gradients = (storage.alloc for storage in self.storage_table if storage.kind == "Gradient")
        first = min((alloc for alloc in gradients if alloc != NEVER), default=self.end)
        return offsets, sum(root.start < first for root in roots)

    @property
    def saved_by_class(self) -> pd.DataFrame:
        """What autograd saves for backward, by class of the module that makes it: module_class, storages, bytes.

        Parameters and whatever else was there before the step are left out; a storage saved twice counts once.
        """
        maker = {storage: op.module for op in self.tape for storage in op.creates}
        rows = []
        for storage in sorted({saved.storage for saved in self.saved}):
            record = self.storage_table[storage]
            if record.alloc != NEVER:
                call = maker.get(storage, NEVER)
                rows.append(("" if call == NEVER else self.calls[call].class_name, record.bytes))
        frame = pd.DataFrame(rows, columns=["module_class", "bytes"]).groupby("module_class")["bytes"]
        found = (
            frame.agg(["size", "sum"]).reset_index().set_axis(["module_class", "storages", "bytes"], axis=1)
        )
        return found.sort_values(["bytes", "module_class"], ascending=[False, True], ignore_index=True)

    def __repr__(self) -> str:
        noted = f", notes: {len(self.notes)}" if self.notes else ""
        return (
            f"Profile({self.model} on {self.device}: {len(self.tape)} ops, a step of {format_seconds(self.step_s)}, "
            f"{format_bytes(self.resident_bytes)} before the step{noted})"
        )

    def as_data(self) -> dict[str, Any]:
        """What `save` writes, in columns."""
        scalars = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _TABLES}
        tables = {name: columns(getattr(self, name), kind) for name, kind in _TABLES.items()}
        compiled = None if self.compiled is None else dataclasses.asdict(self.compiled)
        return {**scalars, **tables, "compiled": compiled}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Profile:
        """The profile that `as_data` gave, checked.

        Raises:
            ValueError: it is no valid profile.
        """
        return cls.of(checked(data, PROFILE))

    @classmethod
    def of(cls, found: msgspec.Struct) -> Profile:
        """The profile of what a file holds in the form of `PROFILE`.

        Raises:
            ValueError: its parts do not fit together.
        """
        values = fields_of(found)
        values |= {name: rows(values[name], kind) for name, kind in _TABLES.items()}
        values["compiled"] = values["compiled"] and _compiled_table(values["compiled"])
        profile = cls(**values)
        _check(profile)
        return profile

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON; the file appears whole or not at all.

        Raises:
            FileNotFoundError, IsADirectoryError, OSError: see `files.check_writable`.
            ProfileError: a name in it is no printable text.
        """
        write_json(path, SCHEMA, SCHEMA_VERSION, self.as_data(), PROFILE)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            ProfileError: the file is damaged, of another kind, or from a newer version.
        """
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            return cls.from_data(data)
        except ValueError as error:
            raise ProfileError(f"{path} is not a valid profile: {error!s:.300}. Record it again.") from error


_TABLES: dict[str, Any] = {"tape": Op, "storage_table": Storage, "saved": Saved, "calls": ModuleCall}


def _check(profile: Profile) -> None:
    """What no type tells: that what refers to each other is there and fits together."""
    _check_ops(profile)
    _check_storages(profile)
    _check_calls(profile)
    _check_compiled(profile)
    for saved in profile.saved:
        _demand(_refers(profile.storage_table, saved.storage), "a saved tensor has no storage")
        _demand(saved.module == NEVER or _refers(profile.calls, saved.module), "a saved tensor has no module")
        in_order = 0 <= saved.tick <= saved.dropped <= saved.released <= profile.end
        _demand(in_order, "a saved tensor's ticks are out of order")
        _demand(
            saved.unpacked == NEVER or saved.tick <= saved.unpacked <= profile.end,
            "a saved tensor is used before it is saved, or after the step",
        )


def _check_ops(profile: Profile) -> None:
    last_tick, created = -1, [False] * len(profile.storage_table)
    for op in profile.tape:
        where = f"op {op.name} at tick {op.tick}"
        _demand(last_tick < op.tick < profile.end, f"{where} is out of order")
        last_tick = op.tick
        for storage in (*op.reads, *op.writes, *op.creates):
            _demand(_refers(created, storage), f"{where} refers to a storage that is not there")
        _demand(op.module == NEVER or _refers(profile.calls, op.module), f"{where} is in no module")
        _demand(
            op.signature == NEVER or _refers(profile.signatures, op.signature), f"{where} has no signature"
        )
        for storage in op.creates:
            _demand(not created[storage], f"{where} creates a storage that was created before")
            _demand(
                profile.storage_table[storage].alloc == op.tick, f"{where} creates a storage of another tick"
            )
            created[storage] = True


def _check_storages(profile: Profile) -> None:
    for storage in profile.storage_table:
        _demand(NEVER <= storage.alloc <= storage.free <= profile.end, "a storage's ticks are out of order")
    total = sum(storage.bytes for storage in profile.storage_table)
    total += sum(op.workspace_bytes + op.random_bytes for op in profile.tape)
    _demand(total <= MOST_BYTES, f"it speaks of more than {MOST_BYTES} bytes of memory")


def _check_calls(profile: Profile) -> None:
    """Calls begin in order, lie inside their parents and not in one another's way, and are numbered by module."""
    free_from: dict[int, int] = {NEVER: 0}  # call -> where the next call inside of it may begin
    numbers: dict[str, int] = {}
    views: dict[int, int] = {}  # call -> how many views there are in the calls directly inside of it
    for index, call in enumerate(profile.calls):
        where = f"call {call.call} of module {call.fqn!r}"
        _demand(call.parent in free_from, f"{where} is inside of one that is not there")
        until = profile.end if call.parent == NEVER else profile.calls[call.parent].end
        _demand(free_from[call.parent] <= call.start <= call.end <= until, f"{where} has ticks out of order")
        free_from[call.parent], free_from[index] = call.end, call.start
        _demand(call.call == numbers.get(call.fqn, 0), f"{where} has a wrong number")
        numbers[call.fqn] = call.call + call.grad
        _demand(
            all(_refers(profile.storage_table, storage) for storage in call.inputs),
            f"{where} refers to a storage that is not there",
        )
        views[call.parent] = views.get(call.parent, 0) + call.views
    for index, inside in views.items():
        _demand(
            index == NEVER or inside <= profile.calls[index].views,
            f"call {index} has fewer views than the calls in it",
        )


def _check_compiled(profile: Profile) -> None:
    """Measured regions are calls of the profile, none in two rows, and each has a point."""
    regions = () if profile.compiled is None else profile.compiled.regions
    calls = [call for region in regions for call in region.calls]
    _demand(all(_refers(profile.calls, call) for call in calls), "a compiled region is no call")
    _demand(len(set(calls)) == len(calls), "a call is in two compiled regions")
    fine = all(bool(region.points) is not bool(region.failure) for region in regions)
    _demand(fine, "a compiled region has neither points nor a failure, or both")
    most = max((len(region.points) for region in regions), default=0)
    _demand(most <= MOST_POINTS, f"a compiled region has more than {MOST_POINTS} points")


def _refers(table: Sequence[Any], index: int) -> bool:
    return 0 <= index < len(table)


def _demand(holds: bool, fault: str) -> None:
    if not holds:
        raise ValueError(fault)


def _compiled_table(found: msgspec.Struct) -> CompiledTable:
    """What a file holds of it."""
    values = fields_of(found)
    regions = []
    for region in values["regions"]:
        parts = fields_of(region)
        points = tuple(CompiledPoint(**fields_of(point)) for point in parts["points"])
        regions.append(CompiledRegion(**{**parts, "points": points}))
    return CompiledTable(**{**values, "regions": tuple(regions)})


_COMPILED = document(
    CompiledTable, regions=list[document(CompiledRegion, points=list[document(CompiledPoint)])]
)
_AS_TABLES: Any = {name: table(kind) for name, kind in _TABLES.items()}
PROFILE = document(
    Profile,
    compiled=_COMPILED | None,
    **_AS_TABLES,
)
"""How a profile stands in a file, and in files that hold one."""
