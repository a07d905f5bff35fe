"""One model in training with AdamW: memory and time of a step under a strategy."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import autoac
from autoac.calibrate.models import LlamaShape, llama
from autoac.compare.blocks import find_blocks
from autoac.compare.measure import Installed
from autoac.compare.strategies import Strategy
from autoac.compare.workload import Workload
from autoac.device import device_for
from autoac.measure import measure_peak
from autoac_solver.plan.planning import least_budget_bytes
from autoac_solver.records.engines import EngineName
from autoac_solver.records.profile import Profile
from benchmarks.models import GPT

SEED = 1


@dataclass(frozen=True)
class Size:
    """Sizes of models and measurements.

    Args:
        gpt: blocks, width, heads, length, vocabulary; its batch.
        llama: the decoder's shape.
        budgets: number of budgets for our plans.
        compile_budgets: fractions of torch's own budget, for compiled blocks.
        compiled: models for engine compile, and the number of its budgets.
        size: of the models of `autoac.calibrate.models`, for selfcheck and table.
        rounds: number of timed steps.
        copied_bytes: size of the copies that measure bandwidth.
    """

    gpt: tuple[int, int, int, int, int]
    gpt_batch: int
    llama: LlamaShape
    budgets: int
    compile_budgets: tuple[float, ...]
    compiled: tuple[str, ...]
    compiled_budgets: int
    size: str
    rounds: int
    copied_bytes: int


SIZES = {
    # GPT-2 medium (355 million parameters), and a Llama of 0.9 billion.
    "full": Size(
        (24, 1024, 16, 1024, 50257),
        8,
        LlamaShape(16, 2048, 5632, 16, 8, 32000, 2048, 4),
        8,
        (0.0, 0.15, 0.25, 0.4, 0.5, 0.75, 1.0),
        ("gpt", "llama"),
        6,
        "small",
        7,
        2**28,
    ),
    "tiny": Size(
        (2, 32, 2, 16, 64),
        2,
        LlamaShape(2, 32, 64, 2, 1, 64, 16, 2),
        2,
        (0.5,),
        ("gpt",),
        2,
        "tiny",
        1,
        2**20,
    ),
}


class Training:
    """A model, a batch and AdamW. The learning rate is zero, so that all steps have the same gradients.

    Attention runs in flash kernels: cuDNN's, which comes first on an H100, has no form whose bits are the same in
    each run, and is switched off (`flash_attention`). Bits are compared under deterministic algorithms, peaks and
    times are taken without.

    Args:
        name: "gpt" or "llama".
        device, size: where, and how large.

    Attributes:
        workload: for strategies.
        profile: of a step, recorded on first use.
    """

    def __init__(self, name: str, device: torch.device, size: Size) -> None:
        self.device, self.known, self.size, self.name = device, device_for(device), size, name
        self.model, self.sample = self._made(size.gpt_batch if name == "gpt" else size.llama.batch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)
        blocks = find_blocks(self.model)
        self.workload = Workload(name, name, self.model, self.sample, blocks, None, self.optimizer)
        self._plain = self.workload.step()
        self._profiles: dict[EngineName, Profile] = {}
        with flash_attention():
            self.step()  # makes the optimizer's state, and what torch sets up once

    @functools.cached_property
    def profile(self) -> Profile:
        with flash_attention():
            return autoac.profile(self.model, self.sample, optimizer=self.optimizer)

    def profile_of(self, engine: EngineName) -> Profile:
        """The profile with what this engine measures beforehand; recorded on first use."""
        if engine not in self._profiles:
            with flash_attention():
                self._profiles[engine] = autoac.profile(
                    self.model, self.sample, optimizer=self.optimizer, engine=engine, progress=False
                )
        return self._profiles[engine]

    @functools.cached_property
    def least_bytes(self) -> int:
        """The least feasible budget."""
        return least_budget_bytes(self.profile)

    def step(self) -> None:
        """Forward, loss, backward, and the optimizer's step; no gradients before and after."""
        self._plain()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def batch(self, count: int) -> Any:
        """A sample with this number of rows."""
        return self._sample(count)

    def measure(self, strategy: Strategy) -> dict[str, Any]:
        """Peak, reserved memory, gradients and time of a strategy, resident bytes included."""
        if strategy.error:
            return {"error": strategy.error}
        resident = self.profile.resident_bytes  # recorded before the strategy is on the model
        installed = Installed(self.model, strategy.install)
        with installed.applied(), flash_attention():
            self.step()
            self.known.release_cache()
            peak = measure_peak(self.step, self.device)
            found: dict[str, Any] = {"peak_bytes": resident + peak.peak_above_start_bytes}
            found |= reserved(self.device, self.step)
            if not strategy.compiled:  # which has bits of its own
                found["bits"] = self._bits()
            seconds = [self.known.step_seconds(self.step)[1] for _ in range(self.size.rounds)]
        found["step_s"] = statistics.median(seconds)
        return found | {"spread_s": max(seconds) - min(seconds)}

    def captured(self, install: Callable[[torch.nn.Module], object]) -> dict[str, Any]:
        """Time, pool and gradients of forward and backward, captured as a CUDA graph after warm-up steps."""
        zero_grad = functools.partial(self.optimizer.zero_grad, set_to_none=True)
        with Installed(self.model, install).applied(), flash_attention():
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(2):
                    self._plain()
                    zero_grad()
            torch.cuda.current_stream().wait_stream(aside)
            self.known.release_cache()
            before = torch.cuda.memory_reserved()
            graph = self._graph()
            pool_bytes = torch.cuda.memory_reserved() - before
            seconds = [self.known.step_seconds(graph.replay)[1] for _ in range(self.size.rounds)]
            del graph
            zero_grad()
            with deterministic():
                graph = self._graph()
                graph.replay()
                bits = self._bits_of_gradients()
                del graph
            zero_grad()
            self.known.release_cache()
        return {
            "pool_bytes": pool_bytes,
            "bits": bits,
            "step_s": statistics.median(seconds),
            "spread_s": max(seconds) - min(seconds),
        }

    def _graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._plain()
        return graph

    def _bits(self) -> str:
        """Checksums of the gradients of an eager step."""
        torch.manual_seed(SEED)
        with deterministic():
            self._plain()
        return self._bits_of_gradients()

    def _bits_of_gradients(self) -> str:
        """Checksums of the gradients, then dropped: equal for equal gradients, and almost never for others."""
        total, every_second = 0, 0
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                bits = parameter.grad.contiguous().view(_WHOLE[parameter.grad.element_size()])
                total += int(bits.sum(dtype=torch.int64))
                every_second += int(bits.flatten()[::2].sum(dtype=torch.int64))
        self.optimizer.zero_grad(set_to_none=True)
        return f"{total:x} {every_second:x}"

    def _made(self, batch: int) -> tuple[torch.nn.Module, Any]:
        dtype = self.known.training_dtype
        if self.name == "llama":
            return llama(self.size.llama, dtype, self.device)
        torch.manual_seed(0)
        model = GPT(*self.size.gpt).to(device=self.device, dtype=dtype)
        return model.train(), self._sample(batch)

    def _sample(self, batch: int) -> Any:
        torch.manual_seed(0)
        if self.name == "llama":
            shape = self.size.llama
            return (torch.randint(shape.vocabulary, (batch, shape.length + 1), device=self.device),)
        length, vocabulary = self.size.gpt[3:]
        ids = torch.randint(vocabulary, (batch, length + 1), device=self.device)
        return ids[:, :-1].clone(), ids[:, 1:].clone()


_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Context without cuDNN's attention; the rest of torch's order stands."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Context in which kernels give the same bits in each run; an op without such a form is an error.

    With `warn_only` attention would not take its form, which is slower.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warned_only)


def reserved(device: torch.device, step: Callable[[], object]) -> dict[str, int]:
    """Memory that CUDA's allocator reserves and allocates over three steps, by its own count; empty elsewhere."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        step()
    torch.cuda.synchronize(device)
    return {
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
    }
