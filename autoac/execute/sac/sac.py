"""Engine "sac": the decisions as a policy for torch's own selective activation checkpointing.

NOTE [ The second run ]
  1. `torch.utils.checkpoint` runs the region's Python code again at the first unpack. Saved values are taken from
     forward (`_CachingTorchDispatchMode` and `_CachedTorchDispatchMode` in torch/utils/checkpoint.py). Early stop and
     nesting are torch's (NOTE [ Nestable Checkpoint ] there, Rules 1, 4 and 5).
  2. Torch matches saved values by (overload, n-th call of that overload). `SacPolicy` answers by the same key, so an op
     that comes in another order would get another op's result; it refuses cases that would be wrong.
  3. The resulting rules are rows of the ILP: no skip; random ops all saved or all recomputed (torch stashes one random
     state per region); ops that change state outside the region saved. `SacPolicy` enforces them again at run time,
     since data-dependent control flow may bring ops in another order than the profile's.
  4. The second run must start from the same state as the first: kernel flags, autocast's cached casts, the state of its
     modules, and its argument objects. `_SecondRun` restores what it can, and raises an error for the rest.
  5. On a GPU, the second run uses the stream of the node that unpacks first, which is forward's, see NOTE [ Streams ]
     in `autoac.execute.streams`. While a CUDA graph is captured, torch cannot stash the GPU's random state. It need
     not: recomputing a random op is refused there.
  6. Random numbers: see NOTE [ The second run's random numbers ] in `autoac.execute.sac.randoms`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoac.device import streams
from autoac.execute.program import END, Program
from autoac.execute.running import first_run, second_run
from autoac.execute.sac.debug import OpLog, compared, debugging, hidden_from_torch
from autoac.execute.sac.failures import FailingAgain
from autoac.execute.sac.first_step import Comparing, FirstStep
from autoac.execute.sac.randoms import DrawingTheSame, Drawn, HostRandoms, may_draw
from autoac.execute.sac.state import ModuleState
from autoac.execute.streams import CallStreams, streams_of_call
from autoac.execute.watch.following import CACHED_PARAMETRIZATIONS
from autoac.ops.arguments import held_in
from autoac.ops.generators import generators_of
from autoac.ops.info import OpInfo, op_info, read_tensors, tensors_in, written_tensors
from autoac.torch_private import (
    TorchDispatchMode,
    any_autocast,
    being_traced,
    bypassing_hooks,
    compiler_off,
    counted_writes,
    detach_sharing_version,
    disable_dispatch_modes,
    is_sharded_type,
    is_wrapper_type,
    local_part,
    noting_failures,
    on_fake_tensors,
    on_local_parts,
    parts_of,
    reads_cached_parametrizations,
    storage_key,
    storage_ref,
    version_of,
    without_dispatch_modes,
)
from autoac.torch_private.kernel_flags import kernel_flags, with_kernel_flags

SAVE = CheckpointPolicy.MUST_SAVE
RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE


def run(
    program: Program,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: torch.nn.Module | None = None,
) -> Any:
    """Run one call of a region under torch's checkpoint with the plan's policy.

    Args:
        module: the module of `forward`; its state is restored for the second run.
    """
    if torch.compiler.is_compiling() or being_traced():
        context_fn = functools.partial(contexts, program.unnamed)
        function = functools.partial(forward, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn)
    if module is not None and reads_cached_parametrizations(module):
        # Code that runs again in backward would find this cache gone, or fuller.
        first = program.names[0][0] if program.names else None
        program.following.deviates(program.region, first, CACHED_PARAMETRIZATIONS, CACHED_PARAMETRIZATIONS)
        return forward(*args, **kwargs)
    # By position: torch stashes the random states of the devices that it finds among positional arguments.
    named = functools.partial(_by_name, forward, tuple(kwargs))
    given = (*args, *kwargs.values())
    objects = [value for value in (*args, *kwargs.values()) if not isinstance(value, torch.Tensor)]
    by = streams()
    program.unchecked &= not program.found_right
    # Comparing reads values on the host, which a captured CUDA graph cannot do.
    compares = FirstStep(program) if program.unchecked and (by is None or not by.capturing()) else None
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": by is None or not by.capturing()}
    if not debugging():
        context_fn = functools.partial(contexts, program, objects, module, compares)
        return checkpoint(named, *given, **options, context_fn=context_fn)
    with hidden_from_torch() as off:

        def context_fn() -> tuple[Any, Any]:
            off.close()  # checkpoints inside the region stay in debug mode
            return contexts(program, objects, module, compares)

        return checkpoint(named, *given, **options, context_fn=context_fn)


def _by_name(forward: Callable[..., Any], names: tuple[str, ...], *given: Any) -> Any:
    """Call a function with the last arguments by these names."""
    count = len(given) - len(names)
    return forward(*given[:count], **dict(zip(names, given[count:], strict=True)))


def contexts(
    program: Program,
    objects: Sequence[Any] = (),
    module: torch.nn.Module | None = None,
    compares: FirstStep | None = None,
) -> tuple[Any, Any]:
    """The pair of contexts for `checkpoint(context_fn=...)`.

    Args:
        objects: arguments of the region whose contents must not change until the second run.
        module: as for `run`.
        compares: compares the two runs; None if they are not compared.
    """
    policy = SacPolicy(program, compares)
    first, second = create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)
    if torch.compiler.is_compiling() or being_traced():
        return first, second
    first, policy.failures = noting_failures(bypassing_hooks(first))
    first, second = on_local_parts(first), on_local_parts(second)
    policy.watches = True
    policy.streams = streams_of_call(program.region)
    log = OpLog(program.region) if debugging() else None
    casts = policy.cast if torch.is_autocast_cache_enabled() and any_autocast() else None
    state = None if module is None else ModuleState(module)
    policy.state = state
    if threading.active_count() > 1 and not (policy.streams is not None and policy.streams.capturing):
        policy.drawn = Drawn()
    # A compiled function may write the buffer of an op again that is saved as the op's result.
    firsts = [compiler_off(), first_run(), first, *([] if log is None else [log])]
    if program.draws_on_host is not False:
        firsts.append(_DrawingOnHost(policy, module))
    if compares is not None:
        firsts.append(compares.hooks())
    if casts is not None:
        firsts.append(_CastsOfShards(policy))
    return _Together(firsts), _SecondRun(second, policy, casts, log, objects, state)


class _Together:
    """Several contexts as one; the last one sees ops first."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]):
        self.contexts = contexts

    def __enter__(self) -> None:
        with contextlib.ExitStack() as entered:
            for context in self.contexts:
                entered.enter_context(context)
            self.entered = entered.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self.entered.__exit__(*exception)


class _SecondRun:
    """The second run's context: torch's, errors that name the region, and handling of autocast's cached casts.

    In forward, a weight that an earlier region has cast is not cast again; the second run starts without those casts.
    Its additional casts must not be matched with forward's saved values: they bypass selective checkpointing. All other
    casts come in forward's order, as long as the second run neither finds cached casts nor leaves any.

    Args:
        selective: torch's context.
        policy: of the first run.
        casts: storages of the weights that forward has cast itself; None if autocast caches no casts.
        log: of the first run, None if it was not kept.
        objects: arguments whose contents must be the same in the second run as now.
        state: of the region's module, None if it is not known.
    """

    def __init__(
        self,
        selective: Any,
        policy: SacPolicy,
        casts: set[int] | None,
        log: OpLog | None,
        objects: Sequence[Any],
        state: ModuleState | None,
    ):
        self.selective, self.policy, self.casts, self.first = selective, policy, casts, log
        self.state = state
        self.objects, self.held = objects, held_in(objects)
        self.flags = kernel_flags()  # as forward finds them; flags that the region sets itself are set again

    def __enter__(self) -> None:
        if self.policy.watches:
            self.policy.program.has_run(sum(self.policy.counts.values()))
        if self.held.lost(held_in(self.objects)):
            raise RuntimeError(
                self.policy.refusal(
                    "an object that it is given no longer holds what it held in forward", _GIVEN
                )
            )
        if self.state is not None and (name := self.state.lost()):
            raise RuntimeError(
                self.policy.refusal(
                    f"what its modules hold in {name!r} has changed since forward read it", _GIVEN
                )
            )
        parts = [self.selective]
        if self.policy.drawn is not None and self.policy.drawn.results:
            parts.insert(0, DrawingTheSame(self.policy.drawn, self.policy.program.region))
        if self.policy.compares is not None:
            parts.append(Comparing(self.policy.compares))
        if changed := self.policy.changed():
            parts.append(_Refusing(changed, self.policy))
        if self.policy.writes_lists:
            parts.append(_CountedWrites())
        if self.policy.failures:
            parts.append(FailingAgain(self.policy.failures, self.policy.program.region))
        self.second = OpLog(self.policy.program.region) if self.first is not None else None
        if self.second is not None:
            parts.append(self.second)
        if self.casts is not None:
            torch.clear_autocast_cache()
            parts.append(_AdditionalCasts(self.casts))
        with contextlib.ExitStack() as entered:
            entered.enter_context(compiler_off())
            if self.flags != kernel_flags():
                entered.enter_context(with_kernel_flags(self.flags))
            if self.state is not None:
                entered.enter_context(self.state)
            if self.policy.host is not None:
                entered.enter_context(self.policy.host)
            for part in parts:
                entered.enter_context(part)
            entered.enter_context(second_run())
            self.entered = entered.pop_all()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.entered.__exit__(kind, error, traceback)
        if self.policy.host is not None and not self.policy.host.drew and not self.policy.runs_unknown:
            self.policy.program.draws_on_host = False  # it was another thread that drew
        if self.casts is not None:
            torch.clear_autocast_cache()
        if self.first is not None and self.second is not None:
            found = compared(self.first, self.second, whole=error is None)
            if found is not None:
                raise found from error
        elif isinstance(error, RuntimeError):
            error.add_note(_SECOND_RUN.format(region=self.policy.program.where))


_SECOND_RUN = (
    "This was in the second run of {region} for backward. To see which op differs from forward, wrap the step "
    'in `torch.utils.checkpoint.set_checkpoint_debug_enabled(True)`; engine="replay" runs no code twice.'
)


class _DrawingOnHost:
    """Context of the first run, by which the policy learns whether the region draws from Python's or numpy's generator.

    What it learns of one call holds for the next ones, but for another library's ops: they may draw in some calls only.

    Args:
        module: as for `run`. In evaluation it may draw nothing that it does in training.
    """

    def __init__(self, policy: SacPolicy, module: torch.nn.Module | None):
        self.policy, self.training = policy, module is None or module.training

    def __enter__(self) -> None:
        self.before = HostRandoms()
        if self.policy.program.draws_on_host:
            self.policy.host = self.before

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self.policy.program.draws_on_host:
            return
        if self.before.changed():
            self.policy.host, self.policy.program.draws_on_host = self.before, True
        elif self.training and error is None and not self.policy.runs_unknown:
            self.policy.program.draws_on_host = False


class _Refusing(TorchDispatchMode):
    """Refuses to run ops again whose inputs have changed; with early stop they may not run.

    Args:
        calls: ops as (overload, n-th call in the region).
        policy: of the first run.
    """

    supports_higher_order_operators = True

    def __init__(self, calls: set[tuple[Any, int]], policy: SacPolicy):
        super().__init__()
        self.calls, self.policy = calls, policy
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_sharded_type, types)):
            return NotImplemented  # the policy has seen the ops on the local parts
        if on_fake_tensors():
            return func(*args, **(kwargs or {}))
        call = func, self.counts[func]
        self.counts[func] += 1
        if call in self.calls:
            raise RuntimeError(
                self.policy.refusal(f"{func} would run again on what was written since", _WRITTEN)
            )
        return func(*args, **(kwargs or {}))


class _CountedWrites(TorchDispatchMode):
    """Writes to lists of tensors bump version counters, see `counted_writes`."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        with counted_writes(written_tensors(info, args, kwargs) if info.writes_lists else []):
            return func(*args, **kwargs)


class _AdditionalCasts(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, known: set[int]):
        super().__init__()
        self.known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _casts_weight(func, args) and storage_key(local_part(args[0])) not in self.known:
            with without_dispatch_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _CastsOfShards(TorchDispatchMode):
    """Adds the sharded weights that the first run casts itself to the policy, which sees local tensors only."""

    supports_higher_order_operators = True

    def __init__(self, policy: SacPolicy):
        super().__init__()
        self.policy = policy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(map(is_sharded_type, types)):
            return func(*args, **(kwargs or {}))
        if _casts_weight(func, args):
            self.policy.cast.add(storage_key(local_part(args[0])))
        return NotImplemented


def _casts_weight(func: Any, args: Any) -> bool:
    """Whether this may be a cast that autocast caches."""
    return func is torch.ops.aten._to_copy.default and args[0].is_leaf and args[0].requires_grad


_ORDER = (
    "its ops run in another order than the profiled ones, and selective checkpointing cannot recompute that exactly. "
    'Plan with engine="replay", which can.'
)
_GIVEN = (
    "its code would run again on something else. Give it an object that nobody changes until backward is over, or "
    'plan with engine="replay", which runs no code twice.'
)
_WRITTEN = (
    "between forward and backward something has changed that did not in the profiled step. "
    "Plan from a step that does the same."
)


class _Storages:
    """A weak set of storages: a dead one is not in it, even if another storage has its address."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self._alive[storage_key(tensor)] = storage_ref(tensor)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        storage = self._alive.get(storage_key(tensor))
        return storage is not None and storage() is not None


@dataclass(frozen=True, slots=True)
class _Input:
    """An input of a recomputed op that is not recomputed itself.

    Args:
        call: the op, as (overload, n-th call in the region).
        alias: a tensor that shares memory and version counter with the input.
        version: the input's version when it was read.
    """

    call: tuple[Any, int]
    alias: torch.Tensor
    version: int


def _parts_of_wrappers(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What wrapper subclasses (quantized) among these keep their values in; their own dispatch writes that."""
    return [part for tensor in tensors if is_wrapper_type(type(tensor)) for part in parts_of(tensor)]


class SacPolicy:
    """`policy_fn(ctx, op, *args, **kwargs)` for one call of a region; make a new one for each call.

    It answers by (overload, n-th call), which is also how torch matches the saved entries.

    Args:
        compares: is told of each op, None if the runs are not compared.
    """

    def __init__(self, program: Program, compares: FirstStep | None = None):
        self.program = program
        self.compares = compares
        self.counts: Counter[Any] = Counter()
        self.recomputed = _Storages()
        self.cast: set[int] = set()  # storages of weights that this region casts itself
        self.read = _Storages()  # kept storages that a recomputed op reads
        self.random: CheckpointPolicy | None = None  # what was decided for the region's first random op
        self.watches = False  # whether to remember what recomputed ops read; not where a compiler traces
        self.inputs: list[_Input] = []
        self.aliases: dict[tuple[int, int], torch.Tensor] = {}  # by storage and version
        self.state: ModuleState | None = None  # of the region's module, if that is known
        self.writes_lists = False  # whether the region has written the tensors of a list
        self.streams: CallStreams | None = None  # None if no GPU is in use
        self.drawn: Drawn | None = None  # None if no other thread can disturb it
        self.host: HostRandoms | None = None  # None if the region draws nothing there
        self.runs_unknown = False  # whether another library's op has run in the region
        self.failures: Counter[tuple[Any, int]] = Counter()  # see NOTE [ Ops that raise ]

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        info = op_info(func)
        self.runs_unknown |= info.unknown
        if self.streams is not None and not info.ignored:
            self.streams.ran(ctx.op_output)
        if self.compares is not None:
            self.compares.has_run(func, args, kwargs, ctx.op_output)
        if self.state is not None and self.state.unread:
            # Whatever the decision: autograd may save an argument of a saved op, too.
            for tensor in tensors_in([*args, *kwargs.values()]):
                if tensor.layout is torch.strided:
                    self.state.is_read(storage_key(tensor))
        if _casts_weight(func, args):
            self.cast.add(storage_key(args[0]))
        if info.ignored:
            # A value read by the host (`item`) steers Python code: the second run must read the same one.
            views = any(isinstance(out, torch.Tensor) for out in tensors_in(ctx.op_output))
            return RECOMPUTE if views else SAVE
        nth = self.counts[func]
        self.counts[func] += 1
        planned = self.program.by_call(func, nth)
        if planned is END and self.watches:
            self.program.following.deviates(self.program.region, None, func, func)
        decision = RECOMPUTE if planned[1] else SAVE
        if not (info.replayable or info.repeatable) or info.updates_statistics(args):
            decision = SAVE
        if info.writes:
            decision = self._written(info, args, kwargs)
            written = written_tensors(info, args, kwargs)
            # Below torch's mode these are not counted, see `counted_writes`.
            self.writes_lists |= info.writes_lists
            uncounted = written if info.writes_lists else _parts_of_wrappers(written)
            torch.autograd.graph.increment_version([t for t in uncounted if version_of(t) >= 0])
        if info.random and info.draws_random(args):
            own = info.generator(args, kwargs) is not None
            decision = self._random(func, decision, own, in_place=bool(info.writes))
            if decision is RECOMPUTE and self.streams is not None:
                self.streams.refuse_drawing(func, generators_of(info, args, kwargs))
        if decision is RECOMPUTE:
            if self.drawn is not None and may_draw(info, args):
                self.drawn.add(func, info, args, kwargs, ctx.op_output)
            self._note((func, nth), info, args, kwargs, ctx.op_output)
        return decision

    def _written(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointPolicy:
        """An in-place op is decided as the op that made the storage; writes outside the region are saved."""
        written = written_tensors(info, args, kwargs)
        written = _parts_of_wrappers(written) or written
        again = [tensor in self.recomputed for tensor in written]
        # A collective must run as often as the other ranks expect.
        if any(again) and not info.replayable:
            raise RuntimeError(
                self.refusal(f"{info.name} writes in place what would be computed again, without it", _ORDER)
            )
        if written and all(again):
            return RECOMPUTE
        if any(again) or any(tensor in self.read for tensor in written):
            raise RuntimeError(
                self.refusal(f"{info.name} writes in place what recomputed ops have read", _ORDER)
            )
        return SAVE

    def _random(self, func: Any, decision: CheckpointPolicy, own: bool, in_place: bool) -> CheckpointPolicy:
        """One random state is stashed for the whole region: its random ops are all saved or all recomputed.

        The model's own generators are not stashed: numbers drawn from them are saved.
        """
        if own:
            wanted = SAVE
        elif self.random is None:
            wanted = self.random = decision
        else:
            wanted = self.random
        if decision is not wanted and in_place:
            raise RuntimeError(
                self.refusal(f"{func} draws random numbers for one part of what is recomputed", _ORDER)
            )
        return wanted

    def _note(
        self,
        call: tuple[Any, int],
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        for tensor in read_tensors(info, args, kwargs):
            if tensor.layout is torch.strided and tensor not in self.recomputed:
                self.read.add(tensor)
                if self.watches:
                    self._watch(call, tensor)
        given = {storage_key(t) for t in tensors_in([*args, *kwargs.values()]) if t.layout is torch.strided}
        for tensor in tensors_in(result):
            # A view shares the storage of an argument.
            if tensor.layout is torch.strided and storage_key(tensor) not in given:
                self.recomputed.add(tensor)

    def _watch(self, call: tuple[Any, int], tensor: torch.Tensor) -> None:
        """Remember an input of an op; the alias keeps memory alive that the second run needs anyway."""
        version = version_of(tensor)
        if version < 0:
            return  # inference tensors have none
        key = storage_key(tensor), version
        if key not in self.aliases:
            with disable_dispatch_modes():
                self.aliases[key] = detach_sharing_version(tensor)
        self.inputs.append(_Input(call, self.aliases[key], version))

    def changed(self) -> set[tuple[Any, int]]:
        """The recomputed ops whose inputs were written since; drops all that was remembered."""
        found = {known.call for known in self.inputs if version_of(known.alias) != known.version}
        self.inputs, self.aliases = [], {}
        return found

    def refusal(self, what: str, why: str) -> str:
        """The message of an error, with the region's name."""
        return f"in {self.program.where}, {what}: {why}"
