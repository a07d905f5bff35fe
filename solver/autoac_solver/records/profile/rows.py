"""The rows of a profile: ops, storages, saved tensors, and calls of modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from autoac_solver.records.clocks import WAITING_OPS
from autoac_solver.records.disk.limits import Seconds, Size, one_of

NEVER = -1

SCALAR_BYTES = 8
"""Size of a number that autograd saves as a tensor of its own, which no op makes."""

TIMES_FROM = ("measured", "table", "interpolated", "estimated")
"""An op's time was measured when the profile was made; looked up in a device's cost table, which holds measurements;
interpolated between entries of such a table; or estimated from a device's rates."""

UNSTEADY = "times are unsteady"
"""How a profile's note begins that its measured times should not be relied on."""

VARIES = "the step varies"
"""How a profile's note begins on a step that does not run the same ops every time."""

INFERENCE = "inference mode"
CACHED = "cached parametrizations"
SHARDED = "sharded units"
FOREIGN = "writes of code that torch does not see"
STREAMS = "a second stream"
"""Kinds of code that does not do the same a second time, see `ModuleCall.once`."""

GATHERED = "(gathered)"
"""The name of parameters that are gathered from their shards and given up in the step, see `Storage.is_gathered`."""

KINDS = ("Parameter", "Buffer", "Gradient", "Optstate", "Input", "Activation", "Temp")
"""Kinds of memory, named as torch's MemTracker does; Input is the sample and whatever else was there before."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the step that made or changed a storage.

    Args:
        name: its overload, such as "aten.mm.default".
        tick: when it ran.
        module: index of the innermost module call it ran in, -1 for none.
        backward: whether it ran inside a backward pass.
        time_s: seconds it takes.
        reads, writes, creates: storages it reads (those it writes in place too), writes in place, allocates.
        workspace_bytes: bytes that are alive inside the op on top of its inputs and outputs.
        random_bytes: size of the generator state that must be stashed to run it again, 0 if it is not random.
        replayable: it may be run again.
        side_effect: it updates statistics outside of its region or draws from a generator of the model's own, which
            `replay` leaves out or puts back, and `sac` cannot.
        uninitialised: its output holds no values yet.
        spread_s: distance between the quartiles of what was measured.
        rerun_s: seconds it takes to run it again in backward, 0 if that is not known to differ from `time_s`.
        time_from: how `time_s` was found, see `TIMES_FROM`.
        signature: index of its signature's text, -1 for none.
        dtype: the floating type it computes in, "" for none.
        flops: floating-point operations of a matrix product, convolution or attention, 0 for what only moves memory.
        moved_bytes: bytes read and written if every element of its arguments and results is touched once.
        cached_cast: autocast keeps its result, a cast of a parameter, and hands it to all that read the parameter; code
            that runs a second time (`sac`) makes it anew.
        host_s: seconds that the host takes to launch it, 0 where ops run as they are called, or that is not known.
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

    @property
    def waits(self) -> bool:
        """Whether the host waits until it is done."""
        return self.name in WAITING_OPS

    @property
    def again_s(self) -> float:
        """Seconds it takes to run it again in backward."""
        return self.rerun_s or self.time_s


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage.

    Args:
        bytes: what it occupies on the device.
        alloc: tick of its allocation, -1 if it was there before the step; 0 if it was, and dies in the step, for which
            nobody but the loop is to blame (ops begin at 1).
        free: tick of its death where neither autograd nor a plan holds it; the end of the step if it survives.
        kind: "Parameter", "Buffer", "Gradient", "Optstate", "Input", "Activation" or "Temp".
        name: name of the parameter or buffer, else "".
    """

    bytes: Size
    alloc: int
    free: int
    kind: Annotated[str, one_of(*KINDS)]
    name: str = ""

    @property
    def is_gathered(self) -> bool:
        """Whether whoever shards parameters gathered it and gives it up, whatever autograd and plans still hold."""
        return self.kind == "Parameter" and self.name == GATHERED


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd saved for backward.

    Args:
        storage: the storage it stands on.
        module: the module call it was saved in, -1 for none.
        tick: when it was saved.
        unpacked: tick of its first use in backward, -1 for never.
        released: tick at which autograd let go of it.
        dropped: tick at which nobody holds what autograd unpacked, where that is another tensor on another storage:
            before `released` if autograd still had to bring gradients to the shapes or types of their inputs.
    """

    storage: int
    module: int
    tick: int
    unpacked: int
    released: int
    dropped: int


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module's forward.

    Args:
        fqn: the module's name in the model, "" for the model itself.
        call: how many calls of this module with gradients on came before it in the step.
        parent: index of the call it happened in, -1 for none.
        class_name: the module's class.
        grad: whether gradients were on.
        start, end: ticks.
        inputs: storages of the tensors among its arguments.
        views: how many ops that only make views or metadata ran directly in it or below.
        changes_arguments: an object among its arguments holds something else afterwards, as a cache of keys and values
            does; so its code cannot be run twice.
        once: why else its code cannot be run twice, "" if nothing is known: `INFERENCE`, it makes or is given
            tensors of `torch.inference_mode`; `CACHED`, a `parametrize.cached` around it is over when its code would
            run again; `FOREIGN`, code that torch does not see writes a tensor of it; `SHARDED`, there are units of
            FSDP2 inside of it, whose parameters are gathered only around their own forward and backward; `STREAMS`,
            it runs on more than one stream of a GPU, so what it makes must live as long as without a plan.
    """

    fqn: str
    call: int
    parent: int
    class_name: str
    grad: bool
    start: int
    end: int
    inputs: tuple[int, ...] = ()
    views: Size = 0
    changes_arguments: bool = False
    once: Annotated[str, one_of("", INFERENCE, CACHED, FOREIGN, SHARDED, STREAMS)] = ""
