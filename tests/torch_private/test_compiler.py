"""`torch.compile`."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.testing import CompileCounter

from autoac import torch_private


def test_in_compiled_autograd():
    """While the captured graph runs, which is when it calls unpack hooks."""
    import torch._dynamo.compiled_autograd

    found = []

    def unpack(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_private.in_compiled_autograd())
        return x

    x = torch.ones(2, requires_grad=True)
    for context in (contextlib.nullcontext(), torch._dynamo.compiled_autograd._enable(lambda graph: graph)):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            loss = x.sin().sum()
        with context:
            loss.backward()
    assert found == [False, True]
    torch._dynamo.reset()


def test_in_compiled_call():
    """There, what a compiled function's end restores is restored after all that is done."""
    found = []

    def look() -> None:
        found.append(torch_private.in_compiled_call())

    looks: Any = torch.compiler.disable(look)

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        looks()
        return x.cos()

    assert not torch_private.in_compiled_call()
    function(torch.ones(2))
    torch.compile(function, backend="eager")(torch.ones(2))
    assert found == [False, True]
    torch._dynamo.reset()


def test_untraced():
    """Dynamo looks at the hooks that C++ code calls within a function that it could not compile."""

    def seen_by_the_compiler(pack: Any) -> bool:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                torch._dynamo.graph_break()
                x = x.sin()
            return x

        torch._dynamo.reset()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            torch.compile(forward, backend="eager")(torch.ones(2, requires_grad=True))
        seen = torch._dynamo.convert_frame.input_codes.seen
        return any(code() is pack.__code__ for code in seen)

    def pack(x: torch.Tensor) -> torch.Tensor:
        return x

    assert seen_by_the_compiler(pack)
    torch._dynamo.reset()
    assert torch_private.untraced(pack) is pack
    assert not seen_by_the_compiler(pack)
    torch._dynamo.reset()


def test_compiler_off():
    """Until the last thread that wants it off is done."""
    backend = CompileCounter()
    function = torch.compile(lambda x: x.sin(), backend=backend, fullgraph=True)
    first, second = torch_private.compiler_off(), torch_private.compiler_off()
    with first:
        with second:
            function(torch.ones(2))
        function(torch.ones(2))
    assert backend.frame_count == 0
    function(torch.ones(2))
    assert backend.frame_count == 1
    torch._dynamo.reset()
    entered = []

    @torch.compile(backend="eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # a break within a loop: the frame is skipped
            torch._dynamo.graph_break()
            with torch_private.compiler_off():
                entered.append(x)
        return x.sin()

    broken(torch.ones(2))
    assert len(entered) == 2
    torch._dynamo.reset()


def test_constant_while_compiling():
    runs = []

    def now() -> int:
        runs.append(1)
        return len(runs)

    assert torch.compiler.assume_constant_result(lambda: None)._dynamo_marked_constant
    marked = torch_private.constant_while_compiling(now)
    compiled = torch.compile(lambda x: x + marked(), backend="eager", fullgraph=True)
    assert [compiled(torch.zeros(())).item() for _ in range(2)] == [1.0, 1.0]
    assert len(runs) == 1
    torch._dynamo.reset()


def test_is_compiled_wrapper():
    model = nn.Linear(2, 2)
    assert not torch_private.is_compiled_wrapper(model)
    compiled = torch.compile(model)
    assert torch_private.is_compiled_wrapper(compiled)
    assert torch_private.wrapped_module(compiled) is model
    assert list(dict(compiled.named_modules())) == ["", torch_private.WRAPPED]  # type: ignore[union-attr]
    assert compiled._orig_mod is model  # type: ignore[union-attr]
    assert getattr(model, "_compiled_call_impl", None) is None
    model.compile()
    assert model._compiled_call_impl is not None
    assert not torch_private.is_compiled_wrapper(model)


def test_compiled_attribute():
    model = nn.Linear(2, 2)
    assert torch_private.compiled_attribute(model) is None
    assert torch_private.compiled_attribute(torch.compile(model)) == "forward"  # type: ignore[arg-type]
    assert "forward" in vars(torch.compile(model))
    model.compile()
    assert torch_private.compiled_attribute(model) == "_compiled_call_impl"
    del model.__dict__["_compiled_call_impl"]
    assert model._compiled_call_impl is None
    assert torch_private.compiled_attribute(model) is None


def test_hooked_inside():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model.register_forward_hook(lambda *_: None)  # its own run around it
    assert not torch_private.hooked_inside(model)
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        handle = getattr(model.get_submodule("1.0"), f"register_{register}")(lambda *_: None)
        assert torch_private.hooked_inside(model) == "1.0"
        handle.remove()
        assert not torch_private.hooked_inside(model)
    seen: list[int] = []
    layer: nn.Module = model.get_submodule("1.0")
    hooks = [lambda *_, i=i: seen.append(i) for i in range(2)]
    for hook in hooks:
        layer.register_forward_hook(hook)
    assert torch_private.hooked_inside(model, (), lambda hook: hook is hooks[0]) == "1.0"
    assert not torch_private.hooked_inside(model, (), lambda hook: hook in hooks)
    with torch_private.without_forward_hooks(layer, lambda hook: hook is hooks[0]):
        model(torch.ones(2))
    assert seen == [1]
    model(torch.ones(2))
    assert seen == [1, 0, 1]


def test_compiled_code_does_not_see_later_hooks():
    """Why regions with hooks inside of them are not compiled. If this fails, torch looks for them, and they may be."""
    model, seen = nn.Sequential(nn.Linear(2, 2)), []
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 2))
    model[0].register_forward_hook(lambda *_: seen.append(1))
    compiled(torch.ones(1, 2))
    assert not seen
    torch._dynamo.reset()


def test_is_compiled_by_inductor():
    model = nn.Linear(2, 2)
    assert not torch_private.is_compiled_by_inductor(model)
    assert torch_private.is_compiled_by_inductor(torch.compile(model))  # type: ignore[arg-type]
    other = torch.compile(model, backend="aot_eager")
    assert not torch_private.is_compiled_by_inductor(other)  # type: ignore[arg-type]
    model.compile()
    assert torch_private.is_compiled_by_inductor(model)
    model.compile(backend="eager")
    assert not torch_private.is_compiled_by_inductor(model)


def test_compile_settings_of_ones_own():
    model: Any = nn.Linear(2, 2)
    compiled: Any = torch.compile(model)
    assert not torch_private.has_own_compile_settings(compiled)
    settings: list[dict[str, Any]] = [{"mode": "max-autotune"}, {"options": {"max_autotune": True}}]
    for own in settings:
        compiled = torch.compile(model, **own)
        assert torch_private.has_own_compile_settings(compiled)
        model.compile(**own)
        assert torch_private.has_own_compile_settings(model)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_name_of_the_node_of_compiled_code():
    compiled = torch.compile(lambda x: x.sin().cos(), backend="aot_eager")
    assert compiled(torch.zeros(2, requires_grad=True)).grad_fn.name() == torch_private.COMPILED_NODE
    torch._dynamo.reset()


def test_nothing_imports_the_compiler():
    """It takes seconds."""
    code = (
        "import sys, torch, autoac.api, autoac.torch_private as c;"
        "c.is_compiled_wrapper(torch.nn.Linear(1, 1));"
        "print('torch._dynamo' in sys.modules)"
    )
    paths = [p for p in sys.path if p]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "False", result.stderr


def test_disable_dynamo():
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        assert not torch.compiler.is_compiling()
        return x + 1

    plain = torch_private.disable_dynamo(plus_one, "because we say so")

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return plain(x) * 2

    assert plain(torch.zeros(2)).tolist() == [1, 1]
    assert compiled(torch.zeros(2)).tolist() == [2, 2]
    with pytest.raises(Exception, match="because we say so"):
        torch.compile(lambda x: plain(x) * 2, backend="eager", fullgraph=True)(torch.zeros(2))


def test_put_compiled_back():
    model = nn.Linear(2, 2)
    torch_private.put_compiled_back(model, lambda x: "compiled")
    assert torch_private.compiled_attribute(model) == "_compiled_call_impl"
    assert model(torch.zeros(2)) == "compiled"
    torch_private.put_compiled_back(model, lambda x: "again")
    assert model(torch.zeros(2)) == "compiled"


def test_compiled_by_inductor():
    """A graph of Dynamo's, under options of `torch.compile`, with its backward."""

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return torch_private.compiled_by_inductor(graph, inputs, {"triton.cudagraphs": False})

    torch._dynamo.reset()
    x = torch.arange(4.0, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_compiled_code_forgotten():
    """But for functions that were compiled before."""

    def earlier(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def within(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    compiled: list[str] = []

    def backend(name: str) -> Any:
        def compile(graph: Any, inputs: Any) -> Any:
            compiled.append(name)
            return graph.forward

        return compile

    runs = [torch.compile(run, backend=backend(run.__name__)) for run in (earlier, within)]
    x = torch.ones(2)
    runs[0](x)
    with torch_private.compiled_code_forgotten():
        runs[0](x)
        runs[1](x)
        runs[1](x)
    assert compiled == ["earlier", "within"]
    for run in runs:
        run(x)
    assert compiled == ["earlier", "within", "within"]
