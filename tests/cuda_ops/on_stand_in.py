"""Run by `python -m tests.cuda_ops` on the stand-in: compares, prints differences, writes what CUDA does as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from autoac.record.cuda_attention import choice
from tests.cuda_ops import attention
from tests.cuda_ops.families import ALL
from tests.cuda_ops.steps import DECIDED_BY_MODEL, kinds, run

warnings.simplefilter("ignore")


def main(to: Path, families: list[str]) -> int:
    capability = torch.cuda.get_device_capability()
    different = 0
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
