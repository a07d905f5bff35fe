"""Make a `Profile`: a warm-up step that measures workspace, steps that measure times, of which the last is recorded."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoac.device import device_for
from autoac.ops.info import is_collective
from autoac.price.chunked_loss import with_price_of_chunks
from autoac.price.engine_costs import engine_costs
from autoac.price.meters import Disturbance, OpTimer, WorkspaceMeter
from autoac.progress import Tell, part
from autoac.record.buffers import Buffers
from autoac.record.guard import Guard, next_guard
from autoac.record.notes import (
    is_loss_sized_by_values,
    note_if_unsteady,
    note_on_device,
    notes_if_calls_differ,
    notes_if_checkpointed,
    notes_if_compiled,
    notes_if_drawn_on_host,
    notes_if_sized_by_values,
    notes_if_uncounted,
    notes_if_under_hooks,
)
from autoac.record.optimizer import state_tensors, states_made
from autoac.record.single_draws import CHANCE, HIGH, LOW, SingleDraws
from autoac.record.tape import tables as tape_tables
from autoac.record.tape.instrumented import Instrumented
from autoac.record.tape.tape import Tape
from autoac.record.unseen import OpOfStep, UnseenWrites, mark
from autoac.record.varying import Runs
from autoac.step.failures import add_note
from autoac.step.model import (
    check_backwards_may_run,
    check_model,
    device_bytes,
    device_of,
    gradient_of,
    model_fingerprint,
)
from autoac.step.modules import lean_modules
from autoac.step.optimizer import inner_optimizer
from autoac.step.restore import other_random_numbers, untouched
from autoac.step.step import TrainingStep
from autoac.step.uncompiled import compiled_modules, is_inside, uncompiled
from autoac.step.units import has_units, here, own_name
from autoac.torch_private import storage_key
from autoac_solver.build.losses.cross_entropy import losses_in_modules
from autoac_solver.plan.parts import with_parts
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import (
    COMPILED_FUNCTIONS,
    GRAPH_OF_BACKWARD,
    LOSS_SIZED_BY_VALUES,
    OWN_CHECKPOINTING,
    SIZED_BY_VALUES,
    VARYING,
    Op,
    Profile,
)

Losses = Mapping[str, Collection[str | None]]

_NO_HOOKS = "don't yet support saved tensor hooks"
"""Part of torch.func's error message under saved-tensor hooks; the error has no type of its own."""
_TIMED_STEPS = 2
"""Timed steps before the recorded one: a single step runs most backward ops only once."""
_TIMING_S = 10.0
"""Seconds after which no further timed step begins. With collectives there is no limit: all ranks run equally many."""


def record(step: TrainingStep, progress: Tell | None = None) -> Profile:
    """Run up to four steps and record the last one; the model and the sample are restored.

    Args, Raises: as for `recorded_step`.
    """
    return recorded_step(step, progress)[0]


def recorded_step(
    step: TrainingStep, progress: Tell | None = None, lean_losses: bool = True
) -> tuple[Profile, bool]:
    """Run up to four steps and record the last one; the model and the sample are restored.

    A callable sample, which is the user's own code, is called only twice; once more if it draws single random numbers
    (see NOTE [ Steps that vary ]), and once more if code that torch does not see writes parameters.

    Args:
        step: its optimizer is not run.
        lean_losses: whether the model's cross entropy runs as the lean loss, as in a planned model.

    Returns:
        The profile, and whether only the model's parameters and the sample get gradients in the step.

    Raises:
        ProfilingError: the model is planned already, has no parameters that need a gradient, or the step runs no
            backward.
    """
    model = step.model
    check_model(model)
    check_backwards_may_run(model)
    device = device_of(model)
    tell = progress or (lambda *_: None)
    gradients = [
        g for p in model.parameters() if (g := gradient_of(p)) is not None
    ]  # the step accumulates into these
    fixed = [*model.parameters(), *gradients, *model.buffers(), *step.inputs]
    # Counted with the optimizer.
    states = [] if step.optimizer is None else state_tensors(inner_optimizer(step.optimizer), device.type)
    with untouched(model, step.inputs) as restorer:
        tell("warm-up step", 0.0)
        buffers = Buffers(model, parameters=device_for(device).known)
        restorer.later(buffers.put_back)
        meter = WorkspaceMeter(device)
        runs = Runs(sets_up=has_units(model))
        all_losses = None if lean_losses else {}
        written_by_others: dict[OpOfStep, str] = {}

        def warmed_up(outcome: str) -> tuple[Tape, dict[str, Any] | None]:
            warm_up = Tape(device, meter)
            warm_up.single = SingleDraws(outcome)
            warm_up.saved.guard = Guard()
            skipped = [p for name, p in model.named_parameters() if name not in buffers.overwritten]
            unseen = warm_up.saved.unseen = UnseenWrites(warm_up, skipped)
            with meter.measuring():
                tables = runs.tried(warm_up, lambda: _run(step, warm_up, fixed, all_losses))
            buffers.put_back()
            if tables is not None:
                written_by_others.update(unseen.found())
            return warm_up, tables

        with states_made() as made:
            warm_up, tables = warmed_up(HIGH)
            if tables is None:
                warm_up, tables = warmed_up(CHANCE)
        if made and step.is_whole:
            runs.sets_up = True
            warm_up, tables = warmed_up(warm_up.single.outcome)
        if any(name in buffers.overwritten for name, _ in model.named_parameters()):
            warm_up, tables = warmed_up(warm_up.single.outcome)  # finds what has read them before
        if runs.draws and step.is_whole:
            _, low = warmed_up(LOW)
            tables = low if runs.to_record == LOW else tables
        losses = losses_of(model, tables or {}) if lean_losses else {}
        timer, guard = OpTimer(device), warm_up.saved.guard
        if guard is not None:
            guard.unfit.update(written_by_others)  # what has read such a value before is then found
        expected = max(1, len(warm_up.ops))
        with_others = any(is_collective(row["name"]) for row in warm_up.ops)
        started, disturbance = time.perf_counter(), Disturbance()
        for index, outcome in enumerate(_outcomes(step, runs)):
            timed = Tape(device, timer)
            timed.single = SingleDraws(outcome)
            timed.saved.guard = next_guard(guard)
            told = part(tell, 0.25 + 0.2 * index, 0.45 + 0.2 * index)
            timed.on_op = lambda done, told=told: told("timed step", done / expected)
            with other_random_numbers(model, index):
                run = functools.partial(_run, step, timed, fixed, losses)
                if runs.tried(timed, run, numbers=index) is not None:
                    guard = timed.saved.guard
            buffers.put_back()
            if time.perf_counter() - started > _TIMING_S and not with_others:
                break
        if (
            runs.to_record == LOW and runs.low_adds and not step.is_whole
        ):  # the warm-up did not run all of its ops
            _, tables = warmed_up(LOW)
            losses = losses_of(model, tables or {}) if lean_losses else {}
        tape = Tape(device, timer)
        tape.single = SingleDraws(runs.to_record)
        tape.saved.guard = next_guard(guard)
        told = part(tell, 0.65, 0.9)
        tape.on_op = lambda done: told("recorded step", done / expected)
        tape.storages.note_others(here([*fixed, *states]))
        start, numbers = time.perf_counter(), runs.numbers_to_record
        drawn = contextlib.nullcontext() if numbers is None else other_random_numbers(model, numbers)
        with drawn, recording(step, tape, fixed, losses):
            elapsed = time.perf_counter() - start
            times = timer.times()
            note = note_if_unsteady(times.values(), device, disturbance)
            unfit = mark(tape.ops, tape.calls, written_by_others)
            if tape.saved.guard is not None:
                unfit = (*unfit, *tape.saved.guard.mark(tape.ops, written_by_others))
            unfit = (*unfit, *buffers.mark(tape.calls))
            tables = tape_tables.finish(tape, names_of(model), meter.workspace_bytes, times)
            runs.add(tape, tables, numbers)
            its_own = {id(leaf) for leaf in (*model.parameters(), *step.inputs)}.issuperset(
                map(id, tape.leaves)
            )
    tell("engine costs", 0.9)
    check_recorded(tables, step.is_whole)
    checkpointed = notes_if_checkpointed(model)
    profile = with_parts(
        Profile(
            model=own_name(model),
            model_fingerprint=model_fingerprint(model),
            device=str(device),
            device_bytes=device_bytes(device),
            torch_version=torch.__version__,
            costs=engine_costs(device, bytes_per_op(tables["tape"])),
            measured_step_s=elapsed,
            notes=(
                *checkpointed,
                *notes_if_compiled(model, tape),
                *notes_if_uncounted(tape),
                *([] if checkpointed else notes_if_under_hooks(tape)),
                *notes_if_calls_differ(tape),
                *notes_if_sized_by_values(tape),
                *notes_if_drawn_on_host(tape),
                *runs.notes(),
                *unfit,
                *note,
                *note_on_device(device),
            ),
            facts=facts_of(tape, checkpointed, runs),
            **tables,
        )
    )
    return with_price_of_chunks(profile, device), its_own


def facts_of(tape: Tape, checkpointed: Sequence[str], runs: Runs | None = None) -> tuple[str, ...]:
    """The facts (see `FACTS`) about a recorded step.

    Args:
        checkpointed: notes on the model's own checkpointing.
        runs: of the step, if there were several.
    """
    by_values, _ = tape.calls.with_sizes_by_values()
    found = {
        OWN_CHECKPOINTING: checkpointed,
        VARYING: runs is not None and runs.varies,
        SIZED_BY_VALUES: by_values,
        COMPILED_FUNCTIONS: tape.calls.with_compiled_code(),
        LOSS_SIZED_BY_VALUES: is_loss_sized_by_values(tape),
        GRAPH_OF_BACKWARD: tape.calls.graph_of_backward.is_made,
    }
    return tuple(fact for fact, is_so in found.items() if is_so)


def _outcomes(step: TrainingStep, runs: Runs) -> list[str]:
    """Outcomes of single draws for the timed steps; none for a callable sample, the user's own code."""
    if step.is_whole:
        return []
    return [LOW, CHANCE] if runs.draws else [CHANCE] * _TIMED_STEPS


def bytes_per_op(tape: Sequence[Op]) -> int:
    """Average bytes that a forward op reads and writes."""
    moved = [op.moved_bytes for op in tape if not op.backward]
    return sum(moved) // max(1, len(moved))


@contextlib.contextmanager
def recording(
    step: TrainingStep,
    tape: Tape,
    fixed: list[torch.Tensor],
    losses: Losses | None,
    below: contextlib.AbstractContextManager[None] | None = None,
) -> Iterator[None]:
    """Context: run the step under the tape, and undo it at exit.

    Loss and output stay alive in the context, as in the usual loop, which holds them while its optimizer steps.

    Args:
        fixed: tensors that exist before the step.
        losses: as for `Instrumented`.
        below: a context for the step, entered before the tape.
    """
    tape.storages.indices_of(fixed)
    tape.storages.first_seen.step_begins(tape.device)
    held: list[Any] = []
    try:
        with (
            below or contextlib.nullcontext(),
            uncompiled(step.model),
            Instrumented(step.model, tape, lean_modules(step.model), losses),
            torch.autograd.graph.saved_tensors_hooks(tape.saved.pack, tape.saved.unpack),
            tape,
            _failures_located(tape, step),
            tape.single.of_python(),
        ):
            step.run(held)
        yield
    finally:
        held.clear()
        tape.restore()


@contextlib.contextmanager
def _failures_located(tape: Tape, step: TrainingStep) -> Iterator[None]:
    """Context: add the sample and the place of failure to the model's own errors, as a note."""
    try:
        yield
    except ProfilingError:
        raise
    except Exception as error:
        raise_if_by_torch_func(error)
        op, module = tape.failed_at or ("", "")
        add_note(error, step, (f"at {op}, in {module}, " if op else "") + "while it was recorded")
        raise


def raise_if_by_torch_func(error: BaseException) -> None:
    """Raise an error that names the cause if a recorded step takes gradients by torch.func."""
    if isinstance(error, RuntimeError) and _NO_HOOKS in str(error):
        raise ProfilingError(
            "the model takes gradients by torch.func (grad, vjp, jacrev, hessian), inside of which torch "
            "allows no hooks on saved tensors; autoac needs these, to record a step as well as to run its plans. "
            "Use torch.autograd.grad(..., create_graph=True) there. The model is as it was."
        ) from error


def _run(
    step: TrainingStep,
    tape: Tape,
    fixed: list[torch.Tensor],
    losses: Losses | None,
) -> dict[str, Any]:
    with recording(step, tape, fixed, losses):
        return tape_tables.finish(tape, {}, {}, {})


def losses_of(model: torch.nn.Module, tables: dict[str, Any]) -> Losses:
    """Modules that compute losses, as for `Instrumented`, except compiled ones: these have the compiler's loss."""
    compiled = list(compiled_modules(model))

    def runs_compiled(fqn: str | None) -> bool:
        return fqn is not None and any(is_inside(fqn, name) for name in compiled)

    found = losses_in_modules(tables["tape"], tables["calls"], lean=False)
    kept = {fqn: [name for name in names if not runs_compiled(name)] for fqn, names in found.items()}
    return {fqn: names for fqn, names in kept.items() if names and not runs_compiled(fqn)}


def check_recorded(tables: dict[str, Any], is_whole: bool) -> None:
    """Refuse a step in which the model was not trained.

    Args:
        is_whole: the user's code runs the backward; autoac's own need not run an op.

    Raises:
        ProfilingError: no backward ran, or no module was called.
    """
    if is_whole and not any(op.backward for op in tables["tape"]):
        raise ProfilingError(
            "the recorded step ran no backward: does the callable sample run forward, loss and backward of this model, "
            "with gradients on?"
        )
    if not tables["calls"]:
        raise ProfilingError(
            "the recorded step called no module of this model: does the callable sample train another one? (Modules of "
            "TorchScript are not seen.)"
        )


def names_of(model: torch.nn.Module) -> dict[int, tuple[str, str]]:
    """Kind and name of the storages that belong to the model, by key."""
    names: dict[int, tuple[str, str]] = {}

    def add(tensor: torch.Tensor, kind: str, name: str) -> None:
        for plain in here([tensor]):
            if plain.layout is torch.strided:
                names.setdefault(storage_key(plain), (kind, name))

    for name, parameter in model.named_parameters():
        gradient = gradient_of(parameter)
        if gradient is not None:
            add(gradient, "Gradient", name)
        add(parameter, "Parameter", name)
    for name, buffer in model.named_buffers():
        add(buffer, "Buffer", name)
    return names
