"""Linker for the machine code of one kernel: a relocatable ELF file becomes an image that can be put at any address.

Numba compiles with the large code model, so that its code refers to everything outside by absolute addresses of 64
bits. An image is therefore bytes with a list of such words to be filled in. Only files for x86-64 are understood; what
is not known here is a ValueError, and the kernel then stays with Numba.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

_HEADER, _SECTION = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ")
_SYMBOL, _RELOCATION = struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
_X86_64 = 62
_SYMBOL_TABLE, _RELOCATIONS, _NO_DATA = 2, 4, 8
_WRITE, _ALLOCATE = 1, 2
_UNDEFINED, _COMMON, _LARGE_COMMON = 0, 0xFFF2, 0xFF02
_ABSOLUTE_64, _RELATIVE_32, _CALL_32, _RELATIVE_64 = 1, 2, 4, 24
_RELATIVE = {_RELATIVE_32: "<i", _CALL_32: "<i", _RELATIVE_64: "<q"}
_ENVIRONMENT = "_ZN08NumbaEnv"
IMAGE = -1
"""In a fixup, in the place of an import: the image itself."""


class Image(NamedTuple):
    """Machine code that can be put at any address.

    Attributes
    ----------
    code
        The bytes, at an address that is a multiple of 4096.
    imports
        Names of symbols outside.
    fixups
        Words to be filled in: offset in the image, number of an import or IMAGE, and what is added to its address.
    environments
        Offsets of words that get the address of Numba's Environment of the kernel.
    symbols
        Offsets of the functions that were asked for.
    """

    code: bytes
    imports: list[str]
    fixups: list[tuple[int, int, int]]
    environments: list[int]
    symbols: dict[str, int]


class _Symbol(NamedTuple):
    name: str
    section: int
    value: int
    nbytes: int


class _Section(NamedTuple):
    name: str
    kind: int
    flags: int
    data: bytes
    nbytes: int
    alignment: int
    info: int


def _string(table: bytes, start: int) -> str:
    return table[start : table.index(b"\0", start)].decode()


def _sections(file: bytes) -> tuple[list[_Section], list[_Symbol]]:
    """Return the sections and the symbols of a file."""
    fields = _HEADER.unpack_from(file)
    if fields[0][:6] != b"\x7fELF\x02\x01" or fields[1] != 1 or fields[2] != _X86_64:
        raise ValueError("it is no relocatable ELF file for x86-64")
    start, number, names = fields[6], fields[12], fields[13]
    rows = [_SECTION.unpack_from(file, start + _SECTION.size * i) for i in range(number)]
    contents = [b"" if row[1] == _NO_DATA else file[row[4] : row[4] + row[5]] for row in rows]
    sections = [
        _Section(_string(contents[names], row[0]), row[1], row[2], data, row[5], max(1, row[8]), row[7])
        for row, data in zip(rows, contents, strict=True)
    ]
    symbols = []
    for row, data in zip(rows, contents, strict=True):
        if row[1] == _SYMBOL_TABLE:
            for name, _, _, section, value, nbytes in _SYMBOL.iter_unpack(data):
                symbols.append(_Symbol(_string(contents[row[6]], name), section, value, nbytes))
    return sections, symbols


def _is_loaded(section: _Section) -> bool:
    """Return whether a section is part of the image; what unwinds the stack is not, since nothing is thrown."""
    return bool(section.flags & _ALLOCATE) and section.nbytes > 0 and section.name != ".eh_frame"


class _Linker:
    """Image in the making; of a name that several files define the first is taken."""

    def __init__(self) -> None:
        self._code = bytearray()
        self._defined: dict[str, int] = {}
        self._environments: list[int] = []
        self._pending: list[tuple[int, int, str | int, int]] = []
        """Relocations: offset, kind, name of a symbol or its offset, addend."""

    def _reserve(self, nbytes: int, alignment: int) -> int:
        self._code.extend(bytes(-len(self._code) % alignment))
        start = len(self._code)
        self._code.extend(bytes(nbytes))
        return start

    def add(self, file: bytes) -> None:
        """Add what a file has."""
        sections, symbols = _sections(file)
        places = {}
        for number, section in enumerate(sections):
            if _is_loaded(section):
                if section.flags & _WRITE and ".data.rel.ro" not in section.name:
                    raise ValueError(f"section {section.name} can be written to")
                places[number] = start = self._reserve(section.nbytes, section.alignment)
                self._code[start : start + len(section.data)] = section.data
        targets = [self._target(symbol, places) for symbol in symbols]
        for section in sections:
            if section.kind == _RELOCATIONS and section.info in places:
                for offset, info, addend in _RELOCATION.iter_unpack(section.data):
                    place = places[section.info] + offset
                    self._pending.append((place, info & 0xFFFFFFFF, targets[info >> 32], addend))

    def _target(self, symbol: _Symbol, places: dict[int, int]) -> str | int:
        """Return a symbol's offset if it has no name, else its name, and note where it is."""
        if symbol.section in (_COMMON, _LARGE_COMMON):
            if not symbol.name.startswith(_ENVIRONMENT) or symbol.nbytes != 8:
                raise ValueError(f"symbol {symbol.name} can be written to")
            if symbol.name not in self._defined:
                self._defined[symbol.name] = self._reserve(8, 8)
                self._environments.append(self._defined[symbol.name])
        elif symbol.section in places:
            offset = places[symbol.section] + symbol.value
            if not symbol.name:
                return offset
            self._defined.setdefault(symbol.name, offset)
        return symbol.name

    def image(self, wanted: Sequence[str]) -> Image:
        """Return the image with the offsets of the functions in `wanted`."""
        imports: dict[str, int] = {}
        fixups = []
        for place, kind, target, addend in self._pending:
            offset = target if isinstance(target, int) else self._defined.get(target)
            if kind == _ABSOLUTE_64:
                number = imports.setdefault(str(target), len(imports)) if offset is None else IMAGE
                fixups.append((place, number, addend + (offset or 0)))
            elif kind in _RELATIVE and offset is not None:
                struct.pack_into(_RELATIVE[kind], self._code, place, offset + addend - place)
            else:
                raise ValueError(f"relocation of kind {kind} for {target}")
        symbols = {name: self._defined[name] for name in wanted}
        return Image(bytes(self._code), list(imports), fixups, self._environments, symbols)


def link(files: Sequence[bytes], wanted: Sequence[str]) -> Image:
    """Link files to one image.

    Parameters
    ----------
    files
        Relocatable ELF files, the kernel's first.
    wanted
        Functions whose offsets are needed.

    Raises
    ------
    ValueError
        If they have what is not understood here.
    """
    linker = _Linker()
    try:
        for file in files:
            linker.add(file)
        return linker.image(wanted)
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError(f"the file is damaged: {error!r}") from error
