"""A plan's decisions for one region: its ops in order, and which of them are recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch

from autoac.execute.watch.following import Following
from autoac.ops.info import OpInfo, op_info
from autoac.torch_private import OpOverload
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.names import region_in_words

CUT = 2
"""In place of true: the recording must handle the op, with which another part of the call begins."""

PlannedOp = tuple[Any, bool, bool | int, OpInfo]
"""Op overload, whether it is recomputed, whether the recording must handle it (or `CUT`), and its `OpInfo`."""

END: PlannedOp = (None, False, False, op_info(None))


class Program:
    """The decisions for one call of one region.

    Args:
        region: name of the region, for messages.
        steps: for every op of the region's forward in order, its overload's name ("aten.mm.default") and whether it
            is recomputed. Ops with `OpInfo.ignored` do not count.
        wrapped: whether anything is recomputed; if not, this call of the region is left untouched.
        following: collects ops that the profiled step did not run; None makes one for this program alone.
        point: the point that the region is compiled at (engine compile).
        inputs: the planned inputs of a compiled region, as `described` tells them; "" if not known.
        cuts: places among `steps` where another part begins: the ops of each are run again on their own (replay).
        children: if the compiled region is a tail, the names of the modules that run by themselves before it.
        apart: whether the module is one of those of a tail, so that code compiled around it leaves it out.
        unchecked: whether recomputed values have not been compared with forward's yet; the engine then does so in its
            first step, and clears this.

    As long as the ops follow the profile, a decision is read by position. Data-dependent control flow may change their
    order; from there on, decisions are looked up by (overload, n-th call in the region), as torch's selective
    checkpointing matches its saved entries.

    `unnamed` is the same object for all programs with the same decisions: torch.compile guards on it, and so compiles
    equal regions once.
    """

    def __init__(
        self,
        region: str,
        steps: Iterable[tuple[str, bool]],
        wrapped: bool = True,
        following: Following | None = None,
        point: str = EAGER,
        unchecked: bool = False,
        inputs: str = "",
        cuts: Iterable[int] = (),
        children: Iterable[str] = (),
        apart: bool = False,
    ):
        self.region = region
        self.names = tuple(steps)
        self.wrapped = wrapped
        self.following = following or Following()
        self.point = point
        self.unchecked = unchecked
        self.inputs = inputs
        self.cuts = frozenset(cuts)
        self.children = tuple(children)
        self.apart = apart
        self.found_right = False  # by the last comparison
        self.draws_on_host: bool | None = (
            None  # Python's or numpy's random numbers; None until a call was seen
        )
        self.warned = False
        # Inputs and modes that the compiler has failed on, each with its error.
        self.not_compiled: dict[tuple[str, bool], str] = {}
        # Calls in a row, for each of which a tail was compiled anew, by inputs ("" for others) and modes.
        self.compiled_in_a_row: Counter[tuple[str, bool]] = Counter()
        self.unnamed = _unnamed(self.names) if region else self
        self._steps: tuple[PlannedOp, ...] | None = None
        self._by_call: dict[tuple[Any, int], PlannedOp] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self  # its decisions never change

    def __reduce__(self) -> Any:
        return Program, (
            *(self.region, self.names, self.wrapped),
            *(self.following, self.point, self.unchecked, self.inputs, self.cuts, self.children, self.apart),
        )

    @property
    def where(self) -> str:
        """The region in words."""
        return region_in_words(self.region)

    @property
    def steps(self) -> tuple[PlannedOp, ...]:
        """The ops in the order of the recording, then `END`."""
        if self._steps is None:
            found = [
                _planned(find_overload(name), recompute, place in self.cuts)
                for place, (name, recompute) in enumerate(self.names)
            ]
            self._steps = (*found, END)
        return self._steps

    def by_call(self, func: Any, nth: int) -> PlannedOp:
        """The op for the n-th call of this overload; `END` if the profile has no such call."""
        if self._by_call is None:
            seen: Counter[Any] = Counter()
            by_call = {}
            for step in self.steps[:-1]:
                by_call[step[0], seen[step[0]]] = step
                seen[step[0]] += 1
            self._by_call = by_call  # only when complete: other threads may be reading
        return self._by_call.get((func, nth), END)

    def has_run(self, ops: int) -> None:
        """Note how many ops a call of the region has run in forward."""
        if ops < len(self.names):
            self.following.runs_less = True

    def counts_before(self, position: int) -> Counter[Any]:
        """Number of calls of each overload before this position."""
        return Counter(step[0] for step in self.steps[:position])


def _planned(overload: Any, recompute: bool, cut: bool) -> PlannedOp:
    info = op_info(overload)
    return overload, recompute, CUT if cut else recompute or bool(info.writes), info


_UNNAMED: WeakValueDictionary[tuple[tuple[str, bool], ...], Program] = WeakValueDictionary()


def _unnamed(names: tuple[tuple[str, bool], ...]) -> Program:
    found = _UNNAMED.get(names)
    if found is None:
        found = _UNNAMED[names] = Program("", names)
    return found


def find_overload(name: str) -> Any:
    """The op overload with this name, e.g. "aten.mm.default"; None if no such op is registered (yet)."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        return None
    return found if isinstance(found, OpOverload) else None  # a file can name any attribute
