"""Make a `Profile` of a step on fake tensors: ops with shapes and bytes; distinct ops are timed in isolation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoac.device import device_for
from autoac.ops.private_results import PrivateResults
from autoac.price.chunked_loss import with_price_of_chunks
from autoac.price.engine_costs import device_rates, engine_costs
from autoac.price.isolated_ops import OnScratch, measure_on_scratch
from autoac.price.meters import Disturbance, OpTime, SignatureMeter
from autoac.progress import Tell
from autoac.record.cuda.attention import Capability
from autoac.record.cuda.ops import CudaOps, CudaResults
from autoac.record.fake import Faked, explained, fake_model
from autoac.record.notes import (
    note_if_unsteady,
    notes_if_checkpointed,
    notes_if_compiled,
    notes_if_sized_by_values,
    notes_if_uncounted,
    notes_if_under_hooks,
    notes_on_fake,
)
from autoac.record.recorder import (
    Losses,
    bytes_per_op,
    check_recorded,
    facts_of,
    losses_of,
    names_of,
    recording,
)
from autoac.record.single_draws import HIGH, LOW, SingleDraws
from autoac.record.tape import tables as tape_tables
from autoac.record.tape.tape import Tape
from autoac.record.varying import Runs
from autoac.step.model import check_model, device_bytes, device_of, free_bytes, model_fingerprint
from autoac.step.restore import untouched
from autoac.step.step import TrainingStep
from autoac.step.units import has_units, own_name
from autoac_solver.plan.parts import with_parts
from autoac_solver.records.profile import Profile


def record_fake(
    step: TrainingStep,
    progress: Tell | None = None,
    measure: bool = True,
    as_cuda: Capability | None = None,
    lean_losses: bool = True,
    shard: Callable[[], None] | None = None,
) -> Profile:
    """Record a step on fake tensors. Allocates nothing of the model and leaves it unchanged.

    Parameters on the meta device are taken to be on the CPU.

    Args:
        step: its optimizer is not run.
        measure: run each distinct op on scratch memory, for its time and workspace, unless it is too long or too large.
            Those ops, and all ops without `measure`, are estimated from this device's rates.
        as_cuda: record the ops that a GPU of this capability takes, see `CudaOps`. They cannot be run here, so
            `measure` must be off.
        lean_losses: as for `recorded_step`.
        shard: called once the model's tensors are fake; the model is then a private copy.

    Raises:
        ProfilingError: the step depends on values, or an op has no fake implementation; it names op and module.
    """
    model = step.model
    check_model(model)
    device = device_of(model)
    device = torch.device("cpu") if device.type == "meta" else device
    tell = progress or (lambda *_: None)
    rates = device_rates(device)
    most_bytes = free_bytes(device) // 4
    cuda_ops = None if as_cuda is None else CudaOps(as_cuda)
    results = PrivateResults(lambda signature: measure and signature.fits_in(most_bytes))
    tell("recording on fake tensors", 0.0)
    with untouched(model, step.inputs):
        fake = fake_model(step, device)
        if shard is not None:
            fake = fake.sharded(shard)
        runs = Runs(sets_up=has_units(model))

        def run(outcome: str, losses: Losses | None) -> tuple[Tape, dict[str, Any] | None]:
            tape = Tape(device, SignatureMeter())
            tape.single = SingleDraws(outcome)
            return tape, runs.tried(tape, lambda: _run(fake, tape, results, cuda_ops, losses))

        # Run twice: the first run does one-time setup, such as position tables.
        all_losses = None if lean_losses else {}
        _, tables = run(HIGH, all_losses)
        low = run(LOW, all_losses)[1] if runs.draws else None
        if runs.to_record == LOW:
            tables = low
        tell("recording on fake tensors", 0.1)
        start = time.perf_counter()
        losses = losses_of(model, tables) if lean_losses and tables else all_losses
        tape, tables = run(runs.to_record, losses)
        assert tables is not None
        elapsed = time.perf_counter() - start
    check_recorded(tables, step.is_whole)
    signatures = {str(row["signature"]): row for row in tape.ops}
    found = OnScratch()
    disturbance = Disturbance()
    if measure:
        found = measure_on_scratch(
            [row["signature"] for row in tape.ops],
            {row["signature"]: rates.roofline_s(*_work(row)) for row in tape.ops}.__getitem__,
            device,
            most_bytes,
            lambda share: tell("timing distinct ops on scratch memory", 0.2 + 0.7 * share),
        )
    note = note_if_unsteady(found.times.values(), device, disturbance)
    tell("engine costs", 0.95)
    launch_s = rates.launch_s if device_for(device).asynchronous else 0.0
    times = {
        row["signature"]: found.times.get(row["signature"])
        or OpTime.estimated(rates.roofline_s(*_work(row)), launch_s)
        for row in signatures.values()
    }
    tables["tape"] = tape_tables.timed(tape.ops, times, found.workspace_bytes, with_others=False)
    tables["storage_table"] = tape_tables.resized(
        tape.ops, tables["storage_table"], found.result_bytes, device, tape.storages.in_host_memory
    )
    checkpointed = notes_if_checkpointed(model)
    profile = with_parts(
        Profile(
            model=own_name(model),
            model_fingerprint=model_fingerprint(model),
            device=str(device),
            device_bytes=device_bytes(device),
            torch_version=torch.__version__,
            costs=engine_costs(device, bytes_per_op(tables["tape"]) if measure else 0),
            measured_step_s=elapsed,
            mode="fake",
            notes=(
                *notes_on_fake(results.unknown, found, len(signatures), measure, cuda_ops),
                *runs.notes(),
                *checkpointed,
                *([] if checkpointed else notes_if_under_hooks(tape)),
                *notes_if_compiled(model, tape),
                *notes_if_uncounted(tape),
                *notes_if_sized_by_values(tape),
                *note,
            ),
            facts=facts_of(tape, checkpointed, runs),
            **tables,
        )
    )
    return with_price_of_chunks(profile, device) if measure else profile


def _run(
    fake: Faked, tape: Tape, results: PrivateResults, cuda_ops: CudaOps | None, losses: Losses | None
) -> dict[str, Any]:
    fake.start_anew()
    with (
        explained(fake.step, lambda: tape.failed_at),
        cuda_ops or contextlib.nullcontext(),
        recording(
            fake.step, tape, fake.tensors, losses, fake.active(_above_fakes(results, cuda_ops is not None))
        ),
    ):
        return tape_tables.finish(tape, names_of(fake.step.model), {}, {})


@contextlib.contextmanager
def _above_fakes(results: PrivateResults, as_cuda: bool) -> Iterator[None]:
    with CudaResults() if as_cuda else contextlib.nullcontext(), results:
        yield


def _work(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["dtype"], row["flops"], row["moved_bytes"]
