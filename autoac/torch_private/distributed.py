"""Distributed models: sharded parameters, FSDP2's units, DDP's reducer, the processes' store.

Nothing here imports torch's distributed packages before other code has: the import is slow.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import functools
import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from autoac.torch_private.fake import unset_fake_temporarily
from autoac_solver.records.errors import ProfilingError


def _class(module: str, name: str) -> type | None:
    """A class of torch, None while its module is not imported: there can be no instance then."""
    return getattr(sys.modules.get(module), name, None)


# -- sharded tensors -----------------------------------------------------------------------------------------------


def is_sharded_type(kind: type) -> bool:
    """Whether tensors of this type wrap a local one: DTensors, and results of collectives not waited for yet.

    Source: `DTensor` (torch/distributed/tensor/_api.py), `AsyncCollectiveTensor`
    (torch/distributed/_functional_collectives.py).
    """
    sharded = _class("torch.distributed.tensor", "DTensor")
    return (sharded is not None and issubclass(kind, sharded)) or _is_awaited_type(kind)


def _is_awaited_type(kind: type) -> bool:
    awaited = _class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    return awaited is not None and issubclass(kind, awaited)


@functools.cache
def is_wait(func: Any) -> bool:
    """Whether this op waits for a collective, which is done once: a second run of the code has nothing to wait for.

    Source: `AsyncCollectiveTensor.trigger_wait` (torch/distributed/_functional_collectives.py).
    """
    return str(func) == "_c10d_functional.wait_tensor.default"


@functools.cache
def is_wrap(func: Any) -> bool:
    """Whether this op returns its argument, the result of a collective, as a tensor of another node of autograd.

    Source: `_wrap_tensor_autograd` (torch/distributed/_functional_collectives.py).
    """
    return str(func) == "_c10d_functional._wrap_tensor_autograd.default"


@functools.cache
def waited_for(func: Any) -> Callable[..., torch.Tensor]:
    """A form of a functional collective that returns once its result is there.

    Source: `wait_tensor`, as `AsyncCollectiveTensor.trigger_wait` calls it
    (torch/distributed/_functional_collectives.py).
    """

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        waits: Any = importlib.import_module("torch.distributed._functional_collectives")
        return waits.wait_tensor(func(*args, **kwargs))

    run.__name__ = run.__qualname__ = str(func)
    return run


def ranks_of_group(name: str) -> int:
    """The number of ranks in the process group of this name, as collectives are given it.

    Source: `_resolve_process_group` (torch/distributed/distributed_c10d.py).
    """
    group: Any = torch.distributed.distributed_c10d._resolve_process_group(cast("Any", name))
    return group.size()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, or the tensor that a collective writes; any other tensor itself.

    Source: `DTensor._local_tensor` (torch/distributed/tensor/_api.py), `AsyncCollectiveTensor.elem`
    (torch/distributed/_functional_collectives.py).
    """
    while is_sharded_type(type(tensor)):
        tensor = tensor.elem if _is_awaited_type(type(tensor)) else tensor._local_tensor
    return tensor


def used_on(parameter: torch.Tensor) -> torch.device:
    """The device that a parameter is used on: FSDP2's `CPUOffloadPolicy` keeps its shard in the host's memory.

    Source: `DTensor.device_mesh`; public, here for `is_sharded_type`. `_get_device_from_mesh`
    (torch/distributed/fsdp/_fully_shard/_fsdp_init.py).
    """
    device = parameter.device
    if device.type != "cpu" or not is_sharded_type(type(parameter)):
        return device
    kind = cast("Any", parameter).device_mesh.device_type
    return device if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def sharded_like(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that makes a DTensor like this one from another local tensor; None if this is no DTensor.

    Source: `DTensor.__new__`, `DTensor._spec` (torch/distributed/tensor/_api.py).
    """
    kind: Any = type(tensor)
    if not is_sharded_type(kind) or _is_awaited_type(kind):
        return None
    return functools.partial(kind, spec=tensor._spec, requires_grad=False)


# -- FSDP2 ---------------------------------------------------------------------------------------------------------


def is_unit(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` was called with this module: its parameters are gathered around its calls.

    Source: `FSDPModule` (torch/distributed/fsdp/_fully_shard/_fully_shard.py); `fully_shard` changes a module's class
    to a subclass of it.
    """
    kind = _class("torch.distributed.fsdp", "FSDPModule")
    return kind is not None and isinstance(module, kind)


def is_fsdp1(module: torch.nn.Module) -> bool:
    """Whether this is a `FullyShardedDataParallel`, with flat parameters.

    Source: torch/distributed/fsdp/fully_sharded_data_parallel.py; public, but here because this must not import it.
    """
    kind = _class("torch.distributed.fsdp", "FullyShardedDataParallel")
    return kind is not None and isinstance(module, kind)


def own_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The module's class before `fully_shard` replaced it by a subclass.

    Source: `FSDPModule._orig_cls_mro_index` (torch/distributed/fsdp/_fully_shard/_fully_shard.py).
    """
    kind: Any = type(module)
    return kind.__mro__[kind._orig_cls_mro_index] if is_unit(module) else kind


def set_units_up(root: torch.nn.Module) -> None:
    """Run the setup that a root of FSDP2 does at its first call, so that restoring a step does not undo it.

    For example, it registers hooks for state dictionaries.

    Source: `FSDPState._lazy_init` (torch/distributed/fsdp/_fully_shard/_fsdp_state.py).
    """
    cast("Any", root)._get_fsdp_state()._lazy_init()


def reset_units(root: torch.nn.Module) -> None:
    """Reset a root of FSDP2 to its state between two steps, after a step that failed.

    Source: `FSDPModule.reset_iter_state` (torch/distributed/fsdp/_fully_shard/_fully_shard.py); public, but missing in
    releases before 2.13, where the model stays as the step left it. `FSDPState._is_root` (_fsdp_state.py beside it).
    """
    reset: Any = getattr(root, "reset_iter_state", None)
    # Without its setup at the first call there is nothing to reset, and torch's function fails.
    if reset is not None and cast("Any", root)._get_fsdp_state()._is_root:
        reset()


def holds_unreduced_gradients(unit: torch.nn.Module) -> bool:
    """Whether a unit has gradients that it has not reduced: `set_requires_gradient_sync(False)` was called with it.

    The shards have none before they are reduced.

    Source: `FSDPParam.unsharded_accumulated_grad`, `FSDPParam._unsharded_param`, `FSDPState._fsdp_param_groups`
    (_fsdp_param.py and _fsdp_state.py in torch/distributed/fsdp/_fully_shard).
    """
    return any(
        parameter.unsharded_accumulated_grad is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in cast("Any", unit)._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
    )


@contextmanager
def offloads_copied(to_host: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context in which FSDP2 copies offloaded shards and gradients, although the host is the device here.

    There `Tensor.to(device)` returns the tensor itself.

    Args:
        to_host: context in which gradients are copied to the host's memory.

    Source: `FSDPParam.all_gather_inputs` (torch/distributed/fsdp/_fully_shard/_fsdp_param.py), and `foreach_reduce`
    (_fsdp_collectives.py beside it) as `_fsdp_param_group.py` calls it.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as calls
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    def copying(function: Callable[..., Any], target: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with _CopiedToDevices(target):
                return function(*args, **kwargs)

        return called

    inputs: Any = FSDPParam.all_gather_inputs
    reduce = calls.foreach_reduce
    try:
        FSDPParam.all_gather_inputs = property(copying(inputs.fget, nullcontext))
        calls.foreach_reduce = copying(reduce, to_host)
        yield
    finally:
        FSDPParam.all_gather_inputs, calls.foreach_reduce = inputs, reduce


class _CopiedToDevices(TorchFunctionMode):
    """Mode in which `Tensor.to(device)` always makes a copy, inside of the context `target`."""

    def __init__(self, target: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.target = target

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.device):
            with self.target():
                return args[0].clone()
        return func(*args, **(kwargs or {}))


# -- DDP -----------------------------------------------------------------------------------------------------------


def is_ddp(module: Any) -> bool:
    """Whether this is a `DistributedDataParallel`.

    Source: torch/nn/parallel/distributed.py; public, here for `ddp_around`.
    """
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def ddp_around(model: torch.nn.Module) -> Any:
    """The live `DistributedDataParallel` whose reducer waits for this module's gradients, None if there is none.

    A reducer's hooks are on gradient accumulators, where Python cannot see them; so all objects are searched.

    Source: `Reducer::Reducer` (torch/csrc/distributed/c10d/reducer.cpp).
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    if not has_process_group():
        return None
    for found in gc.get_objects():
        is_whole = issubclass(type(found), ddp) and found.__dict__.get("_modules")
        if is_whole and any(module is model for module in found.module.modules()):
            return found
    return None


def counts_backwards(ddp: Any) -> bool:
    """Whether its reducer, of a static graph, has not seen the first backward yet, and will take any for it.

    Source: `DistributedDataParallel._static_graph_delay_allreduce_enqueued` (torch/nn/parallel/distributed.py),
    `Reducer::static_graph_first_iteration` (torch/csrc/distributed/c10d/reducer.cpp).
    """
    return bool(ddp.static_graph) and not ddp._static_graph_delay_allreduce_enqueued


def bucket_options(ddp: Any) -> tuple[bool, list[torch.nn.Parameter]]:
    """Whether gradients are views of the buckets, and the parameters that have a place in them.

    Source: `DistributedDataParallel._module_parameters` (torch/nn/parallel/distributed.py).
    """
    return bool(ddp.gradient_as_bucket_view), list(ddp._module_parameters)


def ranks_of(model: torch.nn.Module) -> tuple[int, ...] | None:
    """The ranks that hold this model together, in order; None, for all ranks, if the model does not say.

    Source: `DTensor.device_mesh`, and `DistributedDataParallel.process_group`; public, here for `is_sharded_type`.
    """
    found: set[int] = set()
    for module in model.modules():
        if is_ddp(module):
            found.update(torch.distributed.get_process_group_ranks(cast("Any", module).process_group))
    for tensor in (*model.parameters(), *model.buffers()):
        if is_sharded_type(type(tensor)):
            found.update(cast("Any", tensor).device_mesh.mesh.flatten().tolist())
    return tuple(sorted(found)) or None


# -- processes -----------------------------------------------------------------------------------------------------


def has_process_group() -> bool:
    """Whether this process has joined a process group.

    Source: public; here because importing torch's distributed packages is left to other code.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_one_of_several_ranks() -> bool:
    """Whether this process is one of several that train together.

    Source: as for `has_process_group`.
    """
    return has_process_group() and torch.distributed.get_world_size() > 1


def has_other_ranks() -> bool:
    """Whether there are processes of other ranks: torch's `fake` backend only says so.

    Source: `is_one_of_several_ranks`; the backend's name in torch/testing/_internal/distributed/fake_pg.py.
    """
    return is_one_of_several_ranks() and torch.distributed.get_backend() != "fake"


def default_store() -> Any:
    """The store through which the processes found each other.

    Source: `_get_default_store` (torch/distributed/distributed_c10d.py).
    """
    return torch.distributed.distributed_c10d._get_default_store()


def collectives_asked_for() -> dict[Any, int]:
    """Of each process group of this process, how many collectives, sends and receives it was asked for so far.

    Source: `_world` (torch/distributed/distributed_c10d.py), `ProcessGroup._get_sequence_number_for_group`; gloo and
    NCCL count, some other backends do not.
    """
    found: dict[Any, int] = {}
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # a backend without numbers
            found[group] = group._get_sequence_number_for_group()
    return found


def lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed because the process of another rank is gone, or closed its connections.

    Source: the messages of gloo's pairs (gloo/transport/tcp/pair.cc), and `DistBackendError` of other backends.
    """
    if isinstance(error, torch.distributed.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error) and "onnection" in str(error)


def _gloo_backends() -> list[Any]:
    """Those of all process groups of this process; one for each.

    Source: `_world` (torch/distributed/distributed_c10d.py), `ProcessGroup._get_backend`.
    """
    groups = torch.distributed.distributed_c10d._world.pg_map
    backends = [group._get_backend(device) for group in list(groups) for device in group._device_types]
    return [one for one in dict.fromkeys(backends) if type(one).__name__ == "ProcessGroupGloo"]


def close_connections() -> None:
    """Close this rank's gloo connections: what waits in another thread, also for a receive, raises. So do the others.

    The process groups cannot be used after this. gloo closes a connection on which it gave up waiting.

    Source: `ProcessGroupGloo::recv` (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp), and "Application timeout caused
    pair closure" in gloo/transport/tcp/unbound_buffer.cc. `abort` of that backend leaves a waiting thread as it is.
    """
    for backend in _gloo_backends():
        for peer in set(range(backend.size())) - {backend.rank()}:
            with suppress(RuntimeError):  # the timeout, or the connection is closed already
                backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(
                    timedelta(milliseconds=1)
                )


_UNUSED_TAG = 0x5EA1


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Context in which this process is rank 0 of `world_size`, and collectives do nothing, on fake tensors too.

    Source: `FakeStore` (torch/testing/_internal/distributed/fake_pg.py); the import of
    torch/distributed/_tools/fake_collectives.py gives c10d's ops implementations for fake tensors.

    Raises:
        ProfilingError: this process is a rank already.
    """
    if not torch.distributed.is_available():
        raise ProfilingError(
            "this torch is built without torch.distributed, which runs the step of a sharded model."
        )
    if torch.distributed.is_initialized():
        raise ProfilingError(
            "this process is a rank already, and to plan for ranks that are not there it has to be one of theirs: do "
            "so in a process without init_process_group. For the ranks that are there, shard the model and leave "
            "parallel= out."
        )
    importlib.import_module("torch.distributed._tools.fake_collectives")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    excepthook = sys.excepthook  # torch replaces it by one that names the rank
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = excepthook


@contextmanager
def meshes_joined_for_real() -> Iterator[None]:
    """Context in which meshes are joined on real tensors, in fake mode too: torch reads their values.

    Source: `DeviceMesh._concatenate` (torch/distributed/device_mesh.py), which `fully_shard` calls for parameters that
    `parallelize_module` has split.
    """
    kind: Any = torch.distributed.device_mesh.DeviceMesh
    original = vars(kind)["_concatenate"]

    def joined(meshes: Any) -> Any:
        with unset_fake_temporarily():
            return original.__func__(meshes)

    kind._concatenate = staticmethod(joined)
    try:
        yield
    finally:
        kind._concatenate = original


@contextmanager
def resizes_seen(seen: Callable[[torch.UntypedStorage, int, int], None]) -> Iterator[None]:
    """Context that calls `seen` for each storage that Python resizes, with its bytes before and after.

    Source: `StorageBase.resize_` (torch/csrc/StorageMethods.cpp), which `torch.UntypedStorage` inherits.
    """
    original = torch.UntypedStorage.resize_
    was_own = "resize_" in vars(torch.UntypedStorage)

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        seen(storage, before, storage.nbytes())
        return result

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        if was_own:
            torch.UntypedStorage.resize_ = original
        else:
            del torch.UntypedStorage.resize_


# -- gloo ----------------------------------------------------------------------------------------------------------


def gloo_threads() -> list[Path]:
    """The files in /proc with the states of the threads that run gloo's collectives; empty without /proc.

    Source: `ProcessGroupGloo::runLoop` (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp) is such a thread;
    /proc/[pid]/task/[tid]/stat (proc(5)) has its name and state.
    """
    threads = Path("/proc/self/task")
    stats = [thread / "stat" for thread in threads.iterdir()] if threads.is_dir() else []
    return [stat for stat in stats if _name_and_state(stat)[0] == _GLOO_THREAD]


def wait_for_gloo(threads: list[Path], looks: int = 1) -> None:
    """Wait until none of `gloo_threads` runs: gloo has then released the tensors of the collectives that are over.

    It does so some moments after it has signalled the end, on a busy machine so late that the tensors seem alive. A
    thread that waits for other ranks does not run. To free a tensor it may need the interpreter's lock, so this hands
    that over first.

    Args:
        looks: how often in a row none may run. A thread that waits for a lock for a moment does not run either.

    Source: `ProcessGroupGloo::runLoop` (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
    """
    until, quiet = time.monotonic() + _LONGEST_S, 0
    time.sleep(0)
    while threads and time.monotonic() < until:
        quiet = 0 if any(_name_and_state(stat)[1] == "R" for stat in threads) else quiet + 1
        if quiet >= looks:
            return
        time.sleep(1e-4)


@contextmanager
def gloo_unhurried(threads: list[Path]) -> Iterator[None]:
    """Context in which each wait for a collective lets gloo's threads release what they hold.

    A tensor that such a thread frees is alive for ever to `torch.profiler`, which sees one thread. DDP's reducer, which
    waits in C++, is not slowed: its buckets stay anyway.

    Args:
        threads: from `gloo_threads`.

    Source: `wait_tensor` (torch/distributed/_functional_collectives.py); `Work.wait` is public.
    """
    if not threads:
        yield
        return
    import torch.distributed._functional_collectives as collectives

    work = torch.distributed.Work
    waits = collectives.wait_tensor, work.wait

    def then_rests(wait: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = wait(*args, **kwargs)
            wait_for_gloo(threads)
            return found

        return run

    collectives.wait_tensor, work.wait = map(then_rests, waits)
    try:
        yield
    finally:
        collectives.wait_tensor, work.wait = waits


def _name_and_state(stat: Path) -> tuple[str, str]:
    try:
        name, _, state = stat.read_text().partition("(")[2].rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return "", ""  # the thread has ended
    return name, state.split()[0]


_GLOO_THREAD = "pt_gloo_runloop"
_LONGEST_S = 5.0
