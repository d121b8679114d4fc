"""`infinity export`: write a Hugging Face folder from a checkpoint, without an accelerator, process groups or the
model's code.

    infinity export CHECKPOINT OUT [--tag TAG] [--dtype bf16|fp16|fp32] [--one-file] [--max-shard-size 5GB]
                    [--trained-only] [--config FOLDER]

CHECKPOINT is the folder that was passed to `save_checkpoint`, infinity's or DeepSpeed's (the command uses the tag in
`latest`, or --tag), or the folder of one checkpoint in it. `infinity-export` is the same command. Exit codes: 0
success; 2 the export failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from infinity.base.sizes import format_bytes, parse_bytes
from infinity.base.untrusted import shortened
from infinity.checkpoint.deepspeed.checkpoint import (
    DeepSpeedCheckpoint,
    find_deepspeed,
    holds_deepspeed,
    read_deepspeed,
    verify_deepspeed,
)
from infinity.checkpoint.extract import description_of, extract
from infinity.checkpoint.format import MANIFEST, Manifest, find, latest_tag, read_manifest
from infinity.cli.terminal import Meter, say
from infinity.errors import CheckpointError, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    add_checkpoint(parser)
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--dtype", default="bf16", help="bf16 (default), fp16, or fp32: the master weights")
    parser.add_argument("--one-file", action="store_true", help="all weights in one file")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a weight file (default: 5GB)")
    parser.add_argument("--trained-only", action="store_true", help="leave out parameters that were frozen")
    parser.add_argument("--config", metavar="FOLDER",
                        help="take config.json and tokenizer files from this folder")  # fmt: skip


def run(given: argparse.Namespace) -> int:
    """Write the folder and return 0.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read or exported.
        ConfigError: an option has an invalid value.
    """
    folder = locate(given.checkpoint, given.tag)
    saved: Manifest | DeepSpeedCheckpoint
    if theirs(folder):
        saved = read_deepspeed(folder)
        for _ in verify_deepspeed(saved):
            pass
    else:
        saved = read_manifest(folder)
    try:
        nbytes_max = None if given.one_file else parse_bytes(given.max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}") from error
    with Meter("export") as meter:
        out = extract(
            folder, saved, Path(given.out), dtype=given.dtype, nbytes_max=nbytes_max,
            origin=None if given.config is None else Path(given.config), frozen=not given.trained_only,
            tell=meter.advance,
        )  # fmt: skip
    files = sorted(path.relative_to(out) for path in out.rglob("*.safetensors"))
    nbytes = sum((out / name).stat().st_size for name in files)
    say(f"{out}: {folder.name} in {given.dtype}, {format_bytes(nbytes)} in {len(files)} file(s)")
    if not isinstance(saved, Manifest):
        if given.config is None:
            say("no config.json and no tokenizer files: DeepSpeed keeps none; --config FOLDER takes a model's")
        return 0
    origin = description_of(folder, saved).origin
    if given.config is None and origin is not None:
        say(f"no tokenizer files: the run had its model from {shortened(origin, 200)}; --config FOLDER takes them")
    return 0


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a checkpoint to `parser`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder of checkpoints, or one of them")
    parser.add_argument("--tag", help="tag of the checkpoint in the folder (default: the tag in `latest`)")


def locate(path: str, tag: str | None = None) -> Path:
    """Return the folder of one checkpoint.

    Arguments:
        path: the folder of a checkpoint, or a folder of checkpoints.
        tag: name of a checkpoint in `path`; None uses the one named in `latest`.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    folder = Path(path)
    if tag is None and ((folder / MANIFEST).is_file() or holds_deepspeed(folder)):
        return folder
    found = find(folder, tag) or find_deepspeed(folder, tag)
    if found is not None:
        return found
    named = latest_tag(folder) if tag is None else tag
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    tags = [each.name for each in there if (each / MANIFEST).is_file() or holds_deepspeed(each)]
    what = f"it has no checkpoint {named!r}" if named else f"it has neither {MANIFEST} nor a file that names the latest"
    raise CheckpointError(folder, what, f"Name one with --tag: there are {', '.join(tags)}" if tags else "Name another")


def theirs(folder: Path) -> bool:
    """Return whether the folder of a checkpoint is DeepSpeed's."""
    return not (folder / MANIFEST).is_file() and holds_deepspeed(folder)
