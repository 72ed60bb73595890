#!/usr/bin/env python3
"""Compresses a wheel's files anew with zopfli, whose deflate streams are some 4% smaller.

tools/compress_wheel.py dist/kvedge-*.whl        in place; needs the package zopfli
"""

import sys
import zipfile
from pathlib import Path
from unittest import mock

import zopfli.zlib


class Compressor:
    """What ``zlib.compressobj`` gives for a raw deflate stream, by zopfli."""

    def __init__(self, *_: object) -> None:
        self.content = b""

    def compress(self, data: bytes) -> bytes:
        self.content += data
        return b""

    def flush(self) -> bytes:
        # Two bytes of header and four of checksum belong to zlib's format, not to the stream.
        # 0: as many blocks as serve; 15, the default, are few for a library.
        made: bytes = zopfli.zlib.compress(self.content, numiterations=40, blocksplittingmax=0)
        return made[2:-4]


def compress(path: Path) -> None:
    """Write the wheel at `path` anew, its files in the same order."""
    with zipfile.ZipFile(path) as wheel:
        contents = [(info, wheel.read(info)) for info in wheel.infolist()]
    smaller = path.with_suffix(".smaller")
    with (
        mock.patch.object(zipfile.zlib, "compressobj", Compressor),  # which zipfile calls
        zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as wheel,
    ):
        for info, content in contents:
            wheel.writestr(info, content)
    with zipfile.ZipFile(smaller) as wheel:
        if wheel.testzip() is not None:
            raise SystemExit(f"{smaller} does not read back")
    smaller.replace(path)


for name in sys.argv[1:]:
    compress(Path(name))
