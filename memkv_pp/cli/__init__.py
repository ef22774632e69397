"""The command line; its contract is frozen by ``tests/test_cli.py``."""
