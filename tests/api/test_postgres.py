"""Several services on one PostgreSQL: one leads, and another takes over when it dies."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_service import Service, job, running, wait_for
from postgres import postgres, programs
from sqlalchemy import create_engine, text

from meshwright.control.store.database import Database

pytestmark = pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed")


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres() as url:
        yield url


def test_another_service_leads_when_the_first_dies_or_sleeps(tmp_path: Path, database: str) -> None:
    home = tmp_path / "shared"  # of the services, as their file system is
    with (
        running(home, "--db", database) as first,
        running(home, "--db", database) as second,
    ):
        first.cluster("one", nodes=2, spares=0)
        with first.client() as client:
            body = {"cluster": "one", "job": job(1_000_000, dp_shard=8)}
            found = client.send("POST", "/jobs", body, key="only-once")
            with second.client() as other:
                again = other.send("POST", "/jobs", body, key="only-once")
            assert again == found
            before = client.get("/service")
        first.job_at(found["id"], "RUNNING")
        assert before["leads"] and before["database"] == "postgresql"
        with second.client() as client:
            said = client.get("/service")
            assert not said["leads"] and said["leader"] == before["id"]
            assert first.process is not None
            first.process.send_signal(signal.SIGSTOP)
            assert wait_for(lambda: client.get("/service")["leads"])
            step = client.get(f"/jobs/{found['id']}")["step"]
            assert wait_for(lambda: client.get(f"/jobs/{found['id']}")["step"] > step)
            made = client.send("POST", "/clusters", {"name": "two", "nodes": 1, "spares": 0})
            second.done(made["operation"]["id"])
            first.process.send_signal(signal.SIGCONT)
            time.sleep(1.5)
            assert client.get("/service")["leads"]  # who slept does not act, nor take it back
            with first.client() as awake:
                assert not awake.get("/service")["leads"]
                client.send("POST", f"/jobs/{found['id']}/stop")
                assert awake.get(f"/jobs/{found['id']}")["attempt"] == 1
            second.job_at(found["id"], "STOPPED")


def test_the_tables_are_those_of_the_code(tmp_path: Path, database: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from meshwright.control.store.tables import metadata

    for url in (database, f"sqlite:///{tmp_path / 'fresh.db'}"):
        opened = Database(url)
        opened.upgrade()
        opened.upgrade()  # nothing is left to do
        opened.close()
        engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []
            assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        engine.dispose()


def test_a_database_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    service = Service(tmp_path, ("--db", "postgresql://u:secret@127.0.0.1:1/none"))
    with pytest.raises(AssertionError, match="error: --db") as found:
        service.start()
    assert service.process is not None and service.process.wait(30) == 2
    assert "secret" not in str(found.value)
