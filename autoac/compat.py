"""Every private torch interface that autoac uses, in one place.

Tried with torch 2.13.0 (CPU). `tests/test_compat.py` exercises each of them and fails loudly when one changes its
meaning, so that a new torch release is judged here and nowhere else.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch._prims_common
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor

TRIED_VERSIONS = ("2.13.0",)

OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator
disable_dynamo = torch._disable_dynamo
"""Decorator: `torch.compile` does not trace into the function. Imports the compiler only when it is called."""


def disable_dispatch_modes() -> Any:
    """Context in which no dispatch mode sees an op. It acts from its construction on: make it where it is entered.

    Under fake tensors, whose kernels are themselves a dispatch mode, the modes are put aside one by one: the tensors
    bring their own mode back.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return torch.utils._python_dispatch._disable_current_modes()
    return torch._C._DisableTorchDispatch()


def detach_unseen(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` that no dispatch mode sees."""
    if type(tensor) is torch.Tensor:
        # What `nn.Parameter` is made with: it sets the modes aside in C++, in half the time.
        return torch.Tensor._make_subclass(torch.Tensor, tensor)
    with disable_dispatch_modes():
        return tensor.detach()


def set_aside(mode: Any) -> bool:
    """Take a dispatch mode off the stack, if it is the topmost; `put_back` it. Tells whether it was."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    top = torch._C._pop_torch_dispatch_stack(None)
    if top is mode:
        return True
    torch._C._push_on_torch_dispatch_stack(top)
    return False


put_back = torch._C._push_on_torch_dispatch_stack
"""Put a dispatch mode on the stack again, as the topmost."""


def is_compiled_wrapper(model: Any) -> bool:
    """Whether this is what `torch.compile(module)` returns."""
    dynamo = sys.modules.get(
        "torch._dynamo"
    )  # not imported: nothing can have been compiled, and importing it is slow
    wrapper = getattr(dynamo, "OptimizedModule", None)  # not there yet while another thread imports it
    return wrapper is not None and isinstance(model, wrapper)


def compiled_attribute(module: torch.nn.Module) -> str | None:
    """The instance attribute through which this module's calls run compiled, None if they do not.

    `module.compile()` sets one that the class has as None; the wrapper of `torch.compile(module)` has a `forward` of
    its own.
    """
    if is_compiled_wrapper(module):
        return "forward"
    return "_compiled_call_impl" if module.__dict__.get("_compiled_call_impl") is not None else None


COMPILED_NODE = "CompiledFunctionBackward"
"""Name of the autograd node that stands for all that a graph of AOTAutograd has computed."""


POLICIES_SEE_RESULTS = (
    "op_output" in inspect.signature(torch.utils.checkpoint.SelectiveCheckpointContext).parameters
)
"""Whether selective checkpointing asks its policy once, in forward and with the op's result, as engine sac needs it."""


def storage_key(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage object: unique among the storages that are alive."""
    return tensor.untyped_storage()._cdata


def storage_ref(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    """A weak reference that dies with the storage itself, not with this tensor's wrapper.

    torch keeps a storage's Python object alive as long as the storage (PyObject preservation).
    """
    return weakref.ref(tensor.untyped_storage())


def storage_users(key: int) -> int:
    """How many tensors (TensorImpl) stand on the storage with this key, which must be alive."""
    return torch._C._storage_Use_Count(key) - 1  # asking takes a reference of its own


def has_its_storage_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor stands on this one's storage, nobody has the storage itself, and its memory is torch's.

    So that the memory would be given back once this tensor dies. All who share a storage hold it: views, what autograd
    has saved, arrays of numpy that were made from it, tensors of other libraries. The counts are compared with those of
    a tensor of our own. Memory that a tensor was made on (numpy's, a file's) cannot be resized.
    """
    storage, ours = tensor.untyped_storage(), torch.empty(1, device="cpu")
    if not storage.resizable() or (tensor.device.type == "cpu" and storage.is_shared()):
        return False
    del storage
    return _storage_holders(tensor) == _storage_holders(ours)


def _storage_holders(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def saved_tensors_hooks_allowed() -> bool:
    """Whether saved-tensor hooks may be used here (`torch.autograd.graph.disable_saved_tensors_hooks`)."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()


def held_once_as_argument(tensor: torch.Tensor) -> bool:
    """Whether an argument of `__torch_dispatch__` has one owner only, which is not Python, and so has its storage.

    The dispatch itself adds the wrapper, the boxed argument and the call's own reference to the owner's. All of Python
    counts as the one wrapper, which has five references here: the dispatch's, the tuple of arguments, the caller's
    variable, ours and that of `getrefcount`.
    """
    holders = tensor._use_count()
    return holders <= 4 and storage_users(storage_key(tensor)) <= 1 and sys.getrefcount(tensor) <= 5


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie without gaps or overlap."""
    return torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)


def dense_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a jagged nested tensor, whose own sizes are symbols; any other tensor as it is."""
    return cast("Any", tensor)._values if tensor.layout is torch.jagged else tensor


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's in-place version; -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


@contextlib.contextmanager
def counted_writes(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Every tensor written in this context, inside `__torch_dispatch__`, gets a new in-place version.

    An op that writes the tensors of a list (`_foreach_mul_`) leaves that to the ops it is made of, and below a dispatch
    mode these do not count it on CPU. Autograd would then miss that a saved tensor was modified, and that the
    gradient of a view has to go through the write.
    """
    versions = [version_of(tensor) for tensor in tensors]
    yield
    torch.autograd.graph.increment_version(
        [t for t, version in zip(tensors, versions, strict=True) if version >= 0 and version_of(t) == version]
    )


def detach_sharing_version(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` inside `__torch_dispatch__`, with the version counter still shared.

    Source: `_detach_helper` in torch/utils/checkpoint.py.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def call_below_autograd(function: Callable[..., None], *args: Any) -> None:
    """Call it so that its ops record no graph although gradients are on, and without autocast; modes see them."""
    grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)  # as `torch.enable_grad` does, in a tenth of the time
    try:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            function(*args)
    finally:
        torch._C._set_grad_enabled(grad)


def checkpoint_debug_enabled() -> bool | None:
    """What `torch.utils.checkpoint.set_checkpoint_debug_enabled` is set to; None if it is not."""
    return torch.utils.checkpoint._checkpoint_debug_enabled


def is_fake_type(kind: type) -> bool:
    """Whether tensors of this type have no data."""
    return issubclass(kind, FakeTensor)


def function_modes() -> list[Any]:
    """The torch function modes that are on in this thread, the topmost last."""
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


def is_device_mode(mode: Any) -> bool:
    """Whether a torch function mode is that of a default device, which leaves alone what makes no tensor."""
    return type(mode) is torch.utils._device.DeviceContext


put_function_mode_on = torch._C._push_on_torch_function_stack
"""Put a torch function mode on the stack, as the topmost."""


def take_function_mode_off(mode: Any) -> None:
    """Take a torch function mode off the stack, wherever it is on it; nothing if somebody else has taken it off."""
    above = []
    while function_modes():
        top = torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        put_function_mode_on(other)


def in_function_transform() -> bool:
    """Whether `torch.func` transforms what runs here (grad, vmap, jvp, ...), or forward-mode derivatives are taken."""
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for several, as in `torch.func.vmap` or a gradient with `is_grads_batched`."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


_CROSS_ENTROPY = torch.nn.functional.cross_entropy
_PATCHED = inspect.getsourcefile(_CROSS_ENTROPY) != torch.nn.functional.__file__

torchs_cross_entropy = None if _PATCHED else _CROSS_ENTROPY
"""`torch.nn.functional.cross_entropy`; None if a library had put its own there when this was imported."""


def being_traced() -> bool:
    """Whether ops are being written down by a proxy mode (`make_fx`, AOTAutograd), not run."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def being_jit_traced() -> bool:
    """Whether `torch.jit.trace` is writing ops down."""
    return torch._C._get_tracing_state() is not None


def any_autocast() -> bool:
    """Whether autocast is on for any device in this thread."""
    return torch._C._is_any_autocast_enabled()


def next_node_number() -> int:
    """The sequence number that this thread's next autograd node gets; inside an op's dispatch, its own is one less."""
    return torch._C._autograd._get_sequence_nr()


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The pack and unpack hook that autograd calls now, None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def in_compiled_autograd() -> bool:
    """Whether the running backward is one that compiled autograd has captured."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # not imported: it is slow
    return compiled is not None and compiled.in_compiled_autograd_region


def current_node() -> Any:
    """The autograd node that is being evaluated, None outside of backward."""
    return torch._C._current_autograd_node()


def backward_keeps_graph() -> bool:
    """Whether the running backward retains the graph; true outside of a backward pass."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on this device use unless they are given one."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]


class AllocationRanges:
    """Context: which blocks the CPU allocator hands out and takes back within named ranges.

    Reads the profiler's tree of raw events, as torch's own `_memory_profiler` does. `deltas` is there after the
    context: for each range, the changes in bytes by time.
    """

    def __enter__(self) -> AllocationRanges:
        self.deltas: dict[str, list[int]] = {}
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        stack = raw_events(self._profile)
        while stack:
            event = stack.pop()
            if event.name in self.deltas:
                self.deltas[event.name] = [size for _, _, size in cpu_allocations([event])]
            else:
                stack.extend(event.children)

    def range(self, name: str) -> Any:
        """A context whose allocations are recorded under this name, which must be new."""
        self.deltas[name] = []
        return torch._C._profiler._RecordFunctionFast(name)


def raw_events(profile: torch.profiler.profile) -> list[Any]:
    """The roots of a finished profile's tree of raw events, which torch's own `_memory_profiler` reads as well."""
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    return list(profile.profiler.kineto_results.experimental_event_tree())


def cpu_allocations(events: list[Any]) -> list[tuple[int, int, int]]:
    """(Unix time in ns, address, change in bytes) of what the CPU allocator did in these events, by time."""
    found: list[tuple[int, int, int]] = []
    stack = list(events)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    found.sort(key=lambda event: event[0])
    return found


def cpu_ops(events: list[Any]) -> list[tuple[int, str]]:
    """(Unix time in ns, name such as "aten::mm") of the start of every op in these events, by time.

    An op that a dispatch mode passes on shows up once more inside of itself; that is one op.
    """
    found: list[tuple[int, str]] = []
    stack = [(event, "") for event in events]
    while stack:
        event, inside = stack.pop()
        name = inside
        if event.tag == torch._C._profiler._EventType.TorchOp and event.name.count("::") == 1:
            name = event.name  # autograd's own ranges have more colons
            if name != inside:
                found.append((event.start_time_ns, name))
        stack.extend((child, name) for child in event.children)
    found.sort(key=lambda event: event[0])
    return found


def conjugate_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage with the conjugate bit set."""
    return torch._conj(tensor)


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage with the negative bit set."""
    return torch._neg_view(tensor)


_SAC_TOOLS = {
    "sac_ilp": ("sac_milp", "get_optimal_checkpointing_policy_per_module", "logger"),
    "ilp_utils": ("aggregate_stats", "parse_module_info"),
    "sac_estimator": ("SACEstimator", "OPS_TO_ALWAYS_SKIP"),
    "mem_tracker": ("MemTracker",),
    "runtime_estimator": ("RuntimeEstimator",),
}


@functools.cache
def sac_tools() -> types.SimpleNamespace:
    """torch's own planner of selective checkpointing and its estimators, by name, from `torch.distributed._tools`.

    Raises:
        ImportError: pwlf, which they need, is not installed, or this torch has no such tools.
    """
    importlib.import_module("pwlf")  # torch would say so late
    found: dict[str, Any] = {}
    for file, names in _SAC_TOOLS.items():
        module = importlib.import_module(f"torch.distributed._tools.{file}")
        found |= {name: getattr(module, name) for name in names}
    return types.SimpleNamespace(**found)


def behind_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind those that `torch.func.vmap`, `jvp` and the like hand to the function they transform.

    Those have no storage of their own that could be asked for; dispatch modes and saved-tensor hooks see the plain one.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
