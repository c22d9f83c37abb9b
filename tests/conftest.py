"""What every test may ask for: golden files, and how hypothesis searches."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from goldens import FOLDER, Golden

# No deadline: a busy machine is not a bug. In CI the same examples every time: a red run must be repeatable.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-golden`."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ with what the tests produce")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)` compares `text` with `tests/golden/<name>`."""
    return Golden(FOLDER, update=bool(request.config.getoption("--update-golden")))
