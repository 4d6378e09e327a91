"""One SQLite file that must not lose what it acknowledged: opening, transactions, faults.

Owns the connection, its lock and the meaning of SQLite's errors; ledger.py owns what is in the
file.

Durability: WAL with synchronous=FULL, so a change whose transaction ended well survives SIGKILL
and power loss, and one that did not end well left nothing.

Threads: one connection and one lock. A query takes the lock for itself; a transaction holds it
from BEGIN to COMMIT, so read-decide-write is atomic among the threads of this process, and by
BEGIN IMMEDIATE among processes (waiting up to BUSY_TIMEOUT_S).
"""

import os
import sqlite3
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mgpu.errors import BadInput, StateUnusable

BUSY_TIMEOUT_S = 5.0
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
HEADER_BYTES = 100  # of every SQLite file that is not empty


class Schema(NamedTuple):
    """What the file must be: ``application_id`` tells it from other programs' files."""

    application_id: int
    version: int
    statements: Tuple[str, ...]


class StateFile:
    """Access to the file at ``path``.

    Every method raises StateUnusable when the file cannot serve; then nothing was changed, and the
    next use tries again with a new connection.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        """Opens ``path``, or creates it. A file that is unsound or not ours is left untouched."""
        self.path = path
        self._schema = schema
        self._lock = threading.RLock()
        self._depth = 0
        self._connection: Optional[sqlite3.Connection] = None
        self._identity: Optional[Tuple[int, int]] = None
        self._suspect = False
        with self._lock, self._faults():
            self._connected()

    def close(self) -> None:
        """Closes the file; a later use opens it again."""
        with self._lock:
            self._disconnect()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside happens or nothing does: commits at the end, rolls back on any error.

        May be nested: an inner one that fails takes back its own part only.
        """
        with self._lock:
            name = f"inner{self._depth}"
            with self._faults():
                connection = self._connected()
                if self._depth:
                    _check_begun(connection)  # or SAVEPOINT would begin a transaction of its own
                connection.execute(f"SAVEPOINT {name}" if self._depth else "BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
                with self._faults():
                    connection.execute(f"RELEASE {name}" if self._depth > 1 else "COMMIT")
            except BaseException:
                self._undo(connection, name)
                raise
            finally:
                self._depth -= 1
                if self._suspect and not self._depth:
                    self._disconnect()

    def state(self) -> Optional[Tuple[int, int, int]]:
        """Equal to an earlier one if nothing was written meanwhile; None inside a transaction.

        SQLite counts what this connection wrote (also what was taken back), and tells of commits
        by others (PRAGMA data_version).
        """
        with self._lock, self._faults():
            connection = self._connected()
            if self._depth:
                return None
            return id(connection), connection.total_changes, _pragma(connection, "data_version")

    def read(self, query: str, *values: object) -> List[Tuple[Any, ...]]:
        """All rows of ``query``."""
        with self._lock, self._faults():
            return self._connected().execute(query, values).fetchall()

    def write(self, statement: str, *values: object) -> None:
        """One statement of the transaction in progress. Raises sqlite3.IntegrityError as it is."""
        with self._lock, self._faults():
            connection = self._connected()
            _check_begun(connection)
            connection.execute(statement, values)

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            _make_file(self.path)
            self._connection = _open(self.path, self._schema)
            self._identity = _identity(self.path)
        elif not self._depth and _identity(self.path) != self._identity:
            raise StateUnusable(
                f"ledger {self.path}",
                "the file was replaced or removed while the agent had it open",
                "put it back under its name, or restart the agent to begin with what is there now",
            )
        return self._connection

    def _disconnect(self) -> None:
        self._suspect = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _undo(self, connection: sqlite3.Connection, name: str) -> None:
        """Rolls back; a connection that cannot even do that is closed, which does it too."""
        try:
            if connection.in_transaction:  # not after a full disk or an I/O error
                if self._depth > 1:
                    connection.execute(f"ROLLBACK TO {name}")
                    connection.execute(f"RELEASE {name}")
                else:
                    connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._suspect = True

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """SQLite's errors as StateUnusable; the connection is given up when nothing needs it."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except (UnicodeEncodeError, OverflowError) as error:  # of a value, before SQLite saw it
            raise BadInput(
                "a name or number", f"the ledger cannot hold it ({error.args[0]})", "use UTF-8 text"
            ) from error
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            self._suspect = self._suspect or not _is_locked(error)
            if self._suspect and not self._depth:
                self._disconnect()
            raise _unusable(self.path, error) from error


def _check_begun(connection: sqlite3.Connection) -> None:
    """SQLite ends a transaction that met a full disk by itself: what follows must not commit."""
    if not connection.in_transaction:
        raise sqlite3.OperationalError("the transaction in progress was ended by an error")


def _is_locked(error: Exception) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _make_file(path: Path) -> None:
    """Creates ``path`` empty with FILE_MODE, or gives an existing one that mode.

    SQLite gives its -wal and -shm the mode of the database. An existing file is not opened here:
    closing it would drop SQLite's own POSIX locks on it.
    """
    path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    try:
        os.close(os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        if os.stat(str(path)).st_mode & 0o777 != FILE_MODE:
            os.chmod(str(path), FILE_MODE)


def _identity(path: Path) -> Optional[Tuple[int, int]]:
    try:
        found = os.stat(str(path))
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _open(path: Path, schema: Schema) -> sqlite3.Connection:
    connection = sqlite3.connect(
        str(path),
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,  # transactions are begun here, not by the module
        check_same_thread=False,  # the lock sees to it
    )
    try:
        if 0 < os.stat(str(path)).st_size < HEADER_BYTES:
            raise damaged(path, "shorter than its header")  # SQLite would take it for empty
        _examine(connection, path, schema)
        _prepare(connection, path, schema)
    except BaseException:
        connection.close()
        raise
    return connection


def _examine(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    """Reads only: is the file sound, and of this program and version (or empty)?"""
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and _pragma(connection, "application_id") != schema.application_id:
        raise StateUnusable(
            f"ledger {path}",
            "it is an SQLite file of another program",
            "move it away, or name another file as 'state' in agent.conf",
        )
    version = _pragma(connection, "user_version")
    if version > schema.version:
        raise StateUnusable(
            f"ledger {path}",
            f"its version {version} is newer than this agent's {schema.version}",
            "install the newer agent again",
        )
    verdict = _pragma(connection, "quick_check(1)")
    if verdict != "ok":
        raise sqlite3.DatabaseError(f"database disk image is malformed: {verdict}")


def _prepare(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    """Sets the connection up, makes the tables of an empty file, and finds out if it can write."""
    connection.execute("PRAGMA foreign_keys = ON")
    mode = _pragma(connection, "journal_mode = WAL")
    if mode != "wal":
        raise StateUnusable(
            f"ledger {path}",
            "its file system lacks what SQLite's write-ahead log needs (a network file system?)",
            "name a file on a local file system as 'state' in agent.conf",
        )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        new = not _pragma(connection, "user_version")
        if new:
            for statement in schema.statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {schema.application_id}")
        # Tried on every file, so that a read-only one fails now and not at the first bind; taken
        # back on an old one, so that it can be read when its disk is full.
        connection.execute(f"PRAGMA user_version = {schema.version}")
        connection.execute("COMMIT" if new else "ROLLBACK")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _unusable(path: Path, error: Exception) -> StateUnusable:
    """What ``error`` means for the operator.

    SQLite's own words decide (Python gives its error codes from 3.11 on only), and the file system
    where they are vague: making the -shm file fails as "unable to open" or "disk I/O error" both on
    a read-only and on a full one.
    """
    asked, words = f"ledger {path}", str(error).lower()
    if isinstance(error, UnicodeDecodeError):  # SQLite's message itself quotes the damage
        return damaged(path, "text that is not UTF-8")
    if any(sign in words for sign in ("malformed", "not a database", "could not decode")):
        return damaged(path, words)
    if _is_locked(error):
        return StateUnusable(
            asked,
            f"another process kept it locked for {BUSY_TIMEOUT_S:.0f} s",
            f"find it with 'fuser {path}', end it and try again",
        )
    full, read_only = _file_system(path)
    if "readonly" in words or "read-only" in words or read_only:
        return StateUnusable(
            asked, "it cannot be written", "mount its file system read-write and try again"
        )
    if "full" in words or "no space" in words or full:
        return StateUnusable(asked, "no space is left on its disk", "free some and try again")
    return StateUnusable(
        asked, f"{error}", "see the kernel log and the rights of the file, and try again"
    )


def damaged(path: Path, sign: str) -> StateUnusable:
    """The file holds what no agent wrote."""
    return StateUnusable(
        f"ledger {path}",
        f"it is damaged ({ascii(sign[:100])[1:-1]})",
        "stop the agent, move the file with its -wal and -shm away or restore a copy, start it "
        "and bind the running containers again",
    )


def _file_system(path: Path) -> Tuple[bool, bool]:
    """(full, read-only) of the file system that holds ``path``; (False, False): cannot be asked."""
    try:
        found = os.statvfs(str(path.parent))
    except OSError:
        return False, False
    no_inode = found.f_files > 0 and found.f_ffree == 0
    return found.f_bfree == 0 or no_inode, bool(found.f_flag & os.ST_RDONLY)


def ordered(columns: Sequence[str]) -> str:
    """``columns`` for an INSERT: names, and as many placeholders."""
    return f"({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
