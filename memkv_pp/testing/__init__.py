"""Tools for tests, ours and yours: tiny models, fakes, conformance checks."""
