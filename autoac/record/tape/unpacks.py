"""Uses of saved tensors by the backwards of a recorded step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from autoac.record.tape.calls import sequence_of
from autoac.record.tape.clock import Clock
from autoac.torch_private import backward_keeps_graph, current_backward, current_node, when_backward_ends
from autoac_solver.records.profile import NEVER, Unpack


class Unpacks:
    """The table of uses, and when the autograd node of each drops what it has unpacked.

    That is when another node of the same backward runs an op or unpacks, or when the backward ends: nodes of a backward
    inside of this one come between.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self._rows: list[dict[str, Any]] = []
        self._open: dict[int, list[dict[str, Any]]] = {}  # backward -> uses of the node that runs
        self._nodes: dict[int, int] = {}  # backward -> that node
        self._keeps = False  # whether any backward has kept its graph

    def add(self, saved: int, tick: int) -> None:
        """The node that runs has unpacked a saved tensor."""
        backward, keeps = current_backward(), backward_keeps_graph()
        row = {"saved": saved, "tick": tick, "dropped": NEVER, "backward": backward, "keeps": keeps}
        self._rows.append(row)
        if not keeps:
            return  # it is dropped when it is released
        self._keeps = True
        self.node_runs()
        if backward not in self._nodes:
            when_backward_ends(functools.partial(self._ends, backward))
        self._nodes[backward] = sequence_of(current_node())
        self._open.setdefault(backward, []).append(row)

    def node_runs(self) -> None:
        """Called before an op or a use in backward: another node may have begun."""
        if not self._open:
            return
        backward = current_backward()
        if backward in self._open and self._nodes[backward] != sequence_of(current_node()):
            self._drop(backward)

    def fits(self, may_fit: bool) -> None:
        """The node that runs, of those that fit a gradient afterwards, runs an op that does so, or another one."""
        for row in self._open.get(current_backward(), ()):
            if not may_fit:
                row["dropped"] = NEVER
            elif row["dropped"] == NEVER:
                row["dropped"] = self._clock.tick

    def _ends(self, backward: int) -> None:
        self._drop(backward)
        del self._nodes[backward]

    def _drop(self, backward: int) -> None:
        """The node is over."""
        rows = self._open.pop(backward, ())
        tick = self._clock.next() if rows else NEVER
        for row in rows:
            if row["dropped"] == NEVER:
                row["dropped"] = tick

    def table(self, kept: Sequence[int], released: Sequence[int]) -> tuple[Unpack, ...]:
        """The rows of `Profile.unpacks`.

        Args:
            kept: the saved tensors that are in the profile, in order.
            released: per saved tensor the tick at which autograd has released it.
        """
        if not self._keeps:
            return ()
        places = {saved: place for place, saved in enumerate(kept)}
        numbers = {backward: i for i, backward in enumerate(sorted({row["backward"] for row in self._rows}))}
        found = []
        for row in self._rows:
            if (saved := row["saved"]) in places:
                end = released[saved]
                dropped = end if row["dropped"] == NEVER else min(row["dropped"], end)
                own = {"saved": places[saved], "dropped": dropped, "backward": numbers[row["backward"]]}
                found.append(Unpack(**{**row, **own}))
        return tuple(found)
