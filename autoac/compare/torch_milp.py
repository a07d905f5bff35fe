"""torch's own planner, `torch.distributed._tools.sac_ilp.sac_milp`, with its advice applied.

It only advises: which modules to checkpoint, and which share of their activation memory to discard. From the share,
torch's `get_optimal_checkpointing_policy_per_module` chooses the ops to save, and a policy for selective checkpointing
applies that. Statistics are collected the way torch's tests do it, on a copy of the model on fake tensors; since its
estimators know CUDA only, ops are timed here on real tensors of the same shapes.
"""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autoac.compare.strategies import Strategy, checkpoint_module
from autoac.compare.workload import Workload
from autoac.measure import seconds_of
from autoac.ops.signatures import Signature
from autoac.torch_private import (
    FakeTensor,
    FakeTensorMode,
    sac_tools,
    time_nothing,
    time_ops_with,
    tree_map,
    unset_fake_temporarily,
)
from autoac_solver.records.errors import ProfilingError

NAME = "torch sac_milp"
_TIMED_RUNS = 3
_TRIES = 3
"""Attempts: its fit of each share's cost draws random numbers, and a bad fit makes every budget infeasible."""


def advised(workload: Workload, device: torch.device, budgets: Mapping[str, int]) -> list[Strategy]:
    """The planner's advice for each budget, equal advice once; one entry with the error if it cannot run.

    Args:
        budgets: bytes, by label.
    """
    strategies: list[Strategy] = []
    for _ in range(_TRIES):
        try:
            planner = _Planner(workload, device)
        except Exception as error:
            # Any error is a row of the table: this planner fails on this model.
            reason = str(error).split("\n")[0] or "an assertion of its own"
            return [_failed(NAME, 0, f"cannot run: {type(error).__name__}: {reason}")]
        strategies = _advice(planner, budgets)
        if any(not strategy.error for strategy in strategies):
            break
    return strategies or [_failed(NAME, 0, "gives no advice at any budget")]


def _advice(planner: _Planner, budgets: Mapping[str, int]) -> list[Strategy]:
    strategies: list[Strategy] = []
    seen: list[dict[str, tuple[int, ...]]] = []
    for name, budget in budgets.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # how torch calls PuLP
                saved = planner.decide(budget)
        except Exception as error:
            strategies.append(_failed(f"{NAME}, {name}", budget, f"{type(error).__name__}: {error}"))
            continue
        if saved and saved not in seen:
            seen.append(saved)
            install = functools.partial(_install, saved)
            strategies.append(Strategy(f"{NAME}, {name}", "other", install, budget))
    return strategies


def _failed(name: str, budget: int, error: str) -> Strategy:
    return Strategy(name, "other", lambda model: None, budget, error=error)


class _Planner:
    """The statistics of one model, and torch's solver on them."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.tools = sac_tools()
        self.tools.logger.setLevel(logging.CRITICAL)  # a budget it cannot meet is no error here
        # Real tensors are allowed: a loss may have closed over some.
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fake = _fake(workload, mode)
        with mode, redirect_stdout(StringIO()), _kept_modules():
            step = fake.step()
            memory = _memory(self.tools, fake.model, step)
            runtime = _runtime(self.tools, fake.model, step)
            self.estimator = self.tools.SACEstimator()("operator-level-benchmark")
            time_ops_with(self.estimator, _timed, device)
            with self.estimator:
                step()
            _drop_empty(self.estimator)
            info = self.tools.aggregate_stats(fake.model, memory, runtime, self.estimator, device)
        known = {stats["fqn"] for stats in info["mod_stats"]}
        for order in ("fw_pre_order", "fw_post_order"):  # torch expects each of the model's modules, once
            called = dict.fromkeys(info["mod_order"][order])
            info["mod_order"][order] = [name for name in called if name in known]
        self.graph = self.tools.parse_module_info(info)
        self.prefix = f"{type(fake.model).__name__}."
        self.blocks = [self.prefix + block for block in workload.blocks]

    def decide(self, budget_bytes: int) -> dict[str, tuple[int, ...]]:
        """For each module to checkpoint, whether to save each of its ops; empty without advice."""
        graph = copy.deepcopy(self.graph)
        discarded, _, _ = self.tools.sac_milp(graph, budget_bytes / 2**30, ac_units=self.blocks)
        saved = {}
        for name, share in discarded.items():
            stats = self.estimator.sac_mod_stats[name]
            share_saved = min(1.0, max(0.0, 1 - share))
            decisions = self.tools.get_optimal_checkpointing_policy_per_module(stats, share_saved)
            saved[name.removeprefix(self.prefix)] = tuple(decisions)
        return saved


# -- statistics --------------------------------------------------------------------------------------------------


def _fake(workload: Workload, mode: FakeTensorMode) -> Workload:
    """A copy of the workload on fake tensors, which takes no memory."""
    if workload.runs_itself:
        raise ProfilingError("the sample runs a step of its own, which cannot be moved to fake tensors")

    def faked(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    model, sample = workload.modules, workload.sample
    memo: dict[int, Any] = {id(buffer): faked(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(faked(parameter.detach()), parameter.requires_grad)
    mapping = (
        {key: tree_map(faked, value) for key, value in sample.items()}
        if isinstance(sample, Mapping)
        else None
    )
    return replace(
        workload,
        model=copy.deepcopy(model, memo),
        sample=tree_map(faked, sample) if mapping is None else mapping,
    )


@contextmanager
def _kept_modules() -> Iterator[None]:
    """Context that keeps modules alive that a forward makes and calls (a loss): torch looks them up in backward."""
    modules: list[nn.Module] = []
    hook = register_module_forward_pre_hook(lambda module, args: modules.append(module))
    try:
        yield
    finally:
        hook.remove()


def _memory(tools: Any, model: nn.Module, step: Callable[[], object]) -> Any:
    tracker = tools.MemTracker()
    tracker.track_external(model)
    with tracker:
        for again in (False, True):
            step()
            model.zero_grad(set_to_none=True)
            if not again:
                tracker.reset_mod_stats()
    return tracker


def _runtime(tools: Any, model: nn.Module, step: Callable[[], object]) -> Any:
    """The order of modules; the solver does not use its times."""
    estimator = tools.RuntimeEstimator()
    time_nothing(estimator)
    with estimator:
        step()
    for name in estimator.mod_fw_pre_order:
        estimator.mod_runtimes[name]  # makes an entry for modules that run no op; torch looks for one
    model.zero_grad(set_to_none=True)
    return estimator


def _drop_empty(estimator: Any) -> None:
    """Drop modules with nothing to discard: torch would divide by their memory."""
    for name, stats in list(estimator.sac_mod_stats.items()):
        if not sum(stats.memory):
            del estimator.sac_mod_stats[name]


def _timed(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """An op on fake tensors, and the milliseconds it takes on real ones."""
    kwargs = kwargs or {}
    signature = Signature.of(func, args, kwargs)
    if signature not in _TIMES:
        _TIMES[signature] = _milliseconds(func, args, kwargs)
    return func(*args, **kwargs), _TIMES[signature]


_TIMES: dict[Any, float] = {}


def _milliseconds(func: Any, args: Any, kwargs: Any) -> float:
    with unset_fake_temporarily(), torch.random.fork_rng():
        args, kwargs = tree_map(_real, (args, kwargs))
        # Never on CUDA, see `time_ops_with`.
        return min(seconds_of(lambda: func(*args, **kwargs), _TIMED_RUNS, torch.device("cpu"))) * 1e3


def _real(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    extent = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    memory = torch.ones(extent if value.numel() else 0, dtype=value.dtype, device=value.fake_device)
    return memory.as_strided(value.shape, value.stride())


# -- carrying it out ---------------------------------------------------------------------------------------------


class _AdvisedPolicy:
    """Answers by the op's position among the ops that torch's estimator counts."""

    def __init__(self, saved: tuple[int, ...]) -> None:
        self.saved = saved
        self.skipped = sac_tools().OPS_TO_ALWAYS_SKIP
        self.positions = {False: 0, True: 0}  # by whether it is the second run

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in self.skipped:
            return CheckpointPolicy.PREFER_RECOMPUTE
        position = self.positions[ctx.is_recompute]
        self.positions[ctx.is_recompute] += 1
        keep = position < len(self.saved) and self.saved[position]
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(saved: tuple[int, ...]) -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_AdvisedPolicy(saved), allow_cache_entry_mutation=True)


def _install(saved: dict[str, tuple[int, ...]], model: nn.Module) -> None:
    for name, decisions in saved.items():
        checkpoint_module(model.get_submodule(name), functools.partial(_contexts, decisions))
