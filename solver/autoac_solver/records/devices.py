"""Cost tables: times of ops on a device that is not present, so that a profile can be planned for it.

    time = entry of the table with this signature                                    "table"
         = between entries of the same op and dtype with less and with more work     "interpolated"
         = max(flops / matrix rate, moved bytes / bandwidth) + launch                "estimated" (roofline)

    of a collective: bytes on the link / bandwidth of the link + launch                 "estimated"

Work is FLOPs if there is a formula for the op, else moved bytes. Interpolation is linear in log time over log work. A
table states when, on which hardware and with which torch it was recorded (`autoac calibrate`). Datasheet rates are
peak rates: they are multiplied by an assumed efficiency, and never called measured.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from autoac_solver.records.collectives import WAIT, link_bytes, may_repeat, ranks_in
from autoac_solver.records.disk.files import read_json, write_json
from autoac_solver.records.disk.limits import MOST_NUMBER, Seconds, Size, one_of
from autoac_solver.records.disk.schema import checked, document, fields_of, row
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.profile import UNSTEADY, EngineCosts, Op, Profile

SCHEMA, SCHEMA_VERSION = "autoac.device", 3  # 2: costs by the engines' names; 3: links

SOURCES = ("measured", "datasheet")


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured op.

    Args:
        signature: the op's signature, see `Profile.signatures`.
        name: its overload.
        dtype, flops, moved_bytes: as in `Op`.
        time_s, spread_s: median and interquartile range.
    """

    signature: str
    name: str
    dtype: str
    flops: Size
    moved_bytes: Size
    time_s: Seconds
    spread_s: Seconds

    @property
    def work(self) -> int:
        """The amount of work that its time scales with: FLOPs, else moved bytes."""
        return self.flops or self.moved_bytes


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between devices.

    Args:
        name: readable name, such as "NVLink 4".
        ranks: the most ranks that it joins, one device each; a larger group takes another link.
        bandwidth: bytes/s of one device in one direction.
    """

    name: str
    ranks: Annotated[int, Meta(ge=2, le=MOST_NUMBER)]
    bandwidth: float


_OWN_SEGMENT_BYTES, _SEGMENT_UNIT_BYTES, _LEAST_REST_BYTES = 10 * 2**20, 2 * 2**20, 2**20


def kind_of(device: str) -> str:
    """The type of a device by torch's name of it: "cuda" of "cuda:0"."""
    return device.partition(":")[0]


def is_cuda(device: str) -> bool:
    """Whether this is torch's name of a device whose memory comes from CUDA's caching allocator."""
    return kind_of(device) == "cuda"


def cuda_block_bytes(rounded: int, is_whole: bool = False) -> int:
    """Bytes that CUDA's caching allocator counts for a request.

    A request of 10 MiB or more has a segment of its own, in units of 2 MiB. A rest of up to 1 MiB stays with the block.

    Args:
        rounded: the request, rounded up to the allocator's unit.
        is_whole: blocks of this size are not split, whatever the rest.

    Source: `get_allocation_size` and `should_split` in torch's c10/cuda/CUDACachingAllocator.cpp.
    """
    if rounded < _OWN_SEGMENT_BYTES:
        return rounded
    segment = -(-rounded // _SEGMENT_UNIT_BYTES) * _SEGMENT_UNIT_BYTES
    return segment if is_whole or segment - rounded <= _LEAST_REST_BYTES else rounded


@dataclass(frozen=True)
class DeviceTable:
    """The times of ops on a device.

    Args:
        name: short name, such as "h200".
        kind: "cpu" or "cuda": the device type whose ops and allocator it models.
        title: readable name of the device.
        memory_bytes: total memory of the device.
        block_bytes: the allocator rounds sizes up to a multiple of this.
        matrix_flops: dtype -> FLOP/s of matrix products; "" for all other dtypes.
        bandwidth: bytes/s.
        launch_s: least seconds of any op.
        efficiency: assumed reachable shares of (matrix rate, bandwidth); 1 if they are measured.
        source: "measured" or "datasheet": the origin of the rates.
        made: hardware, date and torch version, or the datasheet.
        links: connections to other devices; a group of ranks takes the first one that joins so many.
        costs: the costs of the engines' bookkeeping on the device.
        entries: measured ops.
    """

    name: str
    kind: Annotated[str, one_of("cpu", "cuda")]
    title: str
    memory_bytes: Size
    block_bytes: Annotated[int, Meta(ge=1, le=MOST_NUMBER)]
    matrix_flops: dict[str, float]
    bandwidth: float
    launch_s: Seconds
    efficiency: tuple[float, float]
    source: Annotated[str, one_of(*SOURCES)]
    made: dict[str, str]
    links: tuple[Link, ...] = ()
    costs: EngineCosts = field(default_factory=dict, repr=False)
    entries: tuple[Entry, ...] = field(default=(), repr=False)

    def time_of(self, op: Op, signature: str) -> tuple[float, float, str]:
        """Seconds, their spread, and their origin (see `profile.TIMES_FROM`)."""
        known = self._by_signature.get(signature)
        if known is not None:
            return known.time_s, known.spread_s, "table"
        between = self._interpolated(op)
        if between is not None:
            return between, 0.0, "interpolated"
        return self.roofline_s(op.dtype, op.flops, op.moved_bytes), 0.0, "estimated"

    def roofline_s(self, dtype: str, flops: int, moved_bytes: int) -> float:
        """max(flops / matrix rate, moved bytes / bandwidth) + launch."""
        matrix, memory = self.efficiency
        rate = self.matrix_flops.get(dtype, self.matrix_flops[""])
        return max(flops / (rate * matrix), moved_bytes / (self.bandwidth * memory)) + self.launch_s

    def link_for(self, ranks: int) -> Link | None:
        """The link that a group of so many ranks takes, None if the table has none."""
        return next((link for link in self.links if link.ranks >= ranks), None)

    def collective_s(self, op: Op, signature: str) -> float:
        """Seconds of a collective that may run a second time; 0 if the table has no link for its ranks.

        The shares of bandwidth that are reached on links are assumed to be that of the memory.
        """
        ranks = ranks_in(signature)
        link = self.link_for(ranks) if ranks else None
        if link is None:
            return 0.0
        sent = link_bytes(op.name, op.moved_bytes, ranks)
        return sent / (link.bandwidth * self.efficiency[1]) + self.launch_s

    @cached_property
    def _by_signature(self) -> dict[str, Entry]:
        return {entry.signature: entry for entry in self.entries}

    @cached_property
    def _by_work(self) -> dict[tuple[str, str], list[Entry]]:
        groups: dict[tuple[str, str], list[Entry]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.work):
            if entry.work and entry.time_s:
                groups.setdefault((entry.name, entry.dtype), []).append(entry)
        return groups

    def _interpolated(self, op: Op) -> float | None:
        work = op.flops or op.moved_bytes
        entries = self._by_work.get((op.name, op.dtype), [])
        if not entries or not entries[0].work <= work <= entries[-1].work:
            return None
        index = bisect_left(entries, work, key=lambda entry: entry.work)
        if entries[index].work == work:
            return entries[index].time_s
        low, high = entries[index - 1], entries[index]
        share = math.log(work / low.work) / math.log(high.work / low.work)
        return math.exp((1 - share) * math.log(low.time_s) + share * math.log(high.time_s))

    def allocated(self, size: int) -> int:
        """Bytes that the allocator takes for a size."""
        rounded = -(-size // self.block_bytes) * self.block_bytes
        return cuda_block_bytes(rounded) if self.kind == "cuda" else rounded

    def save(self, path: str | Path) -> None:
        """Write the table as JSON. The write is atomic.

        Raises:
            FileNotFoundError: the parent folder does not exist.
            IsADirectoryError: `path` is a folder.
        """
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["entries"] = [dataclasses.astuple(entry) for entry in self.entries]
        data["links"] = [dataclasses.asdict(link) for link in self.links]
        write_json(path, SCHEMA, SCHEMA_VERSION, data, _TABLE)

    @classmethod
    def load(cls, path: str | Path) -> DeviceTable:
        """Read a table.

        Raises:
            ProfileError: the file is damaged, of another kind, or from another version.
        """
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            values = fields_of(checked(data, _TABLE))
            values["entries"] = tuple(Entry(*row) for row in values["entries"])
            values["links"] = tuple(Link(**fields_of(link)) for link in values["links"])
            table = cls(**values)
            _check(table)
        except ValueError as error:
            raise ProfileError(
                f"{path} is not a valid cost table: {error!s:.300}. Record it again."
            ) from error
        return table


_TABLE = document(DeviceTable, entries=list[row(Entry)], links=list[document(Link)])


def find_device(device: str | Path) -> DeviceTable:
    """The table of a known device's name, or of a file's path.

    Raises:
        ProfileError: there is neither; the error lists the known names.
    """
    known = {path.stem: path for folder in _FOLDERS if folder.is_dir() for path in folder.glob("*.json")}
    path = known.get(str(device).lower(), Path(device))
    if not path.is_file():
        raise ProfileError(
            f"there is no cost table for device {str(device)!r}: known are {', '.join(sorted(known))}, or the path of "
            "a file that `autoac calibrate` wrote on that device."
        )
    return DeviceTable.load(path)


_FOLDERS = (
    Path(__file__).parents[1] / "device_tables",  # In the installed package.
    Path(__file__).parents[3] / "profiles" / "devices",  # In the repository.
)


def on_device(profile: Profile, table: DeviceTable, allocated: Callable[[int], int] | None = None) -> Profile:
    """The profile for another device, with that allocator's rounding and times from its table.

    Workspace measured on another kind of device does not apply and is left out.

    Args:
        allocated: from the bytes of a request to those that the device's allocator takes; None for the allocator
            without options.
    """
    allocated = table.allocated if allocated is None else allocated
    same_kind = kind_of(profile.device) == table.kind
    return replace(
        profile,
        device=table.kind,
        device_name=table.title,
        device_bytes=table.memory_bytes,
        costs=table.costs,
        tape=tuple(_op_on(op, profile, table, same_kind) for op in profile.tape),
        storage_table=tuple(replace(s, bytes=allocated(s.bytes)) for s in profile.storage_table),
        views_s=0.0 if table.kind == "cuda" else profile.views_s,
        # The measured times are replaced, so notes that they are unsteady no longer apply.
        notes=(
            *(note for note in profile.notes if not note.startswith(UNSTEADY)),
            *_notes(profile, table, same_kind),
        ),
    )


def _op_on(op: Op, profile: Profile, table: DeviceTable, same_kind: bool) -> Op:
    if op.signature < 0:
        return op  # The optimizer's step, which is no single op.
    signature = profile.signatures[op.signature]
    time_s, spread_s, time_from = table.time_of(op, signature)
    on_link_s = table.collective_s(op, signature) if may_repeat(op.name) else 0.0
    if on_link_s:
        time_s, spread_s, time_from = on_link_s, 0.0, "estimated"
    elif op.name == WAIT and table.links:  # the collective's time is up to its end
        time_s, spread_s, time_from = table.launch_s, 0.0, "estimated"
    launches = table.kind == "cuda"  # The host launches while the device computes.
    if launches and time_from == "estimated":
        time_s -= table.launch_s
    return replace(
        op,
        host_s=table.launch_s if launches else 0.0,
        time_s=time_s,
        spread_s=spread_s,
        rerun_s=time_s if on_link_s else 0.0,
        time_from=time_from,
        workspace_bytes=op.workspace_bytes if same_kind else 0,
    )


def _notes(profile: Profile, table: DeviceTable, same_kind: bool) -> list[str]:
    made = ", ".join(f"{name} {value}" for name, value in table.made.items())
    notes = [f"times are for {table.title}, from a cost table whose rates are {table.source} ({made})"]
    if not same_kind and any(op.workspace_bytes for op in profile.tape if op.signature >= 0):
        notes.append(f"workspace inside ops was measured on {profile.device}, and is left out")
    return notes


def _check(table: DeviceTable) -> None:
    if "" not in table.matrix_flops:
        raise ValueError('matrix_flops must have a rate for ""')
    _check_units(table)


def _check_units(table: DeviceTable) -> None:
    """Check plausible ranges: a value a hundred times beyond all known devices is in another unit."""
    rates = {f"matrix_flops of {name or 'other types'}": rate for name, rate in table.matrix_flops.items()}
    for name, unit, value, least, most in (
        ("memory_bytes", "bytes", table.memory_bytes, 1e7, 1e15),
        ("bandwidth", "bytes a second", table.bandwidth, 1e8, 1e15),
        ("launch_s", "seconds", table.launch_s, 0.0, 1e-2),
        *((name, "operations a second", rate, 1e8, 1e18) for name, rate in rates.items()),
        *(("efficiency", "shares of a rate", share, 1e-3, 1.0) for share in table.efficiency),
        *(
            (f"the bandwidth of {link.name}", "bytes a second", link.bandwidth, 1e6, 1e15)
            for link in table.links
        ),
    ):
        if not least <= value <= most:
            raise ValueError(f"{name} is {value:g}, which cannot be {unit}: is it in another unit?")
