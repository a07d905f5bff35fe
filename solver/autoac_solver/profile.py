"""The record of one training step: ops, storages, what autograd saved and when, and the modules they belong to.

Times are *ticks* of one clock that advances with every op and every event between ops, so that the order of an
allocation, a release and the start of a region's backward is never ambiguous. Storages, ops, module calls and saved
tensors refer to each other by index.

On disk a profile is JSON, in columns, with a schema version. Loading one runs no code from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from autoac_solver.errors import ProfileError
from autoac_solver.files import read_json, write_json
from autoac_solver.format import format_bytes, format_seconds
from autoac_solver.html import escape, svg, table
from autoac_solver.limits import MOST_BYTES, is_number, is_seconds, is_size, is_text, is_whole
from autoac_solver.pictures import draw_bars

SCHEMA = "autoac.profile"
SCHEMA_VERSION = 5  # 4: calls that change an argument; 5: what was unpacked is dropped, autocast's casts

NEVER = -1

SCALAR_BYTES = 8
"""Size of a number that autograd saves as a tensor of its own, which no op makes."""

TIMES_FROM = ("measured", "table", "interpolated", "estimated")
"""An op's time was measured when the profile was made; looked up in a device's cost table, which holds measurements;
interpolated between entries of such a table; or estimated from a device's rates."""

UNSTEADY = "times are unsteady"
"""How a profile's note begins that its measured times should not be relied on."""

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
    """

    name: str
    tick: int
    module: int
    backward: bool
    time_s: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    creates: tuple[int, ...]
    workspace_bytes: int = 0
    random_bytes: int = 0
    replayable: bool = True
    side_effect: bool = False
    uninitialised: bool = False
    spread_s: float = 0.0
    rerun_s: float = 0.0
    time_from: str = "measured"
    signature: int = NEVER
    dtype: str = ""
    flops: int = 0
    moved_bytes: int = 0
    cached_cast: bool = False

    @property
    def again_s(self) -> float:
        """Seconds it takes to run it again in backward."""
        return self.rerun_s or self.time_s


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage.

    Args:
        bytes: what it occupies on the device.
        alloc: tick of its allocation, -1 if it was there before the step.
        free: tick of its death where neither autograd nor a plan holds it; the end of the step if it survives.
        kind: "Parameter", "Buffer", "Gradient", "Optstate", "Input", "Activation" or "Temp".
        name: name of the parameter or buffer, else "".
    """

    bytes: int
    alloc: int
    free: int
    kind: str
    name: str = ""


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
    """

    fqn: str
    call: int
    parent: int
    class_name: str
    grad: bool
    start: int
    end: int
    inputs: tuple[int, ...] = ()
    views: int = 0
    plain: bool = False
    changes_arguments: bool = False


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """What the engines' own bookkeeping costs, seconds, measured on the profile's machine.

    Args:
        replay_op: an op that runs under the recording and is not recorded.
        replay_record: recording an op and running it again, on top of `replay_op` and of the op's own time.
        replay_saved: a tensor that passes the pack and unpack hooks.
        replay_call: a call of a wrapped region.
        replay_pause: a call of a module inside of it for which the recording is paused.
        sac_op, sac_saved, sac_call: the same for torch's selective checkpointing.
    """

    replay_op: float = 4e-6
    replay_record: float = 8e-6
    replay_saved: float = 2e-6
    replay_call: float = 2e-5
    replay_pause: float = 2e-6
    sac_op: float = 2.5e-5
    sac_saved: float = 4e-6
    sac_call: float = 1e-4


@dataclass(frozen=True)
class Profile:
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
        costs: what the engines cost on this machine.
        measured_step_s: wall-clock seconds of the recorded step (with everything recomputed, under recording).
        views_s: seconds of all ops that only make views.
        outside_s: seconds of the step that belong to no op (the optimizer's, if it was given).
        notes: what the reader should know about how it was made.
    """

    model: str
    model_fingerprint: str
    op_fingerprint: str
    device: str
    device_bytes: int
    torch_version: str
    end: int
    tape: tuple[Op, ...] = field(repr=False)
    storage_table: tuple[Storage, ...] = field(repr=False)
    saved: tuple[Saved, ...] = field(repr=False)
    calls: tuple[ModuleCall, ...] = field(repr=False)
    signatures: tuple[str, ...] = field(default=(), repr=False)
    costs: EngineCosts = field(default=EngineCosts(), repr=False)
    mode: str = "real"
    device_name: str = ""
    measured_step_s: float = 0.0
    views_s: float = 0.0
    outside_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def resident_bytes(self) -> int:
        """Bytes alive before the step."""
        return sum(storage.bytes for storage in self.storage_table if storage.alloc == NEVER)

    @property
    def step_s(self) -> float:
        """Predicted seconds of the step with nothing recomputed."""
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
        frame = pd.DataFrame(_columns(self.tape, Op))
        frame["module"] = [self.module_name(index) for index in frame["module"]]
        return frame

    @property
    def storages(self) -> pd.DataFrame:
        """The storages, one row each."""
        return pd.DataFrame(_columns(self.storage_table, Storage))

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

    def _repr_html_(self) -> str:
        ops = pd.DataFrame({"op": [op.name for op in self.tape], "time_s": [op.time_s for op in self.tape]})
        ops = ops.groupby("op")["time_s"].agg(["size", "sum"]).reset_index()
        ops = ops.set_axis(["op", "calls", "time_s"], axis=1).sort_values("time_s", ascending=False)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        saved = self.saved_by_class
        picture = svg(lambda axes: draw_bars(axes, saved, "saved for backward, by class of module"))
        return f"<p><b>{escape(repr(self))}</b></p>{notes}{picture}{table(saved, 10)}{table(ops, 10)}"

    def as_data(self) -> dict[str, Any]:
        """What `save` writes, in columns."""
        scalars = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in (*_TABLES, "costs")
        }
        tables = {name: _columns(getattr(self, name), kind) for name, kind in _TABLES.items()}
        return {**scalars, **tables, "costs": dataclasses.asdict(self.costs)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Profile:
        """The profile that `as_data` gave, checked.

        Raises:
            KeyError, TypeError, ValueError, IndexError: it is no valid profile.
        """
        values = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        for name, kind in _TABLES.items():
            values[name] = _rows(values[name], kind)
        values["costs"] = EngineCosts(**values["costs"])
        for name in ("notes", "signatures"):
            values[name] = tuple(values[name])
        profile = cls(**values)
        _check(profile)
        return profile

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON; the file appears whole or not at all.

        Raises:
            FileNotFoundError: there is no folder to write it in.
            IsADirectoryError: there is a folder of that name.
        """
        write_json(path, SCHEMA, SCHEMA_VERSION, self.as_data())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            ProfileError: the file is damaged, of another kind, or from a newer version.
        """
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            return cls.from_data(data)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ProfileError(f"{path} is not a valid profile: {error!r}. Record it again.") from error


_TABLES: dict[str, type] = {"tape": Op, "storage_table": Storage, "saved": Saved, "calls": ModuleCall}

_Row = TypeVar("_Row")


def _columns(rows: Sequence[Any], kind: type) -> dict[str, list[Any]]:
    return {f.name: [getattr(row, f.name) for row in rows] for f in dataclasses.fields(kind)}


def _rows(columns: Mapping[str, list[Any]], kind: type[_Row]) -> tuple[_Row, ...]:
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if set(columns) != set(names):
        raise ValueError(f"columns of {kind.__name__} are {sorted(columns)}, not {sorted(names)}")
    lists = [[tuple(v) if isinstance(v, list) else v for v in columns[name]] for name in names]
    return tuple(kind(*row) for row in zip(*lists, strict=True))


def _check(profile: Profile) -> None:
    """All that later stages rely on: types and ranges, and that what refers to each other fits together."""
    for f in dataclasses.fields(profile):
        if f.name not in (*_TABLES, "costs", "notes", "signatures"):
            _check_type(getattr(profile, f.name), str(f.type), f.name)
    for name, kind in _TABLES.items():
        for row in getattr(profile, name):
            for f in dataclasses.fields(kind):
                _check_type(getattr(row, f.name), str(f.type), f"{kind.__name__}.{f.name}")
    for name, seconds in dataclasses.asdict(profile.costs).items():
        _demand(is_seconds(seconds), f"costs.{name} is {seconds!r:.80}, no duration")
    for text in (*profile.notes, *profile.signatures):
        _check_type(text, "str", "notes or signatures")
    for name in ("end", "device_bytes"):
        _demand(is_size(getattr(profile, name)), f"{name} is negative")
    for name in ("measured_step_s", "views_s", "outside_s"):
        _demand(is_seconds(getattr(profile, name)), f"{name} is no duration")
    _check_ops(profile)
    _check_storages(profile)
    _check_calls(profile)
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
        _demand(op.time_from in TIMES_FROM, f"{where} has its time from {op.time_from!r:.80}")
        _demand(all(map(is_seconds, (op.time_s, op.spread_s, op.rerun_s))), f"{where} takes {op.time_s!r} s")
        amounts = (op.workspace_bytes, op.random_bytes, op.flops, op.moved_bytes)
        _demand(min(amounts) >= 0, f"{where} has a negative size")
        for storage in op.creates:
            _demand(not created[storage], f"{where} creates a storage that was created before")
            _demand(
                profile.storage_table[storage].alloc == op.tick, f"{where} creates a storage of another tick"
            )
            created[storage] = True


def _check_storages(profile: Profile) -> None:
    for storage in profile.storage_table:
        _demand(storage.bytes >= 0, "a storage has a negative size")
        _demand(NEVER <= storage.alloc <= storage.free <= profile.end, "a storage's ticks are out of order")
        _demand(storage.kind in KINDS, f"a storage is of kind {storage.kind!r:.80}")
    total = sum(storage.bytes for storage in profile.storage_table)
    total += sum(op.workspace_bytes + op.random_bytes for op in profile.tape)
    _demand(total <= MOST_BYTES, f"it speaks of more than {MOST_BYTES} bytes of memory")


def _check_calls(profile: Profile) -> None:
    """Calls begin in order, lie inside their parents and not in one another's way, and are numbered by module."""
    free_from: dict[int, int] = {NEVER: 0}  # call -> where the next call inside of it may begin
    numbers: dict[str, int] = {}
    for index, call in enumerate(profile.calls):
        where = f"call {call.call} of module {call.fqn!r}"
        _demand(call.parent in free_from, f"{where} is inside of one that is not there")
        until = profile.end if call.parent == NEVER else profile.calls[call.parent].end
        _demand(free_from[call.parent] <= call.start <= call.end <= until, f"{where} has ticks out of order")
        free_from[call.parent], free_from[index] = call.end, call.start
        _demand(call.call == numbers.get(call.fqn, 0), f"{where} has a wrong number")
        numbers[call.fqn] = call.call + call.grad
        _demand(call.views >= 0, f"{where} has {call.views} views")
        _demand(
            all(_refers(profile.storage_table, storage) for storage in call.inputs),
            f"{where} refers to a storage that is not there",
        )


def _refers(table: Sequence[Any], index: int) -> bool:
    return 0 <= index < len(table)


def _demand(holds: bool, fault: str) -> None:
    if not holds:
        raise ValueError(fault)


_CHECKS: dict[str, Any] = {
    "int": is_whole,
    "float": is_number,
    "bool": lambda v: type(v) is bool,
    "str": is_text,
    "tuple[int, ...]": lambda v: type(v) is tuple and all(map(is_whole, v)),
}


def _check_type(value: Any, kind: str, where: str) -> None:
    if not _CHECKS[kind](value):
        raise ValueError(f"{where} is {value!r:.80}, not {kind}")
