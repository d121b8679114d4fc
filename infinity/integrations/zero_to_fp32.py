"""DeepSpeed's `zero_to_fp32.py`: a checkpoint's weights in fp32 as a state dict or as files, without an engine.

    python zero_to_fp32.py CHECKPOINTS OUT [-t TAG] [--safe_serialization] [--max_shard_size 5GB]
                           [--exclude_frozen_parameters]

CHECKPOINTS is the folder that was passed to `save_checkpoint`; each has a script of this name, which calls this module.
It reads infinity's checkpoints, and DeepSpeed's, of any number of ranks. `infinity export` writes a Hugging Face folder
with its configuration; these functions write what DeepSpeed's of the same names write.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.base.sizes import parse_bytes
from infinity.checkpoint.deepspeed.checkpoint import DeepSpeedCheckpoint, find_deepspeed, read_deepspeed
from infinity.checkpoint.extract import ExportSource, export_source, extract
from infinity.checkpoint.format import BUFFER, Manifest, find, latest_tag, read_manifest
from infinity.checkpoint.model_folder import float_dtype
from infinity.checkpoint.weight_writer import EXPORT_NUMEL, folder_beside, publish_folder
from infinity.errors import CheckpointError
from infinity.memory.partition import DTYPES

_WEIGHTS = "pytorch_model"
_NOT_DEEPSPEEDS = "give the folder of one checkpoint that DeepSpeed saved; `infinity ckpt inspect` shows infinity's own"


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint; `contiguous()` reads it, each time anew."""

    folder: Path
    saved: Manifest | DeepSpeedCheckpoint
    name: str

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.saved.tensors[self.name].shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype: fp32 unless it is not floating."""
        dtype = DTYPES[self.saved.tensors[self.name].dtype]
        return torch.float32 if dtype.is_floating_point else dtype

    def contiguous(self) -> Tensor:
        """Return its values in CPU memory."""
        with export_source(self.folder, self.saved, [self.name]) as source:
            return self.read(source)

    def read(self, source: ExportSource) -> Tensor:
        """Return its values from a source that is open already."""
        info = self.saved.tensors[self.name]
        values = torch.empty(info.numel, dtype=self.dtype, device="cpu")
        for start in range(0, info.numel, EXPORT_NUMEL):
            count = min(EXPORT_NUMEL, info.numel - start)
            if BUFFER in info.kinds:
                values[start : start + count].copy_(source.values(self.name, BUFFER, start, count))
            else:
                values[start : start + count].copy_(source.masters(self.name, start, count))
        return values.view(info.shape)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the weights by name: masters in fp32, frozen parameters and buffers; tied names have one tensor.

    Arguments:
        checkpoint_dir: the folder that was passed to `save_checkpoint`.
        tag: which checkpoint; None takes the one that `latest` names.
        exclude_frozen_parameters: leave out what was not trained.
        lazy_mode: return a `LazyTensor` for each, which reads its values when `contiguous()` is called.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
    """
    folder, saved = _opened(checkpoint_dir, tag)
    lazy = _lazy(folder, saved, exclude_frozen=exclude_frozen_parameters)
    if lazy_mode:
        return {**lazy, **{alias: lazy[name] for alias, name in saved.tied.items() if name in lazy}}
    with export_source(folder, saved, list(lazy)) as source:
        found = {name: each.read(source) for name, each in lazy.items()}
    return {**found, **{alias: found[name] for alias, name in saved.tied.items() if name in found}}


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str],
    dtype: str | torch.dtype = torch.float32, max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False, tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write the weights into `output_dir`: `pytorch_model.bin` for `torch.load`, or shards with an index.

    Arguments:
        dtype: of floating tensors, fp32, bf16 or fp16.
        max_shard_size: largest file, in bytes or as text; None for a single file. One file at a time is in memory.
        safe_serialization: write `model.safetensors` instead, in bounded memory.

    The others are as in `get_fp32_state_dict_from_zero_checkpoint`, and so is what it raises.
    """
    folder, saved = _opened(checkpoint_dir, tag)
    target, chosen = Path(output_dir), float_dtype(str(dtype))
    nbytes_max = None if max_shard_size is None else parse_bytes(max_shard_size)
    if safe_serialization:
        extract(folder, saved, target, dtype=chosen, nbytes_max=nbytes_max, frozen=not exclude_frozen_parameters)
        return
    lazy = _lazy(folder, saved, exclude_frozen=exclude_frozen_parameters)
    aliases = {alias: name for alias, name in saved.tied.items() if name in lazy}
    rows = _rows(lazy, DTYPES[chosen].itemsize, nbytes_max)
    weight_map: dict[str, str] = {}
    total = 0
    with folder_beside(target) as made, export_source(folder, saved, list(lazy)) as source:
        for number, names in enumerate(rows, 1):
            file = f"{_WEIGHTS}.bin" if len(rows) == 1 else f"{_WEIGHTS}-{number:05d}-of-{len(rows):05d}.bin"
            found = {name: _converted(lazy[name].read(source), DTYPES[chosen]) for name in names}
            total += sum(values.nbytes for values in found.values())
            found.update({alias: found[name] for alias, name in aliases.items() if name in found})
            torch.save(found, made / file)
            weight_map.update(dict.fromkeys(found, file))
        if len(rows) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (made / f"{_WEIGHTS}.bin.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        publish_folder(made, target)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB", safe_serialization: bool = False, tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """As `convert_zero_checkpoint_to_state_dict`, in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move a model that no engine owns to the CPU, load a checkpoint's weights into it, and return it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return the files of optimizer states in a checkpoint of DeepSpeed's (its tag's folder), in the order of ranks."""
    found = [str(path) for path in Path(checkpoint_dir).glob("*_optim_states.pt")]
    if not found:
        raise CheckpointError(Path(checkpoint_dir), "it has no files *_optim_states.pt", _NOT_DEEPSPEEDS)
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """Return the first rank's file of module states in a checkpoint of DeepSpeed's of this ZeRO stage."""
    name = ("zero_pp_rank_0_" if zero_stage == 3 else "") + "mp_rank_00_model_states.pt"
    if not (file := Path(checkpoint_dir) / name).exists():
        raise CheckpointError(Path(checkpoint_dir), f"it has no file {name}", _NOT_DEEPSPEEDS)
    return str(file)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line of DeepSpeed's script."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Write a checkpoint's weights in fp32.")
    parser.add_argument("checkpoint_dir", help="the folder that was passed to save_checkpoint")
    parser.add_argument("output_dir", help="the folder to write")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors instead of pickles")
    parser.add_argument("-t", "--tag", help="of the checkpoint (default: the one that `latest` names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="show the traceback of an error")
    given = parser.parse_args(argv)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            given.checkpoint_dir, given.output_dir, given.max_shard_size, given.safe_serialization, given.tag,
            given.exclude_frozen_parameters,
        )  # fmt: skip
    except (CheckpointError, ValueError, OSError) as error:
        if given.debug:
            raise
        parser.exit(2, f"zero_to_fp32.py: {error}\n")


def _opened(directory: str | os.PathLike[str], tag: str | None) -> tuple[Path, Manifest | DeepSpeedCheckpoint]:
    """Return a checkpoint's folder and what it holds."""
    directory = Path(directory)
    folder = find(directory, tag)
    if folder is not None:
        return folder, read_manifest(folder)
    theirs = find_deepspeed(directory, tag)
    if theirs is not None:
        return theirs, read_deepspeed(theirs)
    named = latest_tag(directory) if tag is None else tag
    what = "it has no file `latest`" if named is None else f"it has no complete checkpoint {named!r}"
    raise CheckpointError(directory, what, "Name the folder that was passed to save_checkpoint, and perhaps a tag")


def _lazy(folder: Path, saved: Manifest | DeepSpeedCheckpoint, *, exclude_frozen: bool) -> dict[str, LazyTensor]:
    return {
        name: LazyTensor(folder, saved, name)
        for name, info in saved.tensors.items()
        if info.kinds and (info.trainable or BUFFER in info.kinds or not exclude_frozen)
    }


def _rows(lazy: Mapping[str, LazyTensor], width: int, nbytes_max: int | None) -> list[list[str]]:
    """Return the tensors of each file."""
    rows: list[list[str]] = [[]]
    filled = 0
    for name, each in lazy.items():
        nbytes = each.shape.numel() * (width if each.dtype.is_floating_point else each.dtype.itemsize)
        if rows[-1] and nbytes_max is not None and filled + nbytes > nbytes_max:
            rows.append([])
            filled = 0
        rows[-1].append(name)
        filled += nbytes
    return rows


def _converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if values.is_floating_point() else values


if __name__ == "__main__":
    main()
