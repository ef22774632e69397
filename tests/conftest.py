"""Fixtures and hypothesis profiles: ``pytest --hypothesis-profile=deep`` searches longer."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, max_examples=100, deadline=None, database=None)
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=5000, deadline=None)
settings.load_profile("ci")

MODELS = Path(__file__).parent.parent / ".models"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    path = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(f"{path} is absent: run `make model`")
    return path
