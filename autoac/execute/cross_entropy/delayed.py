"""Casts of half-precision logits to float32 that are left to the loss, which can make them by the chunk.

NOTE [ Delayed casts ]
  1. The losses of transformers' language models call `logits.float()`, view the result as rows, and give it to torch's
     cross entropy. Under autocast, or for a model in half precision, that copy is twice as large as the logits.
  2. In these functions, and where the cross entropy is lean, `.float()` makes no copy: it returns another tensor on the
     same logits. `LeanLosses` knows that tensor and its views, and their cross entropy makes the cast.
  3. The result would differ from torch's if the function did anything else with the float32 logits. So the functions
     are known by the names that their code uses; another version of them makes its cast itself.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch

_MODULE = "transformers.loss.loss_utils"
_USED = {
    "ForCausalLMLoss": "float nn functional pad contiguous view to device fixed_cross_entropy",
    "ForMaskedLMLoss": "float view to device fixed_cross_entropy",
    "fixed_cross_entropy": "nn functional cross_entropy torch is_tensor to device",
}
"""Names that the code of each function uses (transformers 5.24, `loss/loss_utils.py`)."""


class Delayed:
    """Half-precision logits that stand for float32 ones."""

    def __init__(self) -> None:
        self._logits: list[torch.Tensor] = []

    def __contains__(self, tensor: Any) -> bool:
        return any(logits is tensor for logits in self._logits)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor, and return it."""
        self._logits.append(tensor)
        return tensor

    def clear(self) -> None:
        """Forget all."""
        self._logits.clear()


def may_delay(caller: FrameType) -> bool:
    """Whether the code that calls `.float()` may be given the logits as they are."""
    module = sys.modules.get(_MODULE)
    if module is None or caller.f_globals is not vars(module):
        return False
    codes = {name: getattr(vars(module).get(name), "__code__", None) for name in _USED}
    is_known = all(
        isinstance(code, CodeType) and code.co_names == tuple(_USED[name].split())
        for name, code in codes.items()
    )
    return is_known and caller.f_code in codes.values()
