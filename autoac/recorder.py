"""Make a `Profile`: a warm-up step that measures workspace, steps that measure times, of which the last is recorded."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from autoac.as_cuda import CudaOps
from autoac.compat import is_compiled_wrapper, storage_key
from autoac.costs import device_rates, engine_costs
from autoac.engine.attach import planned
from autoac.fake import Faked, explained, fake_model
from autoac.private_results import PrivateResults
from autoac.regions import lean_modules
from autoac.scratch import Measured, measure_on_scratch
from autoac.step import Loss, make_step
from autoac.tape import Instrumented, Tape
from autoac.timing import Disturbance, OpTime, OpTimer, SignatureMeter, WorkspaceMeter, unsteady
from autoac.uncompiled import compiled_modules, is_inside, uncompiled
from autoac.untouched import tensors_of, untouched
from autoac_solver.errors import ProfilingError
from autoac_solver.losses import losses_in_modules
from autoac_solver.profile import Op, Profile

Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""


Losses = Mapping[str, Collection[str | None]]

_NO_HOOKS = "don't yet support saved tensor hooks"
"""In the error of torch.func where hooks are active; it has no type of its own."""
_TIMED_STEPS = 2
"""Steps that are timed before the recorded one: in a single step most ops of a backward are run only once."""
_TIMING_S = 10.0
"""No further one is begun after so long."""


def record(
    model: torch.nn.Module, sample: Any, loss: Loss | None = None, progress: Progress | None = None
) -> Profile:
    """Run up to four steps and record the last one; the model and the sample are left as they were.

    Args, Raises: as for `recorded_step`.
    """
    return recorded_step(model, sample, loss, progress)[0]


def recorded_step(
    model: torch.nn.Module,
    sample: Any,
    loss: Loss | None = None,
    progress: Progress | None = None,
    lean_losses: bool = True,
) -> tuple[Profile, bool]:
    """Run up to four steps and record the last one; the model and the sample are left as they were.

    A callable sample, which is the user's own code, is called twice only.

    Args:
        model, sample, loss: as for `autoac.profile`.
        lean_losses: whether the model's cross entropy is the lean one, as where a plan is on it.

    Returns:
        The profile, and whether the step gives gradients to nothing but the model's parameters and the sample.

    Raises:
        ProfilingError: the model is planned already, has no parameters that need a gradient, or the step runs no
            backward.
    """
    check_model(model)
    device = device_of(model)
    tell = progress or (lambda *_: None)
    step = make_step(model, sample, loss)
    gradients = [
        p.grad for p in model.parameters() if p.grad is not None
    ]  # the step adds to those that are there
    inputs = list(tensors_of(sample if not callable(sample) else ()))
    fixed = [*model.parameters(), *gradients, *model.buffers(), *inputs]
    with untouched(model, sample if not callable(sample) else ()):
        tell("warm-up step", 0.0)
        meter = WorkspaceMeter(device)
        warm_up = Tape(device, meter)
        with meter.measuring():
            tables = _run(model, step, warm_up, fixed, None if lean_losses else {})
        losses = _losses(model, tables) if lean_losses else {}
        timer = OpTimer(device)
        expected = max(1, len(warm_up.ops))
        started, disturbance = time.perf_counter(), Disturbance()
        for _ in range(0 if callable(sample) else _TIMED_STEPS):
            timed = Tape(device, timer)
            timed.on_op = lambda done: tell("timed step", 0.3 + 0.3 * min(1.0, done / expected))
            _run(model, step, timed, fixed, losses)
            if time.perf_counter() - started > _TIMING_S:
                break
        tape = Tape(device, timer)
        tape.on_op = lambda done: tell("recorded step", 0.6 + 0.3 * min(1.0, done / expected))
        tape.note_others(fixed)
        start = time.perf_counter()
        with _recording(model, step, tape, fixed, losses):
            elapsed = time.perf_counter() - start
            times = timer.times()
            note = _note_if_unsteady(times.values(), device, disturbance)
            tables = tape.finish(_names(model), meter.workspace_bytes, times)
            its_own = {id(leaf) for leaf in (*model.parameters(), *inputs)}.issuperset(map(id, tape.leaves))
    tell("engine costs", 0.95)
    _check_recorded(tables)
    profile = Profile(
        model=type(model).__name__,
        model_fingerprint=model_fingerprint(model),
        device=str(device),
        device_bytes=device_bytes(device),
        torch_version=torch.__version__,
        costs=engine_costs(device, _bytes_per_op(tables["tape"])),
        measured_step_s=elapsed,
        notes=(*_notes_if_compiled(model, tape), *_notes_if_uncounted(tape), *note, *_note_on_device(device)),
        **tables,
    )
    return profile, its_own


def record_fake(
    model: torch.nn.Module,
    sample: Any,
    loss: Loss | None = None,
    progress: Progress | None = None,
    measure: bool = True,
    as_cuda: bool = False,
    lean_losses: bool = True,
) -> Profile:
    """Record a step on fake tensors: nothing of the model is allocated, and it is left as it was.

    Its parameters may be on the meta device, which stands for the CPU then.

    Args:
        model, sample, loss: as for `autoac.profile`.
        measure: run each distinct op that can be afforded on scratch memory, for its time and workspace. What cannot
            be is estimated from this device's rates, as is everything without `measure`.
        as_cuda: record the ops that CUDA takes, see `as_cuda`. They cannot be run here, so `measure` must be off.
        lean_losses: as for `recorded_step`.

    Raises:
        ProfilingError: the step depends on values, or an op has no fake implementation; it names op and module.
    """
    check_model(model)
    device = device_of(model)
    device = torch.device("cpu") if device.type == "meta" else device
    tell = progress or (lambda *_: None)
    rates = device_rates(device)
    most_bytes = free_bytes(device) // 4
    results = PrivateResults(lambda signature: measure and signature.fits_in(most_bytes))
    tell("recording on fake tensors", 0.0)
    with untouched(model, sample if not callable(sample) else ()):
        fake = fake_model(model, sample, device)
        step = make_step(model, fake.sample, loss)
        # Twice, for the first sets up what is set up once, such as tables of positions.
        _, tables = _fake_tape(model, step, fake, results, device, as_cuda, None if lean_losses else {})
        tell("recording on fake tensors", 0.1)
        start = time.perf_counter()
        losses = _losses(model, tables) if lean_losses else {}
        tape, tables = _fake_tape(model, step, fake, results, device, as_cuda, losses)
        elapsed = time.perf_counter() - start
    _check_recorded(tables)
    signatures = {str(row["signature"]): row for row in tape.ops}
    found = Measured()
    disturbance = Disturbance()
    if measure:
        found = measure_on_scratch(
            [row["signature"] for row in tape.ops],
            {row["signature"]: rates.roofline_s(*_work(row)) for row in tape.ops}.__getitem__,
            device,
            most_bytes,
            lambda share: tell("timing distinct ops on scratch memory", 0.2 + 0.7 * share),
        )
    note = _note_if_unsteady(found.times.values(), device, disturbance)
    tell("engine costs", 0.95)
    times = {
        row["signature"]: found.times.get(row["signature"]) or OpTime.estimated(rates.roofline_s(*_work(row)))
        for row in signatures.values()
    }
    tables["tape"] = tape.timed(times, found.workspace_bytes)
    tables["storage_table"] = tape.resized(tables["storage_table"], found.result_bytes)
    return Profile(
        model=type(model).__name__,
        model_fingerprint=model_fingerprint(model),
        device=str(device),
        device_bytes=device_bytes(device),
        torch_version=torch.__version__,
        costs=engine_costs(device, _bytes_per_op(tables["tape"]) if measure else 0),
        measured_step_s=elapsed,
        mode="fake",
        notes=(
            *_fake_notes(results.unknown, found, len(signatures), measure, as_cuda),
            *_notes_if_compiled(model, tape),
            *_notes_if_uncounted(tape),
            *note,
        ),
        **tables,
    )


def _bytes_per_op(tape: Sequence[Op]) -> int:
    """What an op of forward reads and writes on average."""
    moved = [op.moved_bytes for op in tape if not op.backward]
    return sum(moved) // max(1, len(moved))


def _note_if_unsteady(
    times: Iterable[OpTime], device: torch.device, disturbance: Disturbance
) -> tuple[str, ...]:
    """A note if times that were measured under this should not be relied on."""
    # On a GPU ops are timed by its own clock, whatever the host waits for.
    shares = (disturbance.waited_share, disturbance.stolen_share) if device.type == "cpu" else (0.0, 0.0)
    note = unsteady(times, *shares)
    return (note,) if note else ()


def _note_on_device(device: torch.device) -> tuple[str, ...]:
    """A note on a device of another kind than those whose clock and memory we read."""
    if device.type in ("cpu", "cuda"):
        return ()
    return (
        f"recorded on {device}: autoac reads the clocks and the memory of CPU and CUDA devices only. Here times are "
        "the host's, which an op that runs on after its launch has not, and bytes are those of the tensors; plans are "
        "exact all the same, their overhead is a guess, and plan.verify cannot measure their peak",
    )


def _notes_if_compiled(model: torch.nn.Module, tape: Tape) -> list[str]:
    """Notes on compiled modules, which are recorded uncompiled, and on other compiled code, which is hardly seen."""
    notes = []
    if modules := list(compiled_modules(model)):
        notes.append(
            f"compiled by torch.compile, but recorded uncompiled: {_some(modules)}. With a plan of engine replay that "
            "recomputes anything they run uncompiled, and its peak holds. To have them compiled, take engine sac, or "
            "compile them after plan.apply (regions of replay run uncompiled all the same): what compiled code takes "
            "is not predicted then, so leave headroom, and see what plan.verify measures"
        )
    if running := tape.with_compiled_code():
        notes.append(
            f"functions compiled by torch.compile run in {_some(running)}: what they keep and take is not seen in "
            "full, so peaks can be larger than predicted. Have them uncompiled, here and in training, or leave "
            "headroom and see what plan.verify measures"
        )
    return notes


def _notes_if_uncounted(tape: Tape) -> list[str]:
    """A note on tensors whose storages are not those of a strided tensor: sparse, jagged, those of oneDNN."""
    modules, layouts = tape.with_uncounted()
    if not modules:
        return []
    return [
        f"tensors of layout {', '.join(layouts)} in {_some(modules)}: their memory is not counted, so peaks can be "
        "larger than predicted. Leave headroom and see what plan.verify measures"
    ]


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) if name else "the model itself" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _fake_tape(
    model: torch.nn.Module,
    step: Callable[[], Any],
    fake: Faked,
    results: PrivateResults,
    device: torch.device,
    as_cuda: bool,
    losses: Losses | None,
) -> tuple[Tape, dict[str, Any]]:
    for parameter, gradient in fake.gradients:
        parameter.grad = gradient
    tape = Tape(device, SignatureMeter())
    with (
        explained(lambda: tape.failed_at),
        CudaOps() if as_cuda else contextlib.nullcontext(),
        _recording(model, step, tape, fake.tensors, losses, fake.active(results)),
    ):
        return tape, tape.finish(_names(model), {}, {})


def _work(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["dtype"], row["flops"], row["moved_bytes"]


def _fake_notes(
    unknown: set[str], found: Measured, distinct: int, measure: bool, as_cuda: bool
) -> tuple[str, ...]:
    notes = ["recorded on fake tensors: nothing of the model was allocated"]
    if as_cuda:
        notes.append(
            "recorded without a GPU, with the ops that CUDA takes for attention, dropout and batch norm; profile there "
            "before training, for other ops may differ"
        )
    if unknown:
        on_cuda = ", and on a GPU recurrent layers run other ops" if as_cuda else ""
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


@contextlib.contextmanager
def _recording(
    model: torch.nn.Module,
    step: Callable[[], Any],
    tape: Tape,
    fixed: list[torch.Tensor],
    losses: Losses | None,
    below: contextlib.AbstractContextManager[None] | None = None,
) -> Iterator[None]:
    """Run the step under the tape; within the context everything is as the step has left it.

    Args:
        fixed: tensors that are there before the step.
        losses: as for `Instrumented`.
        below: a context for the step that the tape is to be above of.
    """
    for tensor in fixed:
        tape.storage_id(tensor)
    try:
        with (
            below or contextlib.nullcontext(),
            uncompiled(model),
            Instrumented(model, tape, lean_modules(model), losses),
            torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack),
            tape,
            _failures_located(tape),
        ):
            step()
        yield
    finally:
        tape.restore()


@contextlib.contextmanager
def _failures_located(tape: Tape) -> Iterator[None]:
    """The model's own errors are left as they are, with a note of where the step was."""
    try:
        yield
    except ProfilingError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and _NO_HOOKS in str(error):
            raise ProfilingError(
                "the model takes gradients by torch.func (grad, vjp, jacrev, hessian), inside of which torch "
                "allows no hooks on saved tensors; autoac needs these, to record a step as well as to run its plans. "
                "Use torch.autograd.grad(..., create_graph=True) there. The model is as it was."
            ) from error
        op, module = tape.failed_at or ("", "")
        where = f" at {op}, in {module}," if op else ""
        error.add_note(
            f"autoac: the step failed{where} while it was recorded; model and sample are as they were. Does the step "
            "run by itself, with this sample?"
        )
        raise


def _run(
    model: torch.nn.Module,
    step: Callable[[], Any],
    tape: Tape,
    fixed: list[torch.Tensor],
    losses: Losses | None,
) -> dict[str, Any]:
    with _recording(model, step, tape, fixed, losses):
        return tape.finish({}, {}, {})


def _losses(model: torch.nn.Module, tables: dict[str, Any]) -> Losses:
    """Which modules compute losses, as for `Instrumented`, but for what runs compiled: it has the compiler's loss."""
    compiled = list(compiled_modules(model))

    def runs_compiled(fqn: str | None) -> bool:
        return fqn is not None and any(is_inside(fqn, name) for name in compiled)

    found = losses_in_modules(tables["tape"], tables["calls"], lean=False)
    kept = {fqn: [name for name in names if not runs_compiled(name)] for fqn, names in found.items()}
    return {fqn: names for fqn, names in kept.items() if names and not runs_compiled(fqn)}


def _check_recorded(tables: dict[str, Any]) -> None:
    if not any(op.backward for op in tables["tape"]):
        raise ProfilingError(
            "the recorded step ran no backward: does the callable sample run forward, loss and backward of this model, "
            "with gradients on?"
        )
    if not tables["calls"]:
        raise ProfilingError(
            "the recorded step called no module of this model: does the callable sample train another one? (Modules of "
            "TorchScript are not seen.)"
        )


def _names(model: torch.nn.Module) -> dict[int, tuple[str, str]]:
    """Kind and name of the storages that belong to the model, by key."""
    names: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            names.setdefault(storage_key(parameter.grad), ("Gradient", name))
        names.setdefault(storage_key(parameter), ("Parameter", name))
    for name, buffer in model.named_buffers():
        names.setdefault(storage_key(buffer), ("Buffer", name))
    return names


def check_model(model: torch.nn.Module) -> None:
    """Refuse what cannot be profiled, before anything runs."""
    if not isinstance(model, torch.nn.Module):
        raise ProfilingError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
    if any(planned(module) for module in model.modules()):
        raise ProfilingError(
            "this model has a plan applied: call plan.remove(model) before profiling it again."
        )
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise ProfilingError(
            "this model has lazy parameters or buffers that are not initialised: run it once first."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ProfilingError(
            "no parameter of this model requires grad, so a training step has nothing to do."
        )
    devices = {p.device for p in model.parameters() if p.requires_grad}
    if len(devices) > 1:
        raise ProfilingError(
            f"the model's parameters are on {sorted(map(str, devices))}; one device is supported."
        )


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module itself where `torch.compile` returned a wrapper of it."""
    return model._orig_mod if is_compiled_wrapper(model) else model  # type: ignore[return-value]


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the model's trained parameters."""
    return next(p.device for p in model.parameters() if p.requires_grad)


def device_bytes(device: torch.device) -> int:
    """The device's total memory in bytes, 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is not in use, in bytes; its total where nobody tells, as on macOS."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return device_bytes(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def model_fingerprint(model: torch.nn.Module) -> str:
    """Tells this model's structure from others: names and classes of modules, shapes and types of parameters."""
    lines = [f"{name}:{type(module).__name__}" for name, module in model.named_modules()]
    lines += [f"{name}:{tuple(p.shape)}:{p.dtype}:{p.requires_grad}" for name, p in model.named_parameters()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
