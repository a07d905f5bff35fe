"""Training on several processes: effects of wrappers, one plan on all ranks, plans for absent ranks."""

from autoac.parallel.ddp import DDP
from autoac.parallel.fsdp2 import FSDP2
from autoac.parallel.one_plan import agree
from autoac.parallel.protocol import Parallel, Plain
from autoac.parallel.sizes import by_world_size
from autoac.parallel.tensor import TensorParallel
from autoac.parallel.wrapped import found_on
from autoac_solver.records.errors import ParallelError

__all__ = [
    "DDP",
    "FSDP2",
    "Parallel",
    "ParallelError",
    "Plain",
    "TensorParallel",
    "agree",
    "by_world_size",
    "found_on",
]
