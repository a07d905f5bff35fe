"""Corrections for autograd formulas that behave differently under a dispatch mode.

See NOTE [ The recorded step ] 4 in tape.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from autoac.ops.info import OpInfo, tensors_in
from autoac.record.tape.calls import name_of, sequence_of
from autoac.record.tape.clock import Clock
from autoac.record.tape.saved import SavedTensors
from autoac.record.tape.storages import Storages
from autoac.torch_private import (
    backward_keeps_graph,
    current_node,
    held_once_as_argument,
    in_backward,
    is_dense,
    next_node_number,
)
from autoac_solver.records.profile import NEVER, SCALAR_BYTES

# Out of place under a dispatch mode only; source: `areAnyTensorSubclassLike` in torch's FunctionsManual.cpp.
_SCATTERS = {"aten.index_put.default", "aten.scatter.src", "aten.scatter_add.default"}
_SCATTERS |= {"aten.index_add.default", "aten.put.default"}
_NO_SCATTERS_IN_PLACE = ("CopySlices", "ScatterReduceBackward", "IndexReduceBackward")
"""Nodes whose scatters are always out of place, or are not part of the node's formula."""
_SAVES_NUMBERS = {"aten.mul.Tensor", "aten.div.Tensor", "aten.div.Tensor_mode"}
_SAVES_NUMBERS |= {"aten.mul_.Tensor", "aten.div_.Tensor", "aten.div_.Tensor_mode"}
_BCE_NODE = "BinaryCrossEntropyWithLogitsBackward"
_EXTREMUM_NODES = ("MaxBackward1", "MinBackward1")
_BCE_OPS = {"aten.sub.Tensor", "aten.mul.Tensor"}

# The engine fits a gradient to its input's shape and dtype (`validate_outputs` in torch's engine.cpp) after the node's
# formula has returned and freed the tensors that it unpacked. The formulas of these nodes do not end with either op.
NODES_FITTED_AFTERWARDS = (
    "MulBackward0",
    "DivBackward0",
    "AddcmulBackward0",
    "AddmmBackward0",
    "BaddbmmBackward0",
)
FITTING_OPS = {"aten.sum.dim_IntList", "aten._to_copy.default"}


class Formulas:
    """Corrections for autograd's own formulas, op by op."""

    def __init__(self, clock: Clock, storages: Storages, saved: SavedTensors):
        self.clock = clock
        self.storages = storages
        self.saved = saved
        self._scalars: dict[int, dict[str, Any]] = {}  # node -> storage of the number that it has saved
        self._extremum_bytes = 0  # of the gradient of the last maximum or minimum

    def note_end(self, info: OpInfo) -> None:
        """Note when the node has dropped the tensors that it unpacked: before the fitting ops that end it.

        An op that may fit counts only if no other op of the node follows, as autocast casts too.
        """
        if not in_backward():
            return
        node = current_node()
        if name_of(node) not in NODES_FITTED_AFTERWARDS:
            return
        for row in self.saved.held_by(node):
            if info.name not in FITTING_OPS:
                row["dropped"] = NEVER
            elif row["dropped"] == NEVER:
                row["dropped"] = self.clock.tick
        self.saved.unpacks.fits(info.name in FITTING_OPS)

    def in_place(self, info: OpInfo, args: Any) -> bool:
        """Whether this is autograd's own op, and runs in place when no dispatch mode is active.

        Formulas of single nodes that do so are known by name, and write a tensor that the same node made. Any other
        case is the sum of two gradients: the first was made by an earlier node than the one just evaluated (a sum
        inside a node's own formula has a term that this node made), and only the engine holds it.
        """
        if not in_backward() or not args or not isinstance(args[0], torch.Tensor):
            return False
        if args[0].layout is not torch.strided:
            return False
        old, node = args[0], current_node()
        known = self.storages.known(old)
        if known is None or not self.storages.rows[known]["backward"] or not is_dense(old):
            return False  # a tensor that forward made is no gradient
        made_by_node = self.storages.made_by(known) == sequence_of(node)
        if info.name in _SCATTERS:  # into zeros; what CopySlices makes is the incoming gradient
            return made_by_node and not any(name in name_of(node) for name in _NO_SCATTERS_IN_PLACE)
        if info.name in _BCE_OPS and name_of(node).startswith(_BCE_NODE):
            return made_by_node
        adds = info.name == "aten.add.Tensor" and len(args) == 2 and _alike(*args)
        return adds and not made_by_node and held_once_as_argument(old)

    def beside_bytes(self, info: OpInfo, args: Any) -> int:
        """Bytes that are alive during this op without a dispatch mode, but not under one.

        In backward of a full maximum or minimum, the gradient's zeros are allocated before the extrema are counted.
        Under a mode, the gradient is a later product, and two masks of one byte per element and one number are alive.
        """
        if not in_backward() or not name_of(current_node()).startswith(_EXTREMUM_NODES):
            return 0
        if info.name == "aten.eq.Tensor":
            self._extremum_bytes = max(0, args[0].numel() * (args[0].element_size() - 2) - 1)
        return self._extremum_bytes if info.name == "aten.sum.default" else 0

    def note_scalar(self, info: OpInfo, args: Any) -> None:
        """Record a Python number that autograd saves for backward as a tensor that no mode and no hook sees.

        It is freed when its node has run in a backward that does not keep the graph. If no op of that node is seen
        then, it counts until the end of the step.
        """
        if in_backward():
            row = self._scalars.get(sequence_of(current_node()))
            if row is not None and not backward_keeps_graph():
                row["free"] = self.clock.tick + 1
            return
        if info.name in _SAVES_NUMBERS and self.storages.device.type == "cpu" and torch.is_grad_enabled():
            numbers = sum(not isinstance(a, torch.Tensor) for a in args[:2])
            if numbers and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args[:2]):
                row = {"bytes": SCALAR_BYTES, "alloc": self.clock.tick, "free": NEVER, "backward": False}
                self.storages.rows.append(row)
                self._scalars[next_node_number() - 1] = row

    def keep_scalars(self) -> None:
        """Keep the saved numbers to the end of the step: the graph outlives it."""
        for row in self._scalars.values():
            row["free"] = NEVER


def traced_bytes(name: str, args: Any) -> int:
    """Bytes that are alive while torch traces the branches of a `torch.cond` for autograd, with all modes disabled.

    Each branch is traced on real copies of the op's tensors (`_from_fun` in torch/_higher_order_ops/utils.py). Numbers
    in it are tensors, too: those saved and the one at hand, twice. All ops that take one are counted: a bound.

    Args:
        name: name of the higher-order op.
        args: its arguments, of which the graphs are the branches.
    """
    copied = [tensor for tensor in tensors_in(args[-1:]) if tensor.layout is torch.strided]
    if name != "cond" or not (in_backward() or any(tensor.requires_grad for tensor in copied)):
        return 0
    numbers = [_numbers(graph) for graph in args if isinstance(graph, GraphModule)]
    most = max(numbers, default=0)
    return sum(map(_bytes_of_copy, copied)) + SCALAR_BYTES * (most + (most > 0))


def _numbers(graph: GraphModule) -> int:
    """How many ops of a graph take a Python number beside a tensor."""
    return sum(any(isinstance(arg, int | float) for arg in node.args[:2]) for node in graph.graph.nodes)


def _bytes_of_copy(tensor: torch.Tensor) -> int:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return copy.untyped_storage().nbytes()


def _alike(a: Any, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
