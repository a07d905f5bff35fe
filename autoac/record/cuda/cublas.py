"""Workspaces of cuBLAS on a GPU, which torch allocates and a CPU does not have.

NOTE [ Workspaces of cuBLAS ]
  Source: aten/src/ATen/cuda/CublasHandlePool.cpp (`parseChosenWorkspaceSize`, `parseCUDABlasLtWorkspaceSize`,
  `getCUDABlasLtWorkspace`). `python -m tests.cuda_ops` compares the sizes with those that torch 2.15.0 gives.
  1. The size is that of CUBLAS_WORKSPACE_CONFIG (the sum of its :KiB:COUNT), or 32 MiB on Hopper and Blackwell
     (capability 9, 10, 11 and 12), or 8,519,680 bytes on others.
  2. Up to torch 2.14, each thread keeps one block for each stream on which it multiplies matrices: forward's thread
     one, and backward's another. cuBLASLt uses the same block, unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0 gives it one
     of its own, of CUBLASLT_WORKSPACE_SIZE KiB (1024 by default).
  3. From torch 2.15 on, each matrix product allocates its workspace and frees it afterwards. cuBLASLt's is smaller,
     and which library runs a product is decided by rules that change, so cuBLAS's size is counted for all of them.
     TORCH_CUBLAS_WORKSPACE_CACHE=1 keeps the blocks as before.
  4. Not followed: `torch.backends.cuda.cublas_workspace_size(size)`, which is of the process that trains.
  5. cuDNN asks for its workspace at each convolution, with a size that depends on the algorithm that it chooses on the
     GPU. It cannot be known elsewhere.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import torch

from autoac.record.cuda.ops import capability_of
from autoac_solver.allocator.caching import BLOCK_BYTES
from autoac_solver.records.devices import DeviceTable, is_cuda
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import NEVER, Profile, Storage

_LARGE, _SMALL = 32 * 2**20, 2 * 4096 * 1024 + 8 * 16 * 1024
_LARGE_FROM, _LARGE_TO = 9, 12
_PRODUCTS = re.compile(
    r"aten\.(_addmm_activation|_grouped_mm|addbmm|addmm|addmv|baddbmm|bmm|dot|mm|mv|vdot)\."
)
_BY_CUDNN = re.compile(r"aten\.(_?convolution|cudnn_|_cudnn_|_scaled_dot_product_cudnn)")
_FREED_FROM = (2, 15)
_SIDES = {"forward": False, "backward": True}
"""Whether the ops that a thread runs are those of backward, which has a thread of its own for each GPU."""


def with_workspaces(profile: Profile, table: DeviceTable | None) -> Profile:
    """Add cuBLAS's workspaces, and a note on them, to the profile of a step on a GPU; others stay as they are.

    Args:
        profile: already of the table's device.
        table: with which it was made; None if it was recorded on the device itself, where workspaces inside of ops
            have been measured.
    """
    if not is_cuda(profile.device):
        return profile
    size = workspace_bytes(capability_of(profile.device_name)[0])
    products = [op for op in profile.tape if _PRODUCTS.match(op.name)]
    notes, added = [], ()
    tape = profile.tape
    if size and products and keeps_workspaces():
        kept = size + _lt_bytes()
        threads = [name for name, side in _SIDES.items() if any(op.backward is side for op in products)]
        added = tuple(Storage(kept, NEVER, profile.end, "Temp", f"cuBLAS ({name})") for name in threads)
        notes.append(
            f"counts the workspace that cuBLAS keeps for {' and '.join(threads)}, {format_bytes(kept)} each"
        )
    elif size and products and table is not None:
        tape = tuple(
            replace(op, workspace_bytes=max(op.workspace_bytes, size)) if _PRODUCTS.match(op.name) else op
            for op in tape
        )
        notes.append(f"counts cuBLAS's workspace, {format_bytes(size)} while a matrix product runs")
    if table is not None and any(_BY_CUDNN.match(op.name) for op in tape):
        notes.append(
            "workspaces of cuDNN (convolutions, its attention) depend on the algorithms that it chooses on the GPU and "
            "are not counted: leave headroom, or profile there"
        )
    return replace(
        profile,
        tape=tape,
        storage_table=(*profile.storage_table, *added),
        notes=(*profile.notes, *notes),
    )


def workspace_bytes(major: int) -> int:
    """The size of one workspace of cuBLAS, as the environment configures it, on a GPU of this major capability."""
    default = _LARGE if _LARGE_FROM <= major <= _LARGE_TO else _SMALL
    asked = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    size = sum(int(kib) * 1024 * int(count) for kib, count in asked) if asked else default
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def keeps_workspaces() -> bool:
    """Whether torch keeps a workspace once it was needed."""
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    return release < _FREED_FROM or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def _lt_bytes() -> int:
    """The size of a workspace of cuBLASLt's own, 0 if it shares cuBLAS's."""
    if os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") != "0":
        return 0
    asked = re.match(r"\s*([0-9]+)", os.environ.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return 1024 * (int(asked[1]) if asked else 1024)
