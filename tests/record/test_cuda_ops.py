"""The ops that are recorded for CUDA on this build, against those that the CUDA build of torch 2.15.0 was seen to take.

`python -m tests.cuda_ops --write` makes the record, for all families and types; here a part of it is looked at.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoac
from autoac.record.cuda_attention import EFFICIENT_SHARES_HEADS, choice
from autoac.record.cuda_ops import CudaOps, capability_elsewhere, capability_of
from tests.cuda_ops import attention
from tests.cuda_ops.__main__ import RECORDED
from tests.cuda_ops.families import ALL
from tests.cuda_ops.steps import run

CAPABILITIES = {"8.0": (8, 0), "9.0": (9, 0)}


@functools.cache
def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_attention_kernel_is_the_one_that_cuda_takes(capability: str):
    kernels = recorded()[capability]["attention"]
    assert len(kernels) > 2000
    assert len(set(kernels)) == (4 if capability == "9.0" else 3)
    for case, kernel in zip(attention.cases("meta"), kernels, strict=True):
        shares = case.key.shape[1] != case.query.shape[1] and kernel == attention.LETTERS["efficient"]
        expected = attention.LETTERS["math"] if shares and not EFFICIENT_SHARES_HEADS else kernel
        assert attention.LETTERS[choice(CAPABILITIES[capability], *case)] == expected, case


def test_the_record_is_of_all_families():
    for found in recorded().values():
        assert found["torch"].startswith("2.15.0+cu")
        assert set(found["families"]) == set(ALL)
        assert len(ALL) >= 20
        assert all(set(of_family) == {"float32", "bfloat16"} for of_family in found["families"].values())


@pytest.mark.parametrize(
    ("family", "dtype", "capability"),
    [
        ("gpt2", "bfloat16", "9.0"),
        ("llama", "bfloat16", "9.0"),
        ("mixtral", "bfloat16", "8.0"),
        ("cnn_with_skips", "float32", "9.0"),
        ("cnn_with_skips", "bfloat16", "9.0"),
        ("plain_decoder", "bfloat16", "9.0"),
        ("plain_decoder", "bfloat16", "8.0"),
    ],
)
def test_ops_and_what_is_saved_are_those_of_cuda(family: str, dtype: str, capability: str):
    """To the shape, stride and type of each result."""
    ours = run(family, getattr(torch, dtype), torch.device("cpu"), CAPABILITIES[capability])
    assert ours.summary(family) == recorded()[capability]["families"][family][dtype]


OF_A_RELEASE = {"view", "_unsafe_view", "lift_fresh", "fill_.Scalar", "fill_.Tensor"}
"""Ops of a linear layer and of a number that is written into a slice, in which releases of torch differ."""


@pytest.mark.parametrize(
    ("family", "dtype", "capability"),
    [("whisper", "float32", "8.0"), ("torch_transformer", "bfloat16", "8.0"), ("clip", "bfloat16", "9.0")],
)
def test_ops_and_saved_bytes_are_those_of_cuda(family: str, dtype: str, capability: str):
    on_cuda = recorded()[capability]["families"][family][dtype]
    ours = run(family, getattr(torch, dtype), torch.device("cpu"), CAPABILITIES[capability]).summary(family)
    assert ours["saved_bytes"] == on_cuda["saved_bytes"]
    counts = [{op: n for op, n in of["ops"].items() if op not in OF_A_RELEASE} for of in (ours, on_cuda)]
    assert counts[0] == counts[1]


def test_a_kernel_that_the_user_has_switched_off_is_not_taken():
    query = torch.empty(2, 4, 16, 32, dtype=torch.bfloat16, device="meta")
    arguments = (9, 0), query, query, query, None, 0.0, False, False
    assert choice(*arguments) == "cudnn"
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert choice(*arguments) == "efficient"
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert choice(*arguments) == "math"


@pytest.mark.parametrize(
    ("title", "capability"),
    [
        ("NVIDIA H200 SXM 141GB", (9, 0)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA L4 24GB", (8, 9)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA GeForce RTX 3090", (8, 6)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("Tesla V100-SXM2-32GB", (7, 0)),
        ("Tesla T4", (7, 5)),
        ("a GPU of tomorrow", (9, 0)),
    ],
)
def test_capability_by_name(title: str, capability: tuple[int, int]):
    assert capability_of(title) == capability
    assert capability_elsewhere(None, torch.device("cpu")) is None


def test_casts_of_the_cpus_autocast_are_told():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = autoac.profile(model, x, device="h200")
    plain = autoac.profile(model, x, device="h200")
    assert [["casts of the CPU" in note for note in of.notes].count(True) for of in (cast, plain)] == [1, 0]


def test_attention_inside_of_torchs_own_layer_is_put_back():
    layer = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
    before = F.scaled_dot_product_attention, F.dropout
    x = torch.randn(2, 6, 32)
    with CudaOps((8, 0)), pytest.raises((NotImplementedError, RuntimeError)):  # the CPU has no such kernel
        layer(x, x, x, need_weights=False)
    assert (F.scaled_dot_product_attention, F.dropout) == before
