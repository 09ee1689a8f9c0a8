"""One service for the tests that only look at what is theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_service import Service, running


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("service")) as found:
        yield found
