"""As for tests of exactness: both engines, one thread, nothing left behind."""

from tests.execute.exact.conftest import _nothing_active, _one_thread, engine

__all__ = ["_nothing_active", "_one_thread", "engine"]
