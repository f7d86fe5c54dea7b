"""The tables of the record store, on SQLite or PostgreSQL, and how each is opened.

    gati_store    one row: the version of these tables, how many records there are, and their bytes
    gati_records  the records
    gati_batches  the last batch of every writer, so that one sent twice is kept once

Every transaction that writes first takes the one row of `gati_store`, so writers take turns and the counts
in it are right at every commit.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gati.errors import AdaptError, StorageError, first_line

try:
    import sqlalchemy as sa
    from sqlalchemy import event, exc
except ImportError:
    raise AdaptError('the record store needs SQLAlchemy: pip install "gati[stream]"') from None

__all__ = ["SCHEMA", "batches", "connect", "prepare", "records", "sa", "store", "translated", "writing"]

SCHEMA = 1  # raise it with every change of the tables

_BUSY_MS = 10_000
_WAL_BYTES = 64 * 2**20  # what SQLite's log may keep of the disk after a checkpoint
_ADVISORY_LOCK = 0x67617469  # "gati": makes the tables in one process at a time
_POSTGRES = {"connect_timeout": 5, "tcp_user_timeout": 15_000, "keepalives_idle": 10}  # s, ms, s

_metadata = sa.MetaData()
_number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

store = sa.Table(
    "gati_store",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("records", sa.BigInteger, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
)
records = sa.Table(
    "gati_records",
    _metadata,
    sa.Column("id", _number, primary_key=True, autoincrement=True),
    sa.Column("time_s", sa.Double, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("base_class", sa.Integer, nullable=False),
    sa.Column("left_at", sa.Text),
    sa.Column("agreed", sa.Boolean),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("dtype", sa.Text, nullable=False),
    sa.Column("shape", sa.Text, nullable=False),
    sa.Column("probabilities_dtype", sa.Text),
    sa.Column("probabilities", sa.LargeBinary),
    sa.Column("input", sa.LargeBinary, nullable=False),
    sa.Index("gati_records_oldest", "time_s", "id", "bytes"),
    sa.Index("gati_records_window", "model", "kind", "time_s", "id"),
)
batches = sa.Table(
    "gati_batches",
    _metadata,
    sa.Column("writer", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("time_s", sa.Double, nullable=False),
)


def connect(url: str) -> sa.Engine:
    """An engine for `sqlite:///PATH` or `postgresql://...`; connects on first use.

    **Raises:** `AdaptError` for other URLs or a missing driver.
    """
    try:
        parsed = sa.make_url(url)
    except exc.ArgumentError:
        raise AdaptError("the store's URL is invalid: use sqlite:///PATH or postgresql://HOST/NAME") from None
    family = parsed.drivername.split("+")[0]
    if family == "sqlite":
        return _sqlite(parsed)
    if family in ("postgresql", "postgres"):
        return _postgresql(parsed)
    raise AdaptError(f"{family!r} stores are not supported: use sqlite:///PATH or postgresql://HOST/NAME")


def _sqlite(url: sa.URL) -> sa.Engine:
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise AdaptError("a store needs a file: sqlite:///relative.db or sqlite:////absolute.db")
    engine = sa.create_engine(url, connect_args={"timeout": _BUSY_MS / 1000})

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # transactions begin where `_begin` says, not where sqlite3 guesses
        connection.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        _write_ahead(connection)
        for setting in ("synchronous=NORMAL", f"journal_size_limit={_WAL_BYTES}"):
            connection.execute(f"PRAGMA {setting}").fetchall()

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        writes = connection.get_execution_options().get("gati_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Keep a write-ahead log; wait for others that open the same new file, as SQLite itself does not here."""
    deadline_s = time.monotonic() + _BUSY_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
        time.sleep(0.01)


def _postgresql(url: sa.URL) -> sa.Engine:
    ours = {name: value for name, value in _POSTGRES.items() if name not in url.query}
    try:
        return sa.create_engine(
            url.set(drivername="postgresql+psycopg"), connect_args=ours, pool_pre_ping=True, pool_timeout=10
        )
    except ImportError:
        raise AdaptError('a store on PostgreSQL needs psycopg: pip install "gati[postgresql]"') from None


@contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A write transaction: committed as a whole, or not at all."""
    with engine.connect().execution_options(gati_writes=True) as connection, connection.begin():
        yield connection


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn the database's errors into ours, without its statements, values and passwords.

    **Raises:** `StorageError` for what may pass (away, full, locked), `AdaptError` for what will not.
    """
    try:
        yield
    except (exc.OperationalError, exc.InterfaceError, exc.InternalError) as error:
        raise StorageError(f"the record store {where} cannot be used now: {_said(error)}") from error
    except exc.TimeoutError as error:
        raise StorageError(f"the record store {where} has no connection free; try again") from error
    except exc.SQLAlchemyError as error:
        raise AdaptError(f"the record store {where} refused: {_said(error)}") from error


def _said(error: exc.SQLAlchemyError) -> str:
    """The first line of the driver's message."""
    return first_line(getattr(error, "orig", None) or error)


def prepare(engine: sa.Engine, where: str) -> None:
    """Create missing tables, and the folder of SQLite's file, which only its owner can read.

    **Raises:** `AdaptError` if the tables are newer, `StorageError` if the database is unreachable.
    """
    if engine.dialect.name == "sqlite":
        _make_file(Path(engine.url.database or ""))
    with translated(where):
        with engine.connect() as connection:
            found = _schema_version(connection)
        if found is None:
            with writing(engine) as connection:
                if connection.dialect.name == "postgresql":
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
                _metadata.create_all(connection)
                if (found := _schema_version(connection)) is None:
                    connection.execute(store.insert().values(id=1, schema_version=SCHEMA, records=0, bytes=0))
    if found is not None and found > SCHEMA:
        raise AdaptError(
            f"the record store {where} has tables of version {found}, newer than this Gati reads "
            f"(up to {SCHEMA}); upgrade gati or use another store"
        )


def _make_file(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # inputs of requests will be in it
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def _schema_version(connection: sa.Connection) -> int | None:
    if not sa.inspect(connection).has_table(store.name):
        return None
    return connection.execute(sa.select(store.c.schema_version).where(store.c.id == 1)).scalar()
