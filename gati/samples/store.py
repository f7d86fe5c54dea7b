"""The record store: recent sampled inputs with the base model's answers, bounded in size and age.

    store = RecordStore.open("sqlite:///records.db", limit_bytes=2**30, max_age_s=3600)
    store.add([Record(image, "image", base_class=3, time_s=time.time(), model="cars")])
    recent = store.window("cars", since_s=time.time() - 600)

Uses SQLite in WAL mode or PostgreSQL. Each `add` is atomic, even if a process is killed. Importing this
module without SQLAlchemy raises AdaptError, which says what to install.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gati.errors import AdaptError
from gati.samples import sql
from gati.samples.record import Record, decode, encode
from gati.samples.sql import sa

_FORGET_WRITERS_S = 7 * 24 * 3600.0  # a writer silent for this long will not resend a batch
_DRIFT = 2.0  # times as fast as it should a clock may go, and is believed
_EVICT_AT_ONCE = 1024  # rows read ahead while looking for what has to go


class Batch(NamedTuple):
    """Identifies a batch, so that one resent after an unconfirmed commit is stored once."""

    writer: str  # unlike every other writer
    number: int  # rising from batch to batch


class Outcome(NamedTuple):
    """What became of a sampled request; the fields are those of `Record`."""

    time_s: float
    source: str
    exit: str | None
    agreed: bool | None


class RecordStore:
    """Bounded storage of records; safe to use from several threads and, each with its own, processes.

    `limit_bytes` bounds the records' arrays with an allowance for the rest (the files of a database are
    somewhat larger), `max_age_s` their age in seconds. The oldest go first, in the transaction that adds.
    Records are as new as they were added, whatever a clock that is set back says of them. `elapsed` is a
    monotonic clock: a wall clock that jumps ahead does not age records.
    """

    def __init__(
        self,
        engine: sa.Engine,
        *,
        where: str,
        limit_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] | None = None,
    ) -> None:
        self._engine = engine
        self._prepared = False
        self._clock = clock
        self._elapsed = elapsed or (time.monotonic if clock is time.time else clock)
        self._steady_s, self._steady_since_s = clock(), self._elapsed()
        self.where = where
        self.limit_bytes = limit_bytes
        self.max_age_s = max_age_s

    @classmethod
    def open(
        cls,
        url: str,
        *,
        limit_bytes: int = 2**30,
        max_age_s: float = 3600.0,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] | None = None,
        connect: bool = True,
    ) -> RecordStore:
        """Open `sqlite:///PATH` (relative; four slashes: absolute) or `postgresql://...`, made where new.

        Without `connect` that is done by the first call that needs it, which raises what this would.

        Raises:
            AdaptError: another kind of URL, a missing package, limits that are none, newer tables.
            StorageError: the database cannot be reached or written to.
        """
        if limit_bytes < 1 or not max_age_s > 0.0:
            raise AdaptError(
                f"limit_bytes is {limit_bytes!r} and max_age_s {max_age_s!r}; both must be above 0"
            )
        engine = sql.connect(url)
        where = engine.url.set(query={}).render_as_string(hide_password=True)
        store = cls(
            engine,
            where=where,
            limit_bytes=limit_bytes,
            max_age_s=max_age_s,
            clock=clock,
            elapsed=elapsed,
        )
        if connect:
            store._prepare()
        return store

    def add(self, records: Sequence[Record], *, batch: Batch | None = None) -> None:
        """Keep all `records`, if any, and drop the oldest beyond the bounds, in one transaction.

        A `time_s` in the future is taken as now, so that a wrong clock does not push out the other records.
        Of two calls with the same `batch` the second changes nothing.

        Raises:
            AdaptError: a record larger than the whole store.
            StorageError: the database is away, full or locked; nothing was kept.
        """
        now = self._clock()
        rows = [self._row(record, now) for record in records]
        self._prepare()
        with sql.translated(self.where), sql.writing(self._engine) as connection:
            held = _lock(connection)
            if batch is not None and not _is_new(connection, batch, now):
                return
            if rows:
                connection.execute(sql.records.insert(), rows)
            added = sum(row["bytes"] for row in rows)
            removed = self._evict(connection, held.bytes + added, self._steady(now))
            _account(connection, len(rows) - removed.records, added - removed.bytes)

    def window(
        self,
        model: str,
        since_s: float | None = None,
        limit: int | None = None,
        kind: str | None = None,
    ) -> list[Record]:
        """The records of `model` no older than `max_age_s`, in the order in which they were added.

        `since_s` (seconds since 1970) leaves out older ones, `limit` all but the last so many, `kind` those
        of another kind.

        **Raises:** `StorageError` when the database is away, `AdaptError` when it was tampered with.
        """
        self._prepare()
        table = sql.records
        newest = (  # found in an index: inputs are not sorted
            sa.select(table.c.id)
            .where(*self._where(model, since_s, kind))
            .order_by(table.c.id.desc())
            .limit(limit)
        )
        kept = sa.select(table).where(table.c.id.in_(newest)).order_by(table.c.id)
        with sql.translated(self.where), self._engine.connect() as connection:
            rows = connection.execute(kept).mappings().all()
        return [decode(dict(row)) for row in rows]

    def outcomes(self, model: str, limit: int | None = None) -> list[Outcome]:
        """What became of the requests in `window`, whose inputs are not read: these may take a gigabyte.

        **Raises:** `StorageError` when the database is away.
        """
        self._prepare()
        columns = sql.records.c
        newest = (
            sa.select(columns.time_s, columns.source, columns.left_at, columns.agreed)
            .where(*self._where(model))
            .order_by(columns.id.desc())
            .limit(limit)
        )
        with sql.translated(self.where), self._engine.connect() as connection:
            rows = connection.execute(newest).all()
        return [Outcome(*row) for row in reversed(rows)]

    def count(self, model: str | None = None) -> int:
        """Number of records no older than `max_age_s`, of `model` or of all.

        **Raises:** `StorageError` when the database is away.
        """
        self._prepare()
        counted = sa.select(sa.func.count()).select_from(sql.records).where(*self._where(model))
        with sql.translated(self.where), self._engine.connect() as connection:
            return connection.execute(counted).scalar_one()

    def size_bytes(self) -> int:
        """Size that counts towards `limit_bytes`. Raises StorageError if the database is unreachable."""
        self._prepare()
        with sql.translated(self.where), self._engine.connect() as connection:
            return connection.execute(sql.store.select()).one().bytes  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _steady(self, now: float) -> float:
        """The time that ages are measured by: a clock that jumps ahead must not empty the store.

        Advances with a monotonic clock, slightly faster, so that slow corrections are followed.
        """
        elapsed_s = self._elapsed()
        reached = self._steady_s + _DRIFT * (elapsed_s - self._steady_since_s)
        self._steady_s, self._steady_since_s = min(now, reached), elapsed_s
        return self._steady_s

    def _prepare(self) -> None:
        """Create missing tables, once. Safe to call from several threads at a time."""
        if not self._prepared:
            sql.prepare(self._engine, self.where)
            self._prepared = True

    def _row(self, record: Record, now: float) -> dict[str, Any]:
        if record.nbytes > self.limit_bytes:
            raise AdaptError(
                f"a record of {record.nbytes} bytes is larger than the whole store ({self.limit_bytes}); "
                "raise limit_bytes or keep smaller inputs"
            )
        row = encode(record)
        row["time_s"] = min(row["time_s"], now)
        return row

    def _where(self, model: str | None, since_s: float | None = None, kind: str | None = None) -> list[Any]:
        columns = sql.records.c
        oldest = self._clock() - self.max_age_s
        conditions: list[Any] = [columns.time_s >= (oldest if since_s is None else max(oldest, since_s))]
        if model is not None:
            conditions.append(columns.model == model)
        if kind is not None:
            conditions.append(columns.kind == kind)
        return conditions

    def _evict(self, connection: sa.Connection, held: int, now: float) -> _Held:
        """Drop the records that are too old, then the first of `held` bytes until the rest fits."""
        columns = sql.records.c
        too_old = columns.time_s < now - self.max_age_s
        counted = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(columns.bytes), 0))
        records, size = connection.execute(counted.where(too_old)).one()
        if records:
            connection.execute(sql.records.delete().where(too_old))
        gone, last = _Held(records, int(size)), None
        if held - gone.bytes <= self.limit_bytes:
            return gone
        first = sa.select(columns.id, columns.bytes).order_by(columns.id)
        with connection.execute(first.execution_options(yield_per=_EVICT_AT_ONCE)) as found:
            for row in found:
                if held - gone.bytes <= self.limit_bytes:
                    break
                gone, last = _Held(gone.records + 1, gone.bytes + row.bytes), row.id
        if last is not None:
            connection.execute(sql.records.delete().where(columns.id <= last))
        return gone


class _Held(NamedTuple):
    records: int
    bytes: int


def _lock(connection: sa.Connection) -> _Held:
    """Lock out other writers until this transaction ends; returns the store's current counts."""
    row = connection.execute(sql.store.select().where(sql.store.c.id == 1).with_for_update()).one()
    return _Held(row.records, row.bytes)


def _account(connection: sa.Connection, records: int, size: int) -> None:
    columns = sql.store.c
    connection.execute(
        sql.store.update()
        .where(columns.id == 1)
        .values(records=columns.records + records, bytes=columns.bytes + size)
    )


def _is_new(connection: sa.Connection, batch: Batch, now: float) -> bool:
    """Note the batch; False if it was noted before."""
    columns = sql.batches.c
    known = connection.execute(sql.batches.select().where(columns.writer == batch.writer)).one_or_none()
    if known is not None and known.number >= batch.number:
        return False
    connection.execute(
        sql.batches.delete().where(
            (columns.writer == batch.writer) | (columns.time_s < now - _FORGET_WRITERS_S)
        )
    )
    connection.execute(sql.batches.insert().values(writer=batch.writer, number=batch.number, time_s=now))
    return True
