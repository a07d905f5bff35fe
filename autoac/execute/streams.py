"""The GPU streams of a region's call, and the rules for engines that follow from them. Not used on CPU.

NOTE [ Streams ]
  1. Autograd runs a backward node on the stream of its forward, lets it wait for the streams of its incoming gradients,
     and records these gradients with the allocator (`Engine::evaluate_function` in torch/csrc/autograd/engine.cpp,
     `InputBuffer::add` in input_buffer.cpp). It does none of this for tensors that hooks unpack. So a replay runs on
     the stream of the region's forward, whichever node unpacks first, and a node on another stream waits for it
     (`Streams.hand_over`).
  2. A region whose own ops run on a second stream is refused. A value to be recomputed is freed as soon as forward no
     longer needs it, and the allocator gives its memory to new work on the stream that allocated it, while the other
     stream may still read it. Without a plan autograd holds it until backward. A profile of a real step shows such
     modules (`ModuleCall.once`), and they do not become regions; if no profile has shown it, the call is an error.
     While the real step is recorded, its GPUs are synchronized instead.
  3. While a CUDA graph is captured, kernels are recorded and not run. Replay and second run are captured like any other
     ops; but the host may not read values, and no generator's state may be read or set (`assertNotCapturing` in
     aten/src/ATen/cuda/CUDAGeneratorImpl.cpp). `graphsafe_set_state` exchanges whole states between generators that
     were registered before (`CUDAGraph.register_generator_state`), and cannot rewind one by some ops. So recomputing a
     random op is refused, and so is the first step of a plan that was made on fake tensors, in which values are
     compared.
  4. Each device has its own autograd thread, which runs its part of backward. Grad mode, autocast, dispatch modes and
     hooks are those of the thread that called backward (`ThreadLocalState` in torch/csrc/autograd/engine.cpp's graph
     task); `threading.local` is not, so nothing that backward reads is kept there. The thread is not a Python thread:
     `threading.active_count` does not count it until it has called `threading.current_thread`, as logging does. See
     NOTE [ Random numbers ], where one thread too many only costs time. The threads of two GPUs may unpack in one
     region at the same time: a call's lock lets one of them replay.
  5. A non-blocking copy from the GPU is complete once forward has waited for it, but a replay waits for nothing: the
     copy is replayed as a blocking one (`as_blocking`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from autoac.device import Streams, streams
from autoac.ops.info import tensors_in
from autoac.torch_private import disable_dispatch_modes, schema_of
from autoac_solver.records.names import region_in_words

_SECOND = (
    "{region} runs on a second stream of the GPU, which the step that was profiled did not do: what it "
    "computes again would be freed while that stream may still read it. Profile a real step on the GPU "
    '(autoac.profile(model, sample, mode="real")): the plan then leaves the region alone.'
)
_DRAWS = (
    "{op} in {region} draws random numbers, and would have to draw the same ones again for backward: not "
    "while a CUDA graph is captured, where no generator's state can be set back. Keep what it makes: "
    'policies=[autoac.Policy("MUST_SAVE", op={op!r})].'
)
_FIRST = (
    "{region} has a plan that was made on fake tensors, and its first step compares what is computed again, "
    "which the host reads: not while a CUDA graph is captured. Run one step under the plan before."
)


class CallStreams:
    """The stream on each GPU that one call of a region runs on.

    Args:
        region: its name, for errors.
        by: access to the process's streams.

    Attributes:
        refuses: whether a second stream is an error; if not, its GPUs are synchronized after each op from then on.
    """

    __slots__ = ("by", "capturing", "known", "refuses", "region", "several")

    def __init__(self, region: str, by: Streams) -> None:
        self.region, self.by = region, by
        self.refuses, self.several = True, False
        self.capturing = by.capturing()
        self.known: dict[int, tuple[int, Any]] = {}

    def ran(self, result: Any) -> None:
        """Note the stream of an op of the region, after it has run.

        Raises:
            RuntimeError: the op ran on another stream than the ops before it, and `refuses` is set.
        """
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in(result):
            key = self.by.key(tensor)
            if key is None:
                continue
            index, raw = key
            if index not in self.known:
                self.known[index] = raw, self.by.current(index)
            elif self.known[index][0] != raw:
                if self.refuses:
                    raise RuntimeError(_SECOND.format(region=region_in_words(self.region)))
                self.several = True
        if self.several:
            self.by.settle(self.known)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which work is submitted to forward's streams."""
        if self.several:
            self.by.settle(self.known)
        if all(self.by.is_current(index, raw) for index, (raw, _) in self.known.items()):
            yield  # mostly so, and a stream's context takes long
            return
        with contextlib.ExitStack() as stack:
            for _, stream in self.known.values():
                stack.enter_context(self.by.on(stream))
            yield

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Make the current stream wait for a replayed tensor, before a backward node reads it."""
        key = self.by.key(tensor)
        if key is None or (known := self.known.get(key[0])) is None or known[0] == key[1]:
            return
        with disable_dispatch_modes():
            self.by.hand_over(tensor, known[1])

    def refuse_drawing(self, op: Any, generators: Iterable[torch.Generator]) -> None:
        """Refuse to recompute an op that draws from these generators, if that is impossible.

        Raises:
            RuntimeError: a CUDA graph is being captured, and one of the generators is a GPU's.
        """
        if self.capturing and any(map(self.by.has, generators)):
            raise RuntimeError(_DRAWS.format(op=str(op), region=region_in_words(self.region)))

    def refuse_comparing(self) -> None:
        """Refuse to compare recomputed values with forward's, if that is impossible.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if self.capturing:
            raise RuntimeError(_FIRST.format(region=region_in_words(self.region)))


def streams_of_call(region: str) -> CallStreams | None:
    """The streams of a region's call that begins; None if no GPU is in use."""
    by = streams()
    return None if by is None else CallStreams(region, by)


def as_blocking(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a copy, made blocking."""
    names = [argument.name for argument in schema_of(func).arguments]
    if "non_blocking" not in names:
        return args, kwargs
    place = names.index("non_blocking")
    if place < len(args):
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, {**kwargs, "non_blocking": False} if "non_blocking" in kwargs else kwargs


def comes_to_host(args: Iterable[Any], result: Any) -> bool:
    """Whether an op has copied from a device to the host."""
    if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return False
    return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in args)
