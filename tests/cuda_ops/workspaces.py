"""Sizes of cuBLAS's workspaces, as torch's host code gives them for a GPU of the stand-in, and as autoac has them."""

from __future__ import annotations

import os
import sys

import torch

from autoac.record.cuda.cublas import keeps_workspaces, workspace_bytes

CAPABILITIES = "7.5", "8.0", "8.9", "9.0", "10.0", "12.0"
CONFIGS = "", ":4096:2:16:8", ":16:8"


def main() -> int:
    torch.cuda.init()
    capability = torch.cuda.get_device_capability()
    torchs, ours = torch.backends.cuda.cublas_workspace_size(), workspace_bytes(capability[0])
    kept = "kept" if keeps_workspaces() else "freed after each product"
    config = os.environ["CUBLAS_WORKSPACE_CONFIG"] or "default"
    print(f"workspace of {capability}, {config}: torch {torchs}, autoac {ours} bytes, {kept}", flush=True)
    return int(torchs != ours)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # at its exit torch would wait for work of a device that is not there
