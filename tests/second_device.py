"""A device that is not the CPU, where there is no GPU; only in processes of its own.

It computes in host memory with the kernels of the CPU, draws random numbers of its own, and counts the bytes that are
allocated there (`torch.ops.toy.allocated_bytes`, `peak_bytes`, `reset_peak`). `second_device.cpp` is its library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

NAME = "toy"
_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parent


def compiled(folder: Path) -> Path | None:
    """The device's library, compiled into a folder; None without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    root, library = Path(torch.__file__).parent, folder / "device.so"
    include = [f"-I{root / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    link = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    source = str(_HERE / "second_device.cpp")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O0", "-std=c++20", *include, source, "-o", str(library), *link],
        check=True,
    )
    return library


def ran(module: str, library: Path, *args: str) -> str:
    """What `python -m module library args` prints; warnings are errors there."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, str(library), *args],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "solver")))},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    return done.stdout


class Stream(torch.cpu.Stream):
    """Everything runs at once, as on CPU; but there are events, which have always happened."""

    stream_id = device_index = device_type = 0

    def record_event(self) -> torch.cpu.Event:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.cpu.Event()

    def is_capturing(self) -> bool:
        return False


def load(library: str) -> torch.Generator:
    """Make the device known to torch, and return its generator."""
    rename_privateuse1_backend(NAME)
    torch.ops.load_library(library)
    generator = torch.ops.toy.default_generator()
    module: Any = types.ModuleType(f"torch.{NAME}")
    module._initialized = True
    module._is_in_bad_fork = lambda: False
    module.is_initialized = module.is_available = lambda: True
    module.current_device, module.device_count = lambda: 0, lambda: 1
    module.device = lambda index: nullcontext()
    module.default_generators = (generator,)
    module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=NAME: generator.get_state()
    module.set_rng_state = lambda state, device=NAME: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.Stream, module.Event, module.stream = Stream, torch.cpu.Event, torch.cpu.stream
    module.current_stream = torch.accelerator.current_stream = Stream
    torch._register_device_module(NAME, module)
    generate_methods_for_privateuse1_backend()
    return generator


def end() -> None:
    """End the process, without the interpreter's and torch's teardown.

    A thread of torch's (autograd's of a device, gloo's) that drops a tensor known to Python while the interpreter ends
    is ended by CPython 3.11 in a C++ destructor, which aborts the process ("terminate called without an active
    exception"). That is rare, and after all was done and said.
    """
    sys.stdout.flush()
    os._exit(0)
