"""The disk tier: append-only files of checksummed pages, in a private folder that goes with the process.

A page is written once and never changed. Its CRC-32 is taken from memory before it is written and checked on every
read, over the bytes that are then used: at 6 GB/s it costs less than the copy out of the page cache. Files are read
with `preadv` and not through a memory map: a mapped file that is cut short kills the process (SIGBUS), and bytes could
change between the check and their use; both go through the same page cache, so nothing is read twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch

PREFIX = "hf_kvcache-"
_NEW = ".hf_kvcache-new-"
_LOCK = "lock"
FILE_BYTES = 1 << 28  # a new file is begun beyond this, so that pages that nobody holds any more free their space
READ_BYTES = 1 << 23  # read at once


class Folder:
    """A private subfolder of `parent`, locked for the life of this process and removed with the object.

    The lock is what tells a live folder from one that a killed process left: the system drops it with the process.
    """

    def __init__(self, parent: str) -> None:
        import fcntl

        sweep(parent)
        made = tempfile.mkdtemp(prefix=_NEW, dir=parent)
        lock = os.open(os.path.join(made, _LOCK), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Nobody ever sees a folder of the final name without its lock.
        self.path = os.path.join(parent, PREFIX + os.path.basename(made)[len(_NEW) :])
        os.rename(made, self.path)
        self.pid = os.getpid()
        self._finalizer = weakref.finalize(self, _remove_folder, self.path, lock, self.pid)


def _remove_folder(path: str, lock: int, pid: int) -> None:
    if os.getpid() != pid:  # a forked child drops its copy of the object; the folder is its parent's
        return
    _empty(path)
    os.close(lock)


def _empty(path: str) -> None:
    """Remove the files that this module made, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(path), key=lambda name: name == _LOCK)  # the lock last
        for name in names:
            if name == _LOCK or name.endswith(".pages"):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(path, name))
        os.rmdir(path)


def sweep(parent: str) -> None:
    """Remove folders of processes that are gone. Those of live ones hold their lock and are left alone."""
    import fcntl

    for entry in list(os.scandir(parent)):
        if not entry.is_dir(follow_symlinks=False):
            continue
        if entry.name.startswith(_NEW):
            # Killed between two system calls, or just being made by someone else.
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > 3600:
                    _empty(entry.path)
            continue
        if not entry.name.startswith(PREFIX):
            continue
        try:
            lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(entry.path)  # killed while it removed itself; fails if anything is in it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # alive
        else:
            _empty(entry.path)
        finally:
            os.close(lock)


class PageFile:
    """One append-only file. Removed when no page of it is held any more."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder  # keeps the folder
        self.pid = os.getpid()
        self.fd, self.path = tempfile.mkstemp(suffix=".pages", dir=folder.path)
        self.size = 0
        self._finalizer = weakref.finalize(self, _remove_file, self.path, self.fd, self.pid)

    def append(self, data: memoryview) -> int:
        """Write `data` at the end and return its offset. Raises `OSError` with nothing appended."""
        start, done = self.size, 0
        # Room first: some file systems report a full disk only when they write back, which would be too late.
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.fd, start, len(data))
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], start + done)
        self.size = start + len(data)
        return start

    def read(self, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self.fd, [into[done:]], offset + done)
            if not count:
                raise RuntimeError(f"{self.path} was cut short while the cache was in use: its tokens are lost")
            done += count


def _remove_file(path: str, fd: int, pid: int) -> None:
    os.close(fd)
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(path)


class DiskTier:
    """Where the stores of one cache (and of its copies) write pages."""

    def __init__(self, parent: str) -> None:
        try:
            import fcntl  # noqa: F401
        except ImportError as error:
            raise NotImplementedError("`disk` needs file locks (POSIX) to tell live files from stale ones") from error
        self.parent = parent
        try:
            self.folder = Folder(parent)
        except OSError as error:
            raise ValueError(f"`disk`: cannot make a locked folder in {parent!r} ({error})") from error
        self.failed = False

    def file_for(self, file: PageFile | None) -> PageFile:
        """The file to append to: `file`, or a new one where it is full or belongs to the process that forked us."""
        if file is not None and file.size < FILE_BYTES and file.pid == os.getpid():
            return file
        if self.folder.pid != os.getpid():
            self.folder = Folder(self.parent)
        return PageFile(self.folder)

    def __deepcopy__(self, memo: dict[int, object]) -> DiskTier:
        return self


def _array(tensor: torch.Tensor) -> Any:
    """The same memory, for functions that take buffers."""
    return tensor.numpy()


class Records:
    """Consecutive pages of one layer in a file. Immutable; shared by copies of the cache.

    Every page is one record of `size` bytes.
    """

    def __init__(self, file: PageFile, offset: int, sums: tuple[int, ...], size: int) -> None:
        self.file, self.offset, self.sums, self.size = file, offset, sums, size

    @property
    def nbytes(self) -> int:
        return self.size * len(self.sums)

    @staticmethod
    def write(file: PageFile, records: torch.Tensor) -> Records:
        """Append records (uint8 `[pages, size]`). Raises `OSError`."""
        pages, size = records.shape
        data = memoryview(_array(records)).cast("B")
        sums = tuple(zlib.crc32(data[i * size : (i + 1) * size]) for i in range(pages))
        return Records(file, file.append(data), sums, size)

    def joined(self, other: Records) -> Records | None:
        """Both as one, where `other` lies right behind this one."""
        if other.file is not self.file or other.offset != self.offset + self.nbytes or other.size != self.size:
            return None
        return Records(self.file, self.offset, self.sums + other.sums, self.size)

    def head(self, pages: int) -> Records:
        return Records(self.file, self.offset, self.sums[:pages], self.size)

    def read(self, start: int, stop: int, pin: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """Pages `start:stop`, a piece at a time: `(first page, uint8 [pages, size])`, verified.

        Raises `RuntimeError` where the file no longer holds what was written.
        """
        step = max(1, READ_BYTES // self.size)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            piece = torch.empty(last - first, self.size, dtype=torch.uint8, pin_memory=pin)
            data = memoryview(_array(piece)).cast("B")
            self.file.read(data, self.offset + first * self.size)
            for page in range(first, last):
                at = (page - first) * self.size
                if zlib.crc32(data[at : at + self.size]) != self.sums[page]:
                    raise RuntimeError(
                        f"{self.file.path} was altered while the cache was in use: page {page} does not match its "
                        "checksum, and its tokens are lost. Call `cache.reset()` and read the prompt again."
                    )
            yield first, piece
