"""The command line; its contract is frozen by ``tests/test_cli.py``."""

from memkv_pp.cli.app import main

__all__ = ["main"]
