"""Which attention kernel is taken for many kinds of arguments, on CUDA and as autoac has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from autoac.torch_private import FakeTensorMode, TorchDispatchMode

LETTERS = {"math": "m", "flash": "f", "efficient": "e", "cudnn": "c"}
_WIDTHS = (
    (4, 4),
    (12, 12),
    (16, 16),
    (64, 64),
    (72, 72),
    (128, 128),
    (136, 136),
    (192, 128),
    (256, 256),
    (264, 264),
    (16, 32),
)
_LENGTHS = (16, 16), (17, 17), (16, 24), (1, 32), (1, 1)
_KINDS = (
    ("", False, 0.0, False),
    ("", True, 0.0, False),
    ("", False, 0.1, False),
    ("", False, 0.125, False),
    ("", True, 0.0, True),
    ("bool", False, 0.0, False),
    ("bool", False, 0.1, False),
    ("float", False, 0.0, True),
    ("float with gradient", False, 0.0, False),
)


class Arguments(NamedTuple):
    """One call of `scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool


def cases(device: str) -> Iterator[Arguments]:
    """All arguments, always in the same order."""
    types = torch.float32, torch.float16, torch.bfloat16
    for dtype, widths, lengths, kind, grad in itertools.product(
        types, _WIDTHS, _LENGTHS, _KINDS, (True, False)
    ):
        mask, causal, dropout, shares = kind
        heads = 2 if shares else 4
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        query = torch.empty(2, 4, lengths[0], widths[0], requires_grad=grad, **options)
        key = torch.empty(2, heads, lengths[1], widths[0], requires_grad=grad, **options)
        value = torch.empty(2, heads, lengths[1], widths[1], requires_grad=grad, **options)
        attn_mask = _mask(mask, (2, 1, *lengths), dtype, device)
        yield Arguments(query, key, value, attn_mask, dropout, causal, shares)


def _mask(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor | None:
    if not kind:
        return None
    dtype = torch.bool if kind == "bool" else dtype
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=kind == "float with gradient")


class _Kernel(TorchDispatchMode):
    letter = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::_scaled_dot_product_").removesuffix("_attention")
        self.letter = LETTERS.get(name, self.letter)
        return func(*args, **(kwargs or {}))


def on_cuda() -> str:
    """The letter of each case's kernel, on fake CUDA tensors."""
    letters = []
    with FakeTensorMode():
        for case in cases("cuda"):
            with _Kernel() as kernel:
                F.scaled_dot_product_attention(**case._asdict())
            letters.append(kernel.letter or LETTERS["math"])
    return "".join(letters)
