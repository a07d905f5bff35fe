"""Warning if a planned model's call is not the planned one: larger, longer, under another autocast, with more to train.

The budget may not hold then.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from autoac.execute.attach import covered
from autoac.execute.watch.earlier_call import EarlierCall
from autoac.execute.watch.following import Following
from autoac.step.carried import replaced
from autoac.step.inputs import (
    autocast_in,
    described,
    elements_in,
    elements_of,
    has_no_longer,
    is_longer,
    under_autocast,
    without_autocast,
)
from autoac.step.model import Trained, checkpointing_switches, own_checkpointing, trained_parameters
from autoac.step.units import has_units
from autoac.torch_private import (
    constant_while_compiling,
    in_backward,
    remove_forward_hooks,
    remove_forward_pre_hooks,
)
from autoac.warned import warn
from autoac_solver.records.format import format_bytes
from autoac_solver.records.outcome import Outcome


class UnplannedCalls:
    """Forward pre-hook of a planned model that warns of calls the plan was not made for.

    Args:
        sample: the planned inputs, as in `Profile.sample`; "" if not known: then nothing is too large.
        peak_bytes, budget_bytes: the plan's predicted peak and its budget.
        others: outcomes of other samples under the plan.
        following: kept from warning of other ops as well, once this hook has warned of another autocast.
        one_call: the step that was planned for calls the model once, and begins without gradients.
        in_eval: the model was in eval mode when the plan was made.
        trained: the parameters that the model trains, and trained when the plan was made; None if not known: then
            nothing was unfrozen or converted since.
        checkpointed: the planned step ran under the model's own checkpointing.
        plan_id: of the plan.

    Attributes:
        carriers: names of the modules that carry it.
        earlier: the previous call, for a plan of one call.
    """

    def __init__(
        self,
        sample: str,
        peak_bytes: int,
        budget_bytes: int,
        *,
        others: tuple[Outcome, ...] = (),
        following: Following | None = None,
        one_call: bool = False,
        in_eval: bool = False,
        trained: Trained | None = None,
        checkpointed: bool = False,
        plan_id: str = "",
    ):
        self.sample = sample
        self.peak_bytes = peak_bytes
        self.budget_bytes = budget_bytes
        self.fitting = (sample, *(other.sample for other in others if other.fits))
        self.too_large = {without_autocast(other.sample): other for other in others if not other.fits}
        self.following = following
        self.one_call = one_call
        self.in_eval = in_eval
        self.trained = trained
        self.asks_for_checkpointing = not checkpointed
        self.plan_id = plan_id
        self.carriers: tuple[str, ...] = ()
        self.switches: list[torch.nn.Module] | None = (
            None  # of the model's own checkpointing, from the first call on
        )
        self.elements = max(map(elements_in, self.fitting))
        self.fit_too: list[str] = []  # steps that were recorded since, and fit under the plan
        self.earlier = EarlierCall()
        self.told: set[str] = set()  # reasons that were warned of
        self._register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()  # a copy warns by itself

    def _register(self) -> None:
        self.key = next(_KEYS)
        _WATCHES[self.key] = self

    @property
    def room_bytes(self) -> int:
        """What a step may take more than planned."""
        return max(0, self.budget_bytes - self.peak_bytes)

    @property
    def may_take_more(self) -> str:
        """The end of a sentence on a step: what it may take, and the budget."""
        return (
            f"may take more than the planned peak of {format_bytes(self.peak_bytes)}; the budget is "
            f"{format_bytes(self.budget_bytes)}"
        )

    def is_larger(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call's tensors have more elements than planned for, and it is none of those that fit as well."""
        if not (self.elements > 0 and elements_of(args, kwargs) > self.elements):
            return False
        called = without_autocast(described(args, kwargs))
        return not any(has_no_longer(called, sample) for sample in self.fit_too)

    def words(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The warning about such a call."""
        return (
            f"the model is called with {described(args, kwargs)}, and its plan was made for {self.sample}: this step "
            f"{self.may_take_more}. Plan for the largest batch that comes"
        )

    def is_other_autocast(self) -> bool:
        """Whether autocast's state or dtype differs from the recorded step's."""
        return self.elements > 0 and under_autocast() != autocast_in(self.sample)

    def _may_begin_inside(self, module: torch.nn.Module) -> bool:
        """Whether the planned autocast may begin in a forward that other code has put over the model's.

        accelerate does so for mixed precision. If it does not begin there, `following` tells of the other ops.
        """
        return bool(autocast_in(self.sample)) and not under_autocast() and covered(module)

    def words_on_autocast(self) -> str:
        """The warning about another autocast."""
        return (
            f"the model is called{under_autocast() or ' without autocast'}, and its plan was made for a step"
            f"{autocast_in(self.sample) or ' without autocast'}: other ops run, and this step "
            f"{self.may_take_more}. Call autoac.plan under the autocast of the training loop, "
            "around nothing else: with torch.autocast(...): plan = autoac.plan(model, sample, ...)"
        )

    def words_on_trained(self, module: torch.nn.Module, now: Trained) -> str:
        """The warning about parameters that were unfrozen or converted since the plan was made; "" if none were.

        What FSDP2 has gathered may have another dtype than its shards, so in a model with units that is not compared.
        """
        planned = self.trained
        if planned is None:
            return ""
        if now.elements > planned.elements:
            what = (
                f"the model's trained parameters have {now.elements:,} elements, and had {planned.elements:,} when the "
                "plan was made: gradients of those unfrozen since, and what their backward needs, are not planned for"
            )
        elif now.of_all == planned.of_all and now.which - planned.which:
            what = (
                "the model trains other parameters than when the plan was made: what the backward of those unfrozen "
                "since needs is not planned for"
            )
        elif now.elements == planned.elements and now.bytes > planned.bytes and not has_units(module):
            what = (
                f"the model's trained parameters take {format_bytes(now.bytes)}, and took "
                f"{format_bytes(planned.bytes)} when the plan was made: activations of the larger type are not "
                "planned for"
            )
        else:
            return ""
        return f"{what}, and this step {self.may_take_more}. Remove the plan, and plan again for the model as it is."

    def words_on_replaced(self, module: torch.nn.Module) -> str:
        """The warning about modules with a plan in whose place there are others now; "" if there are none."""
        names = replaced(module, self.carriers, self.plan_id)
        if not names:
            return ""
        which = (
            f"module {names[0]!r} was"
            if len(names) == 1
            else f"{len(names)} modules ({names[0]!r}, ...) were"
        )
        return (
            f"{which} replaced after the plan was applied. What is there now runs without it, and this step "
            f"{self.may_take_more}. Remove the plan, and plan again for the model as it is."
        )

    def words_on_shape(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The warning about a call that is no larger, but longer than all that fit; "" if it is not."""
        called = without_autocast(described(args, kwargs))
        if (outcome := self.too_large.get(called)) is not None:
            return (
                f"the model is called with {called}, a sample that was given for its plan, which does not fit: its "
                f"step takes {format_bytes(outcome.peak_bytes)}, and the budget is {format_bytes(self.budget_bytes)}."
            )
        if not self.one_call:  # another call of the planned step may have been as long
            return ""
        elements = elements_of(args, kwargs)
        if any(elements <= elements_in(fits) and not is_longer(called, fits) for fits in self.fitting):
            return ""
        if any(has_no_longer(called, sample) for sample in self.fit_too):
            return ""
        return (
            f"the model is called with {called}, and its plan was made for {self.sample}: with no more elements, but "
            f"longer. Where attention keeps its scores, they grow with the square of the length, and this step "
            f"{self.may_take_more}. Plan for both: autoac.plan(model, autoac.Samples([...]), ...)"
        )

    def trains(self, module: torch.nn.Module) -> bool:
        """Whether a call now belongs to a training step, and not to an evaluation."""
        return torch.is_grad_enabled() and (module.training or self.in_eval) and not in_backward()

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn once for each reason."""
        if torch.compiler.is_compiling():
            trains = torch.is_grad_enabled() and (module.training or self.in_eval)
            if trains and self.elements > 0 and not torch.compiler.is_exporting():
                self._call_compiled(args, kwargs)
            return
        if cast("Any", torch.jit).is_tracing() or not self.trains(module):
            return
        for reason, words in self._differences(module, args, kwargs):
            if words and reason not in self.told:
                self.told.add(reason)
                warn(words)

    def _call_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn once, where the model is compiled together with this hook.

        Dynamo guards the comparison of symbolic sizes, so inputs that are larger compile the model anew and get here.
        It traces this code, which therefore looks at tensors among the arguments only, not inside of them.
        """
        elements = 0
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                elements += value.numel()
        if elements > self.elements:
            _tell_while_compiling(self.key)

    def words_compiled(self) -> str:
        """The warning about inputs that are larger than planned for, of which the compiler knows no numbers."""
        return (
            f"the model is compiled for inputs that are larger than {self.sample}, for which its plan was made: a step "
            f"with them {self.may_take_more}. Plan for the largest batch that comes."
        )

    def _differences(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Reasons why a call may take more than planned, and warnings about them; "" where it is as planned."""
        if self.is_other_autocast() and not self._may_begin_inside(module):
            if self.following is not None:
                self.following.told = True
            yield "autocast", self.words_on_autocast()
        if self.is_larger(args, kwargs):
            yield "larger", self.words(args, kwargs) + ", or let autoac.auto plan anew (on_larger='replan')."
        else:
            yield "longer", self.words_on_shape(args, kwargs)
        if "replaced" not in self.told:
            yield "replaced", self.words_on_replaced(module)
        if "step" not in self.told:
            now = trained_parameters(module)
            yield (
                "step",
                self._words_on_checkpointing(module)
                or self.words_on_trained(module, now)
                or self._words_on_several_calls(now),
            )

    def _words_on_checkpointing(self, module: torch.nn.Module) -> str:
        if not self.asks_for_checkpointing:
            return ""
        if self.switches is None:
            self.switches = checkpointing_switches(module)
        if not any(getattr(switch, "gradient_checkpointing", False) for switch in self.switches):
            return ""
        self.asks_for_checkpointing = False
        name, _ = own_checkpointing(module)
        return name and (
            f"the model's own {name} is on, and was off when the plan was made: it recomputes layers as a whole, and "
            "the plan decides little inside of them. Turn it off (with a trainer, in its arguments), or remove the "
            "plan."
        )

    def _words_on_several_calls(self, now: Trained) -> str:
        if not self.one_call:
            return ""
        # n calls at once take at most n peaks. If these fit the budget, there is nothing to tell.
        waiting = self.earlier.waiting
        if waiting and (1 + waiting) * self.peak_bytes > self.budget_bytes:
            return (
                "the model is called again before the backward of its previous call, and its plan was made for a step "
                "that calls it once: what both calls keep for backward is alive, and this step "
                f"{self.may_take_more}. Plan the whole step, with a function that runs all of its calls: "
                "autoac.plan(model, step, ...)"
            )
        if now.gradient_bytes > max(0, self.budget_bytes - self.peak_bytes):
            return (
                "the model is called while its parameters have gradients, and its plan was made for a step that begins "
                "without and calls it once: the gradients' bytes are not planned for, and this step "
                f"{self.may_take_more}. Clear them before the call, with zero_grad(set_to_none=True), or, for "
                "micro-batches, plan the whole step, with a function that runs all of them: "
                "autoac.plan(model, step, ...)"
            )
        return ""


_KEYS = itertools.count()
_WATCHES: weakref.WeakValueDictionary[int, UnplannedCalls] = weakref.WeakValueDictionary()


@constant_while_compiling
def _tell_while_compiling(key: int) -> bool:
    """Warn while the model is compiled: Dynamo calls this then, and puts its result into the code."""
    watch = _WATCHES.get(key)
    if watch is not None and "larger" not in watch.told:
        watch.told.add("larger")
        warn(watch.words_compiled())
    return True


def watch_calls(model: torch.nn.Module, watch: UnplannedCalls) -> None:
    """Register the hooks on a model, until `unwatch_calls`."""
    if watch.elements:
        model.register_forward_pre_hook(watch, with_kwargs=True)
        if watch.one_call:
            model.register_forward_hook(watch.earlier)


def unwatch_calls(model: torch.nn.Module) -> None:
    """Remove the hooks, if they are there."""
    remove_forward_pre_hooks(model, UnplannedCalls)
    remove_forward_hooks(model, EarlierCall)
