"""The record of one training step: ops, storages, saved tensors, and the module calls they belong to.

Points in time are *ticks* of one clock that advances with every op and every event between ops, so the order of an
allocation, a release and the start of a region's backward is never ambiguous. Storages, ops, module calls and saved
tensors refer to each other by index.

On disk a profile is JSON in columns, with a schema version. Loading a file runs no code from it.
"""

from autoac_solver.records.profile.any_order import (
    IN_ITS_ORDER,
    has_unequal_calls_at_once,
    is_sized_by_values,
)
from autoac_solver.records.profile.profile import PROFILE, EngineCosts, Profile
from autoac_solver.records.profile.rows import (
    BUCKETS,
    CACHED,
    FACTS,
    FOREIGN,
    GATHERED,
    GRAPH_OF_BACKWARD,
    IN_EVAL,
    INFERENCE,
    KINDS,
    LOSS_SIZED_BY_VALUES,
    NEVER,
    NO_AUTOCAST_IN_BACKWARD,
    OPTIMIZER_STEP,
    OWN_CHECKPOINTING,
    OWN_LOOP,
    SCALAR_BYTES,
    SHARDED,
    SIZED_BY_VALUES,
    STREAMS,
    TIMES_FROM,
    UNPACKED_TWICE,
    UNRULED,
    UNSTEADY,
    VARIES,
    VARYING,
    ModuleCall,
    Op,
    Part,
    Saved,
    Storage,
    Unpack,
)

__all__ = [
    "CACHED",
    "FACTS",
    "FOREIGN",
    "BUCKETS",
    "GATHERED",
    "GRAPH_OF_BACKWARD",
    "IN_EVAL",
    "IN_ITS_ORDER",
    "INFERENCE",
    "KINDS",
    "NEVER",
    "NO_AUTOCAST_IN_BACKWARD",
    "OPTIMIZER_STEP",
    "OWN_CHECKPOINTING",
    "OWN_LOOP",
    "PROFILE",
    "SCALAR_BYTES",
    "SHARDED",
    "LOSS_SIZED_BY_VALUES",
    "SIZED_BY_VALUES",
    "STREAMS",
    "UNPACKED_TWICE",
    "UNRULED",
    "TIMES_FROM",
    "UNSTEADY",
    "VARIES",
    "VARYING",
    "EngineCosts",
    "ModuleCall",
    "Op",
    "Part",
    "Profile",
    "Saved",
    "Storage",
    "Unpack",
    "has_unequal_calls_at_once",
    "is_sized_by_values",
]
