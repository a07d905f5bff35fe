"""A small GPT, sharded by FSDP2 block by block, under one plan on all ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py

On CPU with gloo. Every rank calls `autoac.plan`: the ranks record a step together, with FSDP2's gathered parameters and
reductions, and all get the same plan. Compare the last line with that of `--no-plan`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import autoac
from autoac.measure import measure_peak

WIDTH, HEADS, TOKENS, BLOCKS, BATCH = 64, 4, 64, 4, 8


class Block(nn.Module):
    """Attention, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        x = x + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Embedding, blocks, and the loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", default="7MB")
    parser.add_argument("--no-plan", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())  # each rank has data of its own
    tokens = torch.randint(256, (BATCH, TOKENS + 1))

    plan = None
    if not arguments.no_plan:
        plan = autoac.plan(model, (tokens,), budget=arguments.budget)
        plan.apply(model)
    peak_bytes = 0
    for _ in range(4):
        optimizer.zero_grad()
        taken = measure_peak(lambda: model(tokens).backward())
        peak_bytes = min(peak_bytes or taken.peak_above_start_bytes, taken.peak_above_start_bytes)
        optimizer.step()
    with torch.no_grad():
        loss = model(tokens).item()
    if dist.get_rank() == 0:
        if plan is not None:
            print(plan)
            print("at the peak:", plan.peak_parts())
        print(f"above the start of a step: {peak_bytes / 1e6:.2f} MB; loss after four steps {loss:.6f}")
    dist.barrier()  # gloo's threads drop the last tensors before the process ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
