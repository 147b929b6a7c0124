"""The parts of a ZIP file, and the events of an XML part, with limits on both."""

from __future__ import annotations

import posixpath
import zlib
from collections.abc import Iterator, Mapping
from io import BytesIO
from xml.parsers import expat
from zipfile import BadZipFile, ZipFile

from gemserve.files.formats import Refused

MOST_PARTS = 20_000
MOST_UNPACKED = 1 << 28  # bytes of all parts that are read
MOST_DEPTH = 256  # elements in one another
_AT_ONCE = 1 << 16
_ENCRYPTED = 1  # a flag of a part

Attributes = Mapping[str, str]


class Parts:
    """The parts of a ZIP file by name. `what`: how messages call the format."""

    def __init__(self, content: bytes, what: str) -> None:
        """Raises `Refused`."""
        try:
            self._zip = ZipFile(BytesIO(content))
        except BadZipFile as error:
            raise Refused(f"is no {what} file, which is a ZIP file ({error})") from error
        self.names = frozenset(self._zip.namelist())
        if len(self.names) > MOST_PARTS:
            raise Refused(f"has {len(self.names):,} parts, the limit is {MOST_PARTS:,}")
        if any(each.flag_bits & _ENCRYPTED for each in self._zip.infolist()):
            raise Refused("is encrypted; save it without a password first")
        self._left = MOST_UNPACKED

    def check_size(self) -> None:
        """Raise `Refused` if all parts together say that they unpack to too much."""
        if sum(each.file_size for each in self._zip.infolist()) > MOST_UNPACKED:
            raise _too_large()

    def read(self, name: str) -> bytes:
        """The bytes of a part. Raises `Refused` if it is missing, damaged or too large."""
        if name not in self.names:
            raise Refused(f"has no part {name[:100]!r}, so it is damaged")
        try:
            with self._zip.open(name) as part:
                content = part.read(self._left + 1)
        except (BadZipFile, NotImplementedError, EOFError, zlib.error) as error:
            raise Refused(f"has a damaged part {name[:100]!r} ({error})") from error
        self._left -= len(content)
        if self._left < 0:
            raise _too_large()
        return content

    def targets(self, name: str) -> dict[str, tuple[str, str]]:
        """Which parts a part of an Office file refers to: the kind and name of each, by id."""
        folder, base = posixpath.split(name)
        relations = f"{folder}/_rels/{base}.rels"
        found = {}
        if relations in self.names:
            for event, tag, attributes in events(self.read(relations), relations):
                if event == "start" and tag == "Relationship":
                    kind = attributes.get("Type", "").rpartition("/")[2]
                    path = posixpath.join("/", folder, attributes.get("Target", ""))
                    found[attributes.get("Id", "")] = kind, posixpath.normpath(path).lstrip("/")
        return found


def _too_large() -> Refused:
    return Refused(f"unpacks to more than {MOST_UNPACKED:,} bytes, the limit")


def events(content: bytes, part: str) -> Iterator[tuple[str, str, Attributes]]:
    """("start", tag, attributes), ("end", tag, {}) and ("text", text, {}), in order.

    Tags and the names of attributes are without their namespaces, but an attribute that has one
    has ":" in front of its name. Entities that the part declares are refused, and those of other
    files are never fetched. Raises `Refused`.
    """
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    seen: list[tuple[str, str, Attributes]] = []
    depth = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MOST_DEPTH:
            raise Refused(
                f"has elements more than {MOST_DEPTH} deep in its part {part[:100]!r}, the limit"
            )
        short = {_short(name): value for name, value in attributes.items()}
        seen.append(("start", tag.rpartition(" ")[2], short))

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        seen.append(("end", tag.rpartition(" ")[2], {}))

    def entity(*_: object) -> None:
        raise Refused(f"declares XML entities in its part {part[:100]!r}, which are not read")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = lambda text: seen.append(("text", text, {}))
    parser.EntityDeclHandler = entity
    for at in range(0, len(content), _AT_ONCE):
        _feed(parser, content[at : at + _AT_ONCE], at + _AT_ONCE >= len(content), part)
        yield from seen
        seen.clear()


def _short(name: str) -> str:
    space, has_space, own = name.rpartition(" ")
    return f":{own}" if has_space and space else own


def _feed(parser: expat.XMLParserType, piece: bytes, is_last: bool, part: str) -> None:
    try:
        parser.Parse(piece, is_last)
    except expat.ExpatError as error:
        raise Refused(f"has a damaged part {part[:100]!r} ({error})") from error
