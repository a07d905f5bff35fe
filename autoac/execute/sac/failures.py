"""Ops that raised in a region's forward, where its code has caught that and gone on.

NOTE [ Ops that raise ]
  Selective checkpointing counts an op of the first run after it has run, and one of the second run before. An op that
  raises is counted in the second run only: it would get the result of the next op with its overload, without raising,
  and all later ones would be matched off by one. So such an op is run apart from checkpointing in the second run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from autoac.torch_private import (
    TorchDispatchMode,
    is_sharded_type,
    is_wait,
    is_wrap,
    on_fake_tensors,
    without_dispatch_modes,
)
from autoac_solver.records.names import region_in_words

_PASSED = (
    "in {region}, {op} raised in forward, where the code went on without it, and did not raise when it was "
    'run again for backward. Plan with engine="replay", which runs no code twice.'
)


class FailingAgain(TorchDispatchMode):
    """Dispatch mode of the second run, see NOTE [ Ops that raise ]. To be entered after all modes that count ops.

    Args:
        failures: of the first run, as noted by `noting_failures`.
        region: its name, for the error.
    """

    supports_higher_order_operators = True

    def __init__(self, failures: Mapping[tuple[Any, int], int], region: str):
        super().__init__()
        self.left = Counter(failures)  # there may be another backward
        self.region = region
        self.counts: Counter[Any] = Counter()
        self.meets_shards = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_sharded_type, types)):
            self.meets_shards = True
            return NotImplemented  # the ops on the local parts are matched, see `on_local_parts`
        if (self.meets_shards and on_fake_tensors()) or is_wait(func) or is_wrap(func):
            return func(*args, **kwargs)
        call = func, self.counts[func]
        if self.left[call]:
            self.left[call] -= 1
            with without_dispatch_modes():
                func(*args, **kwargs)
            raise RuntimeError(_PASSED.format(region=region_in_words(self.region), op=func))
        self.counts[func] += 1
        return func(*args, **kwargs)
