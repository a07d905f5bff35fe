"""Families for which the contract is not kept to the letter, each with the cause."""

from __future__ import annotations

from collections.abc import Mapping

KNOWN: Mapping[str, tuple[str | tuple[str, ...], str]] = {
    "ernie4_5_moe": (
        "the prediction is off",
        "under engine sac 1,024 of 825,608 bytes less were measured than predicted, with one of three plans "
        "(6 of 120 with drawn times): where a plan saves the routed experts' output and their routing weights "
        "(1,024 bytes) and recomputes others of the region, the backward of their product drops both before it sums, "
        "and they are counted until the node is released (`Saved.released`, not `Saved.dropped`)",
    ),
    "vits": (
        ("the prediction is off", "over the budget", "not found in storage"),
        "its duration predictor draws lengths by torch.randn: a step may draw shorter ones than the recorded runs, or "
        "longer ones (16.6 % above the prediction were seen), which the profile's notes say; its layer drop draws by "
        "numpy, which engine sac's second run draws anew, and refuses",
    ),
}
"""By name: what a fault's words must hold (one of several), and why.
Plans depend on times: the fault need not show each time."""

NOTHING_TO_SAVE = "no plan saves anything"
"""The parameters and their gradients are the peak: the model is too small for its weights to be checked."""
