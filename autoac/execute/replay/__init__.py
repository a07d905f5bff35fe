"""Engine "replay": a region's forward is recorded op by op, and backward runs only the recorded ops again.

`recording` runs a region's forward and writes `records`; `call` keeps them for backward and runs them again. The rules
are in their NOTE blocks: [ Who holds what ] in `records`, [ Replay ] in `call`, [ Never wrong, whatever the
decisions ] in `recording`.
"""

from autoac.execute.replay.call import ReplayCall, unpack
from autoac.execute.replay.recording import Recording, run
from autoac.execute.replay.records import Handle, Record, Slot

__all__ = ["Handle", "Record", "Recording", "ReplayCall", "Slot", "run", "unpack"]
