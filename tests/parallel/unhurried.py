"""Measures steps that run through gloo without what its threads still hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

from autoac import torch_private
from autoac.measure import measure_peak


def step_peak_bytes(step: Callable[[], Any]) -> int:
    """The step's peak above its start.

    A tensor that a thread of gloo frees is alive for ever to `torch.profiler`, which sees one thread. So each wait for
    a collective lets gloo's threads release what they hold, and the step's own thread frees it.
    """
    with _unhurried():
        return measure_peak(step).peak_above_start_bytes


@contextlib.contextmanager
def _unhurried() -> Iterator[None]:
    threads = torch_private.gloo_threads()
    waits = collectives.wait_tensor, dist.Work.wait

    def then_rests(wait: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = wait(*args, **kwargs)
            torch_private.wait_for_gloo(threads)
            return found

        return run

    collectives.wait_tensor, dist.Work.wait = map(then_rests, waits)
    try:
        yield
    finally:
        collectives.wait_tensor, dist.Work.wait = waits
