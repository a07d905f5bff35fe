"""First step of a region under engine sac: the second run's tensors are compared with those saved in forward.

NOTE [ The first second run ]
  1. Gradients depend on saved tensors. So each tensor that a region saves gets a checksum once the region's forward can
     no longer write it, and is compared where backward unpacks it, after the second run has recomputed it. A difference
     is an error: forward's value is no longer available.
  2. A storage from outside the region that is the same in both runs is not compared: it was not recomputed, and the
     step may have written it in between (batch norm's statistics). `SacPolicy` checks for other writes. A tensor kept
     in the policy's cache is compared: code that torch does not see may have written it a second time.
  3. Checksums of the tensors that ops read are compared as well, to name the op at fault: the maker of the first tensor
     that differs. Such a difference alone is no error, for backward may not need the tensor.
  4. After a backward without a difference, later steps are not checked.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autoac.execute.checksums import checksum_in_little_memory
from autoac.execute.program import Program
from autoac.execute.until_released import UntilReleased
from autoac.ops.info import OpInfo, op_info, tensors_in, written_tensors
from autoac.ops.private_results import may_stay_unwritten
from autoac.torch_private import (
    TorchDispatchMode,
    is_sharded_type,
    key_of_storage,
    local_part,
    on_fake_tensors,
    storage_key,
    storage_ref,
    top_saved_tensors_hooks,
    untraced,
)

DIFFERS = (
    "in {where}, {what} when its code was run a second time, so this step's gradients would be wrong. Keep "
    "the region from being recomputed: policies=autoac.policies.never_recompute({region!r}){keep}; or plan with "
    'engine="replay", which runs no code twice, from a real step.'
)
OP = (
    "{op} gave other bits (its result is written by code that torch does not see, random numbers are in it that "
    "nothing sets back, as those of a `numpy.random.Generator`, or its kernel differs from run to run)"
)
OUTSIDE = (
    "a tensor that no op has made held other bits (random numbers are in it that nothing sets back, as those of "
    "a `numpy.random.Generator`)"
)
KEEP = '; keep the result: policies=[autoac.Policy("MUST_SAVE", op={op!r}, module={region!r})]'

Read = tuple[int | None, str]
"""Checksum of a tensor that an op reads, None if it has none, and the op that made it, "" if none did."""


class FirstStep:
    """One call of a region, in both of its runs.

    Args:
        program: the region's; `found_right` is set on it.
    """

    def __init__(self, program: Program):
        self.program = program
        self._reads: dict[tuple[Any, int], list[Read]] = {}  # by overload and number of the call
        self._counts: Counter[Any] = Counter()
        self._made: dict[int, _Made] = {}  # by storage
        self._at_fault: str | None = None
        self.saved = UntilReleased()

    # -- the first run -------------------------------------------------------------------------------------------------

    def has_run(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an op of the first run, after it has run."""
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
                private = may_stay_unwritten(info.name, index)
                self._made[key] = _Made(info.name, private, storage_ref(tensor))

    def _maker(self, tensor: torch.Tensor) -> _Made | None:
        tensor = local_part(tensor)
        made = self._made.get(storage_key(tensor)) if _has_storage(tensor) else None
        return made if made is not None and made.storage() is not None else None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Context of the first run, directly inside torch's checkpoint, whose hooks are on top."""
        hooks = top_saved_tensors_hooks()
        assert hooks is not None
        torchs_pack, torchs_unpack = hooks

        @untraced
        def pack(tensor: torch.Tensor) -> _Packed:
            return self._packed(tensor, torchs_pack)

        @untraced
        def unpack(packed: _Packed) -> torch.Tensor:
            return self._unpacked(packed, torchs_unpack)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack), _Polling(self.saved):
            yield
        self.saved.end()

    def _packed(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any]) -> _Packed:
        made = self._maker(tensor)
        outside = storage_ref(local_part(tensor)) if made is None and _has_storage(tensor) else None
        packed = _Packed(pack(tensor), made, 0 if made is None else made.writes, outside)
        if _has_storage(tensor) and (made is None or not made.private):
            self.saved.hold(local_part(tensor), functools.partial(_is_final, weakref.ref(packed)))
        return packed

    def _unpacked(self, packed: _Packed, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        tensor, made = unpack(packed.handle), packed.made
        if packed.checksum is None or _is_on(packed.outside, tensor):
            return tensor
        if made is not None and made.writes != packed.writes:
            return tensor  # an op has written it later, such as noise that an op fills in
        self.program.found_right = checksum_in_little_memory(tensor) in (packed.checksum, None)
        if not self.program.found_right:
            maker = "" if made is None else made.op
            raise RuntimeError(self._difference(maker if self._at_fault is None else self._at_fault))
        return tensor

    def _difference(self, op: str) -> str:
        region = self.program.region
        keep = KEEP.format(op=op, region=region) if op else ""
        return DIFFERS.format(
            where=self.program.where, region=region, what=OP.format(op=op) if op else OUTSIDE, keep=keep
        )

    # -- the second run ------------------------------------------------------------------------------------------------

    def runs_again(self, call: tuple[Any, int], args: Any, kwargs: Any) -> None:
        """Compare the tensors that an op of the second run is about to read."""
        reads = self._reads.get(call, [])
        for tensor, (checksum, maker) in zip(only_read(op_info(call[0]), args, kwargs), reads, strict=False):
            if self._at_fault is None and checksum_in_little_memory(tensor) not in (checksum, None):
                self._at_fault = maker


@dataclass(slots=True)
class _Made:
    """A storage that the first run has made.

    Args:
        op: the op that made it.
        private: whether it is a kernel's workspace, parts of which may stay unwritten.
        writes: number of ops that have written it since.
    """

    op: str
    private: bool
    storage: weakref.ref[torch.UntypedStorage]
    writes: int = 0


@dataclass(eq=False)
class _Packed:
    """A saved tensor, as autograd holds it.

    Args:
        handle: torch's checkpoint's own.
        made: its storage, None if no op of the region has made it.
        writes: `made.writes` when it was saved.
        outside: its storage if `made` is None.
        checksum: of its last bytes in the region's forward; None if it is not compared.
    """

    handle: Any
    made: _Made | None
    writes: int
    outside: weakref.ref[torch.UntypedStorage] | None
    checksum: int | None = None


def _is_final(ref: weakref.ref[_Packed], tensor: torch.Tensor) -> None:
    """The first run cannot write this saved tensor any more."""
    packed = ref()
    if packed is not None:
        packed.checksum = checksum_in_little_memory(tensor)


class _Polling(TorchDispatchMode):
    """Lets go of the saved tensors that nothing else holds, before each op of the first run."""

    supports_higher_order_operators = True

    def __init__(self, saved: UntilReleased):
        super().__init__()
        self.saved = saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.saved.poll()
        return NotImplemented if any(map(is_sharded_type, types)) else func(*args, **(kwargs or {}))


def only_read(info: OpInfo, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an op's arguments that it does not write."""
    written = {id(tensor) for tensor in written_tensors(info, args, kwargs)}
    return [tensor for tensor in tensors_in([*args, *kwargs.values()]) if id(tensor) not in written]


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _is_on(known: weakref.ref[torch.UntypedStorage] | None, tensor: torch.Tensor) -> bool:
    """Whether a tensor uses this storage."""
    storage = None if known is None else known()
    return storage is not None and key_of_storage(storage) == storage_key(local_part(tensor))


class Comparing(TorchDispatchMode):
    """Dispatch mode of the second run."""

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
