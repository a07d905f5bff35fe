"""The stream of a GPU that a region's call runs on, and what an engine owes to it. On CPU nothing here is used.

NOTE [ Streams ]
  1. Autograd runs a node of backward on the stream that its forward ran on, lets it wait for the streams that its
     gradients come from, and tells the allocator of these gradients (`Engine::evaluate_function` in
     torch/csrc/autograd/engine.cpp, `InputBuffer::add` in input_buffer.cpp). It does nothing of the kind for what hooks
     unpack. So a replay runs on the stream of the region's forward, whichever node asks first, and who asks on another
     stream waits for it (`Streams.hand_over`).
  2. A region whose own ops run on a second stream is refused: what is recomputed is let go of as soon as forward is
     through with it, and the allocator gives its memory to new work on the stream that it was made on, while the other
     stream may still read it. Without a plan autograd holds it until backward. A profile of a real step tells
     (`ModuleCall.once`), and no such module becomes a region; where none told, the call is an error. While that step is
     recorded the device is waited for instead.
  3. While a CUDA graph is captured, kernels are noted and not run. Replay and second run are captured as they come;
     but nothing may be read by the host, and no generator's state may be read or set (`assertNotCapturing` in
     aten/src/ATen/cuda/CUDAGeneratorImpl.cpp). `graphsafe_set_state` exchanges whole states between generators that
     were registered before (`CUDAGraph.register_generator_state`), and cannot take one back to where it was some ops
     ago. So recomputing an op that draws is refused, and so is the first step of a plan that was made on fake tensors,
     whose values are compared.
  4. A device has a thread of its own in which its part of backward runs. Grad mode, autocast, dispatch modes and hooks
     are those of the thread that called backward (`ThreadLocalState` in torch/csrc/autograd/engine.cpp's graph task);
     `threading.local` is not, so nothing that backward reads is kept there. The thread is not Python's, and
     `threading.active_count` does not see it until it has asked for `threading.current_thread`, as logging does: see
     NOTE [ Random numbers ], for which a thread too many is only slower. Two GPUs' threads may unpack in one region at
     the same time: a call's lock lets one of them replay.
  5. A copy from the GPU that does not block is over when forward has waited for it, and who replays waits for nothing:
     it is replayed as one that blocks (`as_blocking`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from autoac.device import Streams, streams
from autoac.ops.info import tensors_in
from autoac.torch_private import disable_dispatch_modes, schema_of

_SECOND = (
    "region {region!r} runs on a second stream of the GPU, which the step that was profiled did not do: what it "
    "computes again would be freed while that stream may still read it. Profile a real step on the GPU "
    '(autoac.profile(model, sample, mode="real")): the plan then leaves the region alone.'
)
_DRAWS = (
    "{op} in region {region!r} draws random numbers, and would have to draw the same ones again for backward: not "
    "while a CUDA graph is captured, where no generator's state can be set back. Keep what it makes: "
    'policies=[autoac.Policy("MUST_SAVE", op={op!r})].'
)
_FIRST = (
    "region {region!r} has a plan that was made on fake tensors, and its first step compares what is computed again, "
    "which the host reads: not while a CUDA graph is captured. Run one step under the plan before."
)


class CallStreams:
    """The stream on each GPU that one call of a region runs on.

    Args:
        region: its name, for errors.
        by: tells streams.

    Attributes:
        refuses: a second stream; else the device is waited for from then on.
    """

    __slots__ = ("by", "capturing", "known", "refuses", "region", "several")

    def __init__(self, region: str, by: Streams) -> None:
        self.region, self.by = region, by
        self.refuses, self.several = True, False
        self.capturing = by.capturing()
        self.known: dict[int, tuple[int, Any]] = {}

    def ran(self, result: Any) -> None:
        """An op of the region has run.

        Raises:
            RuntimeError: on another stream than those before it, if that is refused.
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
                    raise RuntimeError(_SECOND.format(region=self.region))
                self.several = True
        if self.several:
            self.by.settle()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which work is given to the streams of forward."""
        if self.several:
            self.by.settle()
        with contextlib.ExitStack() as stack:
            for _, stream in self.known.values():
                stack.enter_context(self.by.on(stream))
            yield

    def hand_over(self, tensor: torch.Tensor) -> None:
        """A node of backward is about to read what was replayed."""
        key = self.by.key(tensor)
        if key is None or (known := self.known.get(key[0])) is None or known[0] == key[1]:
            return
        with disable_dispatch_modes():
            self.by.hand_over(tensor, known[1])

    def refuse_drawing(self, op: Any, generators: Iterable[torch.Generator]) -> None:
        """An op whose results are to be recomputed draws from these.

        Raises:
            RuntimeError: it is captured.
        """
        if self.capturing and any(map(self.by.has, generators)):
            raise RuntimeError(_DRAWS.format(op=str(op), region=self.region))

    def refuse_comparing(self) -> None:
        """What is recomputed is to be compared with forward.

        Raises:
            RuntimeError: it is captured.
        """
        if self.capturing:
            raise RuntimeError(_FIRST.format(region=self.region))


def streams_of_call(region: str) -> CallStreams | None:
    """For a region's call that begins; None where no GPU is in use."""
    by = streams()
    return None if by is None else CallStreams(region, by)


def as_blocking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with which a copy blocks."""
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
