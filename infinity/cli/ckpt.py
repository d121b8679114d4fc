"""`infinity ckpt`: inspect a checkpoint, verify it, compare two, or make one of a killed run's swap files.

    infinity ckpt inspect CHECKPOINT [--tag TAG] [--tensors] [--json]
    infinity ckpt verify CHECKPOINT [--tag TAG]
    infinity ckpt diff CHECKPOINT OTHER [--all]
    infinity ckpt from-swap FOLDER [FOLDER ...] OUT [--tag TAG] [--path PATH]
    infinity ckpt killed FOLDER [FOLDER ...] [--remove RUN]

CHECKPOINT is the folder that was passed to `save_checkpoint` (the command uses the tag in `latest`, or --tag), or the
folder of one checkpoint in it; `inspect` and `verify` read DeepSpeed's, too. `infinity-ckpt` is the same command. Exit
codes: 0 success; 1 verify found damage, or diff a difference; 2 there is no answer, for example because the folder has
no checkpoint.

FOLDER is what `nvme_path` named in a run with `checkpoint.every_step`; with several nodes, that of each. OUT gets a
checkpoint that loads with any number of ranks, stage and tiers. `killed` lists the runs that were killed and have left
swap files in these folders, beside the newest checkpoint of each; --remove removes the files of one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.base.sizes import format_bytes
from infinity.checkpoint.deepspeed.checkpoint import DeepSpeedCheckpoint, read_deepspeed, verify_deepspeed
from infinity.checkpoint.format import MANIFEST, Manifest, RankIndex, TensorInfo, check_files, complete, read_manifest
from infinity.checkpoint.inspect import Comparison, compare_checkpoints, verify
from infinity.checkpoint.records import left_runs, make_checkpoint, newest, remove_run
from infinity.cli.export import add_checkpoint, locate, theirs
from infinity.cli.terminal import Meter, format_table, say
from infinity.errors import CheckpointError, TransferError

# The most changes that `diff` lists without --all.
_SHOWN_MAX = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    commands = parser.add_subparsers(dest="verb", required=True, metavar="inspect|verify|diff|from-swap|killed")
    inspecting = commands.add_parser("inspect", help="print the contents of a checkpoint")
    inspecting.add_argument("--tensors", action="store_true", help="list every tensor")
    inspecting.add_argument("--json", action="store_true", help="print JSON")
    verifying = commands.add_parser("verify", help="read every byte and compare it with the checksums")
    for each in (inspecting, verifying):
        add_checkpoint(each)
    differing = commands.add_parser("diff", help="compare two checkpoints")
    differing.add_argument("checkpoint", metavar="CHECKPOINT")
    differing.add_argument("other", metavar="OTHER")
    differing.add_argument("--all", action="store_true", help="list every change")
    making = commands.add_parser("from-swap", help="make a checkpoint of the swap files that a killed run has left")
    making.add_argument("folders", metavar="FOLDER", nargs="+", help="that nvme_path named; of each node")
    making.add_argument("out", metavar="OUT", help="the folder of checkpoints, as of save_checkpoint")
    making.add_argument("--tag", help="of the checkpoint (default: global_step and the number)")
    making.add_argument("--path", help="the run's checkpoint.path, where several runs were killed")
    listing = commands.add_parser("killed", help="list the killed runs that have left swap files, or remove one's")
    listing.add_argument("folders", metavar="FOLDER", nargs="+", help="that nvme_path named; of each drive and node")
    listing.add_argument("--remove", metavar="RUN", help="remove the swap files of this run")


def run(given: argparse.Namespace) -> int:
    """Run the subcommand; return 0, or 1 for damage or a difference.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    if given.verb == "diff":
        return _diff(given)
    if given.verb == "from-swap":
        path = None if given.path is None else str(Path(given.path).absolute())
        made = make_checkpoint([*map(Path, given.folders)], Path(given.out), tag=given.tag, path=path)
        folders = " ".join(given.folders)
        say(f"{made}: made of the swap files in {folders}, which stay: `infinity ckpt killed {folders}` removes them")
        return 0
    if given.verb == "killed":
        return _killed([*map(Path, given.folders)], given.remove)
    folder = locate(given.checkpoint, given.tag)
    if theirs(folder):
        return _verify_deepspeed(folder) if given.verb == "verify" else _inspect_deepspeed(folder, given)
    if given.verb == "verify":
        return _verify(folder)
    manifest = read_manifest(folder)
    facts = checkpoint_summary(manifest, check_files(folder, manifest))
    if given.json:
        say(json.dumps({"folder": str(folder), **facts}, indent=2))
    else:
        say(show(folder, facts, tensors=given.tensors))
    return 0


def _killed(folders: Sequence[Path], removed: str | None) -> int:
    """List what killed runs have left in folders for swap files, or remove what one has left there."""
    runs, damaged = left_runs([folder.absolute() for folder in folders])
    where = " ".join(map(str, folders))
    if removed is not None:
        if removed not in runs:
            here = f"Name one that has: {', '.join(runs)}" if runs else "No killed run has"
            raise CheckpointError(folders[0], f"run {removed} has left nothing here that can be read", here)
        gone = [remove_run(each.run.files) for each in runs[removed]]
        say(f"removed {format_bytes(sum(gone))} of run {removed}, of {len(gone)} rank(s)")
        return 0
    rows = [["run", "checkpoint.path", "ranks", "step", "bytes", "newest checkpoint"]]
    for run, ranks in runs.items():
        first, versions = ranks[0].run, newest([each.records for each in ranks])
        size = int(first.plan["world_size"])
        whole = versions is not None and len(ranks) == size
        saved = [int(manifest.engine["counters"]["global_steps"]) for _, manifest in complete(first.path)]
        rows.append([
            run, first.path, f"{len(ranks)} of {size}",
            f"{ranks[0].records[versions].step:,}" if whole and versions is not None else "none that all ranks have",
            format_bytes(sum(each.nbytes for each in ranks)), f"step {max(saved):,}" if saved else "-",
        ])  # fmt: skip
    say(format_table(rows, right=False) if runs else f"no killed run has left swap files in {where}")
    for error in damaged:
        say(f"DAMAGED {error}")
    if runs:
        say(f"\n`infinity ckpt from-swap {where} OUT` makes a checkpoint, `infinity ckpt killed {where} --remove RUN` "
            "removes the files of a run")  # fmt: skip
    return 0


def checkpoint_summary(manifest: Manifest, indexes: Sequence[RankIndex]) -> dict[str, Any]:
    """Return the contents of a checkpoint as JSON values.

    indexes: the index of every rank that wrote the checkpoint.
    """
    nbytes: dict[str, int] = {}
    for index in indexes:
        for array in index.arrays:
            nbytes[array.kind] = nbytes.get(array.kind, 0) + array.nbytes
    numel = _numel(manifest.tensors)
    files = {name: size for index in indexes for name, size in index.files.items()}
    return {
        "tag": manifest.tag, "id": manifest.id, "time": manifest.time, "versions": manifest.versions,
        "plan": manifest.plan, "counters": manifest.engine["counters"],
        "optimizer": manifest.engine["optimizer"]["kind"], "module": manifest.module.get("class"), "numel": numel,
        "bytes": nbytes, "ranks": len(indexes), "files": files, "tied": manifest.tied,
        "tensors": _tensors(manifest.tensors),
    }  # fmt: skip


def _numel(infos: Mapping[str, TensorInfo]) -> dict[str, int]:
    return {
        "trained": sum(info.numel for info in infos.values() if info.trainable),
        "frozen": sum(info.numel for info in infos.values() if not info.trainable and "buffer" not in info.kinds),
    }


def _tensors(infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        name: {"shape": list(info.shape), "dtype": info.dtype, "trained": info.trainable, "kinds": list(info.kinds)}
        for name, info in infos.items()
    }


def show(folder: Path, facts: dict[str, Any], *, tensors: bool) -> str:
    """Return the facts of `checkpoint_summary` as tables; `tensors` adds one row a tensor."""
    plan, counters = facts["plan"], facts["counters"]
    rows = [
        ["checkpoint", str(folder)], ["saved", f"{facts['time']}, infinity {facts['versions']['infinity']}"],
        ["model", f"{facts['module']}, {facts['numel']['trained']:,} parameters trained, "
                  f"{facts['numel']['frozen']:,} frozen"],
        ["run", f"{counters['global_steps']:,} steps ({counters['skipped_steps']:,} skipped), "
                f"{counters['global_samples']:,} samples, {facts['optimizer']}"],
        ["plan", f"stage {plan['stage']}, {plan['world_size']} rank(s){_axes(plan)}, {plan['compute_dtype']}"],
        ["files", f"{len(facts['files'])} of {facts['ranks']} rank(s), {format_bytes(sum(facts['files'].values()))}"],
    ]  # fmt: skip
    return "\n".join([format_table(rows, right=False), "", *_tables(facts, tensors=tensors)])


def _axes(plan: Mapping[str, Any]) -> str:
    sizes = {"pipeline": plan.get("pp", 1), "data": plan.get("dp", plan["world_size"]), "tensor": plan.get("tp", 1)}
    others = [name for name, size in sizes.items() if size > 1 and name != "data"]
    axes = ", ".join(f"{name} {size}" for name, size in sizes.items() if name in (*others, "data"))
    return f" ({axes})" if others else ""


def _tables(facts: Mapping[str, Any], *, tensors: bool) -> list[str]:
    kinds = [[kind, f"{size:,}"] for kind, size in sorted(facts["bytes"].items())]
    lines = [format_table([["kind", "bytes"], *kinds])]
    if tensors:
        header = ["tensor", "shape", "dtype", "trained", "kinds"]
        body = [
            [name, "x".join(map(str, info["shape"])) or "-", info["dtype"], "yes" if info["trained"] else "no",
             ", ".join(info["kinds"]) or "none"]
            for name, info in facts["tensors"].items()
        ]  # fmt: skip
        lines += ["", format_table([header, *body], right=False)]
    return lines


def _verify(folder: Path) -> int:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        say(f"DAMAGED {MANIFEST}: {error.what}")
        return 1
    count = 0
    with Meter("verify") as meter:
        for damage in verify(folder, manifest, meter.advance):
            meter.end()
            say(f"DAMAGED {damage}")
            count += 1
    if count:
        say(f"{folder}: {count} finding(s); {format_bytes(meter.done)} are whole")
        return 1
    say(f"{folder}: whole; {len(manifest.tensors):,} tensors, {meter.summary()}")
    return 0


def _inspect_deepspeed(folder: Path, given: argparse.Namespace) -> int:
    facts = deepspeed_summary(read_deepspeed(folder))
    if given.json:
        say(json.dumps({"folder": str(folder), **facts}, indent=2))
        return 0
    counters, numel = facts["counters"], facts["numel"]
    rows = [
        ["checkpoint", str(folder)],
        ["saved", f"DeepSpeed {facts['version']}{', universal' if facts['universal'] else ''}"],
        ["model", f"{numel['trained']:,} parameters trained, {numel['frozen']:,} frozen"],
        ["run", f"{counters['global_steps']:,} steps ({counters['skipped_steps']:,} skipped), "
                f"{counters['global_samples']:,} samples, {facts['optimizer'] or 'no optimizer states'}"],
        ["plan", f"stage {facts['stage']}, {facts['ranks']} rank(s)"],
        ["files", f"{len(facts['files'])}, {format_bytes(sum(facts['files'].values()))}"],
        ["client_state", ", ".join(facts["client_state"]) or "-"],
    ]  # fmt: skip
    say("\n".join([format_table(rows, right=False), "", *_tables(facts, tensors=given.tensors)]))
    return 0


def deepspeed_summary(saved: DeepSpeedCheckpoint) -> dict[str, Any]:
    """Return the contents of a checkpoint of DeepSpeed as JSON values."""
    return {
        "format": "DeepSpeed", "tag": saved.folder.name, **saved.facts, "counters": saved.engine["counters"],
        "optimizer": saved.engine["optimizer"]["kind"], "numel": _numel(saved.tensors), "bytes": saved.layout.nbytes(),
        "tied": dict(saved.tied), "client_state": sorted(saved.client_state), "tensors": _tensors(saved.tensors),
    }  # fmt: skip


def _verify_deepspeed(folder: Path) -> int:
    """Read the tensors of all files, and compare them with the CRC-32 that torch.save keeps of each."""
    try:
        saved = read_deepspeed(folder)
        total = saved.stored_nbytes
        with Meter("verify") as meter:
            done = 0
            for nbytes in verify_deepspeed(saved):
                done += nbytes
                meter.advance(done, total)
    except (CheckpointError, TransferError) as error:
        say(f"DAMAGED {error}")
        return 1
    unknown = sum(record.crc32 is None for file in saved.files for record in file.storages)
    without = f"; {unknown:,} records have no checksum" if unknown else ""
    say(f"{folder}: complete, and every checksum matches; {len(saved.tensors):,} tensors, {meter.summary()}{without}")
    return 0


def _diff(given: argparse.Namespace) -> int:
    with Meter("diff", unit="elements") as meter:
        folders = locate(given.checkpoint), locate(given.other)
        for folder in folders:
            if theirs(folder):
                raise CheckpointError(
                    folder, "it is DeepSpeed's, and diff compares checkpoints of infinity",
                    "Load it into an engine and save it, then compare that",
                )  # fmt: skip
        first, second = ((folder, read_manifest(folder)) for folder in folders)
        found = compare_checkpoints(first, second, meter.advance)
    say(show_difference(found, everything=given.all))
    return 0 if found.same else 1


def show_difference(found: Comparison, *, everything: bool = False) -> str:
    """Return a comparison as tables; `everything` lists all changes."""
    lines = []
    for title, names in (("added", found.added), ("removed", found.removed), ("another shape", found.reshaped)):
        lines += [f"{title}: {name}" for name in names]
    rows = [["kind", "tensors", "changed", "largest difference"]]
    for kind, count in found.compared.items():
        changes = [change for change in found.changes if change.kind == kind]
        largest = max((change.largest for change in changes), default=0.0)
        rows.append([kind, f"{count:,}", f"{len(changes):,}", f"{largest:.3g}"])
    if len(rows) > 1:
        lines += [format_table(rows)]
    kinds = list(found.compared)
    changes = sorted(found.changes, key=lambda change: (kinds.index(change.kind), -change.largest))
    rows = [
        [change.tensor, change.kind, f"{change.changed:,} of {change.numel:,}", f"{change.largest:.3g}"]
        for change in changes
    ]
    lines += _listed(["changed", "kind", "elements", "largest difference"], rows, everything=everything)
    lines += _listed(["kept", "first", "second"], [list(row) for row in found.unlike], everything=everything)
    rows = [[name, _short(a), _short(b)] for name, a, b in found.counters]
    lines += _listed(["of the run", "first", "second"], rows, everything=everything)
    return "\n".join(lines) if not found.same else "\n".join([*lines, "nothing differs"])


def _listed(header: list[str], rows: list[list[str]], *, everything: bool) -> list[str]:
    """Return the lines of a table of the first rows, or of all; an empty list if there are no rows."""
    if not rows:
        return []
    shown = rows if everything else rows[:_SHOWN_MAX]
    more = [f"and {len(rows) - len(shown)} more (--all)"] if len(rows) > len(shown) else []
    return ["", format_table([header, *shown]), *more]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
