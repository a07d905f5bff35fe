"""Chooses the values that an inductor graph keeps for its backward. Imported only where something is compiled.

The hook is `torch._inductor.config.custom_partitioner_fn`. Only the choice of values is replaced; torch's own
partitioner does the rest: common subexpressions, collectives, the order of backward. See
torch/_functorch/partitioners.py.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from autoac.torch_private.compiler import COMPILE_OPTION

__all__ = [
    "COMPILE_OPTION",
    "CustomPartitionerFn",
    "JointGraph",
    "cache_folder",
    "hash_of_files",
    "partitioned",
    "settings",
]

hash_of_files: Callable[[tuple[str, ...]], bytes] = get_hash_for_files
"""A hash of source files, for `CustomPartitionerFn.uuid`.

Source: `get_hash_for_files` (torch/_inductor/custom_graph_pass.py).
"""

_PRODUCTS = frozenset(
    ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm")
)
_CONVOLUTIONS = frozenset(("convolution", "_convolution", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell"))
_TORCHS_OWN = frozenset(
    (
        "aten",
        "prims",
        "prim",
        "inductor",
        "_inductor_test",
        "_c10d_functional",
        "_dtensor",
        "mkldnn",
        "higher_order",
    )
)
"""Namespaces of ops whose cost torch itself judges; an op of any other may take arbitrarily long."""
_SEEDS = frozenset(("inductor_seed", "inductor_seeds", "inductor_lookup_seed"))
_CHOICES = frozenset(("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "searchsorted", "bucketize"))
"""Ops that pick by comparing: on values that are computed again in another fused kernel, with other last bits, they may
pick otherwise (another expert of a router)."""


@dataclass(frozen=True)
class HeavyOp:
    """A forward op that is never recomputed unless we say so: one that computes long for the bytes it reads.

    Args:
        name: of the op, without overload.
        overload: its full name, such as "aten.mm.default".
        flops: by torch's formulas, 0 where it has none; used only to order candidates.
        bytes: of its result.
    """

    name: str
    overload: str
    flops: int
    bytes: int


class JointGraph:
    """Forward and backward of a region in one graph, as inductor hands it to a partitioner.

    Args:
        graph, info: as prepared by torch's partitioner.
        torchs: torch's own function that chooses the kept values.

    Source: `choose_saved_values_set`, `solve_min_cut`, `MinCutOptions`, `NodeInfo`, `OpTypes`, `_size_of`
    (torch/_functorch/partitioners.py), `get_node_storage` (torch/_inductor/fx_utils.py).
    """

    def __init__(self, graph: Any, info: Any, torchs: Callable[..., list[Any]]) -> None:
        self._graph, self._info, self._torchs = graph, info, torchs
        self._heavy = [node for node in graph.nodes if _is_heavy(node) and info.is_required_fw(node)]
        copies = (node for node in graph.nodes if node.target is torch.ops.aten.copy_.default)
        self._written = {get_node_storage(node.args[0]) for node in copies} - {None}

    @property
    def heavy(self) -> tuple[HeavyOp, ...]:
        """Its heavy ops in order."""
        return tuple(
            HeavyOp(node.target._opname, str(node.target), _flops(node), _value_bytes(node.meta.get("val")))
            for node in self._heavy
        )

    @property
    def draws(self) -> bool:
        """Whether it has a random op."""
        return any(map(_draws, self._graph.nodes))

    @property
    def has_once(self) -> bool:
        """Whether it has an op that must run once: one that draws or chooses, or a higher-order op."""
        return any(map(_runs_once, self._graph.nodes))

    @property
    def is_tagged(self) -> bool:
        """Whether the user's own checkpoints are in it."""
        return any("recompute" in node.meta for node in self._graph.nodes)

    @property
    def text(self) -> str:
        """The graph as text: its ops, their arguments, and the shapes, strides and dtypes of their results."""
        return _text(self._graph)

    def kept_with(self, heavy: Iterable[int]) -> list[Any]:
        """The values kept if these heavy ops must not run again.

        Neither do random ops, higher-order ops (nothing is known of the code in them), ops that choose, and ops on an
        input that the region writes in the end.
        """
        kept = set(heavy)
        never = OrderedSet(
            node
            for node in self._graph.nodes
            if _runs_once(node) or self._is_of_written(node.all_input_nodes)
        )
        firm = OrderedSet(node for index, node in enumerate(self._heavy) if index in kept) | never
        free = OrderedSet(
            node for index, node in enumerate(self._heavy) if index not in kept and node not in never
        )
        options = partitioners.MinCutOptions(
            ban_if_used_far_apart=False,
            ban_if_long_fusible_chains=False,
            ban_if_materialized_backward=False,
            ban_if_not_in_allowlist=False,
            ban_if_reduction=True,
        )
        try:
            for node in firm:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            values, _ = partitioners.solve_min_cut(self._graph, self._info, options, dont_ban=free)
        finally:
            for node in firm:
                del node.meta["recompute"]
        return values

    def kept_by_torch(self, budget: float) -> list[Any]:
        """The values that torch's own partitioner keeps at a budget, a fraction."""
        return self._torchs(self._graph, self._info, memory_budget=budget)

    def is_sound(self, values: Sequence[Any]) -> bool:
        """Whether no kept value lies on an input that the region writes in the end: backward would see it written."""
        return not self._is_of_written(values)

    def _is_of_written(self, nodes: Iterable[Any]) -> bool:
        return bool(self._written) and not self._written.isdisjoint(map(get_node_storage, nodes))

    def kept_bytes(self, values: Sequence[Any]) -> int:
        """Bytes of values, each storage once, and those of inputs left out."""
        given = {get_node_storage(node) for node in self._graph.nodes if node.op == "placeholder"}
        sizes: dict[Any, int] = {}
        for node in values:
            storage = get_node_storage(node)
            if node.op != "placeholder" and (storage is None or storage not in given):
                sizes[storage or node] = max(sizes.get(storage or node, 0), partitioners._size_of(node))
        return sum(sizes.values())


def partitioned(
    choose: Callable[[JointGraph], list[Any]], graph: Any, joint_inputs: Any, **options: Any
) -> tuple[Any, Any]:
    """Split a joint graph into forward and backward that keep the values chosen by a function.

    Source: `min_cut_rematerialization_partition` (torch/_functorch/partitioners.py). Its choice is replaced while it
    runs, which is safe: Dynamo's lock lets no other thread compile.
    """
    torchs = partitioners.choose_saved_values_set

    def chosen(joint: Any, info: Any, memory_budget: float = 1) -> list[Any]:
        joint_graph = JointGraph(joint, info, torchs)
        values = choose(joint_graph)
        if not joint_graph.is_sound(values):
            raise RuntimeError("a kept value is written before backward")
        return values

    with mock.patch.object(partitioners, "choose_saved_values_set", chosen), _no_sync():
        return partitioners.min_cut_rematerialization_partition(graph, joint_inputs, **options)


@contextlib.contextmanager
def _no_sync() -> Iterator[None]:
    """Context: ranks do not vote on the choice, since the plan's is the same on all of them."""
    with torch._functorch.config.patch(_sync_decision_cross_ranks=False):
        yield


def cache_folder() -> str | None:
    """The folder in which inductor keeps compiled code; None if its caches are off.

    Source: `cache_dir` (torch/_inductor/runtime/cache_dir_utils.py), `force_disable_caches`
    (torch/_inductor/config.py).
    """
    return None if torch._inductor.config.force_disable_caches else cache_dir()


def settings() -> str:
    """A hash of inductor's settings.

    Source: `ConfigModule.get_hash` (torch/utils/_config_module.py).
    """
    return torch._inductor.config.get_hash().hex()


def _text(graph: Any) -> str:
    lines = []
    for node in graph.nodes:
        target = node.target if isinstance(node.target, (str, torch._ops.OpOverload)) else _name(node.target)
        lines.append(f"{node.name} = {target}{node.args}{node.kwargs} -> {_described(node.meta.get('val'))}")
        inside = getattr(graph.owning_module, str(target), None) if node.op == "get_attr" else None
        if isinstance(inside, torch.fx.GraphModule):
            lines.append(_text(inside.graph))
    return "\n".join(lines)


def _name(function: Any) -> str:
    return (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else value.layout
        return f"{value.dtype}{tuple(value.shape)}{strides}{value.device}"
    if isinstance(value, (list, tuple)):
        return str([_described(item) for item in value])
    return str(value) if isinstance(value, (bool, int, float, torch.SymInt)) else type(value).__name__


def _opname(node: Any) -> str:
    return getattr(node.target, "_opname", "") if node.op == "call_function" else ""


def _draws(node: Any) -> bool:
    """Whether an op draws random numbers; attention kernels are tagged so, but draw only with dropout."""
    if _opname(node) in _SEEDS:
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, 0.0)
            return given != 0.0
    return True


def _runs_once(node: Any) -> bool:
    """Whether an op must not run again at any point of ours."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    return _draws(node) or _opname(node) in _CHOICES


def _is_heavy(node: Any) -> bool:
    """Whether a node is a product, a convolution, an attention kernel, or an op that torch does not know."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = _opname(node)
    if name in _PRODUCTS or name in _CONVOLUTIONS:
        return True
    if "attention" in name and "backward" not in name:
        return True
    if partitioners.get_default_op_list().is_compute_intensive(node):
        return True
    return not _draws(node) and node.target.namespace not in _TORCHS_OWN


def _flops(node: Any) -> int:
    def value(argument: Any) -> Any:
        return argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument

    args = torch.fx.node.map_aggregate(node.args, value)
    kwargs = torch.fx.node.map_aggregate(node.kwargs, value)
    name = _opname(node)
    if "attention" in name:
        query, key = args[0].shape, args[1].shape
        return int(4 * query[0] * query[1] * query[-2] * key[-2] * query[-1])
    formula = flop_registry.get(node.target._overloadpacket)
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def _value_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel()) * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_value_bytes, value))
    return 0
