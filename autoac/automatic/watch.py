"""Detection of steps that the plan was not made for."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoac.automatic.optimizers import trained_in
from autoac.automatic.recording import MOST_RECORDINGS, StepRecording
from autoac.automatic.report import sizes_vary
from autoac.execute.attach import put_on_again
from autoac.execute.watch.other_calls import outermost, unwatch_other_calls, watch_more_calls, watch_newcomers
from autoac.execute.watch.unplanned_backward import WITH_A_GRAPH, GraphOfBackward, before_backward
from autoac.execute.watch.unplanned_calls import UnplannedCalls, unwatch_calls
from autoac.plans import Plan
from autoac.step.inputs import described, elements_of, without_autocast
from autoac.step.model import has_gradients
from autoac_solver.records.profile import GRAPH_OF_BACKWARD, VARYING

_LONGEST_FIRST = "Let all micro-batches of the first step be as long as any later one"
_MOST_BETWEEN = 64
"""A step that differs from the planned one is expected again as far away as the last one, up to so many steps."""
_MOST_UNSEEN = 3
"""Steps of one optimizer without a call of the model that are not reported."""
_MOST_FITTING = 8
"""Steps with more elements that are recorded to find that they fit under the plan."""
_MOST_FOR_CALLS = 16
"""Steps that are recorded, under on_larger="replan", to find one that calls a module as often as an earlier one."""
_LESS_IN_A_ROW = 2
"""Steps with fewer ops than the first one before another one is recorded."""
_LESS = "a module ran fewer ops than in the first step, which may have set something up"
_MICRO_BATCHES = (
    "the model is called again before its gradients are cleared, and the recorded step called it once: these gradients "
    "are not planned for, and this step may take more than the budget. Let the first step have as many micro-batches "
    "as any other."
)
_GRADIENTS = "a step begins with gradients, and the recorded one began without, so this one may take more"


def _newcomers(names: Sequence[str], recordings: int) -> Finding:
    """A step called these modules, which none of the recorded steps has called."""
    words = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return Finding(
        "newcomers",
        f"the steps of this loop vary: {words} {'was' if len(names) == 1 else 'were'} called, and in none of "
        f"{recordings} recorded steps with the others. Their memory is not planned for, so a step may take more "
        "than the budget: plan beforehand with autoac.plan. Where random numbers skip layers, it plans for a step "
        "that calls them all; else pass it a function that runs a step of each kind as the sample.",
        f"the step before called {words}, which the recorded one had not: recording this step",
        plan_may_do=True,
        varies=True,
    )


def _more_often(words: str, is_new: bool) -> Finding:
    """A step called a module more often than the recorded one did."""
    return Finding(
        "more often",
        f"the steps of this loop vary: {words}. The memory of the further calls is not planned for, so a step may take "
        "more than the budget: plan beforehand with autoac.plan, with a function that runs a step of the most calls "
        "as the sample, or leave headroom (headroom=). With measure=True and on_larger='replan' later steps are "
        "measured, and planned for.",
        f"{words}: recording this step",
        is_new=is_new,
        plan_may_do=True,
        varies=True,
    )


def _by_place(plan: Plan) -> tuple[int, ...]:
    """Elements of the recorded step's calls, if they are unequal and the plan holds for their order only; else ()."""
    record = plan.record
    sizes = record.profile.call_elements
    no_places = record.several is None and any(region.wrapped for region in record.regions)
    return sizes if len(set(sizes)) > 1 and (no_places or not record.profile.any_order) else ()


@dataclass(frozen=True)
class Finding:
    """Something in a step that the plan was not made for, and the reaction.

    Args:
        key: identifies the warning, which is given once.
        warning: text of the warning, if no step is recorded.
        log: text for the log when the step that begins is recorded; "" not to record it.
        is_new: record the step however many were recorded before.
        plan_may_do: keep the plan if the recorded step needs no more; with `by_outcome` if it fits under that plan.
        plan_is_gone: do not keep the plan if no other one fits.
        is_free: do not count the recording.
        varies: the loop's steps differ in what they call.
    """

    key: str
    warning: str = ""
    log: str = ""
    is_new: bool = False
    plan_may_do: bool = False
    by_outcome: bool = False
    plan_is_gone: bool = False
    is_free: bool = False
    varies: bool = False


class _Graph:
    """The graph of a call's result: alive as long as the graph is.

    Args:
        seen: is told of a backward through it that makes a graph.

    Attributes:
        went_backward: something has gone backward through it.
    """

    __slots__ = ("__weakref__", "_seen", "went_backward")

    def __init__(self, seen: GraphOfBackward) -> None:
        self.went_backward = False
        self._seen = seen

    def __call__(self, gradients: Any) -> None:
        """The hook of a node."""
        self.went_backward = True
        self._seen(gradients)


class OtherCalls:
    """Calls of modules that the recorded step did not make: of others, as with layer drop, or more of the same.

    Args:
        model, on_larger: as for `Watch`.
    """

    def __init__(self, model: torch.nn.Module, on_larger: str) -> None:
        self._model = model
        self._goes_on = on_larger == "replan"
        self._times = 0  # times that a step called modules more often

    def put_on(self, plan: Plan, unplanned: UnplannedCalls) -> None:
        """Start noting calls, after a plan was put on the model."""
        unwatch_other_calls(self._model)
        self._newcomers = watch_newcomers(self._model, plan.record.profile.called)
        self._counts = watch_more_calls(self._model, plan.record.step.most_calls, unplanned)

    def begins(self, args: Any, kwargs: Any) -> None:
        """A call of the model begins."""
        self._counts.begins(args, kwargs)

    def ends(self) -> None:
        """The call is over."""
        self._counts.ends()

    def take_off(self) -> None:
        """Stop noting calls."""
        unwatch_other_calls(self._model)

    def found(self, recordings: int) -> Finding | None:
        """What was noted since the last time."""
        names, words = outermost(self._newcomers), self._counts.taken()
        self._newcomers.clear()
        if names:
            return _newcomers(names, recordings)
        is_new, self._times = self._is_to_be_recorded, self._times + bool(words)
        return _more_often(words, is_new) if words else None

    @property
    def will_be_recorded(self) -> bool:
        """Whether a step was noted that called modules more often, and one like it is to be recorded in its turn."""
        return bool(self._counts.words) and self._is_to_be_recorded

    @property
    def _is_to_be_recorded(self) -> bool:
        return self._goes_on and self._times < _MOST_FOR_CALLS


class Refused(ValueError):
    """A call was larger than planned for, and was not run."""


class _TooLarge:
    """Steps that no plan fits, which are not recorded again, as long as the same parameters are trained.

    Args:
        model: without wrappers.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._samples: set[tuple[str, str]] = set()  # with what was trained

    def note(self, sample: str) -> None:
        """No plan fits a step with this sample."""
        self._samples.add((without_autocast(sample), trained_in(self._model)))

    def is_known(self, args: Any, kwargs: Any) -> bool:
        """Whether no plan fits a step with these inputs."""
        if not self._samples:
            return False
        return (without_autocast(described(args, kwargs)), trained_in(self._model)) in self._samples


class Watch:
    """Checks each call of a planned model.

    Args:
        model: without wrappers.
        on_larger: as for `auto`.

    Attributes:
        uncounted: an optimizer has stepped for the first time under the plan.
        others: calls of modules that the planned step had not.
        takes_more: a step has taken more than was planned for, since the compiler ran again.
        too_large: steps that no plan fits.
        steps: number of the step that runs.

    Where a step turns out to be none that the plan was made for, a later one is recorded. It is the next one, in the
    hope that steps differ from now on. Where such a step comes again, it is the one that is as far away from it as it
    is from the one before: in many loops every n-th step is of another kind.
    """

    def __init__(self, model: torch.nn.Module, on_larger: str):
        self.uncounted = self.takes_more = False
        self.others = OtherCalls(model, on_larger)
        self._model = model
        self._on_larger = on_larger
        self._most = 0  # most elements planned for, by this plan or an earlier one
        self._graphs: list[weakref.ref[_Graph]] = []  # of what the calls of this step returned
        self.steps = 0  # that have begun, planned or not
        self._last_deviant: int | None = None  # the last step that the plan was not made for
        # A step to record, in which the like is expected, and why.
        self._due: tuple[int, Finding] | None = None
        self._larger_later = False  # a later call of a planned step was larger
        self._micro_batches = False  # a step has called the model again, and the recorded one called it once
        self._graph_of_backward = GraphOfBackward()
        self._stepped: Counter[int] = Counter()  # steps of each optimizer since the last call
        self._is_first = True  # whether the first plan is on, which no plan has followed
        self._began_with = ""  # what the step that runs was called with first
        self._less_in_a_row = 0  # steps with the planned inputs that ran fewer ops
        # A plan, and samples that fit under it as well.
        self._fit_too: tuple[Plan | None, list[str]] = None, []
        self._times_later = 0  # so many times, since a step was planned for that has more elements
        self.too_large = _TooLarge(model)

    def put_on(self, plan: Plan) -> None:
        """Start checking, after a plan was put on the model."""
        profile = plan.record.profile
        unwatch_calls(self._model)  # checked here instead
        self._plan = plan
        self._unplanned = UnplannedCalls(
            *(profile.sample, plan.predicted_peak_bytes, plan.budget_bytes),
            one_call=profile.is_one_call,
            plan_id=plan.placement.plan_id,
        )
        self._unplanned.carriers = plan.placement.carriers
        if self._fit_too[0] is not plan:
            self._fit_too = plan, []
        self._unplanned.fit_too = self._fit_too[1]
        if self._unplanned.elements > self._most:
            self._most, self._times_later = self._unplanned.elements, 0
        self._due, self.takes_more = None, False
        self._began_with, self._less_in_a_row = "", 0
        self.others.put_on(plan, self._unplanned)
        self._by_place = _by_place(plan)
        self._graph_of_backward.is_made = self._graph_of_backward.is_kept = False
        self._planned_calls = sum(not call.fqn and call.grad for call in profile.calls)
        self._calls = 0  # of the step that runs

    def fits_too(self, sample: str) -> None:
        """Take steps of this sample, and those with no longer tensors, for ones that the plan was made for."""
        self._fit_too = self._plan, [*self._fit_too[1], without_autocast(sample)]
        self._unplanned.fit_too = self._fit_too[1]

    def take_off(self) -> None:
        """Stop checking, when the plan is taken off."""
        self.others.take_off()

    def found(
        self, args: Any, kwargs: Any, begins: bool, is_told: bool, recording: StepRecording, checks: bool
    ) -> Finding | None:
        """A deviation from the plan in this call of the model, or in the steps before it; None if there is none.

        Args:
            args, kwargs: arguments of the call.
            begins: whether a step begins with it.
            is_told: whether a trainer announces the steps, before it enters their autocast.
            checks: whether the call is one of those that the plan was made for; not one inside of an announced step.

        Raises:
            Refused: the call is larger than planned for, and `on_larger` is "error".
        """
        self._stepped.clear()
        self.others.begins(args, kwargs)
        if not checks:
            return None
        self._calls = 1 if begins else self._calls + 1
        if begins:
            self._graphs.clear()
            self._note_fewer_ops(described(args, kwargs))
        finding = self._found(args, kwargs, begins, is_told, recording)
        finding = finding or self._larger_in_its_place(args, kwargs, recording.skipped)
        if finding is not None or self.too_large.is_known(args, kwargs):
            return finding
        if words := self._unplanned.words_on_shape(args, kwargs):
            return Finding("longer", words)
        return None

    def _found(
        self, args: Any, kwargs: Any, begins: bool, is_told: bool, recording: StepRecording
    ) -> Finding | None:
        if begins and not is_told and self._unplanned.is_other_autocast():
            words = self._unplanned.words_on_autocast()
            return Finding("autocast", words, f"{words}: recording this step anew")
        if self._unplanned.is_larger(args, kwargs):
            if self._on_larger == "replan" and self.too_large.is_known(args, kwargs):
                return None  # which was told
            if begins and elements_of(args, kwargs) <= self._most:
                words = "the plan is for a smaller batch than the one before it: recording this larger one"
                return Finding("as before", log=words, is_free=True)
            return self._larger_call(self._unplanned.words(args, kwargs), begins)
        if not begins:
            more = self._more_calls()
            self._micro_batches |= self._unplanned.one_call and has_gradients(self._model)
            return more
        if recording.count and recording.began_otherwise and has_gradients(self._model):
            return Finding("gradients", _GRADIENTS, f"{_GRADIENTS}: recording this step")
        if self._due is not None and self.steps >= self._due[0]:
            (_, finding), self._due = self._due, None
            return finding
        if self._due is None and recording.may_begin_again and self._plan.is_not_followed:
            return self._in_its_turn(
                Finding("followed", log="the plan was not followed: recording a step anew")
            )
        if self.began_with_more(recording):
            self._is_first = False
            return Finding("less", log=f"{_LESS}: recording this step", plan_may_do=True, by_outcome=True)
        told = self._unplanned.told
        if "replaced" not in told and (words := self._unplanned.words_on_replaced(self._model)):
            told.add("replaced")
            log = "modules with a plan were replaced: recording this step"
            return Finding("replaced", words, log, plan_is_gone=True)
        found = self._unlike_the_plan(recording.count)
        if found is not None:
            return self._in_its_turn(found) if found.is_new or recording.may_begin_again else found
        return self._new_optimizer() if self.uncounted else None

    def _note_fewer_ops(self, begins_with: str) -> None:
        """A step begins: note whether the one before, with the planned inputs, ran fewer ops than planned."""
        following, before = self._plan.placement.following, self._began_with
        runs_less, following.runs_less, self._began_with = following.runs_less, False, begins_with
        if before:
            self._less_in_a_row = (
                self._less_in_a_row + 1 if runs_less and before == self._unplanned.sample else 0
            )

    def began_with_more(self, recording: StepRecording) -> bool:
        """Whether the first step, for which the plan is, ran ops that none has run since: another one is recorded."""
        if not (self._is_first and recording.began == 1 and self._less_in_a_row >= _LESS_IN_A_ROW):
            return False
        return VARYING not in self._plan.record.step.facts and not sizes_vary(self._plan)

    def _unlike_the_plan(self, recordings: int) -> Finding | None:
        """What the step before had that the planned one had not; several things of one step count once."""
        larger, takes_more, micro_batches = self._larger_later, self.takes_more, self._micro_batches
        makes_graph, keeps_graph = self._graph_of_backward.is_made, self._graph_of_backward.is_kept
        self._larger_later = self._graph_of_backward.is_made = self.takes_more = False
        self._graph_of_backward.is_kept = self._micro_batches = False
        others = self.others.found(recordings)
        if larger:
            words = "a later micro-batch of a step was larger than planned for: recording this step"
            return Finding("larger later", log=words, is_new=True, plan_may_do=True)
        if micro_batches:
            return Finding(
                "micro-batches", _MICRO_BATCHES, "the step before had micro-batches: recording this step"
            )
        if makes_graph and GRAPH_OF_BACKWARD not in self._plan.record.profile.facts:
            words = f"the step before {WITH_A_GRAPH}: recording this step"
            return Finding("graph", log=words, plan_may_do=True)
        if keeps_graph and not self._plan.record.profile.unpacks:
            words = "the step before kept its graph (retain_graph), and the recorded one did not: recording this step"
            return Finding("kept graph", log=words, plan_may_do=True)
        if takes_more and others is None:
            words = (
                "a region was compiled anew for the same inputs, so something else has changed in it, and the step "
                "takes more than was planned for"
            )
            return Finding("takes more", f"{words}. Leave headroom=.", f"{words}: recording this step")
        return others

    def _in_its_turn(self, finding: Finding) -> Finding | None:
        """What was found in the step before, if the step that begins is to be recorded for it; else it is due later."""
        deviant, before = self.steps - 1, self._last_deviant
        self._last_deviant = deviant
        distance = 0 if before is None else deviant - before
        self._due = None
        if distance <= 1 or distance > _MOST_BETWEEN:
            return finding
        self._due = deviant + distance, finding
        return None

    def _larger_in_its_place(self, args: Any, kwargs: Any, skipped: int) -> Finding | None:
        """The call is larger than the recorded step's call in its place, which was smaller than another one.

        No step is recorded for it, whatever `on_larger` says: with micro-batches of drawn lengths there is one again
        soon.
        """
        place = self._calls - skipped
        if not self._by_place or place < 1:
            return None
        planned = self._by_place[min(place, len(self._by_place)) - 1]
        elements = elements_of(args, kwargs)
        if elements <= planned:
            return None
        words = (
            f"call {place} of this step is with {without_autocast(described(args, kwargs))}, {elements} "
            f"elements, and in the recorded step it had {planned}. The plan is for calls in that order, so this step "
            f"{self._unplanned.may_take_more}. {_LONGEST_FIRST}"
        )
        if self._on_larger == "error":
            raise Refused(f"{words}. The call was not run.")
        return Finding("larger in its place", f"{words}, or leave headroom (headroom=).")

    def step_is_over(self) -> None:
        """Have the plan's forwards where they were: see `put_on_again`."""
        for name in self._plan.placement.carriers:
            with contextlib.suppress(AttributeError):  # the loop has taken the module out
                put_on_again(self._model.get_submodule(name))

    def not_called(self, optimizer: Any) -> Finding | None:
        """An optimizer steps under the plan, and has done so time and again since the model was last called."""
        self._stepped[id(optimizer)] += 1
        if self._stepped[id(optimizer)] <= _MOST_UNSEEN:
            return None
        return Finding(
            "not called",
            f"{type(optimizer).__name__} has stepped {_MOST_UNSEEN + 1} times since the module that autoac.auto was "
            "called for was last called in train mode and with gradients on: what is called instead was not planned "
            "for, and may take more than the budget. If the model has another wrapper now (DistributedDataParallel, "
            "torch.compile), call remove() and then autoac.auto for that.",
        )

    def returned(self, result: Any) -> None:
        """A call of the model has returned."""
        self.others.ends()
        graph = _Graph(self._graph_of_backward)
        before_backward(result, graph)  # whose nodes keep it alive
        self._graphs.append(weakref.ref(graph))

    def _more_calls(self) -> Finding | None:
        """More calls than in the recorded step have activations that are alive together."""
        graphs = [graph for ref in self._graphs if (graph := ref()) is not None]
        calls, planned = 1 + sum(not graph.went_backward for graph in graphs), self._planned_calls
        if calls != planned + 1 or has_gradients(self._model):  # told once in a step
            return None
        words = (
            f"the model is called {calls} times before a backward, and in the recorded step {planned} "
            f"{'time' if planned == 1 else 'times'}, so this step {self._unplanned.may_take_more}. Let the first step "
            "make as many calls as any other"
        )
        return self._larger_call(words, begins=False)

    def _larger_call(self, words: str, begins: bool) -> Finding:
        if self._on_larger == "error":
            raise Refused(f"{words}, or use on_larger='replan'. Nothing was run.")
        if self._on_larger == "warn":
            return Finding("larger", f"{words}, or use on_larger='replan'.")
        if begins and len(self._fit_too[1]) >= _MOST_FITTING:
            return Finding(
                "larger again",
                f"{words}. {_MOST_FITTING} steps with more elements were recorded, and fit under this plan: no more "
                "are recorded. Let the first step have the batch that takes the most memory",
            )
        if begins:
            log = f"{words}: recording this step to plan anew"
            return Finding("larger", log=log, is_new=True, plan_may_do=True)
        self._times_later += 1  # in the middle of a step, where no recording can begin
        if self._times_later > MOST_RECORDINGS:
            return Finding(
                "larger later again",
                f"{words}. {MOST_RECORDINGS} steps were recorded for such micro-batches, and none had one: no more are "
                f"recorded. {_LONGEST_FIRST}.",
            )
        self._larger_later = True
        return Finding("larger later", f"{words}: the next step is recorded for that.")

    def _new_optimizer(self) -> Finding:
        """An optimizer stepped for the first time under the plan, which does not count its state."""
        self.uncounted = False
        return Finding(
            "uncounted",
            "an optimizer stepped for the first time under the plan, or trained more parameters, and the plan does not "
            "count its state and its step: this loop may take more than the budget. Pass it as optimizer= to "
            "autoac.auto.",
            "an optimizer stepped for the first time, or trained more parameters: recording this step to count it",
        )
