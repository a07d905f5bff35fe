"""`torch.compile`, its modules and its compiled backward. Nothing here imports the compiler: that takes seconds."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

Raised = TypeVar("Raised", bound=BaseException)
Function = TypeVar("Function", bound=Callable[..., Any])


def disable_dynamo(function: Function, reason: str) -> Function:
    """A form of the function that `torch.compile` does not trace. Imports the compiler only when it is called.

    Args:
        reason: text of the compiler's error with `fullgraph=True`, where a call of the function cannot be left out.

    Source: `torch._disable_dynamo` (torch/_compile.py); the attributes are those by which Dynamo knows functions of
    `torch.compiler.disable` (`SkipFunctionVariable` in torch/_dynamo/variables/functions.py).
    """
    disabled: Any = torch._disable_dynamo(function)
    disabled._torchdynamo_disable, disabled._torchdynamo_disable_msg = True, reason
    return disabled


def untraced(function: Function) -> Function:
    """The same function; `torch.compile` does not trace its calls, nor what they call, where its own frames are.

    For hooks and dispatch modes: Dynamo looks at each Python frame below a compiled function that it could not
    compile, one that torch's C++ code calls included. A call inside of a function that Dynamo traces is not affected.
    This costs nothing in a call.

    Source: `set_code_exec_strategy` (torch/csrc/dynamo/eval_frame.c), as used by `skip_code`
    (torch/_dynamo/eval_frame.py).
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def in_compiled_call() -> bool:
    """Whether code runs that a compiled function has called, outside of its graphs.

    A dispatch mode that is put on or taken off there breaks all ops of the thread after the function's end, which
    restores the dispatch keys from before it.

    Source: `compile_wrapper` of `_TorchDynamoContext.__call__` (torch/_dynamo/eval_frame.py); the keys are those of
    `torch._C._dispatch_tls_is_dispatch_key_included`.
    """
    frame = sys._getframe(1) if "torch._dynamo.eval_frame" in sys.modules else None
    while frame is not None:
        if (
            frame.f_code.co_name == "compile_wrapper"
            and frame.f_globals["__name__"] == "torch._dynamo.eval_frame"
        ):
            return True
        frame = frame.f_back
    return False


class _CompilerOff:
    """Switches the compiler off as long as any thread wants that: torch's switch is one for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._off: Any = None

    @untraced
    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._off = torch.compiler.set_stance("force_eager")

    @untraced
    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._off.__exit__(None, None, None)


_OFF = _CompilerOff()


@untraced
def compiler_off() -> contextlib.AbstractContextManager[None]:
    """Context: functions of `torch.compile` run uncompiled.

    Under most dispatch modes Dynamo skips a function that it meets, from then on and for good; with `fullgraph=True`
    that is an error. Code that Dynamo runs piece by piece, after a graph break, is not affected.

    Source: `set_stance` (torch/_dynamo/decorators.py).
    """
    # If Dynamo was not imported, nothing can have been compiled. Importing it is slow.
    return _OFF if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def compiled_code_forgotten() -> Iterator[None]:
    """Context: afterwards no function has compiled code that had none before.

    Torch compiles a function again only so often, whatever for, and then no more.

    Source: `reset_code_caches` (torch/_dynamo/__init__.py), `input_codes` (torch/_dynamo/convert_frame.py).
    """
    from torch._dynamo import convert_frame

    def known() -> list[Any]:
        found = (*convert_frame.input_codes.seen, *convert_frame.output_codes.seen)
        return [code for reference in found if (code := reference()) is not None]

    before = set(map(id, held := known()))
    try:
        yield
    finally:
        with convert_frame.compile_lock:
            for code in known():
                if id(code) not in before:
                    torch._C._dynamo.eval_frame.reset_code(code)
        del held


def constant_while_compiling(function: Function) -> Function:
    """A function that Dynamo calls while it compiles, and whose result it puts into the code.

    As `torch.compiler.assume_constant_result`, which imports the compiler (torch/_dynamo/decorators.py).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_compiled_wrapper(model: Any) -> bool:
    """Whether this is a wrapper that `torch.compile(module)` has returned.

    Source: `torch._dynamo.OptimizedModule` (torch/_dynamo/eval_frame.py).
    """
    # If Dynamo was not imported, nothing can have been compiled. Importing it is slow.
    dynamo = sys.modules.get("torch._dynamo")
    wrapper = getattr(dynamo, "OptimizedModule", None)  # missing while another thread imports it
    return wrapper is not None and isinstance(model, wrapper)


WRAPPED = "_orig_mod"
"""The name of the module inside a wrapper that `torch.compile(module)` returns.

Source: `OptimizedModule._orig_mod` (torch/_dynamo/eval_frame.py).
"""


def wrapped_module(wrapper: Any) -> torch.nn.Module:
    """The module inside a wrapper that `torch.compile(module)` has returned.

    Source: `OptimizedModule._orig_mod` (torch/_dynamo/eval_frame.py).
    """
    return wrapper._orig_mod


def compiled_attribute(module: torch.nn.Module) -> str | None:
    """The instance attribute through which this module's calls run compiled, None if they do not.

    `module.compile()` sets one that the class has as None; the wrapper of `torch.compile(module)` has a `forward` of
    its own.

    Source: `Module._compiled_call_impl` (torch/nn/modules/module.py), `OptimizedModule` (torch/_dynamo/eval_frame.py).
    """
    if is_compiled_wrapper(module):
        return "forward"
    return "_compiled_call_impl" if module.__dict__.get("_compiled_call_impl") is not None else None


def is_compiled_by_inductor(module: torch.nn.Module) -> bool:
    """Whether calls of this module run code that inductor has made or will make, not another backend's.

    Source: `get_compiler_config` on what `torch.compile` returns (torch/_dynamo/eval_frame.py), which only inductor's
    backend fills (`_TorchCompileInductorWrapper`, torch/__init__.py).
    """
    compiled = module if is_compiled_wrapper(module) else module.__dict__.get("_compiled_call_impl")
    configuration = getattr(compiled, "get_compiler_config", None)
    return configuration is not None and configuration() is not None


def has_own_compile_settings(module: torch.nn.Module) -> bool:
    """Whether a module was compiled by inductor under other settings (`mode=`, `options=`) than the current ones.

    Source: as for `is_compiled_by_inductor`; `get_patched_config_dict` (torch/_inductor/compile_fx.py).
    """
    from torch._inductor.compile_fx import get_patched_config_dict

    compiled: Any = module if is_compiled_wrapper(module) else module.__dict__.get("_compiled_call_impl")
    return compiled.get_compiler_config() != get_patched_config_dict()


def put_compiled_back(module: torch.nn.Module, attribute: Any) -> None:
    """Make calls of a module run compiled again, by its earlier attribute, unless it was compiled anew.

    Source: `Module._compiled_call_impl` (torch/nn/modules/module.py).
    """
    module.__dict__.setdefault("_compiled_call_impl", attribute)


COMPILED_NODE = "CompiledFunctionBackward"
"""Name of the autograd node that stands for a whole graph of AOTAutograd.

Source: `CompiledFunction` in torch/_functorch/_aot_autograd/runtime_wrappers.py.
"""


def in_compiled_autograd() -> bool:
    """Whether the running backward is one that compiled autograd has captured.

    Source: `in_compiled_autograd_region` in torch/_dynamo/compiled_autograd.py.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # not imported: it is slow
    return compiled is not None and compiled.in_compiled_autograd_region


COMPILE_OPTION = "custom_partitioner_fn"
"""The option of `torch.compile` by which inductor is given a partitioner.

Source: torch/_inductor/config.py.
"""


def compiled_by_inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """The code that inductor makes of a graph of Dynamo's, under these options of `torch.compile`.

    Source: `_TorchCompileInductorWrapper.__call__` (torch/__init__.py).
    """
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, list(inputs), config_patches=options)


def recompile_limit() -> int:
    """The number of times that the user lets one function be compiled.

    Source: `recompile_limit` (torch/_dynamo/config.py).
    """
    return int(torch._dynamo.config.recompile_limit)


def is_recompile_limit(error: BaseException) -> bool:
    """Whether this was raised because a compiled function has met too many kinds of arguments.

    Source: `FailOnRecompileLimitHit` (torch/_dynamo/exc.py), for functions compiled with `fullgraph=True`.
    """
    dynamo = sys.modules.get("torch._dynamo.exc")
    return dynamo is not None and isinstance(error, dynamo.FailOnRecompileLimitHit)


def is_of_compiler(error: BaseException) -> bool:
    """Whether the compiler raised this before the compiled function ran: nothing of the function has happened yet.

    Source: `TorchDynamoException`, `BackendCompilerFailed` (torch/_dynamo/exc.py); `fullgraph=True` compiles a function
    as a whole before it runs.
    """
    dynamo = sys.modules.get("torch._dynamo.exc")
    return dynamo is not None and (
        isinstance(error, dynamo.TorchDynamoException) or is_recompile_limit(error)
    )


def raised_in_compiler(error: BaseException, kind: type[Raised]) -> Raised | None:
    """The error of this kind that a backend raised, inside an error of `torch.compile`; None if there is none.

    Source: `BackendCompilerFailed.inner_exception` (torch/_dynamo/exc.py).
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, kind):
        found = _inner(found)
    return found


def innermost(error: BaseException) -> BaseException:
    """The original error inside an error of `torch.compile`.

    Source: `BackendCompilerFailed.inner_exception` (torch/_dynamo/exc.py).
    """
    while (inner := _inner(error)) is not None:
        error = inner
    return error


def first_line(error: BaseException) -> str:
    """The type of the original error inside an error of `torch.compile`, and its first line, printable only.

    Source: as for `innermost`.
    """
    error = innermost(error)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return "".join(c for c in f"{type(error).__name__}: {text}"[:300] if c.isprintable())


def _inner(error: BaseException) -> BaseException | None:
    return getattr(error, "inner_exception", None) or error.__cause__
