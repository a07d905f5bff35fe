"""One rank of two; the second one dies in the backward of its first recorded step."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from models import batch, make, sharded

import autoac


class Dies(torch.autograd.Function):
    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grad_outputs: torch.Tensor) -> torch.Tensor:
        os._exit(1)


def loss(output: torch.Tensor) -> torch.Tensor:
    return Dies.apply(output) if dist.get_rank() == 1 else output


def main() -> None:
    dist.init_process_group("gloo")
    started = time.monotonic()
    try:
        autoac.plan(sharded(make()), batch(), "1GB", loss=loss)
        words = "no error"
    except autoac.ParallelError as error:
        words = str(error)
    Path(sys.argv[1]).write_text(json.dumps({"error": words, "seconds": time.monotonic() - started}))
    os._exit(0)  # without the goodbyes of a job that has lost a rank


if __name__ == "__main__":
    main()
