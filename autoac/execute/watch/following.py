"""Detection of planned models that run other ops than their plan was made for, and the one warning about it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoac.step.inputs import autocast_in, described, under_autocast, without_autocast
from autoac.torch_private import remove_forward_hooks
from autoac.warned import warn
from autoac_solver.records.format import format_bytes
from autoac_solver.records.names import module_in_words

_SHOWN = 3
_ATTENTION = ("attention", "softmax", "baddbmm", "bmm")
_DROPOUT = ("dropout", "bernoulli")
_CASTS = ("_to_copy", "to_copy")

CACHED_PARAMETRIZATIONS = "torch.nn.utils.parametrize.cached()"
"""Stands for an op where a region is called within this context, and the profiled step did not enter it."""


@dataclass(frozen=True)
class Deviation:
    """The place where a region left the profiled step.

    Args:
        region: its name in the plan.
        expected: the op that the profiled step ran there, "" if its region was over.
        came: the op that came in its place.
        unknown: the first op from there on that the plan does not know; often `came`.
    """

    region: str
    expected: str
    came: str
    unknown: str

    def __str__(self) -> str:
        place = f"{self.came} came where {self.expected or 'its end'} was expected"
        also = "" if self.unknown == self.came else f", then {self.unknown}"
        return f"{module_in_words(self.region)}: {place}{also}"


@dataclass(frozen=True)
class NotFollowed:
    """Result of `Plan.is_not_followed`; true if any region has left the profiled step.

    Args:
        deviations: one for each such region, in order of occurrence.
        likely_cause: in words.
        peak_bytes: the peak if those regions recompute nothing, for the planned shapes; 0 if it cannot be predicted.
        planned_peak_bytes: the plan's predicted peak.
    """

    deviations: tuple[Deviation, ...] = ()
    likely_cause: str = ""
    peak_bytes: int = 0
    planned_peak_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.deviations)

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions, as in the plan."""
        return tuple(deviation.region for deviation in self.deviations)

    def __str__(self) -> str:
        if not self.deviations:
            return "the plan is followed"
        count = len(self.deviations)
        several = f"{count} regions " if count > 1 else "region " if self.regions[0] else ""
        names = ", ".join(map(module_in_words, self.regions[:_SHOWN])) + (", ..." if count > _SHOWN else "")
        places = "; ".join(map(str, self.deviations[:_SHOWN]))
        peak = ""
        if self.peak_bytes:
            peak = (
                f", so the peak may be up to {format_bytes(self.peak_bytes)} where "
                f"{format_bytes(self.planned_peak_bytes)} were planned"
            )
        return (
            f"the plan is not followed: {several}{names} ran ops that the profiled step did not run ({places}). "
            f"Likely cause: {self.likely_cause}. Gradients are right; what the plan does not know is not recomputed"
            f"{peak}. Plan the step as it is trained; plan.is_not_followed tells all regions."
        )


class Following:
    """Deviations of a plan's regions from the profiled step; shared by all its programs.

    It warns once for the whole model: after a call of the root, or when a region is first recomputed if the root was
    not called.

    Args:
        sample: the planned inputs, as in `Profile.sample`.
        varies: whether the profiled step is known to vary.
        peaks: maps region names to the peak if these regions recompute nothing, and the planned peak.
        in_eval: the model was in eval mode in the profiled step.

    Attributes:
        times_compiled: calls of compiled regions with the planned inputs, since the plan was put on, for which the
            compiler ran.
        runs_less: a call of a region has run fewer ops than in the profiled step, since the plan was put on.
    """

    def __init__(
        self,
        sample: str = "",
        varies: bool = False,
        peaks: Callable[[Collection[str]], tuple[int, int]] | None = None,
        in_eval: bool = False,
    ):
        self.sample = sample
        self.in_eval = in_eval
        self.in_other_mode = False  # of train and eval, in the root's call that deviates
        self.varies = varies
        self.peaks = peaks
        self.waits = False  # for the end of the root's call
        self.deviations: dict[str, Deviation] = {}
        self.unknown: set[Any] = set()  # all ops that the plan does not know
        self.called_with = ""
        self.told = False
        self.times_compiled = 0
        self.runs_less = False
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Following:
        return self  # shared, as the programs that refer to it are

    def __reduce__(self) -> Any:
        return Following, (self.sample, self.varies, None, self.in_eval)

    def start_anew(self, waits: bool) -> None:
        """Reset, when the plan is put on a model."""
        self.waits, self.told, self.called_with = waits, False, ""
        self.times_compiled, self.runs_less = 0, False
        self.deviations, self.unknown, self.in_other_mode = {}, set(), False

    def deviates(self, region: str, expected: Any, came: Any, unknown: Any) -> None:
        """Note that a region runs an op that the plan does not know."""
        with self.lock:
            self.unknown.add(unknown)
            if region in self.deviations:
                return
            expected = "" if expected is None else str(expected)
            self.deviations[region] = Deviation(region, expected, str(came), str(unknown))
        if not self.waits:
            self.tell()

    def root_is_over(self, args: Any, kwargs: Mapping[str, Any], training: bool) -> None:
        """Warn of deviations after a call of the root."""
        if self.deviations and not self.told:
            self.in_other_mode = training == self.in_eval
            self.called_with = described(args, kwargs) or under_autocast()
            self.tell()

    def tell(self) -> None:
        """Warn, at most once."""
        with self.lock:
            if self.told or not self.deviations:
                return
            self.told = True
        warn(str(self.report()))

    def report(self) -> NotFollowed:
        """All deviations so far."""
        with self.lock:
            deviations = tuple(self.deviations.values())
        if not deviations:
            return NotFollowed()
        peaks = (0, 0) if self.peaks is None else self.peaks([one.region for one in deviations])
        return NotFollowed(deviations, self._cause(deviations), *peaks)

    def _cause(self, deviations: tuple[Deviation, ...]) -> str:
        first, unknown = deviations[0], " ".join(sorted(map(str, self.unknown)))
        if CACHED_PARAMETRIZATIONS in self.unknown:
            return (
                f"the model is called within {CACHED_PARAMETRIZATIONS}, and the plan was made without: make it within "
                "that context (modules that read its cache are no regions then), or with engine='replay'"
            )
        if self.called_with and autocast_in(self.sample) != autocast_in(self.called_with):
            return (
                f"the model is called{autocast_in(self.called_with) or ' without autocast'}, and the plan was made"
                f"{autocast_in(self.sample) or ' without autocast'}: call autoac.plan under the autocast of the loop"
            )
        if self.in_other_mode:
            now, then = ("train", "eval") if self.in_eval else ("eval", "train")
            return f"the model is in {now} mode, and the plan was made in {then} mode: call model.{then}()"
        if _of(unknown, _DROPOUT) and not _of(first.expected, _DROPOUT):
            return "dropout runs that did not: the plan was made in eval mode, or for a rate of 0"
        if _of(first.expected, _DROPOUT):
            return "no dropout runs: the model is in eval mode (call model.train()), or its rate is 0 now"
        if _of(unknown, _ATTENTION) or _of(first.expected, _ATTENTION):
            return "another attention implementation than was planned with, or another mask"
        if _of(unknown, _CASTS) or _of(first.expected, _CASTS):
            return "other types than were planned with (autocast, or a model or input that was converted)"
        if self.varies:
            return "the step varies with its data or with random numbers, see the profile's notes"
        if self.called_with and without_autocast(self.called_with) != without_autocast(self.sample):
            return f"the model is called with {self.called_with}, and the plan was made for {self.sample}"
        return "another mode or configuration of the model, or a path in it that depends on data"


def _of(op: str, parts: tuple[str, ...]) -> bool:
    return any(part in op for part in parts)


class TellWhenOver:
    """Forward hook of the root: runs after the forwards of all its regions."""

    def __init__(self, following: Following):
        self.following = following

    def __deepcopy__(self, memo: dict[int, Any]) -> TellWhenOver:
        return self

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Warn of deviations."""
        if not torch.compiler.is_compiling():
            self.following.root_is_over(args, kwargs, module.training)


def watch_following(model: torch.nn.Module, following: Following) -> None:
    """Register the hook on a model's root, until `unwatch_following`."""
    model.register_forward_hook(TellWhenOver(following), with_kwargs=True)


def unwatch_following(model: torch.nn.Module) -> None:
    """Remove the hook, if it is there."""
    remove_forward_hooks(model, TellWhenOver)
