"""What does a run leave that is cut off anywhere? Its writes, cut and damaged, read again.

    python -m tests.record_cuts [--points 10000] [--mutations 1000] [--json FILE]

A short run's writes to its swap file, and its records, are logged in their order. A point is a moment of that log, and
what a drive may have of it then: all that had ended before (a killed process), or all that was flushed (power), and of
the rest any sectors, in any order, a record cut anywhere. What is there is read as a killed run: it must be the state
behind one of the last two steps, byte for byte. A mutation changes what a whole run has left: a block that is torn, of
an earlier time, or of another place, or a single byte of any file. It must be found, or change nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import infinity
from infinity.checkpoint import records
from infinity.checkpoint.records import KilledRun, SwapSource, killed_runs
from infinity.errors import CheckpointError, TransferError
from infinity.memory.partition import State
from infinity.memory.tiers.nvme import RECORD_SUFFIXES, RUN_SUFFIX, NvmeTier
from tests.support.models import MLP, vector_batch

STEPS = 12
SECTOR, BLOCK = 512, 4096


@dataclass
class Log:
    """What a run has written. events: ("write", offset, bytes), ("record", suffix, bytes) or ("flush",), in order."""

    name: str = ""
    nbytes: int = 0
    run: bytes = b""
    events: list[tuple[Any, ...]] = field(default_factory=list)
    # By version: the digest of all values, and the step.
    states: dict[int, str] = field(default_factory=dict)


def logged(folder: Path, *, every_step: str, checksum: Any, params: str = "nvme") -> Log:
    """Train, and return what was written."""
    log, submit, put, sync = Log(), NvmeTier._submit_piece, records._put, NvmeTier.sync
    engines: list[Any] = []

    def logging_submit(tier: NvmeTier, piece: Any, part: torch.Tensor, *, write: bool, priority: int) -> Any:
        if write:
            log.events.append(("write", piece.offset, part.numpy().tobytes()))
        return submit(tier, piece, part, write=write, priority=priority)

    def logging_put(path: Path, data: bytes, *, sync: bool) -> None:
        put(path, data, sync=sync)
        if path.suffix == RUN_SUFFIX:
            log.name, log.run = path.stem, data
            return
        moving = [each for each in engines[0].store.saved if each.state is State.WRITING]
        assert not moving, f"a record was begun while {moving[0].key} was being written"
        log.events.append(("record", path.suffix, data))
        if sync:
            log.events.append(("flush",))

    def logging_sync(tier: NvmeTier) -> None:
        sync(tier)
        log.events.append(("flush",))

    torch.manual_seed(0)
    nvme = str(folder / "nvme")
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0, "check_grad_overflow": False, "aio": {"checksum": checksum},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 300,
            "offload_optimizer": {"device": "nvme", "nvme_path": nvme},
            "offload_param": {"device": params, "nvme_path": nvme},
        },
        "checkpoint": {"path": str(folder / "checkpoints"), "every_step": every_step},
    }  # fmt: skip
    with ExitStack() as stack:
        for place, name, stand_in in (
            (NvmeTier, "_submit_piece", logging_submit), (NvmeTier, "sync", logging_sync),
            (records, "_put", logging_put),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(place, name, stand_in))
        engine = infinity.initialize(model=MLP(hidden=32), config=config)[0]
        engines.append(engine)
        for step in range(STEPS):
            engine.backward(engine(**vector_batch(0, step)))
            engine.step()
        engine.synchronize()
        log.nbytes = engine.store.swap_files.nbytes
        engine.close()
    with Place(log) as place_of_log:
        for at in [at for at, event in enumerate(log.events) if event[0] == "record"]:
            found = place_of_log.recover(*replayed(log, at + 1))
            log.states[found[0]] = found[1]
    return log


def replayed(log: Log, count: int) -> tuple[bytearray, dict[str, bytes]]:
    """Return the swap file and the records after so many events."""
    image, beside = bytearray(log.nbytes), dict[str, bytes]()
    for kind, *rest in log.events[:count]:
        if kind == "write":
            offset, data = rest
            image[offset : offset + len(data)] = data
        elif kind == "record":
            beside[rest[0]] = rest[1]
    return image, beside


class Place:
    """A folder in which a run lies as it may have been left. Used as a context."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._stack = ExitStack()

    def __enter__(self) -> Place:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="record-cuts-")))
        self._path = self._folder / f"{self._log.name}.bin"
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def recover(
        self, image: bytes, beside: dict[str, bytes], run: bytes | None = None, *, values: bool = True
    ) -> tuple[int, str]:
        """Return (version, digest of all values) of what is there; raise what reading it raises. values: read them."""
        self._path.write_bytes(image)
        self._path.with_suffix(RUN_SUFFIX).write_bytes(self._log.run if run is None else run)
        for suffix in RECORD_SUFFIXES:
            at = self._path.with_suffix(suffix)
            at.unlink(missing_ok=True)
            if suffix in beside:
                at.write_bytes(beside[suffix])
        (killed,) = killed_runs(self._folder) or (None,)
        if killed is None:
            return 0, ""
        version = max(killed.records)
        return version, digest_of(killed, version) if values else ""


def digest_of(killed: KilledRun, version: int) -> str:
    """The digest of all values of a record."""
    run, record, digest = killed.run, killed.records[version], hashlib.sha256()
    with killed.opened() as tier:
        source = SwapSource(run, record, tier)
        for each in run.partitions:
            with source.lend(each.key) as lent:
                assert lent.buffer is not None
                digest.update(lent.buffer.numpy().tobytes())
    digest.update(json.dumps(record.engine, sort_keys=True).encode())
    return digest.hexdigest()


def cut(log: Log, drawn: random.Random, *, power: bool) -> tuple[bytearray, dict[str, bytes], int]:
    """Return what a drive may have at a moment, and the version of the last record that it must have."""
    # Often in the middle of a record, of which there are few among the writes.
    written = [at for at, event in enumerate(log.events, 1) if event[0] == "record"]
    at = drawn.choice(written) if drawn.random() < 0.25 else drawn.randrange(1, len(log.events) + 1)
    # What has ended, or was flushed, is there: writes end before a record is begun.
    firm = 0
    for index, (kind, *_) in enumerate(log.events[: at - 1]):
        if kind == "flush" or (kind == "record" and not power):
            firm = index + 1
    if log.events[at - 1][0] == "record" and not power:
        # It is begun once all writes before it have ended.
        firm = at - 1
    image, beside = replayed(log, firm)
    version = sum(kind == "record" for kind, *_ in log.events[:firm])
    rest = log.events[firm:at]
    if power:
        drawn.shuffle(rest)
    for kind, *more in rest:
        if kind == "write":
            offset, data = more
            for begin in range(0, len(data), SECTOR):
                if drawn.random() < 0.5:
                    sector = data[begin : begin + SECTOR]
                    image[offset + begin : offset + begin + len(sector)] = sector
        elif kind == "record":
            suffix, data = more
            old = beside.get(suffix, b"")
            kept = drawn.choice([0, len(data), drawn.randrange(len(data) + 1)])
            beside[suffix] = (data[:kept] + old[kept:]) if drawn.random() < 0.5 else data[:kept]
    return image, beside, version


def try_cuts(log: Log, points: int, seed: int, *, power: bool) -> Iterator[str]:
    """Yield how each point went: "same" or "next", the record that must be there or one after it; or what is wrong."""
    drawn = random.Random(seed)
    with Place(log) as place:
        for _ in range(points):
            image, beside, version = cut(log, drawn, power=power)
            try:
                found, digest = place.recover(image, beside)
            except CheckpointError as error:
                # Before the first record is whole there is nothing to go on from.
                yield "none" if version == 0 else f"wrong: {error}"
                continue
            if found not in (version, version + 1) or (found and log.states[found] != digest):
                yield f"wrong: version {found} where {version} must be there"
            else:
                yield "same" if found == version else "next"


def mutations(log: Log, drawn: random.Random) -> Callable[[bytearray, dict[str, bytes]], bytes]:
    """Draw a change of what is left; it returns the run's file."""
    kind = drawn.choice(["torn", "stale", "foreign", "byte", "byte of a record", "byte of the run"])
    earlier, _ = replayed(log, drawn.randrange(len(log.events) // 2))

    def change(image: bytearray, beside: dict[str, bytes]) -> bytes:
        at = drawn.randrange(log.nbytes // BLOCK) * BLOCK
        if kind == "torn":
            image[at + BLOCK // 2 : at + BLOCK] = earlier[at + BLOCK // 2 : at + BLOCK]
        elif kind == "stale":
            image[at : at + BLOCK] = earlier[at : at + BLOCK]
        elif kind == "foreign":
            other = drawn.randrange(log.nbytes // BLOCK) * BLOCK
            image[at : at + BLOCK] = image[other : other + BLOCK]
        elif kind == "byte":
            image[at + drawn.randrange(BLOCK)] ^= 1 << drawn.randrange(8)
        elif kind == "byte of a record":
            suffix = drawn.choice(RECORD_SUFFIXES)
            beside[suffix] = _flipped(beside[suffix], drawn)
        else:
            return _flipped(log.run, drawn)
        return log.run

    return change


def _flipped(data: bytes, drawn: random.Random) -> bytes:
    at = drawn.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << drawn.randrange(8)]) + data[at + 1 :]


def try_mutations(log: Log, count: int, seed: int) -> Iterator[str]:
    """Yield how each went: "found", "no matter" (nothing of the state lies there), "older", or what is wrong."""
    drawn = random.Random(seed)
    last = max(log.states)
    with Place(log) as place:
        for _ in range(count):
            image, beside = replayed(log, len(log.events))
            run = mutations(log, drawn)(image, beside)
            try:
                version, digest = place.recover(image, beside, run)
            except (CheckpointError, TransferError):
                yield "found"
                continue
            if log.states.get(version) != digest:
                yield f"wrong: version {version} has other values"
            else:
                yield "no matter" if version == last else "older"


def try_records(log: Log, every: int = 1) -> Iterator[str]:
    """Cut the newest record at every byte, or at one in so many, then both."""
    image, beside = replayed(log, len(log.events))
    last = max(log.states)
    newest, older = (RECORD_SUFFIXES[version % 2] for version in (last, last - 1))
    with Place(log) as place:
        for at in range(0, len(beside[newest]), every):
            # Nothing is written behind the newest: the values of the older one are still there.
            whole = at % (97 * every) == 0
            version, digest = place.recover(image, {**beside, newest: beside[newest][:at]}, values=whole)
            right = version == last - 1 and digest == (log.states[version] if whole else "")
            yield "older" if right else f"wrong: version {version}"
            if whole:
                try:
                    place.recover(image, {newest: beside[newest][:at], older: beside[older][:-1]})
                    yield "wrong: a state of two records that are cut"
                except CheckpointError:
                    yield "found"


def main() -> None:
    """Try it all, print and record what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for every_step, params in (("process", "nvme"), ("process", "cpu"), ("power", "nvme"), ("power", "cpu")):
            log = logged(Path(folder) / f"{every_step}-{params}", every_step=every_step, checksum=True, params=params)
            power = every_step == "power"
            for name, outcomes in (
                ("cuts", try_cuts(log, given.points // 4, 1, power=power)),
                ("mutations", try_mutations(log, given.mutations // 4, 2)), ("records", try_records(log)),
            ):  # fmt: skip
                began = time.monotonic()
                counts = Counter(outcomes)
                found[f"{name}, {every_step}, parameters on {params}"] = dict(counts)
                print(f"{name}, {every_step}, {params}: {dict(counts)}, {time.monotonic() - began:.0f} s", flush=True)
    wrong = sum(count for counts in found.values() for what, count in counts.items() if what.startswith("wrong"))
    print(f"{sum(sum(counts.values()) for counts in found.values())} tried, {wrong} wrong")
    if given.json:
        outcome = {"date": date.today().isoformat(), "command": "python -m tests.record_cuts", "found": found}
        given.json.write_text(json.dumps(outcome, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
