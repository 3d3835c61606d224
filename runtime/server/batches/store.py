"""BatchStore: files and batches in SQLite, which persist when the server ends. Calls block; one thread at a time."""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ...errors import UsageError

_SCHEMA = """
create table if not exists meta (name text primary key, value blob not null);
create table if not exists files (
    id text primary key, client text not null, name text not null, purpose text not null, created integer not null,
    content blob not null);
create table if not exists batches (
    id text primary key, client text not null, status text not null, created integer not null, record text not null);
create table if not exists lines (
    batch text not null, number integer not null, request blob not null, status integer, result blob,
    primary key (batch, number));
create index if not exists open_batches on batches (status);
"""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


class FileObject(msgspec.Struct):
    """A file, in the form of the API."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class Counts(msgspec.Struct):
    """Numbers of lines of a batch: all, answered and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct):
    """Why a batch failed; `line`: the number, from 1, of the line with the error, if it is in one."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    """A list of errors, in the form of OpenAI's API."""

    data: list[BatchError]
    object: str = "list"


class Batch(msgspec.Struct, kw_only=True):
    """A batch, in the form of the API. Times are seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    status: str = "validating"
    object: str = "batch"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None


class BatchStore:
    """The stored files and batches. All reads name the client, who sees nothing of other clients."""

    def __init__(self, path: Path) -> None:
        try:
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            os.chmod(path, 0o600)
            self._connection.executescript("pragma journal_mode=wal; pragma synchronous=full;" + _SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise UsageError(f"{path} cannot be used to keep batches: {error}", "give another file") from error
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._connection.close()

    def secret(self) -> bytes:
        """The secret of ApiKeys, which is stored so that clients stay the same after a restart."""
        with self._transaction() as database:
            database.execute("insert or ignore into meta values ('secret', ?)", (secrets.token_bytes(32),))
            return database.execute("select value from meta where name = 'secret'").fetchone()[0]

    # -- files -------------------------------------------------------------------------------------------------------

    def add_file(self, client: str, name: str, purpose: str, content: bytes) -> FileObject:
        """Store a file of a client under a new id."""
        file_id = f"file-{secrets.token_hex(12)}"
        with self._transaction() as database:
            row = (file_id, client, name, purpose, int(time.time()), content)
            database.execute("insert into files values (?, ?, ?, ?, ?, ?)", row)
        return FileObject(file_id, len(content), row[4], name, purpose)

    def files(self, client: str) -> list[FileObject]:
        """All files of a client, the newest first."""
        with self._transaction() as database:
            rows = database.execute(
                "select id, length(content), created, name, purpose from files where client = ? "
                "order by created desc, id",
                (client,),
            ).fetchall()
        return [FileObject(*row) for row in rows]

    def file(self, client: str, file_id: str) -> FileObject | None:
        """A file without its content; None if the client has no such file."""
        return next((found for found in self.files(client) if found.id == file_id), None)

    def content(self, client: str, file_id: str) -> bytes | None:
        """The bytes of a file; None if the client has no such file."""
        with self._transaction() as database:
            row = database.execute(
                "select content from files where client = ? and id = ?", (client, file_id)
            ).fetchone()
        return None if row is None else row[0]

    def delete_file(self, client: str, file_id: str) -> bool:
        """Delete a file; returns whether it existed."""
        with self._transaction() as database:
            return database.execute("delete from files where client = ? and id = ?", (client, file_id)).rowcount > 0

    # -- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, client: str, batch: Batch) -> None:
        """Store a new batch of a client."""
        with self._transaction() as database:
            row = (batch.id, client, batch.status, batch.created_at, msgspec.json.encode(batch).decode())
            database.execute("insert into batches values (?, ?, ?, ?, ?)", row)

    def save_batch(self, batch: Batch) -> None:
        """Store the changed record of a batch."""
        with self._transaction() as database:
            row = (batch.status, msgspec.json.encode(batch).decode(), batch.id)
            database.execute("update batches set status = ?, record = ? where id = ?", row)

    def batches(self, client: str) -> list[Batch]:
        """A client's batches, the newest first, with their current counts."""
        with self._transaction() as database:
            rows = database.execute(
                "select record from batches where client = ? order by created desc, rowid desc", (client,)
            ).fetchall()
            return [self._counted(database, msgspec.json.decode(row[0], type=Batch)) for row in rows]

    def batch(self, client: str, batch_id: str) -> Batch | None:
        """A batch with its counts; None if the client has no such batch."""
        with self._transaction() as database:
            row = database.execute(
                "select record from batches where client = ? and id = ?", (client, batch_id)
            ).fetchone()
            return None if row is None else self._counted(database, msgspec.json.decode(row[0], type=Batch))

    def open_batches(self) -> list[tuple[str, Batch]]:
        """Every batch that has not ended, with its client, the oldest first."""
        marks = ", ".join("?" * len(OPEN))
        with self._transaction() as database:
            rows = database.execute(
                f"select client, record from batches where status in ({marks}) order by created, rowid", OPEN
            ).fetchall()
        return [(client, msgspec.json.decode(record, type=Batch)) for client, record in rows]

    # -- lines -------------------------------------------------------------------------------------------------------

    def add_lines(self, batch_id: str, requests: Sequence[bytes]) -> None:
        """Store the requests of a batch, numbered from 0; a number that is stored already is not changed."""
        with self._transaction() as database:
            database.executemany(
                "insert or ignore into lines (batch, number, request) values (?, ?, ?)",
                [(batch_id, number, request) for number, request in enumerate(requests)],
            )

    def pending_lines(self, batch_id: str, most: int) -> list[tuple[int, bytes]]:
        """(number, request) of the first `most` lines without a result."""
        with self._transaction() as database:
            return database.execute(
                "select number, request from lines where batch = ? and result is null order by number limit ?",
                (batch_id, most),
            ).fetchall()

    def save_result(self, batch_id: str, number: int, status: int, result: bytes) -> None:
        """Store the answer to line `number` of a batch: the HTTP status and the result line."""
        with self._transaction() as database:
            row = (status, result, batch_id, number)
            database.execute("update lines set status = ?, result = ? where batch = ? and number = ?", row)

    def results(self, batch_id: str, succeeded: bool) -> bytes:
        """The results of lines that succeeded, or of those that failed, in the order of the lines, one per line of
        text."""
        test = "status = 200" if succeeded else "status != 200"
        with self._transaction() as database:
            rows = database.execute(f"select result from lines where batch = ? and {test} order by number", (batch_id,))
            return b"".join(row[0] + b"\n" for row in rows)

    # -- parts -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _counted(database: sqlite3.Connection, batch: Batch) -> Batch:
        total, completed, failed = database.execute(
            "select count(*), count(case when status = 200 then 1 end), count(case when status != 200 then 1 end) "
            "from lines where batch = ?",
            (batch.id,),
        ).fetchone()
        batch.request_counts = Counts(total, completed, failed)
        return batch

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("begin immediate")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("rollback")
                raise
            self._connection.execute("commit")
