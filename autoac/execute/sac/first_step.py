"""A region's first step under engine sac: what its second run makes is compared with what autograd saved in forward.

NOTE [ The first step ]
  1. Gradients are made of what autograd saves. So each tensor that a region saves gets a checksum, and is compared
     where backward unpacks it: by then the second run has made it again. A difference is an error, for forward's value
     is gone.
  2. What the region has not made is not compared, if it is the same memory in both runs: it was not recomputed, and the
     step may have written it in between (batch norm's statistics). That nothing else writes it is watched by
     `SacPolicy`. What was saved may have been written a second time, by code that torch does not see; it is compared.
  3. To name the op at fault, checksums of what ops read are compared, too: the first difference is at the op that made
     it. That is no error by itself, for backward may not need the value.
  4. Once a backward has found all right, the next step is not looked at.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autoac.execute.checksums import checksum_in_little_memory
from autoac.execute.program import Program
from autoac.ops.info import OpInfo, op_info, tensors_in, written_tensors
from autoac.ops.private_results import PRIVATE_RESULTS
from autoac.torch_private import (
    TorchDispatchMode,
    is_sharded_type,
    key_of_storage,
    local_part,
    on_fake_tensors,
    storage_key,
    storage_ref,
    top_saved_tensors_hooks,
)

DIFFERS = (
    "in region {region!r}, {what} when its code was run a second time, so this step's gradients would be wrong. Keep "
    "the region from being recomputed: policies=autoac.policies.never_recompute({region!r}){keep}; or plan with "
    'engine="replay", which runs no code twice, from a real step.'
)
OP = (
    "{op} gave other bits (its result is written by code that torch does not see, random numbers are in it that torch "
    "does not put back, as those of Python and numpy, or its kernel differs from run to run)"
)
OUTSIDE = (
    "a tensor that no op has made held other bits (random numbers are in it that torch does not put back, as those of "
    "Python and numpy)"
)
KEEP = '; keep the result: policies=[autoac.Policy("MUST_SAVE", op={op!r}, module={region!r})]'

Read = tuple[int | None, str]
"""Of a tensor that an op reads: its checksum, None if it has none, and the op that made it, "" if none did."""


class FirstStep:
    """One call of a region, in both of its runs.

    Args:
        program: of the region; is told what was found.
    """

    def __init__(self, program: Program):
        self.program = program
        self._reads: dict[tuple[Any, int], list[Read]] = {}  # of ops, by overload and the how manieth call
        self._counts: Counter[Any] = Counter()
        self._made: dict[int, _Made] = {}  # by storage
        self._at_fault: str | None = None

    # -- the first run -------------------------------------------------------------------------------------------------

    def has_run(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An op of the first run has run."""
        info = op_info(func)
        self._reads[func, self._counts[func]] = [
            (checksum_in_little_memory(tensor), made.op if (made := self._maker(tensor)) else "")
            for tensor in only_read(info, args, kwargs)
        ]
        self._counts[func] += 1
        for tensor in written_tensors(info, args, kwargs):
            if (made := self._maker(tensor)) is not None:
                made.writes += 1
        given = {storage_key(t) for t in tensors_in([*args, *kwargs.values()]) if _has_storage(t)}
        for index, tensor in enumerate(tensors_in(result)):
            if _has_storage(tensor) and (key := storage_key(tensor)) not in given:
                private = PRIVATE_RESULTS.get(info.name) == index
                self._made[key] = _Made(info.name, private, storage_ref(tensor))

    def _maker(self, tensor: torch.Tensor) -> _Made | None:
        tensor = local_part(tensor)
        made = self._made.get(storage_key(tensor)) if _has_storage(tensor) else None
        return made if made is not None and made.storage() is not None else None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Context of the first run, right inside of torch's checkpoint, whose hooks are on top."""
        hooks = top_saved_tensors_hooks()
        assert hooks is not None
        pack, unpack = hooks
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self._packed(tensor, pack), lambda packed: self._unpacked(packed, unpack)
        ):
            yield

    def _packed(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any]) -> _Packed:
        made, checksum = self._maker(tensor), checksum_in_little_memory(tensor)
        if made is not None and made.private:
            checksum = None
        outside = storage_ref(local_part(tensor)) if made is None and checksum is not None else None
        return _Packed(pack(tensor), checksum, made, 0 if made is None else made.writes, outside)

    def _unpacked(self, packed: _Packed, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        tensor, made = unpack(packed.handle), packed.made
        if packed.checksum is None or _is_on(packed.outside, tensor):
            return tensor
        if made is not None and made.writes != packed.writes:
            return tensor  # an op that has it for its noise, say, has written it later
        self.program.found_right = checksum_in_little_memory(tensor) in (packed.checksum, None)
        if not self.program.found_right:
            maker = "" if made is None else made.op
            raise RuntimeError(self._difference(maker if self._at_fault is None else self._at_fault))
        return tensor

    def _difference(self, op: str) -> str:
        region = self.program.region
        keep = KEEP.format(op=op, region=region) if op else ""
        return DIFFERS.format(region=region, what=OP.format(op=op) if op else OUTSIDE, keep=keep)

    # -- the second run ------------------------------------------------------------------------------------------------

    def runs_again(self, call: tuple[Any, int], args: Any, kwargs: Any) -> None:
        """An op is about to run in the second run."""
        reads = self._reads.get(call, [])
        for tensor, (checksum, maker) in zip(only_read(op_info(call[0]), args, kwargs), reads, strict=False):
            if self._at_fault is None and checksum_in_little_memory(tensor) not in (checksum, None):
                self._at_fault = maker


@dataclass(slots=True)
class _Made:
    """A storage that the first run has made.

    Args:
        op: what made it.
        private: it is a kernel's workspace, of which it may leave parts unwritten.
        writes: how often an op has written it since.
    """

    op: str
    private: bool
    storage: weakref.ref[torch.UntypedStorage]
    writes: int = 0


@dataclass(frozen=True, slots=True)
class _Packed:
    """What autograd holds of a tensor.

    Args:
        handle: of torch's checkpoint.
        checksum: None if it is not to be compared.
        made: its storage, None if no op of the region has made it.
        writes: how often ops had written that by then.
        outside: its storage otherwise.
    """

    handle: Any
    checksum: int | None
    made: _Made | None
    writes: int
    outside: weakref.ref[torch.UntypedStorage] | None


def only_read(info: OpInfo, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an op's arguments that it does not write."""
    written = {id(tensor) for tensor in written_tensors(info, args, kwargs)}
    return [tensor for tensor in tensors_in([*args, *kwargs.values()]) if id(tensor) not in written]


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _is_on(known: weakref.ref[torch.UntypedStorage] | None, tensor: torch.Tensor) -> bool:
    """Whether a tensor stands on this storage."""
    storage = None if known is None else known()
    return storage is not None and key_of_storage(storage) == storage_key(local_part(tensor))


class Comparing(TorchDispatchMode):
    """Mode of the second run."""

    supports_higher_order_operators = True

    def __init__(self, first: FirstStep):
        super().__init__()
        self.first = first
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_sharded_type, types)):
            return NotImplemented  # the first run was seen on the local parts
        kwargs = kwargs or {}
        if not on_fake_tensors():
            self.first.runs_again((func, self.counts[func]), args, kwargs)
            self.counts[func] += 1
        return func(*args, **kwargs)
