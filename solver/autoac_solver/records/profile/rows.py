"""The rows of a profile: ops, storages, saved tensors, and module calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from autoac_solver.records.disk.limits import Seconds, Size, one_of

NEVER = -1

OPTIMIZER_STEP = "optimizer.step"
"""Name of the op that stands for the step of an optimizer, at the end."""

SCALAR_BYTES = 8
"""Size of a number that autograd saves as its own tensor, made by no op."""

TIMES_FROM = ("measured", "table", "interpolated", "estimated")
"""Origins of an op's time: measured when the profile was made; looked up in a device's cost table, which holds
measurements; interpolated between entries of such a table; or estimated from a device's rates."""

UNSTEADY = "times are unsteady"
"""Beginning of a profile's note that its measured times are unreliable."""

VARIES = "the step varies"
"""Beginning of a profile's note that the step does not run the same ops every time."""

FACTS = (
    "own loop",
    "eval mode",
    "own checkpointing",
    "varies",
    "no autocast in backward",
    "sized by values",
    "graph of backward",
    "loss sized by values",
    "compiled functions",
)
"""Facts about a recorded step, for code; the profile's notes say them to readers. In this order: the step was the
loop's own, with the tensors that the loop still held; the model was in eval mode; it recomputes by its own
checkpointing; the step does not run the same ops every time; its backward ran without the autocast of its forward;
shapes in its modules depend on the values of its batch; its backward made a graph of its own (`create_graph`); shapes
of what is saved outside of the modules depend on values; functions that torch.compile has compiled ran in it."""

(
    OWN_LOOP,
    IN_EVAL,
    OWN_CHECKPOINTING,
    VARYING,
    NO_AUTOCAST_IN_BACKWARD,
    SIZED_BY_VALUES,
    GRAPH_OF_BACKWARD,
    LOSS_SIZED_BY_VALUES,
    COMPILED_FUNCTIONS,
) = FACTS

INFERENCE = "inference mode"
CACHED = "cached parametrizations"
SHARDED = "sharded units"
FOREIGN = "writes of code that torch does not see"
STREAMS = "a second stream"
UNRULED = "a higher-order op without a rule"
UNPACKED_TWICE = "a saved tensor read twice"
"""Kinds of code that must not run a second time, or that no engine may recompute: see `ModuleCall.once`."""

GATHERED = "(gathered)"
"""Name of parameters that are gathered from shards and freed during the step, see `Storage.is_gathered`."""

BUCKETS = "DDP's buckets"
"""Name of the storage that `DistributedDataParallel` reduces gradients in, see `Storage.is_gradient_before`."""

KINDS = ("Parameter", "Buffer", "Gradient", "Optstate", "Input", "Activation", "Temp")
"""Kinds of memory, named as in torch's MemTracker; Input is the sample and any other earlier storage."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the step that made or changed a storage.

    Args:
        name: its overload, such as "aten.mm.default".
        tick: the tick at which it ran.
        module: index of the innermost module call it ran in, -1 for none.
        backward: it ran inside a backward pass.
        time_s: its seconds.
        reads, writes, creates: storages it reads (including those written in place), writes in place, allocates.
        workspace_bytes: bytes that are alive only inside the op, on top of its inputs and outputs.
        random_bytes: size of the generator state that must be stashed to run it again, 0 if it is not random.
        replayable: it may run again.
        side_effect: it updates statistics outside of its region or draws from one of the model's own generators. Engine
            replay leaves that out or restores it; engine sac cannot.
        uninitialised: its output holds no values yet.
        spread_s: interquartile range of the measurements.
        rerun_s: its seconds if run again in backward, 0 if not known to differ from `time_s`.
        time_from: origin of `time_s`, see `TIMES_FROM`.
        signature: index of its signature's text, -1 for none.
        dtype: the floating dtype it computes in, "" for none.
        flops: floating-point operations of a matrix product, convolution or attention, 0 for ops that only move memory.
        moved_bytes: bytes read and written if every element of its arguments and results is touched once.
        cached_cast: its result is a cast of a parameter in autocast's cache, shared by all readers of the parameter;
            code that runs a second time (`sac`) makes it again.
        host_s: seconds in which the host launches it; 0 if ops run synchronously, or if unknown.
        waits: the host waits until it is done: for the size of its result, or for a copy between host and device.
        read_on_host: once it is done, the host reads a value (`item()`), which engine replay does not repeat.
    """

    name: str
    tick: int
    module: int
    backward: bool
    time_s: Seconds
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    creates: tuple[int, ...]
    workspace_bytes: Size = 0
    random_bytes: Size = 0
    replayable: bool = True
    side_effect: bool = False
    uninitialised: bool = False
    spread_s: Seconds = 0.0
    rerun_s: Seconds = 0.0
    time_from: Annotated[str, one_of(*TIMES_FROM)] = "measured"
    signature: int = NEVER
    dtype: str = ""
    flops: Size = 0
    moved_bytes: Size = 0
    cached_cast: bool = False
    host_s: Seconds = 0.0
    waits: bool = False
    read_on_host: bool = False

    @property
    def host_waits(self) -> bool:
        """Whether the step goes on only when it is done."""
        return self.waits or self.read_on_host

    @property
    def again_s(self) -> float:
        """Its seconds if run again in backward."""
        return self.rerun_s or self.time_s


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage.

    Args:
        bytes: its size on the device.
        alloc: tick of its allocation (ops begin at 1). -1: it existed before the step. 0: it existed before the step
            and the training loop frees it during the step, such as gradients cleared after forward.
        free: tick at which it is freed if neither autograd nor a plan holds it; the end of the step if it survives.
        kind: "Parameter", "Buffer", "Gradient", "Optstate", "Input", "Activation" or "Temp".
        name: name of the parameter or buffer, else "".
    """

    bytes: Size
    alloc: int
    free: int
    kind: Annotated[str, one_of(*KINDS)]
    name: str = ""

    @property
    def is_workspace(self) -> bool:
        """Whether it is temporary memory that a library keeps all the time."""
        return self.kind == "Temp" and self.alloc == NEVER

    @property
    def is_gradient_before(self) -> bool:
        """Whether it is a gradient from before the step, which the step adds to; DDP's buckets are none."""
        return self.kind == "Gradient" and self.alloc == NEVER and self.name != BUCKETS

    @property
    def is_gathered(self) -> bool:
        """Whether it is a gathered parameter: its sharding code frees it even if autograd or plans still hold it."""
        return self.kind == "Parameter" and self.name == GATHERED


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd saved for backward.

    Args:
        storage: index of its storage.
        module: the module call it was saved in, -1 for none.
        tick: the tick at which it was saved.
        unpacked: tick of its first use in backward, -1 for never.
        released: tick at which autograd released it.
        dropped: tick at which the autograd node drops the unpacked tensor; it matters if that is another tensor on
            another storage. It is before `released` if the node's last ops only fit gradients to the shapes or dtypes
            of their inputs.
    """

    storage: int
    module: int
    tick: int
    unpacked: int
    released: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Unpack:
    """A use of a saved tensor in one of a step's backwards, some of which keep the graph.

    Args:
        saved: index of the saved tensor.
        tick: the tick of the use; the first one's is `Saved.unpacked`.
        dropped: tick at which the autograd node drops the unpacked tensor; see `Saved.dropped`.
        backward: number of the backward in the step.
        keeps: whether this backward keeps the graph (`retain_graph`, `create_graph`), so that another may follow.
    """

    saved: int
    tick: int
    dropped: int
    backward: Size
    keeps: bool


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module's forward.

    Args:
        fqn: the module's name in the model, "" for the root module.
        call: number of earlier calls of this module with gradients on in the step.
        parent: index of the enclosing call, -1 for none.
        class_name: the module's class.
        grad: gradients were on.
        start, end: ticks.
        inputs: storages of the tensors among its arguments.
        outputs: storages of the tensors in its result.
        differentiable: those of them that need a gradient; the step may go backward from some of them only.
        views: number of ops in it, nested calls included, that only make views or metadata.
        changes_arguments: it changes an object among its arguments, such as a KV cache, so its code cannot run twice.
        once: another reason against it as a region, "" if none is known. Under every engine, *replay* included:
            `SHARDED`: it contains FSDP2 units, whose parameters are gathered only around their own forward and
            backward. `STREAMS`: it runs on several streams of a GPU, so its storages must live as long as without a
            plan. Under engines that run its code a second time: `INFERENCE`: it makes or receives tensors of
            `torch.inference_mode`. `CACHED`: a `parametrize.cached` context around it has ended when its code would
            run again. `FOREIGN`: code invisible to torch writes one of its tensors. `UNRULED`: it runs a higher-order
            op that torch's selective checkpointing has no rule for. `UNPACKED_TWICE`: a backward node reads a tensor
            saved in it twice, which torch's checkpoint refuses.
    """

    fqn: str
    call: int
    parent: int
    class_name: str
    grad: bool
    start: int
    end: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    differentiable: tuple[int, ...] = ()
    views: Size = 0
    changes_arguments: bool = False
    once: Annotated[
        str, one_of("", INFERENCE, CACHED, FOREIGN, SHARDED, STREAMS, UNRULED, UNPACKED_TWICE)
    ] = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of one module call: consecutive ops, between two items (ops or calls) of the forward's own code.

    An engine that does not run code again can have parts as regions. They are halves, quarters and so on of their call.

    Args:
        call: index of its module call.
        number: number among the parts of this call, from 1.
        start, end: ticks. It starts with an op, a tail with what autograd saves for one.
        inputs: storages made before it in the step that its ops read.
        views: as for `ModuleCall`, estimated.
    """

    call: int
    number: int
    start: int
    end: int
    inputs: tuple[int, ...] = ()
    views: Size = 0
