"""`infinity bench`: measure this machine for at most a minute, and write a hardware profile for configurations and the
estimator.

    infinity bench --drive FOLDER [--drive FOLDER ...] [--seconds 60] [--output profile.json]

Measurement of a drive's bandwidth through infinity's I/O queue, over block sizes and depths.

The measured file is unlinked right after its creation, so that it disappears however the process ends. It has one
gibibyte, or a quarter of the free space if that is less. It is written before it is read, because reads of blocks that
were never written do not reach the drive.

Measurement of memory copies, the optimizer and a transformer block for a hardware profile.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.cli.engine_facts import processor
from infinity.cli.terminal import TaskProgress, format_table, say
from infinity.errors import ConfigError
from infinity.memory.folder import FolderInfo, look
from infinity.memory.ledger import Ledger
from infinity.memory.partition import DTYPES
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import HostMemory
from infinity.ops.adam import adam_step, grad_stats, set_threads, shutdown_threads
from infinity.ops.aio import File, Queue, Request
from infinity.ops.cores import allowed_cores, thread_count
from infinity.ops.rules import AdamHyper, Piece
from infinity.plan.hardware import ASSUMED, Compute, Drive, HardwareProfile, load_profile, save_profile

FILE_NBYTES = 1 << 30
_FILE_NBYTES_MIN = 64 << 20
# A request is as large as a typical sub-group or layer partition; the queue cuts it into blocks.
_REQUEST_NBYTES = 16 << 20
_REQUESTS = 4
# (bytes of a block, blocks in flight), in the order in which they are tried.
SETTINGS = ((256 << 10, 32), (512 << 10, 16), (512 << 10, 32), (1 << 20, 32), (2 << 20, 16))
_PATTERNS = ("read", "write", "mixed")
# Shares of a drive's time: writing the file, searching for the best setting. The rest measures the best setting.
_FILL_SHARE, _SEARCH_SHARE = 0.15, 0.4


def measure_drive(
    folder: str | os.PathLike[str], *, seconds: float, endurance_nbytes: int | None = None,
    tell: Callable[[str], None] = lambda text: None, settings: tuple[tuple[int, int], ...] = SETTINGS,
) -> Drive:  # fmt: skip
    """Measure the drive of `folder` for about `seconds`.

    Arguments:
        endurance_nbytes: rated endurance, copied into the result.
        tell: receives a line of text for each phase.
        settings: (bytes of a block, blocks in flight) to try; a slow drive is measured at the first few only.

    Raises:
        ConfigError: `folder` does not exist, or the drive cannot be measured.
    """
    path = Path(folder)
    check_drive(path)
    try:
        return _measure(path, seconds, endurance_nbytes, tell, settings)
    except OSError as error:
        raise ConfigError(f"{path} cannot be measured: {error.strerror or error}") from error


def check_drive(folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError if `folder` does not exist, is not writable or has too little free space for a measurement."""
    path = Path(folder)
    if not path.is_dir():
        what = "is no folder" if path.exists() else "there is no such folder"
        raise ConfigError(f"{path}: {what}; name one that is on the drive to measure")
    place = look(path)
    if not place.writable:
        raise ConfigError(f"{path}: the folder cannot be written to; name another, or change its owner")
    if _file_nbytes(place) < _FILE_NBYTES_MIN:
        raise ConfigError(
            f"{path}: {place.free_nbytes / 1e6:.0f} MB are free, and a measurement takes a quarter of that, at least "
            f"{_FILE_NBYTES_MIN / 1e6:.0f} MB: free some space, or choose another folder"
        )


def _file_nbytes(place: FolderInfo) -> int:
    return min(FILE_NBYTES, place.free_nbytes // 4) // _REQUEST_NBYTES * _REQUEST_NBYTES


def _measure(
    path: Path, seconds: float, endurance_nbytes: int | None, tell: Callable[[str], None],
    settings: tuple[tuple[int, int], ...],
) -> Drive:  # fmt: skip
    place = look(path)
    nbytes = _file_nbytes(place)
    ends = time.monotonic() + seconds
    file = _nameless(path, nbytes)
    with file:
        # Random bytes, because some drives compress.
        buffer = page_aligned(_REQUESTS * _REQUEST_NBYTES)
        buffer.random_(0, 256, generator=torch.Generator().manual_seed(0))
        tell(f"{path}: writing {nbytes / 1e9:.1f} GB to measure on")
        nbytes = _fill(file, nbytes, buffer, _FILL_SHARE * seconds)
        turn = _SEARCH_SHARE * seconds / (len(settings) * len(_PATTERNS))
        found: dict[tuple[int, int], tuple[float, float, float]] = {}
        searched = time.monotonic() + _SEARCH_SHARE * seconds
        for setting in settings:
            if found and time.monotonic() + turn > searched:
                # A slow drive leaves no time for the other settings.
                break
            tell(f"{path}: blocks of {setting[0] >> 10} KiB, {setting[1]} in flight")
            found[setting] = _rates(file, nbytes, buffer, setting, turn)
        best = max(found, key=lambda setting: 1 / sum(1 / rate for rate in found[setting]))
        tell(f"{path}: once more with the best, {best[0] >> 10} KiB and {best[1]} in flight")
        rest = max(ends - time.monotonic(), 0.0) / len(_PATTERNS)
        read, write, mixed = _rates(file, nbytes, buffer, best, rest)
    return Drive(
        folder=os.path.abspath(path), read_rate=read, write_rate=write, mixed_rate=mixed, block_nbytes=best[0],
        queue_depth=best[1], direct=file.direct, file_system=place.file_system, model=place.model,
        capacity_nbytes=place.capacity_nbytes, endurance_nbytes=endurance_nbytes,
    )  # fmt: skip


def _nameless(folder: Path, nbytes: int) -> File:
    """Return a new file of `nbytes` without a name, which the kernel removes with its last descriptor."""
    path = folder / f".infinity-bench-{uuid.uuid4().hex}"
    try:
        # Create it empty and reserve the space after the unlink, because that may take long.
        empty = File.create(path, 0)
    finally:
        path.unlink(missing_ok=True)
    os.posix_fallocate(empty.descriptors.buffered, 0, nbytes)
    return File(empty.path, nbytes, empty.descriptors, writable=True)


def _fill(file: File, nbytes: int, buffer: Tensor, seconds: float) -> int:
    """Write `nbytes` from the start of the file, for at most `seconds`; return the number of bytes written."""
    ends = time.monotonic() + seconds
    with Queue() as queue:
        for offset in range(0, nbytes, buffer.nbytes):
            queue.write(file, offset, buffer[: min(buffer.nbytes, nbytes - offset)]).wait()
            if time.monotonic() > ends and offset + buffer.nbytes < nbytes:
                return offset + buffer.nbytes
    return nbytes


def _rates(
    file: File, nbytes: int, buffer: Tensor, setting: tuple[int, int], seconds: float
) -> tuple[float, float, float]:
    """Return the bandwidths of reads, of writes and of both together, in bytes a second."""
    block_nbytes, depth = setting
    with Queue(depth=depth, block_nbytes=block_nbytes) as queue:
        queue.register(buffer)
        queue.register(file)
        read, write, mixed = (_drive_rate(queue, file, nbytes, buffer, pattern, seconds) for pattern in _PATTERNS)
    return read, write, mixed


def _drive_rate(queue: Queue, file: File, nbytes: int, buffer: Tensor, pattern: str, seconds: float) -> float:
    pieces = buffer.split(_REQUEST_NBYTES)
    in_flight: deque[Request] = deque()
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < seconds or count < 2:
        if len(in_flight) == len(pieces):
            in_flight.popleft().wait()
        write = pattern == "write" or (pattern == "mixed" and count % 2 == 1)
        submit = queue.write if write else queue.read
        # The mixed pattern reads one half of the file and writes the other.
        half = nbytes // 2 // _REQUEST_NBYTES * _REQUEST_NBYTES if pattern == "mixed" else nbytes
        offset = (count * _REQUEST_NBYTES) % half + (half if write and pattern == "mixed" else 0)
        in_flight.append(submit(file, offset, pieces[count % len(pieces)]))
        count += 1
    for request in in_flight:
        request.wait()
    return count * _REQUEST_NBYTES / (time.perf_counter() - began)


_COPY_NBYTES = 256 << 20
# About the elements of a sub-group that is stepped from NVMe.
_PIECE_NUMEL, _PIECES = 1 << 21, 16
_VOCABULARY = 32_000
# Enough blocks that their weights do not stay in a cache between passes.
_BLOCKS = 6
# Measuring n blocks and the head takes about as long as n * _PASSES_A_BLOCK + _PASSES_OF_HEAD passes of one block with
# few tokens.
_PASSES_A_BLOCK, _PASSES_OF_HEAD = 10, 28
_HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, adamw=True, bias_correction=True)


def repeat(body: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a call of `body`, over as many calls as fit into `seconds`.

    The first call may compile and allocate, so it counts only if no second call fits.
    """
    ends = time.perf_counter() + seconds
    taken: list[float] = []
    first = last = _timed(body)
    while time.perf_counter() + last <= ends:
        last = _timed(body)
        taken.append(last)
    return statistics.median(taken) if taken else first


def _timed(body: Callable[[], object]) -> float:
    began = time.perf_counter()
    body()
    return time.perf_counter() - began


def copy_rate(seconds: float) -> float:
    """Return the bandwidth of copies within CPU memory in bytes a second, measured for about `seconds`."""
    ends = time.perf_counter() + seconds
    # Larger than any cache, but small enough to be filled in a part of the time.
    nbytes = _COPY_NBYTES if seconds > 1 else _COPY_NBYTES // 4
    source, target = page_aligned(nbytes).fill_(1), page_aligned(nbytes)
    return nbytes / repeat(lambda: target.copy_(source), ends - time.perf_counter())


def adam_seconds(dtype: str, seconds: float) -> tuple[float, float]:
    """Return the seconds of an Adam step and of the gradient norm on the CPU, for one parameter of type `dtype`."""
    ends = time.perf_counter() + seconds
    pieces = [_piece(DTYPES[dtype])]
    # If allocation is slow, fewer pieces leave time for the measurement.
    while len(pieces) < _PIECES and time.perf_counter() < ends - 2 * seconds / 3:
        pieces.append(_piece(DTYPES[dtype]))
    numel = len(pieces) * _PIECE_NUMEL
    norm = repeat(lambda: [grad_stats([piece.grad]) for piece in pieces], (ends - time.perf_counter()) / 3)
    step = repeat(lambda: [adam_step([piece], step=1, grad_scale=1.0) for piece in pieces], ends - time.perf_counter())
    return step / numel, norm / numel


def _piece(dtype: torch.dtype) -> Piece:
    def make(kind: torch.dtype) -> Tensor:
        tensor = page_aligned(_PIECE_NUMEL * kind.itemsize).view(kind)
        # Filled, so that the kernel provides the pages before the first step.
        return tensor.fill_(1e-3) if kind.is_floating_point else tensor.zero_()

    return Piece(
        param=make(dtype), grad=make(dtype), exp_avg=make(torch.float32), exp_avg_sq=make(torch.float32),
        remainder=make(torch.int16) if dtype == torch.bfloat16 else None,
        master=make(torch.float32) if dtype == torch.float16 else None, hyper=_HYPER,
    )  # fmt: skip


class TransformerBlock(nn.Module):
    """A Llama block as model libraries write it in eager PyTorch: norms in fp32, rotary positions, SwiGLU."""

    def __init__(self, hidden: int, intermediate: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ParameterList(torch.ones(hidden, device="cpu") for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(hidden, hidden, bias=False, device="cpu") for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False, device="cpu") for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False, device="cpu")

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed = _rms_norm(x, self.norms[0])
        query, key, value = (
            linear(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        query, key = (part * cosine + _rotated(part) * sine for part in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        normed = _rms_norm(x, self.norms[1])
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def compute(dtype: str, device: Device, seconds: float) -> Compute:
    """Measure forward and backward of transformer blocks and of a language model's head for about `seconds`.

    Two numbers of tokens separate the rate from the time of each parameter that does not depend on the tokens, such as
    reading weights and writing gradients.
    """
    ends = time.perf_counter() + seconds
    large, kind = device.is_accelerator, DTYPES[dtype]
    # Typical widths for the device, because element-wise work and attention weigh less in wider models.
    hidden, intermediate, heads = (4096, 11008, 32) if large else (768, 2048, 12)
    positions, few, many = (1024, 1024, 8192) if large else (256, 256, 1024)
    blocks = nn.ModuleList()

    def passes(tokens: int, seconds: float) -> float:
        """Return the seconds of forward and backward through all blocks."""
        x = torch.randn(tokens // positions, positions, hidden, device=device.torch, dtype=kind)
        angles = torch.randn(2, positions, hidden // heads, device=device.torch).to(kind)

        def run() -> None:
            y = x
            for block in blocks:
                y = block(y, *angles)
            y.sum().backward()
            blocks.zero_grad(set_to_none=True)
            device.synchronize()

        return repeat(run, seconds)

    def add_block() -> None:
        blocks.append(TransformerBlock(hidden, intermediate, heads).to(device.torch, kind))

    def numel() -> int:
        return sum(param.numel() for param in blocks.parameters())

    def flops(tokens: int) -> float:
        return 3.0 * (2 * numel() + 4 * len(blocks) * positions * hidden) * tokens

    add_block()
    one = passes(few, seconds / 20)
    left = ends - time.perf_counter()
    fitting = int((left / one - _PASSES_OF_HEAD) / _PASSES_A_BLOCK)
    if fitting < 1:
        # A slow device leaves no time for the other measurements.
        return Compute(rate=flops(few) / one)
    while len(blocks) < min(fitting, _BLOCKS):
        add_block()
    taken = {tokens: passes(tokens, (ends - time.perf_counter()) / share) for tokens, share in ((few, 4), (many, 2))}
    found = fit_rates(numel(), {tokens: flops(tokens) for tokens in taken}, taken)
    head = repeat(_head(many, hidden, kind, device), ends - time.perf_counter())
    operations = 6 * many * hidden * _VOCABULARY
    beyond = head - operations / found.rate - hidden * _VOCABULARY * found.parameter_seconds
    return found.model_copy(update={"logit_seconds": max(beyond, 0.0) / (many * _VOCABULARY)})


def _head(tokens: int, hidden: int, dtype: torch.dtype, device: Device) -> Callable[[], None]:
    """Return a function that runs forward and backward of a language model's head with its loss in fp32."""
    # As small as trained weights, because tiny probabilities would be denormal numbers, which are slow.
    weight = torch.randn(_VOCABULARY, hidden, device=device.torch).mul_(hidden**-0.5).to(dtype).requires_grad_()
    x = torch.randn(tokens, hidden, device=device.torch, dtype=dtype, requires_grad=True)
    labels = torch.randint(_VOCABULARY, (tokens,), device=device.torch)

    def run() -> None:
        F.cross_entropy(F.linear(x, weight).float(), labels).backward()
        weight.grad = x.grad = None
        device.synchronize()

    return run


def fit_rates(numel: int, flops: dict[int, float], taken: dict[int, float]) -> Compute:
    """Fit the rate and the token-independent time of a parameter to two measurements.

    Arguments:
        numel: parameters of the measured blocks.
        flops: number of tokens -> floating-point operations.
        taken: number of tokens -> measured seconds.
    """
    few, many = min(taken), max(taken)
    slope = (taken[many] - taken[few]) / (flops[many] - flops[few])
    fixed = taken[few] - slope * flops[few]
    if slope <= 0 or fixed < 0:
        # Noise hides the token-independent part; only one rate is known.
        return Compute(rate=flops[many] / taken[many])
    return Compute(rate=1 / slope, parameter_seconds=fixed / numel)


def link_rates(device: Device, seconds: float) -> tuple[float, float, float]:
    """Return bandwidths in bytes a second: pinned CPU memory to the accelerator, back, and within its memory."""
    memory = HostMemory(device, pin=True, ledger=Ledger())
    host = memory.allocate(_COPY_NBYTES)
    source, target = (device.empty(_COPY_NBYTES, torch.uint8) for _ in range(2))

    def up() -> None:
        device.arrived(device.copy(source, host))

    def down() -> None:
        device.arrived(device.copy(host, source))

    def within() -> None:
        target.copy_(source)
        device.synchronize()

    try:
        up_rate, down_rate, within_rate = (_COPY_NBYTES / repeat(copy, seconds / 3) for copy in (up, down, within))
    finally:
        memory.close()
    return up_rate, down_rate, within_rate


MEASURED_DTYPES = ("fp32", "bf16", "fp16")
# Shares of the time limit: drives, a transformer block (in all dtypes), the optimizer (in all dtypes), copies, the
# processor's name. The rest is spare.
_DRIVE_SHARE, _COMPUTE_SHARE, _ADAM_SHARE, _COPY_SHARE, _NAME_SHARE = 0.5, 0.25, 0.06, 0.04, 0.05
# Time of a measurement if earlier ones have used up its share.
_SECONDS_MIN = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument(
        "--drive", action="append", metavar="FOLDER", help="a folder on a drive to measure; again for each drive"
    )
    parser.add_argument("--tbw", action="append", type=float, metavar="TB",
                        help="terabytes that the drive is rated to take, in the order of --drive")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="time limit in all (default: 60)")
    parser.add_argument("--output", default="profile.json", metavar="FILE",
                        help="where the profile goes (default: profile.json)")  # fmt: skip


def run(given: argparse.Namespace) -> int:
    """Measure, write the profile and print it; return 0.

    Raises:
        ConfigError: an option has an invalid value, a drive cannot be measured, or the output path is not writable.
    """
    if given.seconds < 5:
        raise ConfigError(f"--seconds {given.seconds:g}: at least 5 are needed to measure anything")
    folders = given.drive or []
    if len(given.tbw or []) > len(folders):
        raise ConfigError(f"--tbw is given {len(given.tbw)} times for {len(folders)} drives: give it once a --drive")
    check_output(given.output)
    for folder in folders:
        check_drive(folder)
    began = time.monotonic()
    before = signal.signal(signal.SIGTERM, _terminated)
    progress = TaskProgress()
    try:
        profile = measure(folders, seconds=given.seconds, endurance_tb=given.tbw or [], progress=progress)
    finally:
        progress.end()
        signal.signal(signal.SIGTERM, before)
    taken = time.monotonic() - began
    # Another process may have created a file at this path during the measurement.
    check_output(given.output)
    save_profile(profile, given.output)
    say(show(profile))
    if not folders:
        say("no drive was measured: name a folder on each with --drive")
    say(f'measured in {taken:.1f} s and written to {given.output}: set "hardware_profile" to it in a configuration')
    return 0


def check_output(path: str) -> None:
    """Raise ConfigError if a profile cannot be written to `path`, or would overwrite a file that is not a profile."""
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {Path(path).absolute().parent}")
    if os.path.lexists(path):
        try:
            load_profile(path)
        except ConfigError:
            raise ConfigError(
                f"--output {path}: what is there is no profile and is not overwritten; name another file"
            ) from None


def measure(
    folders: Sequence[str], *, seconds: float, endurance_tb: Sequence[float] = (), progress: TaskProgress | None = None
) -> HardwareProfile:
    """Return a profile of this machine, measured in about `seconds`.

    Arguments:
        folders: a folder on each drive to measure.
        seconds: time limit of all measurements together; each one gets its share of it.
        endurance_tb: rated endurance of the drives in terabytes written, in the order of `folders`; may be shorter.
        progress: prints the current measurement.
    """
    began = time.monotonic()
    progress = progress or TaskProgress()
    progress.task("the processor")
    name = processor()
    device = Device.detect(0)
    cores = allowed_cores()
    set_threads(thread_count(len(cores)), cores)
    dtypes = MEASURED_DTYPES if device.is_accelerator else MEASURED_DTYPES[:2]
    found: dict[str, Compute] = {}
    for index, dtype in enumerate(dtypes):
        progress.task(f"a transformer block in {dtype}")
        # Deadlines count from the start, so that the next dtype gets the time that one leaves.
        ends = began + _NAME_SHARE * seconds + _COMPUTE_SHARE * seconds * (index + 1) / len(dtypes)
        found[dtype] = compute(dtype, device, max(ends - time.monotonic(), _SECONDS_MIN))
    steps: dict[str, tuple[float, float]] = {}
    for dtype in MEASURED_DTYPES:
        progress.task(f"the optimizer in {dtype}")
        steps[dtype] = adam_seconds(dtype, _ADAM_SHARE * seconds / len(MEASURED_DTYPES))
    progress.task("copies")
    copied = copy_rate(_COPY_SHARE * seconds / 2)
    links = link_rates(device, _COPY_SHARE * seconds / 2) if device.is_accelerator else (None,) * 3
    shutdown_threads()
    drives: list[Drive] = []
    for index, folder in enumerate(folders):
        endurance = int(endurance_tb[index] * 1e12) if index < len(endurance_tb) else None
        # On a slow machine the earlier measurements take longer than their shares.
        left = 0.95 * seconds - (time.monotonic() - began)
        share = min(_DRIVE_SHARE * seconds / len(folders), max(left / (len(folders) - index), _SECONDS_MIN))
        drives.append(measure_drive(folder, seconds=share, endurance_nbytes=endurance, tell=progress.task))
    return HardwareProfile(
        host=socket.gethostname(), date=time.strftime("%Y-%m-%d %H:%M"), processor=name,
        accelerator=str(device.torch) if device.is_accelerator else None, cores=thread_count(len(cores)),
        memory_nbytes=int(psutil.virtual_memory().total), drives=tuple(drives), copy_rate=copied,
        adam_seconds={dtype: step for dtype, (step, _) in steps.items()},
        norm_seconds={dtype: norm for dtype, (_, norm) in steps.items()}, compute=found,
        up_rate=links[0], down_rate=links[1], device_copy_rate=links[2], network_rate=ASSUMED.network_rate,
        assumptions=("network_rate",),
    )  # fmt: skip


def show(profile: HardwareProfile) -> str:
    """Return a profile as tables."""
    lines = [
        f"{profile.host}, {profile.date}: {profile.cores} cores of {profile.processor}, "
        f"{profile.memory_nbytes / 1e9:.1f} GB; accelerator: {profile.accelerator or 'none'}"
    ]
    if profile.drives:
        rows = [["drive", "read", "write", "both at once", "block", "in flight", "O_DIRECT"]]
        rows += [
            [drive.folder, _per_second(drive.read_rate), _per_second(drive.write_rate), _per_second(drive.mixed_rate),
             f"{drive.block_nbytes >> 10} KiB", str(drive.queue_depth), "yes" if drive.direct else "no"]
            for drive in profile.drives
        ]  # fmt: skip
        lines += ["", format_table(rows)]
    dtypes = list(profile.adam_seconds)
    known = [profile.compute.get(dtype) for dtype in dtypes]
    rows = [["", *dtypes]]
    rows.append(["transformer block", *(f"{each.rate / 1e9:,.0f} GFLOP/s" if each else "-" for each in known)])
    fixed = [each or Compute(rate=1) for each in known]
    rows.append(["  and for 1 B parameters", *(_seconds(each.parameter_seconds) for each in fixed)])
    rows.append(["  and for 1 B logits of the head", *(_seconds(each.logit_seconds) for each in fixed)])
    rows.append(["Adam step of 1 B parameters", *(_seconds(profile.adam_seconds[dtype]) for dtype in dtypes)])
    rows.append(["norm of 1 B gradients", *(_seconds(profile.norm_seconds.get(dtype)) for dtype in dtypes)])
    lines += ["", format_table(rows), "", f"copies within CPU memory {_per_second(profile.copy_rate)}"]
    if profile.up_rate is not None and profile.down_rate is not None:
        lines.append(f"CPU to accelerator {_per_second(profile.up_rate)}, back {_per_second(profile.down_rate)}")
    if profile.assumptions:
        rate = profile.network_rate
        network = "" if rate is None else f"the network between ranks, {_per_second(rate)}"
        told = [network if name == "network_rate" and network else name for name in profile.assumptions]
        lines.append(f"assumed, not measured: {', '.join(told)}")
    return "\n".join(lines)


def _seconds(each: float | None) -> str:
    """Return the seconds of a billion elements from those of one; "-" if they are 0 or unknown."""
    return f"{each * 1e9:.2f} s" if each else "-"


def _per_second(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s"


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
