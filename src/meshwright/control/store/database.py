"""One database, SQLite or PostgreSQL: opened, brought to the newest tables, read and written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from meshwright.base.errors import InputError
from meshwright.control.store.turn import Turn

_MIGRATIONS = Path(__file__).with_name("migrations")
_LOCK_WAIT_MS = 10_000
_FIX = "give sqlite:///PATH or postgresql://USER@HOST/NAME"
_WRITER_LOCK = 0x6D657368  # of PostgreSQL; any number that others do not use


class Database:
    """Transactions: `read()`, and `write()`, one at a time among all services on one database.
    So the numbers of events come in the order in which they can be seen, and a cursor over them
    misses none. Safe to use from several threads."""

    def __init__(self, url: str) -> None:
        """Open `sqlite:///PATH` or `postgresql://...`. Raises InputError, one line, without the
        password."""
        self._engine = _open(url)
        self.sqlite = self._engine.dialect.name == "sqlite"
        # SQLite would have writers poll for their turn.
        file = sqlite_file(url) if self.sqlite else None
        self._turn = Turn(file.with_name(f".{file.name}.turn")) if file else None

    def upgrade(self) -> None:
        """Make the tables, or bring them to what this version needs. Raises InputError."""
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        try:
            with self.write() as connection:
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        except SQLAlchemyError as error:
            raise InputError(f"--db: {_line(error)}") from error

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent look at everything."""
        with self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """All or nothing, on the disk when the block has ended without an exception."""
        turn: AbstractContextManager[object] = self._turn or nullcontext()
        with turn:
            connection = self._engine.connect().execution_options(begin="IMMEDIATE")
            with connection, connection.begin():
                if not self.sqlite:
                    connection.execute(text(f"SELECT pg_advisory_xact_lock({_WRITER_LOCK})"))
                yield connection

    def now_s(self, connection: Connection) -> float | None:
        """The clock that services on one PostgreSQL share; None on SQLite, which has one."""
        if self.sqlite:
            return None
        found = connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar()
        return float(found)  # type: ignore[arg-type]

    def close(self) -> None:
        """Let go of all connections."""
        self._engine.dispose()
        if self._turn is not None:
            self._turn.close()


def sqlite_file(url: str) -> Path | None:
    """The file of a database of SQLite, None for another. Raises InputError."""
    found = _parsed(url)
    if found.get_backend_name() != "sqlite":
        return None
    if not found.database or found.database == ":memory:":
        raise InputError("--db: a database in memory is gone with the service; give sqlite:///PATH")
    return Path(found.database).resolve()


def _parsed(text_url: str) -> URL:
    try:
        return make_url(text_url)
    except ArgumentError as error:
        raise InputError(f"--db: not an address of a database; {_FIX}") from error


def _open(text_url: str) -> Engine:
    url = _parsed(text_url)
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    try:
        if url.get_backend_name() == "sqlite":
            engine = create_engine(url, connect_args={"check_same_thread": False})
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        else:
            engine = create_engine(
                url, pool_size=10, max_overflow=20, pool_pre_ping=True, pool_timeout=5
            )
        with engine.connect():
            return engine
    except ModuleNotFoundError as error:
        raise InputError(f"--db: needs {error.name}: pip install 'meshwright[postgres]'") from error
    except NoSuchModuleError as error:
        raise InputError(f"--db {url.get_backend_name()}: unknown kind; {_FIX}") from error
    except DBAPIError as error:
        where = url.render_as_string(hide_password=True)
        raise InputError(f"--db {where}: {_line(error)}") from error


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where we say so
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",  # an answered request outlives a loss of power
        f"busy_timeout={_LOCK_WAIT_MS}",
        "foreign_keys=ON",
        "wal_autocheckpoint=2000",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    mode = connection.get_execution_options().get("begin", "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {mode}")


def _line(error: Exception) -> str:
    said = getattr(error, "orig", None) or error
    return " ".join(str(said).split())
