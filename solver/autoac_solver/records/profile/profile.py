"""The profile and its file format."""

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
from autoac_solver.records.clocks import Lanes, run
from autoac_solver.records.compiled import CompiledPoint, CompiledRegion, CompiledTable
from autoac_solver.records.disk.files import read_json, write_json
from autoac_solver.records.disk.limits import Seconds, Size, one_of
from autoac_solver.records.disk.schema import checked, columns, document, fields_of, rows, table
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.format import format_bytes, format_seconds
from autoac_solver.records.names import PART
from autoac_solver.records.profile.any_order import in_any_order
from autoac_solver.records.profile.checks import check
from autoac_solver.records.profile.rows import (
    FACTS,
    NEVER,
    TIMES_FROM,
    ModuleCall,
    Op,
    Part,
    Saved,
    Storage,
    Unpack,
)

SCHEMA = "autoac.profile"
SCHEMA_VERSION = 14  # 13: what compiled regions alone hold; 14: backwards that keep the graph

EngineCosts = dict[str, dict[str, Seconds]]
"""Seconds of the engines' bookkeeping on the profile's machine: engine name -> part -> seconds.

Each engine defines its parts (`build.engines`), with defaults for those that were not measured. The measured
price of chunked losses has a name of its own (`build.losses.chunked`).
"""


@dataclass(frozen=True)
class Profile(Shown):
    """One recorded training step.

    Args:
        model: class name of the model.
        model_fingerprint: fingerprint of the model's structure (module names and classes, parameter shapes).
        op_fingerprint: fingerprint of the sequence of ops.
        device: torch's name of the device, such as "cpu".
        device_bytes: the device's total memory, 0 if unknown.
        torch_version: the torch it was recorded with.
        end: the last tick plus one.
        tape: the ops in order.
        storage_table, saved, calls: rows of `Storage`, `Saved` and `ModuleCall`.
        parts: parts of the calls, rows of `Part`.
        unpacks: all uses of saved tensors in backward, rows of `Unpack` in the order of their ticks, if a backward kept
            the graph; else empty.
        signatures: overload, shapes, dtypes and scalars of the distinct ops, as text.
        mode: "real" if the step ran on real tensors, "fake" if it was recorded from shapes alone.
        device_name: readable name of the device, "" if unknown.
        costs: costs of the engines' bookkeeping on this machine, see `EngineCosts`.
        measured_step_s: wall-clock seconds of the recorded step (with everything recomputed, under recording).
        views_s: seconds of all ops that only make views.
        outside_s: seconds of the step that belong to no op (the optimizer's, if it was given).
        notes: remarks for the reader on how the profile was made.
        facts: those of `FACTS` that hold.
        sample: names, types and shapes of the model's arguments, of the call with the most elements; "" if unknown.
        call_elements: elements of the tensors that each call of the root module with gradients on is given; () if
            unknown.
        any_order: these calls may come in any order, see `in_any_order`.
        compiled: measurements of compiled regions, None if none was compiled (`engine="compile"`).
        tails: parts among the compiled regions: what a call's own code runs after the last region inside of it.
        sources: module class (except torch's own) -> place of its forward: file name without folder, and line, such as
            "modeling_llama.py:312".

    A region is one of `spans`: the calls, followed by the parts and the tails.
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
    facts: tuple[Annotated[str, one_of(*FACTS)], ...] = ()
    sample: str = ""
    call_elements: tuple[Size, ...] = ()
    any_order: bool = False
    compiled: CompiledTable | None = field(default=None, repr=False)
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    parts: tuple[Part, ...] = field(default=(), repr=False)
    tails: tuple[Part, ...] = field(default=(), repr=False)
    unpacks: tuple[Unpack, ...] = field(default=(), repr=False)

    @property
    def resident_bytes(self) -> int:
        """Bytes alive before the step, including storages freed during it."""
        return sum(storage.bytes for storage in self.storage_table if storage.alloc <= 0)

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Predicted peak of the step without autoac, resident bytes included."""
        return ask("peak_bytes", self)

    @functools.cached_property
    def least_peak_bytes(self) -> int:
        """The least predicted peak of any plan (engine replay); smaller budgets are infeasible. Runs the solver."""
        return ask("least_peak_bytes", self)

    @property
    def spans_of_parts(self) -> tuple[ModuleCall, ...]:
        """The parts and tails among the `spans`."""
        return self.spans[len(self.calls) :]

    @property
    def tail_spans(self) -> range:
        """Indices of the tails among the `spans`."""
        first = len(self.calls) + len(self.parts)
        return range(first, first + len(self.tails))

    @functools.cached_property
    def spans(self) -> tuple[ModuleCall, ...]:
        """The calls, and after them parts and tails, each as a call of a module of its own name inside of its call."""
        parts = (
            dataclasses.replace(
                self.calls[part.call],
                fqn=f"{self.module_name(part.call)}{PART}{part.number}",
                call=0,
                parent=part.call,
                start=part.start,
                end=part.end,
                inputs=part.inputs,
                outputs=(),
                differentiable=(),
                views=part.views,
            )
            for part in (*self.parts, *self.tails)
        )
        return (*self.calls, *parts)

    def source_of(self, module: str) -> str:
        """The class of a module, or of a call's module, and the place of its forward in `sources` if known."""
        found = self._class_of.get(module.partition(PART)[0].partition("#")[0], "")
        return f"{found}, {self.sources[found]}" if found in self.sources else found

    @property
    def called(self) -> set[str]:
        """The names of the modules that the step calls with gradients on."""
        return {call.fqn for call in self.calls if call.grad}

    @property
    def is_one_call(self) -> bool:
        """Whether the step calls the root module once and begins without gradients."""
        return not self.has_gradients_before and self.n_root_calls == 1

    @property
    def has_gradients_before(self) -> bool:
        """Whether the step adds to gradients from before it."""
        return any(storage.is_gradient_before for storage in self.storage_table)

    def in_any_order(self) -> Profile:
        """The step as if its calls of the model, micro-batches of different sizes, came in any order.

        A plan made from it is within its budget for micro-batches of drawn lengths, none of which is larger than the
        recorded step's largest. Its predicted peak is that of the worst order. The profile is returned unchanged if the
        calls are equal, or if one begins before the backward of another.
        """
        return in_any_order(self)

    @functools.cached_property
    def _class_of(self) -> dict[str, str]:
        return {call.fqn: call.class_name for call in self.calls}

    @property
    def has_two_clocks(self) -> bool:
        """Whether a device computes ops that the host launches, and both times are known."""
        return any(op.host_s for op in self.tape)

    @functools.cached_property
    def lanes(self) -> Lanes:
        """Host and device timelines of the step with nothing recomputed, if it `has_two_clocks`."""
        host_s = np.array([*(op.host_s + self.views_of_op_s for op in self.tape), 0.0])
        device_s = np.array([*(op.time_s for op in self.tape), self.outside_s])
        return run(host_s, device_s, np.array([*(op.host_waits for op in self.tape), False]))

    @property
    def views_of_op_s(self) -> float:
        """The part of `views_s` before each op, with two clocks: the host makes views all along the step."""
        return self.views_s / max(1, len(self.tape))

    @functools.cached_property
    def step_s(self) -> float:
        """Predicted seconds of the step with nothing recomputed."""
        if self.has_two_clocks:
            return self.lanes.end_s
        return sum(op.time_s for op in self.tape) + self.views_s + self.outside_s

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of the ops' time that were measured, looked up, interpolated and estimated; see `TIMES_FROM`."""
        total = sum(op.time_s for op in self.tape)
        parts = {kind: sum(op.time_s for op in self.tape if op.time_from == kind) for kind in TIMES_FROM}
        return {kind: part / total for kind, part in parts.items() if part}

    @property
    def ops(self) -> pd.DataFrame:
        """The tape, one row per op."""
        frame = pd.DataFrame(columns(self.tape, Op))
        frame["module"] = [self.module_name(index) for index in frame["module"]]
        return frame

    @property
    def storages(self) -> pd.DataFrame:
        """The storages, one row per storage."""
        return pd.DataFrame(columns(self.storage_table, Storage))

    def module_name(self, call: int) -> str:
        """Display name of a call or part: its fqn, with the call's number if it is not the first."""
        if call < 0:
            return ""
        record = self.calls[call] if call < len(self.calls) else self.spans[call]
        return record.fqn if record.call == 0 else f"{record.fqn}#{record.call}"

    @property
    def n_root_calls(self) -> int:
        """Number of calls of the root module with gradients on."""
        return sum(call.fqn == "" and call.grad for call in self.calls)

    def calls_below_root(self, names: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], int] | None:
        """Distribution of the calls of some modules over the step's calls of the root module.

        Returns:
            Module -> number of its calls with gradients on before each root call, and the number of root calls before
            the first gradient that exists at the end of the step (a backward before that leaves none). None if a module
            was also called outside of root calls.
        """
        roots = [call for call in self.calls if call.fqn == "" and call.grad]
        offsets = {}
        for name in names:
            starts = [call.start for call in self.calls if call.fqn == name and call.grad]
            if name and any(not any(root.start < start < root.end for root in roots) for start in starts):
                return None
            offsets[name] = tuple(sum(start < root.start for start in starts) for root in roots)
        gradients = (storage.alloc for storage in self.storage_table if storage.kind == "Gradient")
        no_real = {NEVER, 0}  # those that the step begins with
        if self.any_order:  # there from the first call on
            no_real.add(roots[0].start)
        first = min((alloc for alloc in gradients if alloc not in no_real), default=self.end)
        return offsets, sum(root.start < first for root in roots)

    @property
    def saved_by_class(self) -> pd.DataFrame:
        """Storages saved for backward, by class of the module that makes them: module_class, storages, bytes.

        Parameters and other storages from before the step are left out; a storage saved twice counts once.
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
        """The data that `save` writes, in columns."""
        scalars = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _TABLES}
        tables = {name: columns(getattr(self, name), kind) for name, kind in _TABLES.items()}
        compiled = None if self.compiled is None else dataclasses.asdict(self.compiled)
        return {**scalars, **tables, "compiled": compiled}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Profile:
        """The profile from `as_data`, checked.

        Raises:
            ValueError: it is no valid profile.
        """
        return cls.of(checked(data, PROFILE))

    @classmethod
    def of(cls, found: msgspec.Struct) -> Profile:
        """The profile from a struct of type `PROFILE`.

        Raises:
            ValueError: its parts are inconsistent.
        """
        values = fields_of(found)
        values |= {name: rows(values[name], kind) for name, kind in _TABLES.items()}
        values["compiled"] = values["compiled"] and _compiled_table(values["compiled"])
        profile = cls(**values)
        check(profile)
        return profile

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON. The write is atomic.

        Raises:
            FileNotFoundError, IsADirectoryError, OSError: see `files.check_writable`.
            ProfileError: a name in it is not printable.
        """
        write_json(path, SCHEMA, SCHEMA_VERSION, self.as_data(), PROFILE)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            ProfileError: the file is damaged, of another kind, or from another version.
        """
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            return cls.from_data(data)
        except ValueError as error:
            raise ProfileError(f"{path} is not a valid profile: {error!s:.300}. Record it again.") from error


_TABLES: dict[str, Any] = {
    "tape": Op,
    "storage_table": Storage,
    "saved": Saved,
    "calls": ModuleCall,
    "parts": Part,
    "tails": Part,
    "unpacks": Unpack,
}


def _compiled_table(found: msgspec.Struct) -> CompiledTable:
    """The table from a struct of type `_COMPILED`."""
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
"""File format of a profile, also inside other files."""
