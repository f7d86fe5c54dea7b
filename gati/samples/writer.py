"""Writing records in the background: offering one never blocks.

    writer = BackgroundWriter(store, queue_records=10_000)
    writer.offer(record)            # microseconds; False if the queue is full and the record was dropped
    writer.close(deadline_s=5.0)    # what is left is written, then the thread ends

A record stays in the queue until its transaction is confirmed, so the queue's bounds include records being
written. While the database is unreachable, the thread retries with growing pauses. Every batch has a number:
a batch resent after an unconfirmed commit is not stored twice.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from itertools import islice

from gati.errors import AdaptError, StorageError
from gati.samples.record import Record
from gati.samples.store import Batch, RecordStore

_CLOSING_PAUSE_S = 0.1  # between attempts once there is a deadline

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriterStatistics:
    """Counts since the writer began; `offered == written + dropped + waiting`.

    `dropped` counts records that met a full or closed queue, those the store refused, and those left over
    at the deadline of `close`. `failures` counts attempts to write that failed, `failing` says whether the
    last one did, and `last_error` what it said.
    """

    offered: int
    written: int
    dropped: int
    waiting: int
    failures: int
    failing: bool
    last_error: str | None


class BackgroundWriter:
    """A bounded queue of records, and a thread from the first one on that stores many in a transaction.

    The queue holds at most `queue_records` records and `queue_bytes` bytes; `batch_records` go into one
    transaction, for which the thread gathers for `gather_s` seconds. After a failure it waits `backoff_s[0]`
    seconds, then twice as long each time up to `backoff_s[1]`, each a little by chance.
    """

    def __init__(
        self,
        store: RecordStore,
        *,
        queue_records: int = 4096,
        queue_bytes: int = 256 * 2**20,
        batch_records: int = 128,
        gather_s: float = 0.05,
        backoff_s: tuple[float, float] = (0.1, 10.0),
    ) -> None:
        if queue_records < 1 or queue_bytes < 1 or batch_records < 1:
            raise AdaptError(
                f"queue_records, queue_bytes and batch_records are {queue_records}, {queue_bytes} and "
                f"{batch_records}; each must be at least 1"
            )
        self._store = store
        self._queue_records = queue_records
        self._queue_bytes = queue_bytes
        self._batch_records = batch_records
        self._gather_s = gather_s
        self._backoff_s = backoff_s
        self._queue: deque[Record] = deque()
        self._bytes = self._offered = self._written = self._dropped = self._failures = 0
        self._failing = False
        self._last_error: str | None = None
        self._end: float | None = None  # on time.monotonic: when a closing writer gives up
        self._changed = threading.Condition(threading.Lock())
        self._name = uuid.uuid4().hex
        self._number = 0  # of the batch under way
        self._singly = 0  # records at the queue's head to be written one by one
        self._thread: threading.Thread | None = None  # from the first record on

    def offer(self, record: Record) -> bool:
        """Queue the record and return at once; False if the queue is full and it was dropped."""
        size = record.nbytes
        with self._changed:
            self._offered += 1
            full = len(self._queue) >= self._queue_records or self._bytes + size > self._queue_bytes
            if full or self._end is not None or size > self._store.limit_bytes:
                self._dropped += 1
                return False
            self._queue.append(record)
            self._bytes += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gati-record-writer", daemon=True)
                self._thread.start()
            if len(self._queue) in (1, self._batch_records):  # else the thread is awake, or soon will be
                self._changed.notify_all()
            return True

    def statistics(self) -> WriterStatistics:
        """A consistent snapshot of the counts."""
        with self._changed:
            return WriterStatistics(
                self._offered,
                self._written,
                self._dropped,
                len(self._queue),
                self._failures,
                self._failing,
                self._last_error,
            )

    def flush(self, deadline_s: float = 5.0) -> bool:
        """Wait at most `deadline_s` seconds until the queue is empty; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout=deadline_s)

    def close(self, deadline_s: float = 5.0) -> WriterStatistics:
        """Refuse new records, write waiting ones for at most `deadline_s` seconds, and drop the rest.

        Returns within that time even if the database does not respond. May be called again.
        """
        with self._changed:
            if self._end is None:
                self._end = time.monotonic() + deadline_s
            end = self._end
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            self._drop(len(self._queue))
        return self.statistics()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._number += 1
            attempts = 0
            while not self._settled(batch):  # tried again as it is: its number stands for these records
                attempts += 1
                if not self._wait_to_try_again(attempts):
                    return

    def _next_batch(self) -> list[Record] | None:
        """Wait for records and gather some more; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._end is not None)
            self._changed.wait_for(
                lambda: len(self._queue) >= self._batch_records or self._singly or self._end is not None,
                timeout=self._gather_s,
            )
            if not self._queue or self._over():
                return None
            return list(islice(self._queue, 1 if self._singly else self._batch_records))

    def _settled(self, batch: list[Record]) -> bool:
        """Try to write the batch; False if it is worth trying again."""
        try:
            self._store.add(batch, batch=Batch(self._name, self._number))
        except StorageError as error:
            self._failed(error)
            return False
        except Exception as error:  # never to be taken: find out which of the records it is, and drop that
            self._failed(error)
            self._refused(len(batch))
        else:
            self._succeeded(len(batch))
        return True

    def _wait_to_try_again(self, attempts: int) -> bool:
        """Wait longer after each failure, but not when closing; False when time is over."""
        least, most = self._backoff_s
        pause = min(most, least * 2.0 ** min(attempts - 1, 30)) * random.uniform(0.75, 1.25)
        with self._changed:
            until = time.monotonic() + pause
            while (left := until - time.monotonic()) > 0.0 and not self._over():
                if self._end is not None:
                    until = min(until, time.monotonic() + _CLOSING_PAUSE_S, self._end)
                    left = until - time.monotonic()
                self._changed.wait(max(0.0, left))
            return not self._over()

    def _over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def _succeeded(self, count: int) -> None:
        with self._changed:
            count = min(count, len(self._queue))  # fewer where `close` gave up meanwhile
            self._remove(count)
            self._written += count
            self._singly = max(0, self._singly - count)
            if self._failing:
                _log.info("records can be written again to %s", self._store.where)
            self._failing = False

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self._failures += 1
            self._last_error = str(error)
            if not self._failing:
                _log.warning("records could not be written: %s", error)
            self._failing = True

    def _refused(self, count: int) -> None:
        """Drop the refused record, or find it among those of the batch."""
        with self._changed:
            if count > 1:
                self._singly = count
                return
            _log.error("a record was dropped: %s", self._last_error)
            self._singly = max(0, self._singly - 1)
            self._drop(min(1, len(self._queue)))

    def _drop(self, count: int) -> None:
        self._remove(count)
        self._dropped += count

    def _remove(self, count: int) -> None:
        for _ in range(count):
            self._bytes -= self._queue.popleft().nbytes
        if not self._queue:
            self._changed.notify_all()
