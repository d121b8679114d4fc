"""A compiler that takes no time: it hands out the libraries that this checkout has, whatever it is given."""

from __future__ import annotations

from pathlib import Path

from infinity.ops import build

_SCRIPT = """#!/bin/sh
[ "$1" = --version ] && echo stand-in && exit
while [ "$1" != -o ]; do shift; done
case "$*" in
  *library.so*crc32c.o*) echo aio >> {folder}/linked; sleep 0.3; cp {aio} "$2";;
  *library.so*isa_scalar.o*) echo adam >> {folder}/linked; cp {adam} "$2";;
  *) echo >> "$2";;
esac
"""


def standing_in(folder: Path) -> dict[str, str]:
    """The variables that name it, for C++ and for CUDA; FOLDER/linked gets a line for each library of the host."""
    paths = {name: library.path for name in build.HOST_NAMES if (library := build._library(name))}
    script = folder / "compiler"
    script.write_text(_SCRIPT.format(folder=folder, **paths))
    script.chmod(0o755)
    return {"CXX": str(script), "NVCC": str(script)}
