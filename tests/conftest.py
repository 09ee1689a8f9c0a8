"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _nothing_measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test depends on, or adds to, what was measured on this machine before."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MESHWRIGHT_CONFIG", str(tmp_path_factory.mktemp("config")))
    yield
    patch.undo()
