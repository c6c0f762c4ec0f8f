"""The folder of a prefix cache: a file for each segment of a text, and a key.

    key                        32 bytes, made once, for all HMACs
    MODEL-SEGMENT.safetensors  MODEL: an HMAC of the model's mark; SEGMENT: an HMAC of
                               MODEL, all tokens before the segment, and its own tokens

Each file is written under a temporary name and then renamed, so a killed process leaves
no incomplete file under a final name. Each file has a seal, an HMAC of its header's
entry "segment", and a digest, an HMAC of its content. A file that is damaged, swapped,
cut or from another folder is removed and logged. Several processes can share a folder.
Files of other models are not read, but count toward the limit.
"""

import hmac
import json
import logging
import math
import os
import re
import stat
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.files.safetensors_reader import (
    DIGEST,
    FlawError,
    Header,
    need,
    opened,
    read_arrays,
    read_header,
)
from mlx_speculation.caches.files.safetensors_writer import write
from mlx_speculation.errors import InvalidRequestError

LOG = logging.getLogger("mlx_speculation.caches")
KEY_BYTES = 32
SETTLED_NANOSECONDS = 10**9
COUNTED_SECONDS = 10.0
ABANDONED_SECONDS = 3600.0  # an unfinished file of this age is removed
_NAME = re.compile(r"([0-9a-f]{32})-[0-9a-f]{64}\.safetensors")

_UNFINISHED = re.compile(r"\.(key|[0-9a-f]{32}-[0-9a-f]*)\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One file: the cache contents for the tokens [start, stop)."""

    name: str  # of the file
    parent: str  # the hash of all tokens before it
    start: int  # the number of these tokens
    tokens: tuple[int, ...]  # the segment's own tokens
    roles: frozenset[str]  # the marks (`Role.mark`) of models whose rows it has
    points: frozenset[str]  # the marks of models with a restore point at its end
    written: bool = False  # whether the model generated its tokens

    @property
    def stop(self) -> int:
        """Number of tokens from the start of the text to the segment's end."""
        return self.start + len(self.tokens)


class SegmentFolder:
    """Files of segments, in at most `gigabytes`.

    The folder is created with mode 0700 if missing. The least recently used files are
    removed first.

    Raises:
        InvalidRequestError: other users can read the folder, its key is not valid, or
            `gigabytes` is out of range.
    """

    def __init__(self, folder: str | os.PathLike[str], gigabytes: float) -> None:
        if not 0 < gigabytes < math.inf:
            raise InvalidRequestError(
                f"disk_gigabytes is {gigabytes}, and a number above 0 is needed. "
                "Leave folder out to keep nothing on disk."
            )
        self.path, self._max_bytes = Path(folder), int(gigabytes * 1e9)
        self._model = ""
        self._bytes, self._counted = 0, 0.0  # bytes of all files; when counted
        self._known: set[str] = set()  # names at the last scan
        self._scanned = -1  # the folder's modification time at that scan
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_mode()
            self._key = self._read_key()
        except (OSError, FlawError) as error:
            raise InvalidRequestError(
                f"{self.path} cannot be the folder of a prefix cache: {error}. Name "
                "another one."
            ) from error

    def _check_mode(self) -> None:
        status = self.path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not private or mode & 0o077:
            raise FlawError(
                f"it has mode {mode:04o} and owner {status.st_uid}; it has to be a "
                f"folder with mode 0700 and owner {os.geteuid()}"
            )

    def _read_key(self) -> bytes:
        """Return the key; the first process creates it."""
        place = self.path / "key"
        if not place.is_symlink() and not place.exists():
            made = self.path / f".key.{os.urandom(8).hex()}.tmp"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(made, flags, 0o600), "wb") as file:
                file.write(os.urandom(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was first
                os.link(made, place)
            made.unlink()
        with opened(place, follow=False) as (file, size):
            need(size == KEY_BYTES, f"its key has {size} bytes, not {KEY_BYTES}")
            return file.read()

    def serve(self, model: str) -> None:
        """Use the segments of the model with this mark (see `Role`) from now on."""
        self._model = self._hash(model.encode())[:32]
        self._known, self._scanned = set(), -1

    def digest(self, tokens: Sequence[int]) -> Any:
        """Return an HMAC of the tokens before a segment."""
        result = hmac.new(self._key, self._model.encode(), "sha256")
        return extended(result, tokens)

    def _name(self, parent: str, tokens: Sequence[int]) -> str:
        text = json.dumps([self._model, parent, [*tokens]])
        return f"{self._model}-{self._hash(text.encode())}.safetensors"

    def _hash(self, data: bytes) -> str:
        return hmac.new(self._key, data, "sha256").hexdigest()

    def new_segments(self) -> list[Segment]:
        """Return the segments added since the last call, in order of `start`."""
        with suppress(OSError):
            now = self.path.stat().st_mtime_ns
            if now != self._scanned:
                result = self.names()
                new = sorted(result - self._known)
                # A file added within the same clock tick would not change the time.
                settled = time.time_ns() - now > SETTLED_NANOSECONDS
                self._known, self._scanned = result, now if settled else -1
                read = [self._looked_at(name) for name in new if self._is_own(name)]
                segments = [each for each in read if each is not None]
                return sorted(segments, key=lambda each: each.start)
        return []

    def names(self) -> set[str]:
        """Return the names of all files in the folder."""
        return {each.name for each in os.scandir(self.path)}

    def _is_own(self, name: str) -> bool:
        match = _NAME.fullmatch(name)
        return match is not None and match[1] == self._model

    def _looked_at(self, name: str) -> Segment | None:
        try:
            with opened(self.path / name, follow=False) as (file, size):
                return self._segment(name, read_header(file, size))
        except FlawError as error:
            self.drop(name, error)
            return None

    def _segment(self, name: str, header: Header) -> Segment:
        text = header.metadata.get("segment", "").encode()
        seal = header.metadata.get("seal", "").encode()
        same = hmac.compare_digest(self._hash(text).encode(), seal)
        need(same, "its header has changed, or was written with another key")
        said = json.loads(text)
        result = _segment_of(name, said)
        same = name == self._name(result.parent, result.tokens)
        need(same, "it holds another segment than its file name says")
        return result

    def read(self, segment: Segment) -> tuple[dict[str, mx.array], Any]:
        """Return the arrays and the plan (see `segment.py`) of a segment.

        Raises:
            FlawError: the file has changed since it was written, or is gone.
        """
        with opened(self.path / segment.name, follow=False) as (file, size):
            header = read_header(file, size)
            self._segment(segment.name, header)
            digest = header.digest(self._key)
            arrays = read_arrays(file, header, digest)
        said = header.metadata.get(DIGEST, "")
        need(
            hmac.compare_digest(digest.hexdigest().encode(), said.encode()),
            "its content has changed since it was written",
        )
        return arrays, json.loads(header.metadata["segment"])["plan"]

    def write(
        self,
        before: Sequence[int],
        tokens: Sequence[int],
        arrays: dict[str, mx.array],
        plan: Any,
        *,
        written: bool,
    ) -> Segment:
        """Write a segment that follows the tokens `before`, and return it.

        Raises:
            OSError: the file cannot be written, or is larger than the limit.
        """
        parent = self.digest(before).hexdigest()
        name = self._name(parent, tokens)
        said = {
            "parent": parent,
            "start": len(before),
            "tokens": [*tokens],
            "plan": plan,
            "written": written,
        }
        text = json.dumps(said, separators=(",", ":"))
        metadata = {"segment": text, "seal": self._hash(text.encode())}
        header = len(text) * 2 + 200 * len(arrays) + 1000  # at most, with JSON escapes
        self._make_room(header + sum(array.nbytes for array in arrays.values()))
        write(self.path / name, arrays, metadata, self._key)
        self._known.add(name)
        return _segment_of(name, said)

    def touch(self, segment: Segment, when: float) -> None:
        """Set a file's time of last use, 1 µs earlier per token before the segment.

        So the end of a text is removed before its beginning.
        """
        moment = when - segment.start * 1e-6
        with suppress(OSError):
            os.utime(self.path / segment.name, (moment, moment))

    def drop(self, name: str, error: Exception) -> None:
        """Remove a file that cannot be used; log that, unless the file was gone."""
        if not isinstance(error.__cause__, FileNotFoundError):
            LOG.warning("removed %s, which cannot be used: %s", self.path / name, error)
        self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(OSError):
            (self.path / name).unlink()

    def _make_room(self, size: int) -> None:
        """Remove abandoned and least recently used files until `size` bytes fit."""
        if size > self._max_bytes:
            raise OSError(
                f"a segment has {size} bytes, and disk_gigabytes allows "
                f"{self._max_bytes} in all"
            )
        now = time.time()
        # Files are counted every 10 seconds, and when they seem to leave no room.
        self._bytes += size
        if self._bytes <= self._max_bytes and now - self._counted < COUNTED_SECONDS:
            return
        files = []
        for entry in os.scandir(self.path):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                old = now - status.st_mtime > ABANDONED_SECONDS
                if _NAME.fullmatch(entry.name):
                    files.append((status.st_mtime, status.st_size, entry.name))
                elif old and _UNFINISHED.fullmatch(entry.name):
                    self.remove(entry.name)
        self._counted = now
        self._bytes = size + sum(each[1] for each in files)
        for _, taken, name in sorted(files):
            if self._bytes <= self._max_bytes:
                return
            self.remove(name)
            self._bytes -= taken


def _segment_of(name: str, said: Any) -> Segment:
    return Segment(
        name,
        said["parent"],
        said["start"],
        tuple(said["tokens"]),
        frozenset(said["plan"]),
        frozenset(mark for mark, each in said["plan"].items() if each[2]),
        said["written"],
    )


def extended(digest: Any, tokens: Sequence[int]) -> Any:
    """Return a copy of a digest, extended by further tokens."""
    result = digest.copy()
    result.update(array("I", tokens).tobytes())
    return result
