"""The version, in one place: the build, `autoac.__version__` and `autoac --version` read it, without torch."""

__version__ = "0.1.0"
