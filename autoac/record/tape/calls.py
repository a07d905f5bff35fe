"""Module calls of a recorded step, and the call that an op belongs to."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

import torch

from autoac.execute.watch.unplanned_backward import GraphOfBackward, before_backward
from autoac.ops.info import OpInfo
from autoac.step.units import holds_units, own_name
from autoac.torch_private import (
    any_autocast,
    current_node,
    in_backward,
    is_fake,
    node_number,
    own_class,
    reads_cached_parametrizations,
)
from autoac_solver.records.profile import CACHED, INFERENCE, NEVER, SHARDED, STREAMS, UNPACKED_TWICE, UNRULED


@functools.cache
def source_of(kind: type) -> str:
    """File name and line of a class's forward; "" for torch's own classes and for code that is not Python."""
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    if code is None or kind.__module__.partition(".")[0] == "torch":
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


class ModuleCalls:
    """The table of module calls, and the stack of running ones.

    Attributes:
        rows: the fields of `ModuleCall`, in the order in which the calls began.
        stack: indices of the running calls, the innermost last.
        sources: as in `Profile`.
        graph_of_backward: of the backwards from what the model has returned.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.stack: list[int] = []
        self.sources: dict[str, str] = {}
        self.graph_of_backward = GraphOfBackward()
        self._autocast: list[bool] = []  # per call on the stack: whether autocast was on when it began
        self._streams: dict[int, dict[int, int]] = {}  # call -> its first stream on each GPU
        self._compiled: set[int] = set()  # calls in which compiled code ran
        self._unseen: dict[int, set[str]] = {}  # call -> higher-order ops in it
        self._sized: dict[int, set[str]] = {}  # call -> ops in it whose results' shapes depend on values
        self._hooked: set[int] = set()  # calls under saved-tensor hooks that are not the tape's
        self._uncounted: dict[int, set[str]] = {}  # call -> layouts of tensors whose memory is not counted
        self._unpacked_for = (NEVER, NEVER)  # node that unpacked last, and the call it belongs to

    @property
    def current(self) -> int:
        """Index of the innermost running call, `NEVER` if there is none."""
        return self.stack[-1] if self.stack else NEVER

    @property
    def autocast(self) -> bool:
        """Whether autocast was on when the innermost module was called."""
        return bool(self._autocast) and self._autocast[-1]

    @property
    def node_that_unpacked_last(self) -> int:
        """Sequence number of the backward node that unpacked a saved tensor last."""
        return self._unpacked_for[0]

    def enter(
        self, tick: int, fqn: str, call: int, module: torch.nn.Module, inputs: tuple[int, ...]
    ) -> dict[str, Any]:
        """A module's forward begins; arguments as the fields of `ModuleCall`. Returns its row."""
        row = {
            "fqn": fqn,
            "call": call,
            "parent": self.current,
            "class_name": own_name(module),
            "grad": torch.is_grad_enabled(),
            "start": tick,
            "end": NEVER,
            "inputs": inputs,
            "outputs": (),
            "differentiable": (),
            "views": 0,
            "changes_arguments": False,
            "once": SHARDED
            if holds_units(module)
            else CACHED
            if reads_cached_parametrizations(module)
            else "",
        }
        if place := source_of(own_class(module)):
            self.sources.setdefault(row["class_name"], place)
        self.rows.append(row)
        self.stack.append(len(self.rows) - 1)
        self._autocast.append(any_autocast())
        return row

    def returns(self, outputs: tuple[int, ...], differentiable: tuple[int, ...]) -> None:
        """The innermost module's forward is about to return; arguments as in `ModuleCall`."""
        self.rows[self.stack[-1]].update(outputs=outputs, differentiable=differentiable)

    def leave(self, tick: int, changes_arguments: bool) -> None:
        """The innermost module's forward ends; `changes_arguments` as in `ModuleCall`."""
        self._autocast.pop()
        row = self.rows[self.stack.pop()]
        row["end"] = tick
        row["changes_arguments"] |= changes_arguments

    def root_returned(self, result: Any) -> None:
        """The model has returned; what goes backward from its result is watched."""
        before_backward(result, self.graph_of_backward)

    def runs(self, info: OpInfo, args: tuple[Any, ...]) -> None:
        """An op has run."""
        if torch.is_inference_mode_enabled():
            self._run_once(self.stack, INFERENCE)
        if self.stack and info.sized_by_values(args) and not in_backward():
            self._sized.setdefault(self.stack[-1], set()).add(info.name)

    def runs_unruled(self) -> None:
        """A higher-order op has run that selective checkpointing has no rule for."""
        self._run_once(self.stack, UNRULED)

    def unpacked_twice(self, call: int) -> None:
        """A backward has unpacked a tensor twice that was saved in this call."""
        around = []
        while call != NEVER:
            around.append(call)
            call = self.rows[call]["parent"]
        self._run_once(around, UNPACKED_TWICE)

    def _run_once(self, calls: Iterable[int], why: str) -> None:
        for call in calls:
            self.rows[call]["once"] = self.rows[call]["once"] or why

    def runs_on(self, stream: tuple[int, int]) -> None:
        """An op has run on this stream of a GPU, see `Streams.key`."""
        index, raw = stream
        for call in self.stack:
            first = self._streams.setdefault(call, {}).setdefault(index, raw)
            # FSDP2 has streams of its own, and its units' parents are refused anyway.
            if raw != first and self.rows[call]["once"] != SHARDED:
                self.rows[call]["once"] = STREAMS

    def count_view(self) -> None:
        """An op that only makes a view has run."""
        for call in self.stack:
            self.rows[call]["views"] += 1

    def of_op(self) -> int:
        """The call that the current op belongs to; in backward, the call whose saved tensors its node has unpacked."""
        if self.stack:
            return self.stack[-1]
        sequence, call = self._unpacked_for
        return call if in_backward() and sequence == sequence_of(current_node()) else NEVER

    def unpacked(self, node: Any, call: int) -> None:
        """A backward node has unpacked a tensor that was saved in this call."""
        self._unpacked_for = sequence_of(node), call

    def runs_compiled(self, call: int) -> None:
        """Compiled code has run in this call."""
        self._compiled.add(call)

    def runs_unseen(self, name: str) -> None:
        """A higher-order op has run, whose own ops are not seen."""
        self._unseen.setdefault(self.of_op(), set()).add(name)

    def not_counted(self, tensor: torch.Tensor) -> None:
        """Note a tensor that is not strided: its memory is not counted."""
        if not is_fake(tensor):
            layout = str(tensor.layout).removeprefix("torch.")
            self._uncounted.setdefault(self.of_op(), set()).add(layout)

    def where(self) -> str:
        """Describe the module whose forward or backward is running."""
        index = self.of_op()
        if index == NEVER:
            return "code outside of all modules"
        call = self.rows[index]
        module = f"module {call['fqn']!r}" if call["fqn"] else "the model itself"
        return f"{module} ({call['class_name']})"

    def runs_under_hooks(self) -> None:
        """Note that the innermost call runs under saved-tensor hooks that are not the tape's."""
        self._hooked.add(self.current)

    def under_hooks(self) -> list[str]:
        """Names of the modules that run under such hooks."""
        return self._names(self._hooked)

    def with_compiled_code(self) -> list[str]:
        """Names of the modules in which code compiled by `torch.compile` ran."""
        return self._names(self._compiled)

    def with_uncounted(self) -> tuple[list[str], list[str]]:
        """Names of the modules that have uncounted tensors, and the layouts of these tensors."""
        return self._names(set(self._uncounted)), sorted(set[str]().union(*self._uncounted.values()))

    def with_unseen_ops(self) -> tuple[list[str], list[str]]:
        """Names of the modules in which higher-order ops run, and of those ops."""
        modules = set(self._unseen) - {NEVER} or set(self._unseen)  # unknown in backward at times
        return self._names(modules), sorted(set[str]().union(*self._unseen.values()))

    def with_sizes_by_values(self) -> tuple[list[str], list[str]]:
        """Names of the modules with ops whose results' shapes depend on values, and of those ops."""
        return self._names(set(self._sized)), sorted(set[str]().union(*self._sized.values()))

    def _names(self, calls: set[int]) -> list[str]:
        names = ("" if call == NEVER else self.rows[call]["fqn"] for call in sorted(calls))
        return list(dict.fromkeys(names))


def sequence_of(node: Any) -> int:
    """An autograd node's sequence number, -1 for none."""
    return -1 if node is None else node_number(node)


def name_of(node: Any) -> str:
    """An autograd node's name, "" for none."""
    return "" if node is None else node.name()
