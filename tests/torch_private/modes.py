"""Modes that note what reaches them."""

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Calls a function for every op that reaches it.

    Args:
        look: called with the op and its arguments, before it runs.
    """

    def __init__(self, look: Callable[[Any, tuple[Any, ...]], None] = lambda *_: None):
        super().__init__()
        self.look = look
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        self.look(func, args)
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
