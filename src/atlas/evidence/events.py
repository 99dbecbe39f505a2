"""The events of a Chrome trace file (torch.profiler's Kineto, Atlas, plain or gzip), one by one.

The file is read as a stream: memory does not grow with its size. Knows JSON and its damage, not what events mean.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, Protocol

from atlas.errors import AtlasError

BLOCK_BYTES = 1 << 20
"""Read at a time."""
MAX_VALUE_CHARS = 64 << 20
"""The largest single event or other value. A larger one is damage, such as a missing quote."""
TAIL_CHARS = 4096
"""An error this close to the end of what was read may be a value that the next block completes."""
EVENTS_KEY = "traceEvents"

_SCAN: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]
"""The compiled scanner behind `raw_decode`, without its exceptions for missing values."""
_SPACE = re.compile(r"[ \t\n\r]*")
_BETWEEN = re.compile(r"[ \t\n\r,]*")


class DamagedTraceError(AtlasError):
    """A trace file that ends too early or is not JSON from some point on."""


class NotATraceError(AtlasError):
    """A JSON file without a list of events."""


class TraceFile:
    """Iterate over it once for the events, as dicts. Then `info` has the file's other values.

    With `salvage`, a damaged file gives the events before the damage, and `damage` has what was wrong.
    """

    def __init__(self, path: Path, *, salvage: bool = False) -> None:
        self.path, self.salvage = path, salvage
        self.info: dict[str, Any] = {}
        self.damage = ""
        self.num_events = 0
        self.num_odd = 0
        """Entries that are not JSON objects."""
        self._text, self._at, self._dropped, self._ended = "", 0, 0, False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with closing(_opened(self.path)) as self._file:
                self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
                yield from self._events()
        except DamagedTraceError as error:
            if not self.salvage or not self.num_events:
                raise
            self.damage = str(error)
        except OSError as error:
            raise AtlasError(f"{self.path}: cannot be read: {error.strerror or error}. Check the path") from error

    # ---- the document --------------------------------------------------------------------------------------
    def _events(self) -> Iterator[dict[str, Any]]:
        opening = self._next_char(_SPACE)
        if opening == "\ufeff":
            self._at += 1
            opening = self._next_char(_SPACE)
        if opening == "[":
            self._at += 1
            yield from self._array(closed=False)
            return
        if opening != "{":
            raise self._wrong("it begins with neither { nor [: not a JSON trace", cut=not opening)
        self._at += 1
        found = False
        while (char := self._next_char(_BETWEEN)) != "}":
            if char != '"':
                raise self._wrong("not JSON: a key was expected", cut=not char)
            key = self._value()
            if self._next_char(_SPACE) != ":":
                raise self._wrong(f"not JSON: no value for the key {str(key)[:40]!r}", cut=self._ended)
            self._at += 1
            char = self._next_char(_SPACE)
            if key == EVENTS_KEY and char == "[":
                self._at += 1
                found = True
                yield from self._array(closed=True)
            else:
                self.info[str(key)] = self._value()
        if not found:
            raise NotATraceError(f"{self.path}: has no list {EVENTS_KEY!r}: not a trace. Name a file of torch.profiler")

    def _array(self, *, closed: bool) -> Iterator[dict[str, Any]]:
        """The items of a list, without its opening bracket. A bare list need not be `closed`: the format allows it."""
        between, scan = _BETWEEN.match, _SCAN
        while True:
            # The inner loop works on local names: a trace has millions of events.
            text, at = self._text, self._at
            while True:
                space = between(text, at)
                assert space is not None
                try:
                    value, end = scan(text, space.end())
                except (StopIteration, ValueError, RecursionError):
                    break
                at = self._at = end
                if type(value) is dict:
                    self.num_events += 1
                    yield value
                else:
                    self.num_odd += 1
            char = self._next_char(_BETWEEN)
            if char == "]":
                self._at += 1
                return
            if not char and not closed and self.num_events:
                return
            value = self._value()
            if isinstance(value, dict):
                self.num_events += 1
                yield value
            else:
                self.num_odd += 1

    # ---- the buffer ----------------------------------------------------------------------------------------
    def _next_char(self, skip: re.Pattern[str]) -> str:
        """The next character after what `skip` matches; empty at the end of the file."""
        while True:
            space = skip.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self) -> Any:
        """The value at the cursor, which then stands behind it."""
        block = BLOCK_BYTES
        while True:
            # Only numbers and words of an error are kept: the error itself holds the whole buffer.
            where, words = len(self._text), "no value"
            try:
                value, end = _SCAN(self._text, self._at)
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            except StopIteration as found:
                where = int(found.value)
            except json.JSONDecodeError as found:
                where, words = found.pos, found.msg
            except RecursionError:
                raise self._wrong("nested too deeply") from None
            except ValueError:
                raise self._wrong("a number is too long") from None
            unfinished = where > len(self._text) - TAIL_CHARS or "Unterminated" in words
            if not unfinished or len(self._text) - self._at > MAX_VALUE_CHARS:
                raise self._wrong(f"not JSON ({words})")
            if not self._more(block):
                raise self._wrong("", cut=True)
            block *= 2

    def _more(self, size: int = BLOCK_BYTES) -> bool:
        """Read on; what was used is dropped. Whether there was more."""
        if self._ended:
            return False
        try:
            data = self._file.read(size)
        except (EOFError, zlib.error) as error:
            self._ended = True
            raise self._wrong(f"the compressed data is damaged ({error})", cut=isinstance(error, EOFError)) from None
        self._ended = not data
        self._dropped += self._at
        self._text = self._text[self._at :] + self._decode(data, self._ended)
        self._at = 0
        return bool(data)

    def _wrong(self, what: str, *, cut: bool = False) -> DamagedTraceError:
        if cut and not self._dropped + self._at:
            what = "is empty"
        elif cut:
            what = f"is truncated after {self.num_events:,} events"
        else:
            what = f"character {self._dropped + self._at:,}, after {self.num_events:,} events: {what}"
        hint = ", or give --salvage to use the events before it" if self.num_events and not self.salvage else ""
        return DamagedTraceError(f"{self.path}: {what}. Write the trace again{hint}")


class _Bytes(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


class _Unzipped:
    """A gzip file's content. Unlike the standard library's, it gives all bytes before the damage, then raises."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._packed = file, b""
        self._member = zlib.decompressobj(wbits=31)

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes. Raises EOFError where the file is cut off, zlib.error where it is damaged."""
        while True:
            if self._member.eof:
                self._packed = self._member.unused_data or self._packed
                self._packed = self._packed or self._file.read(BLOCK_BYTES)
                if not self._packed.strip(b"\0"):
                    return b""  # padding may follow the last member
                self._member = zlib.decompressobj(wbits=31)
            self._packed = self._packed or self._file.read(BLOCK_BYTES)
            if not self._packed:
                raise EOFError("cut off")
            data = self._member.decompress(self._packed, size)
            self._packed = self._member.unconsumed_tail
            if data:
                return data

    def close(self) -> None:
        self._file.close()


def _opened(path: Path) -> _Bytes:
    """The file's bytes, unpacked where they are gzip. The content decides, not the name."""
    if path.is_dir():
        raise AtlasError(f"{path}: is a folder, not a trace. Name a file in it")
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] == b"\x1f\x8b":
        return _Unzipped(path.open("rb"))
    if path.suffix == ".gz":
        raise AtlasError(f"{path}: is named .gz but is not gzip data. Write it again, or rename it")
    if start == b"PK\x03\x04":
        raise AtlasError(f"{path}: is a zip archive, which is not unpacked here. Unpack it and name the folder")
    return path.open("rb")
