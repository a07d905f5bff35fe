"""Run by `python -m tests.cuda_ops` on the stand-in: compares, prints differences, writes what CUDA does as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import autoac
from autoac.record.cuda.attention import choice
from tests.cuda_ops import attention
from tests.cuda_ops.families import ALL
from tests.cuda_ops.steps import DECIDED_BY_MODEL, kinds, run

warnings.simplefilter("ignore")


def losses() -> int:
    """The number of types whose cross entropy runs other ops in the lean form than in torch's, under autocast."""
    different = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        half = torch.bfloat16 if dtype is torch.float32 else dtype
        found = []
        for loss in (F.cross_entropy, autoac.cross_entropy):
            with FakeTensorMode():
                logits = torch.empty(8, 16, device="cuda", dtype=dtype, requires_grad=True)
                with torch.autocast("cuda", dtype=half), Computing() as seen:
                    loss(logits, torch.zeros(8, dtype=torch.int64, device="cuda"))
            found.append(seen.ops)
        different += found[0] != found[1]
        print(f"cross entropy of {dtype}: {found[0]}, lean: {found[1]}", flush=True)
    return different


class Computing(TorchDispatchMode):
    """Mode that notes softmax and loss, with the types that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "softmax" in str(func) or "nll_loss" in str(func):
            self.ops.append(f"{func} of {args[0].dtype}")
        return func(*args, **(kwargs or {}))


def main(to: Path, families: list[str]) -> int:
    capability = torch.cuda.get_device_capability()
    different = losses()
    kernels = attention.on_cuda()
    for case, letter in zip(attention.cases("meta"), kernels, strict=True):
        ours = attention.LETTERS[choice(capability, *case)]
        if ours != letter:
            different += 1
            print(
                f"attention {[(x.dtype, x.shape) for x in case[:3]]} {case[4:]}: CUDA {letter}, autoac {ours}"
            )
    print(f"attention: {len(kernels)} cases, {different} differ", flush=True)
    steps: dict[str, dict[str, Any]] = {}
    for family in families or ALL:
        for kind in kinds():
            cuda = run(family, kind, torch.device("cuda"))
            ours = run(family, kind, torch.device("cpu"), capability)
            found = cuda.differences(ours)
            expected = DECIDED_BY_MODEL.get(family, set())
            unexpected = {op: count for op, count in found.items() if op not in expected}
            different += bool(unexpected)
            counts = f"{len(cuda.forward)} + {len(cuda.backward)} ops, {len(cuda.saved)} tensors saved"
            print(f"{family} {kind}: {counts}, different: {unexpected or 'none'}", flush=True)
            steps.setdefault(family, {})[kind] = cuda.summary(family)
    to.write_text(json.dumps({"torch": torch.__version__, "attention": kernels, "families": steps}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
