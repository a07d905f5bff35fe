"""Simulated reserved memory of a plan on a GPU, and plans whose reserved memory fits a budget."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from autoac_solver.allocator.options import AllocatorOptions, options_in_environment, parse_options
from autoac_solver.allocator.step import ReservedMemory
from autoac_solver.build.built import Built
from autoac_solver.plan.choices import Choice, Choices
from autoac_solver.plan.recorded.programs import settled
from autoac_solver.plan.recorded.report import describe_position
from autoac_solver.problem.simulator import Simulator
from autoac_solver.problem.solution import Solution
from autoac_solver.records.arguments import Tell
from autoac_solver.records.devices import is_cuda
from autoac_solver.records.errors import AllocatorOptionsError, InfeasibleBudgetError, NoPlanInTimeError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import NEVER, OPTIMIZER_STEP, Profile

BUDGETS_OF = ("allocated", "reserved")

_ROUNDS = 12
"""Most limits of allocated memory tried for one budget of reserved memory."""
_NEAR = 0.002
"""The search stops when its limits are within this share of the budget."""


def check_budget_of(budget_of: str, device: str) -> None:
    """Check `budget_of`.

    Args:
        budget_of: see `BUDGETS_OF`.
        device: torch's name of the device.

    Raises:
        ValueError: it is not in `BUDGETS_OF`, or the device has no reserved memory.
        AllocatorOptionsError: the options in the environment are not understood.
    """
    if budget_of not in BUDGETS_OF:
        raise ValueError(f"budget_of is {budget_of!r}; possible are {', '.join(map(repr, BUDGETS_OF))}.")
    if budget_of == "reserved":
        if not is_cuda(device):
            raise ValueError(
                f"budget_of='reserved' is for CUDA, whose allocator reserves more than it hands out; the step is on "
                f"{device!r}. Leave it out, or profile with device='h100' or another GPU."
            )
        parse_options(options_in_environment())


def allocator_of(profile: Profile) -> str:
    """The allocator options with which a plan for this profile is made, as text; "" for none."""
    return "".join(options_in_environment().split()) if is_cuda(profile.device) else ""


def reserved_memory(profile: Profile, built: Built, options: AllocatorOptions) -> ReservedMemory:
    """A simulator of the memory that the allocator reserves for plans of a problem.

    The optimizer's state and the temporaries of its step are one number each in a profile. They are simulated as blocks
    of the parameters' sizes, as which optimizers allocate them.
    """
    parameters = [s.bytes for s in profile.storage_table if s.kind == "Parameter" and s.alloc == NEVER]
    resident: list[int] = []
    for storage in profile.storage_table:
        if storage.alloc == NEVER:
            is_state = storage.kind == "Optstate"
            resident += like_parameters(storage.bytes, parameters) if is_state else [storage.bytes]
    return ReservedMemory(
        Simulator(built.problem),
        resident,
        options,
        profile.device_bytes,
        _parts_of_optimizer(profile, built, parameters),
    )


def _parts_of_optimizer(
    profile: Profile, built: Built, parameters: Sequence[int]
) -> dict[int, Sequence[int]]:
    """The blocks of the optimizer's temporaries, which are one lifetime at the end of the step."""
    steps = [op for op in profile.tape if op.name == OPTIMIZER_STEP and op.workspace_bytes]
    if not steps:
        return {}
    size = steps[-1].workspace_bytes
    lifetimes = built.problem.lifetimes
    last = max(
        range(len(lifetimes)), key=lambda index: (lifetimes[index].storage < 0, lifetimes[index].start)
    )
    return {last: like_parameters(size, parameters)} if lifetimes[last].bytes == size else {}


def like_parameters(total: int, parameters: Sequence[int]) -> list[int]:
    """Sizes of blocks as large as the parameters, in their order and over again, that add up to a total."""
    if not any(parameters):
        return [total]
    sizes: list[int] = []
    for size in itertools.cycle(filter(None, parameters)):
        if total <= 0:
            break
        sizes.append(min(size, total))
        total -= sizes[-1]
    return sizes


def reserved_bytes(profile: Profile, built: Built, decisions: Sequence[int], allocator: str) -> int | None:
    """Peak reserved bytes of the planned step.

    Args:
        allocator: its options, as text.

    Returns:
        Bytes. None if unknown: not on CUDA, or with compiled regions, or for the reason given by `about_unknown`.
    """
    if not is_cuda(profile.device) or built.points:  # Allocations of compiled code are unknown.
        return None
    try:
        options = parse_options(allocator)
    except AllocatorOptionsError:
        return None
    return reserved_memory(profile, built, options).peak_bytes_or_none(decisions)


def about_unknown(allocator: str, compiles: bool) -> str:
    """Why a plan's reserved memory is unknown on CUDA under these options.

    Args:
        compiles: whether the plan has compiled regions.
    """
    if compiles:
        return "the blocks that compiled code allocates are not known."
    try:
        parse_options(allocator)
    except AllocatorOptionsError as error:
        return str(error)
    return (
        "the planned step does not fit the share of the device that per_process_memory_fraction allows, or more is "
        "reserved in every step: with this max_split_size_mb free blocks stay too large for the requests that come."
    )


class WithinReserved:
    """Search for the fastest plan whose reserved memory is within a limit.

    Reserved memory is no sum over lifetimes, so the integer program cannot bound it. It bounds allocated memory by a
    limit instead, at first the budget itself. The plan's reserved memory is simulated, and the limit is lowered until
    that fits, then raised half-way to the lowest limit that did not fit.

    Reserved memory is never less than allocated memory, so the bound of the first limit holds: no plan that reserves
    at most the budget is faster.

    Args:
        choices: choices of regions.
        limit: of reserved memory, bytes.
        allocator: its options, as text.
    """

    def __init__(self, choices: Choices, limit: int, allocator: str) -> None:
        self._choices, self._limit, self._allocator = choices, limit, allocator
        self._options = parse_options(allocator)
        self._memory: dict[int, ReservedMemory] = {}
        self._best: tuple[Choice, Solution] | None = None
        self._least: tuple[int, tuple[int, ...], Choice] | None = None
        """The least reserved bytes of any plan above the limit, its decisions, and its choice of regions."""
        self._late = False

    def solve(self, time_limit_s: float, gap: float, tell: Tell) -> tuple[Choice, Solution]:
        """See the class. The solution's status and gap refer to all plans that reserve at most the limit.

        Raises:
            InfeasibleBudgetError, NoPlanInTimeError: as for `Choices.best`.
            AllocatorOptionsError: every plan exceeds the share of the device that the options allow.
        """
        deadline = time.perf_counter() + time_limit_s
        step_s = self._choices.profile.step_s
        fits, fails, target, bound_s = 0, self._limit + 1, self._limit, 0.0
        tried: set[int] = set()
        self._best = self._least = None
        self._late = False
        for round_ in range(_ROUNDS):
            left_s = deadline - time.perf_counter()
            if round_ and left_s <= 0:
                self._late = True
                break
            tried.add(target)
            tell(f"reserved memory: at most {format_bytes(target)} allocated", round_ / _ROUNDS)
            try:
                choice, solution = self._choices.best(target, max(0.1, left_s / 2), gap)
            except InfeasibleBudgetError as error:
                self._note_least(error)
                if not round_ and self._least is None:
                    raise
                # Another plan of the same peak as the error's may reserve less.
                target = error.minimum_bytes
                if self._best is not None or target > self._limit or target in tried:
                    break  # Reserved memory is at least allocated memory.
                continue
            except NoPlanInTimeError:
                if not round_:
                    raise
                self._late = True
                break
            bound_s = bound_s if round_ else solution.bound_s
            reserved = self._reserved_by(choice, solution.decisions)
            if reserved is not None and reserved <= self._limit:
                fits = max(fits, target)
                if self._best is None or solution.objective_s < self._best[1].objective_s:
                    self._best = choice, solution
                if not round_ or solution.objective_s - bound_s <= gap * step_s:
                    break
            else:
                fails = min(fails, target)
                self._note(reserved, solution.decisions, choice)
            if fails - fits <= _NEAR * self._limit:
                break
            over = self._limit // 20 if reserved is None else reserved - self._limit
            target = (fits + fails) // 2 if self._best else min(solution.peak_bytes, fails) - max(over, 512)
            if target <= 0:
                break
        if self._best is None:
            raise self._infeasible()
        choice, solution = self._best
        return choice, solution.bounded(bound_s, gap, step_s)

    def _note_least(self, error: InfeasibleBudgetError) -> None:
        """Note what the error's plan of least peak reserves."""
        for choice in self._choices.built:
            if len(choice.built.problem.groups) != len(error.decisions):
                continue
            if choice.prepared.simulator.simulate(error.decisions).peak_bytes == error.minimum_bytes:
                self._note(self._reserved_by(choice, error.decisions), error.decisions, choice)
                return

    def _note(self, reserved: int | None, decisions: tuple[int, ...], choice: Choice) -> None:
        if reserved is not None and reserved > self._limit and (not self._least or reserved < self._least[0]):
            self._least = reserved, decisions, choice

    def _reserved_by(self, choice: Choice, decisions: Sequence[int]) -> int | None:
        """Reserved bytes of a plan; None if it exceeds the process's memory fraction, or grows with each step."""
        if id(choice) not in self._memory:
            self._memory[id(choice)] = reserved_memory(self._choices.profile, choice.built, self._options)
        return self._memory[id(choice)].peak_bytes_or_none(settled(choice.built, decisions))

    def _infeasible(self) -> InfeasibleBudgetError | AllocatorOptionsError:
        if self._least is None:
            return AllocatorOptionsError(f"no plan was found: {about_unknown(self._allocator, False)}")
        reserved, decisions, choice = self._least
        peak = choice.prepared.simulator.simulate(decisions)
        error = InfeasibleBudgetError(self._limit, reserved, False, decisions, peak.peak_position)
        error.where = describe_position(self._choices.profile, choice.built, peak.peak_position)
        error.reserved_for_bytes = peak.peak_bytes
        error.suggestions = (
            f"budget_of='allocated': that plan allocates {format_bytes(peak.peak_bytes)}, and the allocator gives back "
            "what it holds for later before it runs out of memory",
        )
        if not self._options.expandable_segments:
            grown = replace(self._options, expandable_segments=True)
            memory = reserved_memory(self._choices.profile, choice.built, grown)
            less = memory.peak_bytes_or_none(settled(choice.built, decisions))
            if less is not None and less < reserved:
                error.suggestions = (
                    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the same plan would reserve "
                    f"{format_bytes(less)}",
                    *error.suggestions,
                )
        if self._late:
            error.suggestions = (*error.suggestions, "more time (time_limit_s): the search was cut short")
        return error
