"""Properties of an op overload, read once from its schema: tensor arguments, written arguments, randomness.

The recording of a profile and the engines must agree on which ops count, so both use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autoac.torch_private import HigherOrderOperator, OpOverload, entry_of, schema_of
from autoac_solver.records.collectives import may_repeat

aten = torch.ops.aten

# Ops that return their input's storage although the schema does not say so.
_UNDECLARED_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift"}
_UNDECLARED_VIEWS |= {"aten::unsafe_chunk", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}

# Batch norms update running statistics in training. Positions of (running_mean, running_var, training). Replay leaves
# the statistics alone: the normalisation itself uses the batch's.
_BATCH_NORM_STATISTICS: dict[str, tuple[int, int, int]] = {
    "aten::native_batch_norm": (3, 4, 5),
    "aten::cudnn_batch_norm": (3, 4, 5),
    "aten::miopen_batch_norm": (3, 4, 5),
    # Composites, which are not decomposed in inference mode.
    "aten::batch_norm": (3, 4, 5),
    "aten::instance_norm": (3, 4, 5),
    "aten::_batch_norm_impl_index": (3, 4, 5),
}

_UNINITIALISED = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}
_UNINITIALISED |= {"aten::new_empty_strided", "aten::empty_permuted"}

# Ops that communicate: they must run as often as the other ranks expect.
_COLLECTIVE_NAMESPACES = {
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "symm_mem",
    "_dtensor",  # from one sharded dimension to another
    "fsdp",  # copies in and out of the buffers that FSDP2's collectives write
}
_TORCHS_NAMESPACES = {"aten", "prims", "prim", "quantized", "inductor"} | _COLLECTIVE_NAMESPACES
# Writes that schemas do not declare: the first argument of c10d's ops with a name that ends in "_", and these.
_UNDECLARED_WRITES: dict[str, tuple[int, ...]] = {
    "fsdp::all_gather_copy_in": (1,),
    # Running statistics, whatever the mode (`SyncBatchNorm`).
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}
_NO_WRITES = {"c10d::monitored_barrier_"}
_ONLY_TOLD = {
    "aten::record_stream"
}  # its schema says that it writes, but it only tells the allocator something
_RESIZES = {"aten::resize_", "aten::resize_as_", "aten::set_"}
_NOT_REPLAYABLE = {"aten::set_", "aten::_cudnn_rnn", "aten::_batch_norm_with_update"}
_NOT_REPLAYABLE |= {name for name in _UNDECLARED_WRITES if name.startswith("aten::")}


@dataclass(frozen=True, slots=True)
class OpInfo:
    """Facts about one overload.

    Args:
        name: such as "aten.mm.default".
        run: what runs it in the least time.
        ignored: it makes and changes no storage (views, metadata, reads by the host): not an op of the tape.
        reshapes: it changes its first argument's geometry in place (`unsqueeze_`).
        resizes: it may change the shape of the tensors that it writes, and the size of their storages: `resize_`, ops
            with `out=`, and any other op that writes an argument without being the in-place form of an op (observers).
        tensors: positions of arguments that are a tensor (or None).
        lists: positions of arguments that are a list of tensors.
        keywords: names of keyword-only arguments that are tensors or lists of them.
        writes: positions (int) or keyword names (str) of the arguments that are written in place.
        writes_lists: some of these are lists of tensors, and the schema says so.
        updates: it reads what it writes: it is the in-place form of a pointwise op.
        random: it may draw from a generator, see `draws_random`.
        unknown: it is an op of another library, not declared random, but may draw all the same: compare the generators'
            states.
        has_flags: torch's kernel flags may affect it.
        generator_at: position or keyword of its generator argument, None if there is none.
        uninitialised: its output holds no values yet.
        replayable: it may be run a second time on the same inputs, in principle.
        repeatable: it is not replayable, but a collective that may run a second time if a plan lets all ranks do so.
        plain: it is replayable and writes none of its arguments.
        statistics: positions of (running mean, running variance, training flag) of a batch norm, else None.
        dropout_p: position of an attention's dropout probability, -1 if there is none.
        dynamic_shape: its result's shape may depend on values.
        gives_values: the host reads values of its arguments, as in `item()`.
    """

    name: str
    run: Callable[..., Any]
    ignored: bool = False
    reshapes: bool = False
    resizes: bool = False
    tensors: tuple[int, ...] = ()
    lists: tuple[int, ...] = ()
    keywords: tuple[str, ...] = ()
    writes: tuple[int | str, ...] = ()
    writes_lists: bool = False
    updates: bool = False
    random: bool = False
    unknown: bool = False
    has_flags: bool = False
    generator_at: int | str | None = None
    uninitialised: bool = False
    replayable: bool = True
    repeatable: bool = False
    plain: bool = False
    statistics: tuple[int, int, int] | None = None
    dropout_p: int = -1
    dynamic_shape: bool = False
    gives_values: bool = False

    def draws_random(self, args: tuple[Any, ...]) -> bool:
        """Whether this call draws random numbers: attention does so only with a dropout probability.

        The probability reaches dispatch positionally, so it is read through the schema.
        """
        if not self.random:
            return False
        if self.dropout_p >= 0:
            return len(args) > self.dropout_p and args[self.dropout_p] > 0
        return True

    def sized_by_values(self, args: tuple[Any, ...]) -> bool:
        """Whether the result's shape depends on the values of the arguments: indexing does so by masks only."""
        if not self.dynamic_shape or self.name != "aten.index.Tensor":
            return self.dynamic_shape
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1]))

    def generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
        """The generator that this call was given, None if it draws from the device's own."""
        where = self.generator_at
        return kwargs.get(where) if isinstance(where, str) else None if where is None else _at(args, where)

    def updates_statistics(self, args: tuple[Any, ...]) -> bool:
        """Whether this call of a batch norm writes its running statistics."""
        return self.statistics is not None and bool(args[self.statistics[2]])


_INFO: dict[Any, OpInfo] = {}


def op_info(func: Any) -> OpInfo:
    """The facts about an op overload (or higher-order op), cached."""
    info = _INFO.get(func)
    if info is None:
        info = _INFO[func] = _read(func)
    return info


def _read(func: Any) -> OpInfo:
    if isinstance(func, HigherOrderOperator) or not isinstance(func, OpOverload):
        # Opaque to us: it runs as it is, and its results are kept by their users.
        return OpInfo(name=str(func), run=func, ignored=True, replayable=False)
    schema = schema_of(func)
    tensors, lists, keywords, writes = [], [], [], []
    dropout_p, generator_at = -1, None
    for position, argument in enumerate(schema.arguments):
        kind = str(argument.type)
        where = argument.name if argument.kwarg_only else position
        if argument.name == "dropout_p" and not argument.kwarg_only:
            dropout_p = position
        if "Generator" in kind:
            generator_at = where
        if "Tensor" not in kind:
            continue
        if argument.kwarg_only:
            keywords.append(argument.name)
        elif "List" in kind:
            lists.append(position)
        else:
            tensors.append(position)
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(where)
    declared = tuple(writes)
    if schema.name in _UNDECLARED_WRITES:
        writes.extend(_UNDECLARED_WRITES[schema.name])
    elif func.namespace == "c10d" and schema.name.endswith("_") and schema.name not in _NO_WRITES:
        writes.append(0)
    makes_tensors = any("Tensor" in str(result.type) for result in schema.returns)
    metadata_only = torch.Tag.inplace_view in func.tags and schema.name not in _RESIZES
    ignored = (
        (func.is_view and not writes)
        or schema.name in _UNDECLARED_VIEWS
        or metadata_only
        or (not makes_tensors and not writes)
        or schema.name in _ONLY_TOLD
    )
    replayable = func.namespace not in _COLLECTIVE_NAMESPACES and schema.name not in _NOT_REPLAYABLE
    return OpInfo(
        name=str(func),
        run=entry_of(func),
        ignored=ignored,
        reshapes=metadata_only,
        resizes=bool(writes) and (schema.name in _RESIZES or not _is_in_place(func)),
        tensors=tuple(tensors),
        lists=tuple(lists),
        keywords=tuple(keywords),
        writes=tuple(writes),
        updates=bool(writes) and torch.Tag.pointwise in func.tags and _is_in_place(func),
        writes_lists=any(where in lists for where in declared),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        unknown=func.namespace not in _TORCHS_NAMESPACES
        and torch.Tag.nondeterministic_seeded not in func.tags,
        has_flags=torch.Tag.pointwise not in func.tags or schema.name == "aten::gelu",
        generator_at=generator_at,
        uninitialised=schema.name in _UNINITIALISED,
        replayable=replayable,
        repeatable=may_repeat(str(func)),
        plain=replayable and not writes,
        statistics=_BATCH_NORM_STATISTICS.get(schema.name),
        dropout_p=dropout_p,
        dynamic_shape=torch.Tag.dynamic_output_shape in func.tags,
        gives_values=torch.Tag.data_dependent_output in func.tags,
    )


def _is_in_place(func: Any) -> bool:
    """Whether an op writes what it is called on; older torch (2.11) has no tag for it, but the name says so."""
    if hasattr(torch.Tag, "inplace"):
        return torch.Tag.inplace in func.tags
    name = schema_of(func).name.partition("::")[2]
    return name.startswith("__i") if name.endswith("__") else name.endswith("_")


def is_collective(name: str) -> bool:
    """Whether an op of this name is a collective, which other ranks have to join, or a copy that belongs to one."""
    return name.partition(".")[0] in _COLLECTIVE_NAMESPACES


def written_tensors(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that this call writes in place, including a batch norm's undeclared running statistics."""
    found: list[torch.Tensor] = []
    for where in info.writes:
        found.extend(tensors_in(kwargs.get(where) if isinstance(where, str) else _at(args, where)))
    if info.statistics is not None and info.updates_statistics(args):
        for where in info.statistics[:2]:
            found.extend(tensors_in(args[where]))
    return found


def read_tensors(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Every tensor among the arguments, including written ones."""
    found: list[torch.Tensor] = []
    for position in (*info.tensors, *info.lists):
        found.extend(tensors_in(_at(args, position)))
    for name in info.keywords:
        found.extend(tensors_in(kwargs.get(name)))
    return found


def read_and_filled(
    info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors whose values this call needs, and those that it writes without."""
    if not info.writes or info.updates:
        return read_tensors(info, args, kwargs), []
    filled = written_tensors(info, args, kwargs)
    among = {id(tensor) for tensor in filled}
    return [tensor for tensor in read_tensors(info, args, kwargs) if id(tensor) not in among], filled


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, None, or a list of these."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _at(args: tuple[Any, ...], position: int) -> Any:
    return args[position] if position < len(args) else None
