"""One service for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hyperpod_service import Service, group, in_service, running


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture(scope="session")
def client(service: Service) -> Any:
    return service.client


@pytest.fixture(scope="session")
def cluster(client: Any) -> str:
    """Four nodes, which tests look at and leave as they are."""
    client.create_cluster(ClusterName="kept", InstanceGroups=[group(4)])
    in_service(client, "kept")
    return "kept"
