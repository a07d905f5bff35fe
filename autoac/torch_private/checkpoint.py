"""torch's own activation checkpointing."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import inspect

import torch.utils.checkpoint

POLICIES_SEE_RESULTS = (
    "op_output" in inspect.signature(torch.utils.checkpoint.SelectiveCheckpointContext).parameters
)
"""Whether selective checkpointing asks its policy once, in forward and with the op's result, as engine sac needs it.

Source: `SelectiveCheckpointContext` in torch/utils/checkpoint.py.
"""


def checkpoint_debug_enabled() -> bool | None:
    """What `torch.utils.checkpoint.set_checkpoint_debug_enabled` is set to; None if it is not.

    Source: `_checkpoint_debug_enabled` in torch/utils/checkpoint.py.
    """
    return torch.utils.checkpoint._checkpoint_debug_enabled
