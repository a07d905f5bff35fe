"""The time to plan a 70B Llama for one of 64 ranks, without its weights: `python -m benchmarks.ranks`.

The command line does it in a process of its own, from the sizes of Llama 3's 70B alone (FSDP2, bfloat16, 4096 tokens a
rank, a budget of 80 GB on an H200). Printed are the plan, and the seconds by the clock and of a processor.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ROOT = Path(__file__).resolve().parents[1]


def main(
    ranks: Annotated[int, typer.Option(help="Ranks over which parameters are sharded.")] = 64,
    split: Annotated[int, typer.Option(help="Ranks that split each layer.")] = 1,
    budget: Annotated[str, typer.Option(help="Peak of each rank.")] = "80GB",
) -> None:
    """Plan, and print how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA_70B))
        command = [sys.executable, "-m", "autoac", "plan", "--hf", str(config), "--fsdp", str(ranks)]
        command += ["--batch", "1", "--seq", "4096", "--dtype", "bfloat16", "--device", "h200"]
        command += ["--budget", budget, *(["--tp", str(split)] if split > 1 else [])]
        path = os.pathsep.join(map(str, (ROOT, ROOT / "solver")))
        started = time.monotonic()
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
        wall_s = time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak_bytes = used.ru_maxrss * 1024
    print(
        f"{wall_s:.0f} s by the clock, {used.ru_utime + used.ru_stime:.0f} s of a processor, "
        f"at most {peak_bytes / 1e9:.1f} GB of memory"
    )


if __name__ == "__main__":
    typer.run(main)
