"""A plan in a few lines: the request, the result, and notes."""

from __future__ import annotations

from collections.abc import Sequence

from autoac_solver.build.engines import engine_model
from autoac_solver.plan.recorded.programs import tails_compiled
from autoac_solver.plan.recorded.report import about_caches, about_torchs_loss, left_bytes
from autoac_solver.plan.recorded.step import PlannedStep, step_of
from autoac_solver.plan.reserved import about_unknown
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.devices import is_cuda
from autoac_solver.records.format import format_bytes, format_seconds
from autoac_solver.records.names import module_in_words
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import Profile
from autoac_solver.show import refusals

_MEASURED = 0.95
"""If at least this share of the ops' time was measured, the summary does not mention the rest."""
_HOST_BOUND = 0.1
"""The summary mentions the device's idle time from this share of the step on."""
_LINES = 14
"""Most lines of a summary: the command line adds one that says where the plan was written."""
_FEW = 3
"""Most lines for policies, and for notes, in a summary."""


def summary(record: PlanRecord) -> str:
    """A plan in at most `_LINES` lines; `explain` and `notes` have the rest."""
    step = step_of(record)
    head, losses = _head(record, step), _losses(record)[:1]
    said = [_row("note", note) for note in notes(record)]
    room = _LINES - len(head) - len(losses) - 1
    policies = _cut(_policies(record), min(_FEW, max(1, room - min(_FEW, len(said)))), "policy")
    notes_shown = _cut(said, min(_FEW, max(1, room - len(policies))), "note")
    return "\n".join([*head, *policies, *losses, *notes_shown, f"The peak lies at {step.peak_where}."])


def summary_lines(record: PlanRecord, step: PlannedStep) -> tuple[str, ...]:
    """The lines of `summary` for an explanation, in full."""
    return (
        *_head(record, step),
        *_compiled(record),
        *_policies(record),
        *_losses(record),
        *refusals.lines(record, step),
        *(_row("note", note) for note in notes(record)),
    )


def notes(record: PlanRecord) -> tuple[str, ...]:
    """Notes on a plan: how its step was recorded, and possible improvements."""
    profile, engine = record.profile, engine_model(record.engine)
    about = [
        about_torchs_loss(profile, step_of(record).peak_where),
        about_caches(profile, record.engine) if engine.runs_code_twice or engine.compiles else "",
        about_held_results(record),
    ]
    return (*needless(record), *filter(None, about), *profile.notes)


def needless(record: PlanRecord) -> tuple[str, ...]:
    """A note if the budget needs no checkpointing, else nothing."""
    spare_bytes = record.budget_bytes - record.headroom_bytes - record.unplanned_peak_bytes
    if record.predicted_extra_s:
        return ()
    if record.budget_of == "reserved":
        if record.chunked_losses or any(region.wrapped for region in record.regions):
            return ()
        return (
            f"no checkpointing is needed: with nothing recomputed the step reserves "
            f"{format_bytes(record.predicted_reserved_bytes or 0)}, which the budget leaves room for",
        )
    if spare_bytes < 0:
        return ()
    return (
        f"no checkpointing is needed: with nothing recomputed the step takes "
        f"{format_bytes(record.unplanned_peak_bytes)}, which the budget leaves room for",
    )


def about_held_results(record: PlanRecord) -> str:
    """A note if a loop that holds the model's output in the next forward would exceed the budget, else ""."""
    left = left_bytes(record.profile)
    peak = step_of(record).peak_in_forward(left) if left else 0
    if peak <= record.budget_bytes or record.budget_of == "reserved":
        return ""
    return (
        f"a loop that still holds the model's output while the next forward runs (output = model(...), without "
        f"del output after backward) takes {format_bytes(peak)}, above the budget: drop it, plan with a headroom of "
        f"{format_bytes(left)}, or use autoac.auto, which sees what the loop holds"
    )


def about_times(profile: Profile) -> str:
    """The origin of the ops' times if they were not measured with the step, else ""."""
    shares = profile.time_shares
    if not shares or shares.get("measured", 0.0) >= _MEASURED:
        return ""
    if shares.get("table", 0.0) + shares.get("measured", 0.0) >= _MEASURED:
        return "times from a cost table"
    return "times estimated"


def share_of_step(seconds: float, record: PlanRecord) -> float:
    """Seconds as a share of the step with nothing recomputed."""
    return seconds / record.predicted_step_s if record.predicted_step_s else 0.0


def _row(name: str, text: str) -> str:
    return f"  {name:<14}  {text}"


def _cut(rows: Sequence[str], most: int, name: str) -> list[str]:
    """The first rows, and a row with the number of the others."""
    if len(rows) <= most:
        return list(rows)
    left = len(rows) - most + 1
    how_many = f"and {left} more" if most > 1 else f"{left} of them"
    return [*rows[: most - 1], _row(name, f"{how_many}: explain(), or --details")]


def _head(record: PlanRecord, step: PlannedStep) -> list[str]:
    of = " of reserved memory" if record.budget_of == "reserved" else ""
    headroom = f", {format_bytes(record.headroom_bytes)} of it headroom" if record.headroom_bytes else ""
    untouched = sum(not region.wrapped for region in record.regions)
    compiled = sum(region.point != EAGER for region in record.regions)
    words = f"{compiled} are compiled, and {untouched} " if compiled else f"{untouched} "
    times = about_times(record.profile)
    return [
        f"Plan for {record.model} on {record.device}, engine {record.engine} ({record.engine_reason}).",
        _row("budget", f"{format_bytes(record.budget_bytes)}{of}{headroom}"),
        _row(
            "predicted peak",
            f"{format_bytes(record.predicted_peak_bytes)}; with nothing recomputed "
            f"{format_bytes(record.unplanned_peak_bytes)}; resident before the step "
            f"{format_bytes(record.resident_bytes)}",
        ),
        *_reserved(record),
        *_lanes(step),
        _row(
            "extra time",
            f"{format_seconds(record.predicted_extra_s)} of a step of {format_seconds(record.predicted_step_s)}: "
            f"{share_of_step(record.predicted_extra_s, record):.1%}" + (f" ({times})" if times else ""),
        ),
        _row(
            "proved",
            f"{record.status}: no plan is faster by more than {record.gap:.2%} of the step "
            f"({record.solver}, {record.solve_s:.1f} s)",
        ),
        *([_row("sample", record.profile.sample)] if record.profile.sample else []),
        _row(
            "regions",
            f"{len(record.regions)}, of which {words}are left untouched (nothing to recompute)",
        ),
    ]


def _lanes(step: PlannedStep) -> list[str]:
    """Host and device times of the planned step, with advice if the device waits for the host."""
    lanes = step.lanes
    if lanes is None:
        return []
    rows = [
        _row(
            "two clocks",
            f"the host works {format_seconds(lanes.host_s)} of the planned step of {format_seconds(lanes.end_s)}, the "
            f"device {format_seconds(lanes.device_s)}",
        )
    ]
    if lanes.idle_share >= _HOST_BOUND:
        rows.append(
            _row(
                "host-bound",
                f"the device waits for the host in {lanes.idle_share:.0%} of the step: a larger batch, torch.compile "
                "or CUDA graphs would help more than other decisions",
            )
        )
    return rows


def _reserved(record: PlanRecord) -> list[str]:
    """The row on memory reserved by CUDA's caching allocator."""
    if not is_cuda(record.profile.device):
        return []
    if record.predicted_reserved_bytes is None:
        why = about_unknown(record.allocator, engine_model(record.engine).compiles)
        return [_row("reserved", f"not predicted: {why}")]
    more = record.predicted_reserved_bytes - record.predicted_peak_bytes
    under = f" with {record.allocator}" if record.allocator else ""
    return [
        _row(
            "reserved",
            f"{format_bytes(record.predicted_reserved_bytes)}, {format_bytes(more)} of it not allocated at the peak: "
            f"CUDA's caching allocator{under}, simulated",
        )
    ]


def _compiled(record: PlanRecord) -> list[str]:
    """Rows on compiled and measured regions, and on those that are not compiled."""
    table = record.profile.compiled
    if table is None or not engine_model(record.engine).compiles:
        return []
    points = sum(len(region.points) for region in table.regions if not region.failure)
    rows = [
        _row(
            "compiled",
            f"{points} points of {len(table.regions)} distinct regions were measured in {table.seconds:.0f} s",
        )
    ]
    for region in table.regions:
        if region.failure:
            name = record.profile.module_name(region.calls[0])
            more = f" and {len(region.calls) - 1} more" if len(region.calls) > 1 else ""
            rows.append(_row("not compiled", f"{name!r}{more}, which engine replay runs: {region.failure}"))
    return rows


def _losses(record: PlanRecord) -> list[str]:
    """Rows on the cross entropies that the plan compiles, makes lean or chunks."""
    how = "is computed over chunks of rows" if record.chunked_losses else "goes backward in place"
    told = dict.fromkeys(record.losses, f"{how}, with torch's bits")
    compiled = tails_compiled(record.profile, record.regions)
    told |= dict.fromkeys(compiled, "is compiled, with what comes after its blocks")
    return [
        _row("loss", f"the cross entropy of {module_in_words(fqn)} {words}") for fqn, words in told.items()
    ]


def _policies(record: PlanRecord) -> list[str]:
    """Rows on the user's policies and how far they are followed."""
    lines = []
    for applied in record.policies:
        policy, label = applied.policy, ""
        if not policy.is_must:
            label = f", {applied.followed} {'kept' if policy.saves else 'recomputed'}"
        name = f"{policy.name}: {policy.decision}" if policy.name else str(policy)
        lines.append(_row("policy", f"{name}: {applied.values} values{label}"))
    if any(not (applied.policy.is_must or applied.policy.permits) for applied in record.policies):
        lines.append(
            _row(
                "hints",
                f"those that were not followed count as {format_seconds(record.hint_s)} in what was minimised; what "
                "was proved is about time and hints together",
            )
        )
    return lines
