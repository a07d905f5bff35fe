"""Finds, while a step is recorded, the values whose recomputation gives other bits. Plans save these values.

NOTE [ The guard ]
  1. While a step is recorded the engine recomputes every value of a lean module. In the first step each value is
     checksummed when an op reads it and when autograd saves it, and the recomputed value at the same places.
  2. A value that differs does not depend on its op and the op's inputs alone: code that torch does not see has written
     it, the op draws random numbers of its own, or a setting around the op has changed. Its op is marked as not
     replayable, and plans save the value.
  3. A value computed from such a value differs as well, though its own op may be fine. So a step with findings is
     followed by one in which the found values are kept. All values that differ in the last step are marked.
  4. Checksums cover the bytes that an op or autograd sees: the rest of a storage may never have been written. A value
     that an op writes in place is checked when it is next read.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from autoac.execute.checksums import checksum_of
from autoac.execute.replay import Handle, Record, Slot
from autoac.ops.generators import generators_of, state_of
from autoac.ops.info import OpInfo
from autoac.ops.private_results import may_stay_unwritten
from autoac.step.restore import host_random_states, same_random_states
from autoac_solver.records.names import module_in_words

OpKey = tuple[str, int, str, int]
"""Module, its call in the step, op, and its call by the module."""


class Guard:
    """Compares the recomputed values of one recorded step with those of forward.

    Args:
        unfit: ops whose results are kept, found in earlier steps.
    """

    def __init__(self, unfit: Iterable[OpKey] = ()):
        self.unfit = set(unfit)
        self.found: set[OpKey] = set()
        self.derived: set[OpKey] = set()  # see NOTE [ The guard ] 3
        self.key_of_row: dict[int, OpKey] = {}
        self._counts: Counter[tuple[str, int, str]] = Counter()
        self._key: OpKey = ("", 0, "", 0)
        self._read: list[tuple[int, int]] = []  # (place in refs, checksum) for the op being recorded
        self._reads: dict[int, tuple[OpKey, list[tuple[int, int]]]] = {}  # by record
        self._packed: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self._maker: dict[Slot, OpKey] = {}
        self._differing: set[Slot] = set()
        self._tainted: set[Slot] = set()

    # -- forward -----------------------------------------------------------------------------------------------

    def about_to_run(self, info: OpInfo, fqn: str, call: int) -> OpInfo:
        """Called before an op is recorded; returns its `OpInfo`, not replayable if the op is unfit."""
        place = fqn, call, info.name
        self._key = (*place, self._counts[place])
        self._counts[place] += 1
        self._read = []
        return dataclasses.replace(info, replayable=False) if self._key in self.unfit else info

    def has_run(self, row: int) -> None:
        """The op is in this row of the tape."""
        self.key_of_row[row] = self._key

    def reads(self, info: OpInfo, tensor: torch.Tensor, where: Any, place: int) -> None:
        """The op reads a value that will be recomputed; `place` is its index among the op's references."""
        position = where[0] if isinstance(where, tuple) else where
        if isinstance(position, str) or position in info.writes:
            return  # noted only after the op has run, or overwritten by it
        if (checksum := checksum_of(tensor)) is not None:
            self._read.append((place, checksum))

    def recorded(self, record: Record) -> None:
        """The op has left a record."""
        self._reads[id(record)] = self._key, self._read

    def packed(self, handle: Handle, tensor: torch.Tensor) -> None:
        """Autograd saves a value that will be recomputed."""
        if (checksum := checksum_of(tensor)) is not None:
            self._packed[handle] = checksum

    # -- replay ------------------------------------------------------------------------------------------------

    def replaying(self, record: Record, table: Mapping[Slot, torch.Tensor]) -> None:
        """A record is about to be replayed."""
        key, reads = self._reads.pop(id(record), (None, []))
        if key is None:
            return  # replayed before
        read = [slot for _, slot, _ in record.refs]
        for place, checksum in reads:
            if checksum_of(record.seen(place, table)) != checksum:
                self._differs(read[place])
        made = [slot for _, slot in record.outputs if not _is_private(key, record, slot)]
        for slot in made:
            self._maker[slot] = key
        if not (self._differing | self._tainted).isdisjoint(read):
            self._tainted.update(made, record.written)

    def unpacked(self, packed: Any, tensor: torch.Tensor) -> None:
        """Autograd unpacks a tensor that it has saved."""
        if type(packed) is Handle:
            checksum = self._packed.pop(packed, None)
            if checksum is not None and checksum_of(tensor) != checksum:
                self._differs(packed.slot)

    def _differs(self, slot: Slot) -> None:
        maker = self._maker.get(slot)
        if maker is not None and slot not in self._differing:
            self._differing.add(slot)
            (self.derived if slot in self._tainted else self.found).add(maker)

    # -- the record --------------------------------------------------------------------------------------------

    def mark(self, rows: Sequence[dict[str, Any]], known: Collection[OpKey]) -> tuple[str, ...]:
        """Mark the ops of the last step's tape that cannot run a second time; notes on them for the profile.

        Args:
            known: ops that are marked already.
        """
        unfit = (self.unfit | self.found | self.derived).difference(known)
        marked = [(row, key) for row, key in self.key_of_row.items() if key in unfit]
        for row, _ in marked:
            rows[row]["replayable"] = False
        return _notes(
            [key for _, key in marked], {rows[row]["name"]: bool(rows[row]["reads"]) for row, _ in marked}
        )


class GuardOfLoop(Guard):
    """For a step of the user's own loop, whose gradients count: a recomputed value with other bits is an error.

    Torch's own ops have no state, so a difference in one whose inputs are the same is that of a kernel which differs
    from run to run. Such a step's gradients differ as much as those of two steps without autoac, and raise no error.

    Args:
        overwritten: gives the ops whose inputs or results unseen code has overwritten.
    """

    def __init__(self, overwritten: Callable[[], Container[OpKey]]):
        super().__init__()
        self._overwritten = overwritten

    def _differs(self, slot: Slot) -> None:
        before = set(self.found)
        super()._differs(slot)
        for key in self.found - before:
            fqn, _, op, _ = key
            is_overwritten = key in self._overwritten()
            if is_overwritten or not op.startswith("aten."):
                module = module_in_words(fqn)
                raise RuntimeError(
                    _WRONG.format(op=op, module=module, why=_INPUTS if is_overwritten else _STATE)
                )


_INPUTS = "code that torch does not see, such as numpy or an extension, has overwritten what it had read"
_STATE = "likely it draws random numbers of its own, or keeps a state"
_WRONG = (
    "{op} in {module} gave other bits when it was run a second time for backward ({why}), so this step's gradients "
    "would be wrong. autoac.auto records a step of the loop in the least memory, where everything is run twice. Call "
    "the handle's remove() and autoac.plan(model, sample, budget): its trial steps find such ops, and its plan saves "
    "what they make."
)


def next_guard(guard: Guard | None) -> Guard | None:
    """The guard for the next step; None if this one found nothing."""
    if guard is None or not (guard.unfit or guard.found):
        return None
    return Guard(guard.unfit | guard.found)


def _is_private(key: OpKey, record: Record, slot: Slot) -> bool:
    """Whether the slot is a kernel's own workspace, parts of which may stay unwritten."""
    return any(made is slot and may_stay_unwritten(key[2], position) for position, made in record.outputs)


def _notes(keys: Sequence[OpKey], reads: Mapping[str, bool]) -> tuple[str, ...]:
    by_op: dict[str, list[str]] = {}
    for fqn, _, op, _ in keys:
        by_op.setdefault(op, []).append(module_in_words(fqn))
    return tuple(
        f"{op} in {_some(list(dict.fromkeys(modules)))} gave other bits when it was run a second time "
        f"({_likely(op, reads[op])}): plans save what it makes"
        for op, modules in by_op.items()
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _likely(op: str, reads_tensors: bool) -> str:
    if not op.startswith("aten."):
        return "likely it draws random numbers of its own, or keeps a state"
    if not reads_tensors:
        return (
            "likely its result is then written by code that torch does not see, such as numpy or an extension"
        )
    return (
        "likely its result is then written by code that torch does not see, a flag was set around it, another thread "
        "has drawn its random numbers, or its kernel differs from run to run"
    )


# -- random numbers ------------------------------------------------------------------------------------------------


class Draws:
    """States of the generators that another library's op may draw from; to be created before the op runs.

    Attributes:
        on_host: whether the op has drawn from Python's or numpy's random numbers, which its replay would draw anew.
    """

    def __init__(self, info: OpInfo, args: Any, kwargs: Any):
        generators = generators_of(info, args, kwargs) if info.unknown else []
        self.states = [(generator, state_of(generator)) for generator in generators]
        self._host = host_random_states() if info.unknown else []
        self.on_host = False

    def note(self, keep: Callable[[torch.Generator, torch.Tensor], Any], on_fakes: bool) -> int:
        """After the op: pass each generator that it advanced, with its earlier state, to `keep`.

        Returns:
            Bytes of these states; on fake tensors, where nothing is drawn, those of all that it may draw from.
        """
        if on_fakes:
            return sum(state.nbytes for _, state in self.states)
        if self._host:
            self.on_host = not same_random_states(self._host, host_random_states())
        drawn = [(g, state) for g, state in self.states if not torch.equal(state_of(g), state)]
        for generator, state in drawn:
            keep(generator, state)
        return sum(state.nbytes for _, state in drawn)
