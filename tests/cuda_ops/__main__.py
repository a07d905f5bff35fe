"""Hold autoac's list of CUDA's ops against a CUDA build of torch: `python -m tests.cuda_ops --environment FOLDER`.

No GPU is needed, only Linux, a C compiler and an environment with such a build (`python -m tests.versions VERSION`
makes one). A stand-in for the driver (`stand_in.c`) lets torch's host code choose its ops as on a GPU: the choice of
attention kernels, autograd's formulas and the device thread of backward are torch's own. All tensors are fake, nothing
is computed and nothing measured. Each family's step is run on fake CUDA tensors and as autoac records it on fake CPU
tensors, and the ops of forward and backward and the saved tensors are compared: names, types, shapes, strides.

Torch's caching allocator and streams are host code as well. `allocator` compares our simulation with that allocator,
call by call, `streams` checks what the engines rely on, and `workspaces` the sizes of cuBLAS's workspaces. They run
after the families; `host-code` runs them alone.

`--write` puts what CUDA does into recorded.json, against which `tests/record/cuda/test_ops.py` holds every CPU build.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cuda_ops import workspaces

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded.json")
CAPABILITIES = "8.0", "9.0"
HOST_CODE = "host-code"


def stand_in(python: Path, folder: Path) -> str:
    """The libraries, for LD_PRELOAD, compiled with the headers that come with torch's Triton."""
    where = "import triton, os; print(os.path.dirname(triton.__file__))"
    triton = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    headers = Path(triton) / "backends" / "nvidia" / "include"
    libraries = []
    # Torch loads driver and management library by these names, and finds them loaded.
    for name, source in (("libcuda.so.1", "stand_in.c"), ("libnvidia-ml.so.1", "stand_in_nvml.c")):
        library = folder / name
        command = ["cc", "-shared", "-fPIC", "-O1", f"-I{headers}", f"-Wl,-soname,{name}", "-o", library]
        subprocess.run([*command, Path(__file__).with_name(source)], check=True)
        libraries.append(str(library))
    return ":".join(libraries)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help=f"all if left out; {HOST_CODE}: none of them")
    parser.add_argument("--environment", type=Path, required=True, help="with a CUDA build of torch")
    parser.add_argument("--write", action="store_true", help="keep what CUDA does; for all families only")
    given = parser.parse_args()
    if given.write and given.families:
        parser.error("--write is for all families")
    python = given.environment / "bin" / "python"
    found, codes = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        preloaded = stand_in(python, Path(scratch))
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "solver"))),
            "LD_PRELOAD": preloaded,
            "HF_HUB_OFFLINE": "1",
        }
        alone = given.families == [HOST_CODE]
        for capability in () if alone else CAPABILITIES:
            print(f"-- capability {capability}", flush=True)
            to = Path(scratch) / f"{capability}.json"
            variables["STAND_IN_CAPABILITY"] = capability
            command = [python, "-m", "tests.cuda_ops.on_stand_in", to, *given.families]
            codes.append(subprocess.run(command, cwd=ROOT, env=variables).returncode)
            found[capability] = json.loads(to.read_text())
        if alone or not given.families:
            for name in ("allocator", "streams"):
                command = [python, "-W", "ignore", "-m", f"tests.cuda_ops.{name}"]
                codes.append(subprocess.run(command, cwd=ROOT, env=variables).returncode)
            command = [python, "-W", "ignore", "-m", "tests.cuda_ops.workspaces"]
            for capability, config in itertools.product(workspaces.CAPABILITIES, workspaces.CONFIGS):
                variables |= {"STAND_IN_CAPABILITY": capability, "CUBLAS_WORKSPACE_CONFIG": config}
                codes.append(subprocess.run(command, cwd=ROOT, env=variables).returncode)
    if given.write:
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
