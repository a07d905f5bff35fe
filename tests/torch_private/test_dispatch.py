"""Dispatch modes and ops."""

import inspect
from typing import Any

import torch
import torch.utils.checkpoint
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from autoac import torch_private
from autoac.execute import replay
from autoac.record.tape.lean import LeanRecording
from autoac.record.tape.tape import Tape
from tests.torch_private.modes import Seen


def test_kinds_of_ops():
    seen: list[Any] = []
    with Seen(lambda func, _: seen.append(func)):
        torch.ones(2).add(1)
    assert seen
    assert all(isinstance(func, torch_private.OpOverload) for func in seen)
    assert not any(isinstance(func, torch_private.HigherOrderOperator) for func in seen)
    assert isinstance(torch.ops.higher_order.cond, torch_private.HigherOrderOperator)
    assert not isinstance(torch.ops.higher_order.cond, torch_private.OpOverload)


def test_disable_dispatch_modes():
    with Seen() as mode:
        context = torch_private.disable_dispatch_modes()
        with context:
            torch.ones(2)
        del context
        torch.zeros(2)
    assert mode.names == ["aten.zeros.default"]


def test_disable_dispatch_modes_acts_from_its_construction():
    with Seen() as mode:
        context = torch_private.disable_dispatch_modes()
        torch.ones(2)
        del context
        torch.zeros(2)
    assert mode.names == ["aten.zeros.default"]


def test_our_modes_are_not_wrapped_by_the_compiler():
    """A wrapped `__torch_dispatch__` costs a microsecond an op."""
    for mode, file in ((replay.Recording, "recording.py"), (LeanRecording, "lean.py")):
        assert inspect.unwrap(mode.__torch_dispatch__) is mode.__torch_dispatch__
        assert mode.__torch_dispatch__.__code__.co_filename.endswith(file)
    assert (
        inspect.unwrap(Seen.__torch_dispatch__) is not Seen.__torch_dispatch__
    )  # what would be without our wish
    for name in ("_should_skip_dynamo", "supports_higher_order_operators"):
        assert hasattr(TorchDispatchMode, name)


def test_functions_are_compiled_under_our_modes():
    class Ours(torch_private.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def is_compiled_under(mode: TorchDispatchMode) -> bool:
        backend = CompileCounter()
        function = torch.compile(lambda x: x.sin(), backend=backend)
        with mode:
            function(torch.ones(2))
        function(torch.ones(2))
        torch._dynamo.reset()
        return backend.frame_count == 1

    assert is_compiled_under(Ours())
    assert not is_compiled_under(Seen())
    assert issubclass(Tape, torch_private.DispatchMode)


def test_a_mode_that_the_compiler_leaves_alone():
    class Plain(torch_private.UnwrappedDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert issubclass(Plain, torch_private.TorchDispatchMode)
    assert inspect.unwrap(Plain.__torch_dispatch__) is Plain.__torch_dispatch__
    with Plain():
        assert torch.ones(2).tolist() == [1, 1]


def test_being_traced():
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.being_traced())
        return x.sin()

    function(torch.ones(2))
    make_fx(function)(torch.ones(2))
    assert seen == [False, True]


def test_jit_tracing_is_noticed():
    found: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_private.being_jit_traced())
        return x + 1

    look(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert found == [False, True]


def test_schema_of():
    schema = torch_private.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable
    assert not torch_private.schema_of(torch.ops.aten.add.Tensor).is_mutable
    arguments = [(a.name, str(a.type), a.kwarg_only) for a in schema.arguments]
    assert arguments == [("self", "Tensor", False), ("other", "Tensor", False), ("alpha", "number", True)]
    assert schema.arguments[0].alias_info.is_write
    assert [str(result.type) for result in schema.returns] == ["Tensor"]


def test_the_mode_on_top_is_told():
    class Mode(torch_private.TorchDispatchMode):
        pass

    assert torch_private.top_dispatch_mode() is None
    with Mode(), Mode() as inner:
        assert torch_private.top_dispatch_mode() is inner
    assert torch_private.top_dispatch_mode() is None


def test_entry_of():
    add = torch.ops.aten.add.Tensor
    run = torch_private.entry_of(add)
    assert run is not add  # it is a built-in function
    assert torch.equal(run(torch.ones(2), torch.ones(2), alpha=3), torch.full((2,), 4.0))
    other = object()
    assert torch_private.entry_of(other) is other
