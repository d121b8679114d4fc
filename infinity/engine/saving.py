"""One save: from what was captured to a published checkpoint.

    folder claimed -> each rank's files -> manifest -> `latest` -> older checkpoints go

It runs in the foreground or behind the program, with the same functions. A save that fails, on whatever rank, leaves
the checkpoint that was there, and the engine as it was: training can go on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from infinity.checkpoint.background import Together
from infinity.checkpoint.describe import describe_model
from infinity.checkpoint.format import BUFFER, MANIFEST, FileInfo, Manifest, RankIndex, TensorInfo, read_manifest
from infinity.checkpoint.module_tensors import checkpoint_buffers, tied_names
from infinity.checkpoint.pieces import shares, tensor_kinds
from infinity.checkpoint.publish import (
    Retention,
    SaveTarget,
    claimed,
    prepare,
    publish_checkpoint,
    remove,
    remove_save,
    write_client,
)
from infinity.checkpoint.save import Capture, write
from infinity.checkpoint.sources import PartitionSource
from infinity.checkpoint.state import ClientState, Run, encode_client_state, random_state
from infinity.engine.runtime import Runtime
from infinity.errors import CheckpointError
from infinity.memory.queue_options import queue_options
from infinity.ops.aio import Queue
from infinity.plan.model_params import model_params
from infinity.plan.spec import dtype_name


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a program asks to be saved.

    latest: DIR/latest names this checkpoint then. frozen: with parameters that are not trained. behind: beside the
    program.
    """

    directory: Path
    tag: str
    latest: bool
    frozen: bool
    behind: bool

    @property
    def folder(self) -> Path:
        return self.directory / self.tag


@dataclass(frozen=True)
class SaveContents:
    """What one rank captured. `manifest`: the manifest's parts about the model and the run; `client_state` as JSON, on
    rank 0 only, and its `tensors` by path.
    """

    capture: Capture
    manifest: dict[str, Any]
    client_state: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, runtime: Runtime, run: Run, request: SaveRequest, client_state: ClientState) -> SaveContents:
        """Look at everything that a checkpoint keeps, and copy none of it. Raise what cannot be saved."""
        groups, module = runtime.groups, runtime.module
        rank = groups.ranks.rank
        kind = type(module)
        manifest = {
            "tensors": tensors_of(runtime, frozen=request.frozen),
            "tied": tied_names(module),
            # For readers that have none of the model's code.
            "module": {
                "class": f"{kind.__module__}.{kind.__qualname__}",
                "export": describe_model(module, runtime.whole_shapes).to_json(),
            },
            "engine": run.to_json(path=request.directory),
        }  # fmt: skip
        # Called on every rank: it may be a collective of the program's.
        own = client_state() if callable(client_state) else client_state
        tensors: dict[str, Tensor] = {}
        encoded = encode_client_state(_plain(own), tensors, path=request.directory) if rank == 0 else None
        capture = Capture(
            rank=rank,
            pieces=tuple(shares(runtime.plan, groups.data.index, groups.tensor.index, frozen=request.frozen)),
            buffers=tuple(each for each in _buffers_of(module) if runtime.tells_buffer(each[0])),
            rng=random_state(runtime.device),
            singles=run.parameter_scalars(),
        )
        return cls(capture, manifest, encoded, tensors)

    def apart(self) -> SaveContents:
        """Return the same with copies of all tensors that the program goes on to change."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return replace(self, capture=self.capture.apart(), tensors=tensors)


@dataclass(frozen=True)
class Save:
    """One save of this rank.

    ask: runs a part on every rank and returns all ranks' values; an error of one is raised by every rank. moved: called
    while this rank writes.
    """

    runtime: Runtime
    request: SaveRequest
    contents: SaveContents
    ask: Together
    moved: Callable[[], None] = lambda: None

    def run(self, source: PartitionSource) -> None:
        """Write the partitions that `source` lends, and all the rest, and publish the checkpoint. Collective."""
        with ExitStack() as stack:
            target = self._claim(stack)
            infos = self._write(source, target)
            self._publish(target, infos)
            if self._first:
                remove([self.request.directory / name for name in target.outdated])

    @property
    def _first(self) -> bool:
        return self.runtime.groups.ranks.rank == 0

    def _claim(self, stack: ExitStack) -> SaveTarget:
        """Take the folder until `stack` is left, and remove what killed saves have left in it."""

        def claim() -> dict[str, Any]:
            if not self._first:
                return {}
            stack.enter_context(claimed(self.request.directory))
            section = self.runtime.config.config.checkpoint
            retention = Retention(section.keep_last, section.keep_every)
            return asdict(prepare(self.request.directory, self.request.tag, retention, latest=self.request.latest))

        return SaveTarget(**self.ask("place of a checkpoint", claim)[0])

    def _previous(self, target: SaveTarget) -> tuple[Path, RankIndex] | None:
        """Return an earlier checkpoint's folder and its index of this rank, where that can be read."""
        if target.previous is None:
            return None
        folder, rank = self.request.directory / target.previous, self.contents.capture.rank
        with suppress(CheckpointError):
            manifest = read_manifest(folder)
            if rank < len(manifest.ranks):
                return folder, manifest.index(folder, rank)
        return None

    def _write(self, source: PartitionSource, target: SaveTarget) -> list[FileInfo]:
        """Write every rank's files, or none; read them back where older checkpoints are to go."""
        folder = self.request.folder
        capture = replace(self.contents.capture, previous=self._previous(target))

        def job() -> dict[str, Any]:
            if not folder.is_dir():
                raise CheckpointError(
                    folder, "rank 0 has made this folder, which is not seen here",
                    "Save into a folder that all nodes share",
                )  # fmt: skip
            with checkpoint_queue(self.runtime) as queue:
                read_back = bool(target.outdated)
                return asdict(
                    write(capture, source, folder, target.id, queue, read_back=read_back, moved=self.moved)
                )

        with self._removed_on_failure(target):
            return [FileInfo(**row) for row in self.ask("files of a checkpoint", job)]

    def _publish(self, target: SaveTarget, infos: list[FileInfo]) -> None:
        def job() -> None:
            if self._first:
                client = write_client(self.request.folder, target.id, self.contents.tensors)
                manifest = self._manifest(target, infos, client)
                publish_checkpoint(
                    self.request.directory, manifest, latest=self.request.latest, checked=bool(target.outdated)
                )

        with self._removed_on_failure(target):
            self.ask("manifest of a checkpoint", job)

    def _manifest(self, target: SaveTarget, infos: list[FileInfo], client: FileInfo | None) -> Manifest:
        plan = self.runtime.plan
        return Manifest(
            id=target.id, tag=self.request.tag, number=target.number,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions={
                "infinity": infinity.__version__, "torch": str(torch.__version__), "python": sys.version.split()[0],
            },
            plan={
                "fingerprint": plan.fingerprint(), "stage": plan.request.stage,
                "world_size": plan.topology.world_size, "dp": plan.topology.dp, "tp": plan.topology.tp,
                "pp": plan.topology.pp,
                "compute_dtype": plan.request.compute_dtype,
            },
            ranks=tuple(infos), client_state=self.contents.client_state, client=client, **self.contents.manifest,
        )  # fmt: skip

    def _removed_on_failure(self, target: SaveTarget) -> ExitStack:
        """Return a block that removes the save's files when it fails, unless they are a checkpoint already. Only rank 0
        knows that; behind the program another rank may have stopped waiting before.
        """

        def remove_files(kind: object, *_: object) -> None:
            folder = self.request.folder
            if kind is None or not self._first:
                return
            if not ((folder / MANIFEST).exists() and read_manifest(folder).id == target.id):
                remove_save(folder, target.id)

        stack = ExitStack()
        stack.push(remove_files)
        return stack


def _plain(state: Any) -> dict[str, Any]:
    return vars(state) if isinstance(state, argparse.Namespace) else dict(state or {})


def checkpoint_queue(runtime: Runtime) -> Queue:
    """Return a queue of its own for a save or a load; the configuration says how drives are used."""
    options = queue_options(runtime.config, ())
    return Queue(
        depth=options.depth, threads=options.threads, timeout_s=options.timeout_seconds,
        block_nbytes=options.block_nbytes,
    )  # fmt: skip


def tensors_of(runtime: Runtime, *, frozen: bool = True) -> dict[str, TensorInfo]:
    """Return the tensors of the whole model, buffers included, in whole shapes, with the kinds that a checkpoint keeps
    of each. `frozen`: with the elements of parameters that are not trained.
    """
    kinds = tensor_kinds(runtime.plan)
    tensors = {
        name: TensorInfo(
            shape=param.shape, dtype=param.dtype, trainable=param.trainable,
            kinds=kinds[name] if param.trainable or frozen else (),
        )
        for name, param in model_params(runtime.plan).items()
    }  # fmt: skip
    for name, dtype, buffer in _buffers_of(runtime.module):
        tensors[name] = TensorInfo(tuple(buffer.shape), dtype, trainable=False, kinds=(BUFFER,))
    return tensors


def _buffers_of(module: nn.Module) -> tuple[tuple[str, str, Tensor], ...]:
    return tuple((name, dtype_name(buffer.dtype), buffer) for name, buffer in checkpoint_buffers(module).items())
