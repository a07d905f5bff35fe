"""Graph breaks of `torch.compile` within loops. Importing this does not import the compiler."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class _Here(threading.local):
    breaks = False


_here = _Here()


@contextlib.contextmanager
def breaks_in_loops(turns: int) -> Iterator[None]:
    """Context: where this thread compiles a frame with a graph break in a loop, it breaks there as anywhere else.

    By itself, torch leaves such a frame uncompiled. What is left of a loop after the break is compiled once for each
    number of turns to come, as a code object's further entries. An integer attribute of a module that changes from call
    to call (a counter of steps) becomes an input of the code, as other numbers do: frames of a tail meet many of them.

    Args:
        turns: most entries of a code object, over all compiled functions that share it.

    Source: `maybe_has_backedge` (torch/_dynamo/symbolic_convert.py), a heuristic for speed: code is valid with either
    answer, it says; `accumulated_recompile_limit`, `allow_unspec_int_on_nn_module` (torch/_dynamo/config.py).
    """
    _installed()
    before, _here.breaks = _here.breaks, True
    try:
        with torch._dynamo.config.patch(
            accumulated_recompile_limit=turns, allow_unspec_int_on_nn_module=True
        ):
            yield
    finally:
        _here.breaks = before


def numbers_as_inputs() -> contextlib.AbstractContextManager[None]:
    """Context: integer attributes of modules that differ from call to call become inputs of the code compiled in it.

    By itself, torch compiles code for each value.

    Source: `allow_unspec_int_on_nn_module` (torch/_dynamo/config.py).
    """
    return torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)


def frames_translated() -> int:
    """How many frames this process has translated for compiling so far, where graph breaks are allowed.

    Source: `counters` (torch/_dynamo/utils.py), `ConvertFrame.__call__` (torch/_dynamo/convert_frame.py).
    """
    from torch._dynamo.utils import counters

    return counters["frames"]["total"]


def graphs_translated() -> int:
    """How many graphs this process has given to compilers so far.

    Source: `counters` (torch/_dynamo/utils.py), `OutputGraph.call_user_compiler` (torch/_dynamo/output_graph.py).
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@functools.cache
def _installed() -> None:
    """Have the compiler ask whether it is to break in loops.

    Where a version of torch has other names, it stays as it is, and does not.
    """
    from torch._dynamo import symbolic_convert

    translator: Any = symbolic_convert.InstructionTranslatorBase
    asked: Callable[[Any], bool] | None = getattr(translator, "maybe_has_backedge", None)
    if asked is None:
        return

    def maybe_has_backedge(self: Any) -> bool:
        return not _here.breaks and asked(self)

    translator.maybe_has_backedge = maybe_has_backedge
    with contextlib.suppress(ImportError):
        from torch._dynamo.variables.iter import DictViewIterator

        if "reconstruct" not in vars(DictViewIterator):
            DictViewIterator.reconstruct = _reconstruct


def _reconstruct(self: Any, codegen: Any) -> None:
    """Have code make the iterator over what is left of a dictionary's values or items, as of a `ModuleList`.

    Source: `ListIteratorVariable.reconstruct` (torch/_dynamo/variables/lists.py); `DictViewIterator`
    (torch/_dynamo/variables/iter.py) has none, and is a graph break of its own.
    """
    from torch._dynamo.bytecode_transformation import create_build_tuple, create_call_function

    if not _here.breaks:
        raise NotImplementedError
    left = list(copy.copy(self._iter))
    codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_python_module(iter)))
    for item in left:
        if self.view_type == "items":
            codegen(item[0].vt)
            codegen(item[1])
            codegen.append_output(create_build_tuple(2))
        else:
            codegen(item.vt if self.view_type == "keys" else item)
    codegen.append_output(create_build_tuple(len(left)))
    codegen.extend_output(create_call_function(1, False))
