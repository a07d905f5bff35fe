"""Notes in a profile on how it was recorded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autoac.device import device_for
from autoac.execute.watch.other_calls import outermost
from autoac.price.isolated_ops import OnScratch
from autoac.price.meters import Disturbance, OpTime, unsteady
from autoac.record.cuda.ops import CudaOps
from autoac.record.tape.tape import Tape
from autoac.step.inputs import elements_in
from autoac.step.model import own_checkpointing
from autoac.step.uncompiled import compiled_modules
from autoac.torch_private import is_checkpoint_wrapper
from autoac_solver.records.names import module_in_words
from autoac_solver.records.profile import IN_ITS_ORDER


def note_if_unsteady(
    times: Iterable[OpTime], device: torch.device, disturbance: Disturbance
) -> tuple[str, ...]:
    """A note if the disturbance makes the measured times unreliable."""
    # A GPU's ops are timed by its own clock, which waits of the host do not affect.
    shares = (
        (disturbance.waited_share, disturbance.stolen_share)
        if device_for(device).on_hosts_processors
        else (0.0, 0.0)
    )
    note = unsteady(times, *shares)
    return (note,) if note else ()


def note_on_device(device: torch.device) -> tuple[str, ...]:
    """A note on a device whose clock and memory autoac cannot read."""
    if device_for(device).known:
        return ()
    return (
        f"recorded on {device}: autoac reads the clocks and the memory of CPU and CUDA devices only. Here times are "
        "the host's, which an op that runs on after its launch has not, and bytes are those of the tensors; plans are "
        "exact all the same, their overhead is a guess, and plan.verify cannot measure their peak",
    )


def notes_if_checkpointed(model: torch.nn.Module) -> list[str]:
    """A note if a model recomputes its layers by its own checkpointing."""
    wrapped = [name for name, module in model.named_modules() if is_checkpoint_wrapper(module)]
    name, method = own_checkpointing(model)
    if wrapped:
        return [
            f"the model's own checkpointing, torch's checkpoint_wrapper, is on {_some(wrapped)}: it recomputes these "
            "modules as a whole, and a plan decides little inside of them. Plan for the model without it (in trainers' "
            "options of FSDP: activation_checkpointing off)"
        ]
    if not name:
        return []
    part, _, call = method.rpartition(".")
    if not all(map(str.isidentifier, filter(None, part.split(".")))):
        part = f'get_submodule("{part}")'  # an entry of a list has no attribute's name
    return [
        f"the model's own checkpointing, {name}, is on: it recomputes layers as a whole, and a plan decides little "
        f"inside of them. Call {'.'.join(filter(None, ('model', part, call)))}() before planning"
    ]


def notes_if_under_hooks(tape: Tape) -> list[str]:
    """A note if the model's own code runs modules under `checkpoint`, or under other saved-tensor hooks."""
    if not (names := tape.calls.under_hooks()):
        return []
    return [
        f"{'the step' if '' in names else 'the model'} runs {_some([''] if '' in names else outermost(names))} under "
        "torch.utils.checkpoint, or other saved-tensor hooks, in its own code: nothing inside of that is planned. "
        "Without it, the plan decides there, too"
    ]


def notes_if_compiled(model: torch.nn.Module, tape: Tape) -> list[str]:
    """Notes on compiled modules, which are recorded uncompiled, and on other compiled code, which is mostly unseen."""
    notes = []
    if modules := list(compiled_modules(model)):
        notes.append(
            f"compiled by torch.compile, but recorded uncompiled: {_some(modules)}. With a plan of engine replay that "
            "recomputes anything they run uncompiled, and its peak holds. To have them compiled within a budget, take "
            "engine='compile': in a loop with autoac.auto or a callback, or before it with autoac.plan(model, sample, "
            "budget, engine='compile').apply(model). Or take engine sac, or compile them after plan.apply (regions of "
            "replay run uncompiled all the same): what compiled code takes is not predicted then, so leave headroom, "
            "and see what plan.verify measures"
        )
    if running := tape.calls.with_compiled_code():
        notes.append(
            f"functions compiled by torch.compile run in {_some(running)}: what they keep and take is not seen in "
            "full, so peaks can be larger than predicted. Have them uncompiled, here and in training, or leave "
            "headroom and see what plan.verify measures"
        )
    return notes


_NOT_COUNTED = (
    "this memory is not counted, so peaks can be larger than predicted. Leave headroom and see what plan.verify "
    "measures"
)


def notes_if_calls_differ(tape: Tape) -> list[str]:
    """A note if the step calls the model several times with different numbers of elements."""
    if len(set(map(elements_in, tape.root_calls))) < 2:
        return []
    return [
        f"calls of different sizes in the step: {'; '.join(tape.root_calls)}. A call runs under the decisions for the "
        "smallest of these that is no smaller (of calls before one backward, under those for its place). "
        f"{IN_ITS_ORDER}"
    ]


def notes_if_sized_by_values(tape: Tape) -> list[str]:
    """A note if shapes in the step depend on the values of its batch."""
    modules, ops = tape.calls.with_sizes_by_values()
    found = []
    if modules:
        found.append(f"({', '.join(ops)}) in {_some(modules)}, as where tokens choose experts")
    if is_loss_sized_by_values(tape):
        found.append("outside of the model's modules, as in a loss that leaves out masked tokens")
    return [
        f"sizes of tensors depend on values {where}: other batches of the same shapes may take more memory than this "
        "one. Plan for several of them, with autoac.Samples([...]), or leave headroom"
        for where in found
    ]


def is_loss_sized_by_values(tape: Tape) -> bool:
    """Whether autograd saves a tensor made outside of modules whose shape depends on values, or a mask for one."""
    return not tape.sized_by_values.isdisjoint(row["storage"] for row in tape.saved.rows)


def notes_if_drawn_on_host(tape: Tape) -> list[str]:
    """Notes on other libraries' ops that draw random numbers which torch has not made."""
    notes = []
    for op, calls in tape.drawn_on_host.items():
        modules = [tape.calls.rows[call]["fqn"] if call >= 0 else "" for call in calls]
        named = _some(list(dict.fromkeys(modules)))
        notes.append(
            f"{op} in {named} draws from Python's or numpy's random numbers: plans save what it makes"
        )
    return notes


def notes_if_uncounted(tape: Tape) -> list[str]:
    """Notes on memory that is not counted: of sparse, jagged and oneDNN tensors, and inside of higher-order ops."""
    notes = []
    modules, layouts = tape.calls.with_uncounted()
    if modules:
        notes.append(f"tensors of layout {', '.join(layouts)} in {_some(modules)}: {_NOT_COUNTED}")
    modules, ops = tape.calls.with_unseen_ops()
    if modules:
        notes.append(
            f"what higher-order ops ({', '.join(ops)}) in {_some(modules)} take inside: {_NOT_COUNTED}"
        )
    return notes


def _some(names: list[str]) -> str:
    shown = ", ".join(map(module_in_words, names[:4]))
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def notes_on_fake(
    unknown: set[str], found: OnScratch, distinct: int, measure: bool, cuda_ops: CudaOps | None
) -> tuple[str, ...]:
    """Notes on the limits of a recording on fake tensors.

    Args:
        unknown: names of ops whose workspace is unknown on fake tensors.
        found: measurements of single ops.
        distinct: number of distinct ops.
        measure: whether measuring single ops was requested.
        cuda_ops: the mode that ran CUDA's ops, None without one.
    """
    notes = [
        "recorded on fake tensors: nothing of the model was allocated, and whether values come out of their "
        "recomputation with the same bits could not be looked at: the first planned step of engine replay "
        "does so, plan.verify can for any engine"
    ]
    if cuda_ops is not None:
        notes.append(
            "recorded without a GPU, with the ops that CUDA takes for attention, dropout, batch norm, rms_norm and "
            "autocast; profile there before training, for other ops may differ"
        )
    if cuda_ops is not None and cuda_ops.saw_cpus_casts:
        notes.append(
            "autocast was on, with the casts of the CPU: CUDA's autocast runs other ops in float32 (norms, softmax, "
            "losses), so the peak there is another one. Profile on the GPU, with a newer torch, or in half precision"
        )
    if cuda_ops is not None and cuda_ops.saw_recurrent:
        notes.append(
            f"{', '.join(sorted(cuda_ops.saw_recurrent))} runs in cuDNN on a GPU, and was recorded as the CPU's ops: "
            "bytes and times of these layers are others there. Profile on the GPU"
        )
    if unknown:
        on_cuda = ", and on a GPU recurrent layers run other ops" if cuda_ops is not None else ""
        notes.append(
            f"the workspace that {', '.join(sorted(unknown))} hands to backward is not known to fake tensors{on_cuda}: "
            "peaks are predicted too low"
        )
    if measure and len(found.times) < distinct:
        notes.append(
            f"{distinct - len(found.times)} of {distinct} distinct ops were too long or too large to be run here, or "
            "refused made-up values: their times are estimated, and their workspace is not known"
        )
    return tuple(notes)
