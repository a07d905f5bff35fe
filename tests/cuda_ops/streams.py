"""Streams, backward's thread and captured graphs, by torch's host code on the stand-in: what the engines rely on.

Run by `python -m tests.cuda_ops`; see NOTE [ Streams ] in `autoac.execute.streams`. No kernel runs, so nothing here
is about what a GPU does meanwhile.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoac.device import device_for, streams
from autoac.execute.streams import CallStreams
from autoac.torch_private import current_raw_stream


class _Tells(torch.autograd.Function):
    """Tells in which thread and on which stream its backward runs."""

    seen: tuple[int, int, int] = (0, 0, 0)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _Tells.seen = threading.get_ident(), current_raw_stream(0), threading.active_count()
        return gradients[0]


def _fails(call: Callable[[], object], words: str) -> bool:
    try:
        call()
    except RuntimeError as error:
        return words in str(error)
    return False


def checks() -> Iterator[tuple[str, bool]]:
    """What is expected, and whether it holds."""
    yield "no streams before CUDA is in use", streams() is None
    torch.cuda.init()
    by = streams()
    assert by is not None
    side, tensor = torch.cuda.Stream(), torch.empty(1000, device="cuda")
    yield (
        "the raw stream is the current one",
        current_raw_stream(0) == torch.cuda.current_stream().cuda_stream,
    )
    call = CallStreams("region", by)
    call.ran(tensor)
    with torch.cuda.stream(side):
        yield "in its context as well", by.key(tensor) == (0, side.cuda_stream)
        with call.entered():
            yield (
                "a replay runs on forward's stream",
                torch.cuda.current_stream() == torch.cuda.default_stream(),
            )
        call.hand_over(tensor)
        yield (
            "a second stream is refused",
            _fails(functools.partial(call.ran, tensor), "a second stream of the GPU"),
        )
    size, here = torch.cuda.memory_reserved(), tensor.data_ptr()
    del tensor
    torch.cuda.current_stream().synchronize()
    again = torch.empty(1000, device="cuda")
    yield (
        "memory that was handed over is free when the other stream is done",
        (again.data_ptr() == here and torch.cuda.memory_reserved() == size),
    )
    yield "events are recorded on the device's stream", device_for(torch.device("cuda", 0)).now() > 0

    x = torch.empty(4, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        y = _Tells.apply(x)
    torch.autograd.backward([y], [torch.empty(4, device="cuda")])
    thread, stream, count = _Tells.seen
    yield (
        "backward has a thread of its own, which Python does not count",
        (thread != threading.get_ident() and count == 1),
    )
    yield "a node runs on the stream of its forward", stream == side.cuda_stream

    generator = torch.cuda.default_generators[0]
    yield "generators are told apart", by.has(generator) and not by.has(torch.default_generator)
    state = generator.get_state()
    os.environ["STAND_IN_CAPTURES"] = "1"
    try:
        captured = CallStreams("region", by)
        yield "a capture is seen", captured.capturing
        yield "torch reads no generator's state then", _fails(generator.get_state, "capture")
        yield "nor sets one", _fails(lambda: generator.set_state(state), "captur")
        yield (
            "so drawing again is refused",
            _fails(lambda: captured.refuse_drawing("op", [generator]), "while a CUDA graph is captured"),
        )
        yield (
            "a CPU's generator may draw",
            not _fails(lambda: captured.refuse_drawing("op", [torch.default_generator]), ""),
        )
    finally:
        del os.environ["STAND_IN_CAPTURES"]


def main() -> int:
    found = list(checks())
    failed = [text for text, holds in found if not holds]
    print(f"streams: {len(found)} checks, failed: {', '.join(failed) or 'none'}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # at its exit torch would wait for work of a device that is not there
