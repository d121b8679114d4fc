"""The oracle: a case trained by plain torch in one process, and by an engine on any ranks, stage and tiers.

A `Case` is a model and how a micro-step makes losses of it. `reference(case, ...)` runs torch.optim.AdamW over all
ranks' data, `train(case, ...)` an engine on this rank's; both give a `Result`, and `difference` says how far apart two
are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.plan.types import Tier
from infinity.zero.unit import GatherState
from tests.support.models import VOCABULARY, Block, RMSNorm, token_batch

ADAM = {"lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.05}
# The states of the first steps are used, the orders that they record are followed, and a schedule comes to its end.
STEPS = 5
# Small enough to always clip: the norms of these models lie between 0.3 and 10.
CLIP = 0.05


class SmallModel(nn.Module):
    """A transformer with difficult parameters: tied weights, a frozen layer, parameters of one and of no element."""

    def __init__(self, dim: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.randn(32, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, 2, 24) for _ in range(layers))
        self.fixed = nn.Linear(dim, dim)
        self.fixed.requires_grad_(False)
        self.temperature = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.empty(0, dim))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[-1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x + self.fixed(x))
        x = torch.cat((x.flatten(0, 1), self.nothing)).unflatten(0, x.shape[:2])
        logits = self.head(x)[:, :-1] * self.temperature
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


class Case:
    """A training case; each subclass changes one thing. `call` is the engine or the plain module."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return SmallModel()

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return groups in which only matrices have weight decay."""
        trained = [param for param in model.parameters() if param.requires_grad]
        return [
            {"params": [param for param in trained if param.ndim > 1]},
            {"params": [param for param in trained if param.ndim <= 1], "weight_decay": 0.0, "lr": 1e-3},
        ]

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        """Return the losses of one micro-step; each has its own backward."""
        yield call(**token_batch(rank, micro, positions=8))

    def after_step(self, call: nn.Module, step: int, access: Access) -> list[Tensor]:
        """Act between two steps; return values that must agree between runs."""
        return []

    def before_step(self, call: nn.Module, micro: int, access: Access) -> list[Tensor]:
        """Act between a backward and its step; return values that must agree between runs."""
        return []


class OnDevice(Case):
    """A case whose batches come on the engine's device."""

    def losses(self, call: Any, rank: int, micro: int) -> Iterable[Tensor]:
        yield call(**{name: ids.to(call.device) for name, ids in token_batch(rank, micro, positions=8).items()})


class SplitBackward(Case):
    """A case whose micro-steps have two losses, with a backward for each."""

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        batch = token_batch(rank, micro, positions=8)
        for row in range(2):
            yield call(**{name: ids[row : row + 1] for name, ids in batch.items()}) / 2


@dataclass
class Result:
    """The result of a run: weights and moments by name, the norm of each step, and the values of the case."""

    master: dict[str, Tensor] = field(default_factory=dict)
    exp_avg: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)
    # Hash over everything of the run, 16-bit parameters included.
    digest: str = ""
    # Units released during training, and those that could have been.
    releases: int = 0
    cut_units: int = 0
    mismatches: int = 0


class Access:
    """How a case reads and changes what a parameter has; this is the Python fallback, `Tiered` the engine's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def params(self, call: nn.Module) -> dict[str, nn.Parameter]:
        return dict(call.named_parameters())

    def get(self, param: nn.Parameter, what: str) -> Tensor:
        if what in ("master", "grad"):
            value = param.detach() if what == "master" else param.grad
        else:
            value = self._optimizer.state[param][what]
        assert value is not None
        return value.clone()

    def set(self, param: nn.Parameter, what: str, value: Tensor) -> None:
        (param.data if what == "master" else self._optimizer.state[param][what]).copy_(value)

    @contextmanager
    def read(self, params: Any) -> Iterator[None]:
        yield

    @contextmanager
    def modify(self, params: Any) -> Iterator[None]:
        with torch.no_grad():
            yield


class Tiered(Access):
    """Access through the engine, to any tier and rank."""

    def __init__(self) -> None:
        pass

    def params(self, call: nn.Module) -> dict[str, nn.Parameter]:
        return dict(call.module.named_parameters())

    def get(self, param: nn.Parameter, what: str) -> Tensor:
        return getattr(infinity.state(param), what)

    def set(self, param: nn.Parameter, what: str, value: Tensor) -> None:
        setattr(infinity.state(param), what, value)

    def read(self, params: Any) -> Any:
        return infinity.read(params)

    def modify(self, params: Any) -> Any:
        return infinity.modify(params)


def join(world: int) -> None:
    """Open the program's own process group for one call on a pool of ranks: engines after engines share it."""
    torch.set_num_threads(1)
    if world > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")


def settings(
    nvme: Path | str, *, stage: int = 3, param: str = "gpu", optimizer: str = "gpu", dtype: str = "fp32",
    accumulation: int = 1, clip: float = 0.0, zero: dict[str, Any] | None = None, **top: Any,
) -> dict[str, Any]:  # fmt: skip
    """A configuration; tiers by their names in the plan. Nothing is small enough to stay gathered at stage 3."""
    device = {"gpu": "none", "cpu": "cpu", "nvme": "nvme"}
    section: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})}
    if stage == 3:
        section["offload_param"] = {"device": device[param], "nvme_path": str(nvme)}
    section["offload_optimizer"] = {"device": device[optimizer], "nvme_path": str(nvme)}
    config = {
        "zero_optimization": section, "gradient_accumulation_steps": accumulation, "gradient_clipping": clip,
        "train_micro_batch_size_per_gpu": 2, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}}, **top,
    }  # fmt: skip
    if dtype != "fp32":
        # A scale that never overflows in these cases, so no step is skipped.
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    return config


def reference(
    case: Case, *, world: int = 1, accumulation: int = 1, clip: float = 0.0, bound: float = 0.0, steps: int = STEPS,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Result:  # fmt: skip
    """Plain torch, one process, all ranks' data. Its fused AdamW, whose arithmetic is ours: another one differs in the
    last bit, and ten steps of a model make more than 1e-6 of that where a small gradient is what two large ones leave.
    """
    model, result = case.model(), Result()
    optimizer = torch.optim.AdamW(case.groups(model), **ADAM, fused=True)
    schedule = scheduler(optimizer) if scheduler is not None else None
    trained = [param for param in model.parameters() if param.requires_grad]
    access = Access(optimizer)
    for micro in range(steps * accumulation):
        for rank in range(world):
            for loss in case.losses(model, rank, micro):
                (loss / (accumulation * world)).backward()
        result.seen += case.before_step(model, micro, access)
        if (micro + 1) % accumulation:
            continue
        norm = torch.nn.utils.clip_grad_norm_(trained, clip or math.inf)
        result.norms.append(float(norm))
        if bound:
            torch.nn.utils.clip_grad_value_(trained, bound)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        result.seen += case.after_step(model, (micro + 1) // accumulation, access)
    result.master = {name: param.detach().clone() for name, param in model.named_parameters()}
    result.exp_avg = {
        name: optimizer.state[param]["exp_avg"] if param in optimizer.state else torch.zeros_like(param)
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    return result


def backward(engine: Engine, loss: Tensor) -> None:
    """The default way to run backward; a test may give `train` another one."""
    engine.backward(loss)


def train(
    case: Case, config: dict[str, Any], *, rank: int = 0, steps: int = STEPS, backward: Callable[..., None] = backward,
    look: Callable[[Engine], None] | None = None,
    prepare: Callable[[nn.Module], dict[str, Any]] | None = None, **given: Any,
) -> Result:  # fmt: skip
    """An engine, on this rank's data. `look` may inspect it before it is closed; `given` goes to `initialize`, and so
    does what `prepare` makes of the model, in place of the case's parameter groups.
    """
    model = case.model()
    if prepare is not None:
        given.update(prepare(model))
    else:
        given["model_parameters"] = case.groups(model)
    engine, *_ = infinity.initialize(model=model, config=config, **given)
    with engine:
        return _train(case, engine, rank, steps, backward, look)


def _train(case: Case, engine: Engine, rank: int, steps: int, backward: Any, look: Any) -> Result:
    result, access = Result(), Tiered()
    count_releases(engine, result)
    for micro in range(steps * engine.gradient_accumulation_steps()):
        for loss in case.losses(engine, rank, micro):
            backward(engine, loss)
        result.seen += case.before_step(engine, micro, access)
        engine.step()
        engine.store.check()
        if engine.was_step_applied():
            result.norms.append(engine.get_global_grad_norm())
            result.seen += case.after_step(engine, engine.global_steps, access)
    collect(engine, result)
    if look is not None:
        look(engine)
    return result


def count_releases(engine: Engine, result: Result) -> None:
    """Count in `result` how often the engine releases a gathered unit."""
    result.cut_units = sum(not unit.placed.whole and unit.layout.numel > 0 for unit in engine.units)

    def counted(unit: Any, release: Callable[..., None]) -> Callable[..., None]:
        def count(**options: Any) -> None:
            result.releases += unit.state is GatherState.GATHERED and not unit.placed.whole
            release(**options)

        return count

    for unit in engine.units:
        unit.release = counted(unit, unit.release)  # type: ignore[method-assign]


def collect(engine: Engine, result: Result) -> None:
    """Read everything of the model out of its tiers. Collective."""
    digest = hashlib.sha256()
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        result.master[name] = state.master
        values = [state.master]
        if param.requires_grad:
            result.exp_avg[name] = state.exp_avg
            values += [state.exp_avg, state.exp_avg_sq]
        with infinity.read(param):
            values.append(param.detach().clone())
        for value in values:
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    result.digest = digest.hexdigest()
    result.mismatches = engine.coordinator.mismatches


def difference(result: Result, expected: Result) -> tuple[float, float, float]:
    """(max |dp|, greatest relative error of a norm, max relative difference of values seen)."""
    assert result.master.keys() == expected.master.keys()
    assert len(result.norms) == len(expected.norms) and len(result.seen) == len(expected.seen)
    weights = max(_apart(value, expected.master[name]) for name, value in result.master.items())
    norms = max(abs(norm / other - 1) for norm, other in zip(result.norms, expected.norms, strict=True))
    seen = max(
        (
            _apart(mine, other) / (1e-3 + float(other.abs().max()))
            for mine, other in zip(result.seen, expected.seen, strict=True)
        ),
        default=0.0,
    )
    return weights, norms, seen


def _apart(value: Tensor, other: Tensor) -> float:
    assert value.shape == other.shape
    # A NaN differs from every value.
    return float((value - other).abs().max().nan_to_num(math.inf)) if value.numel() else 0.0


def digest(values: dict[str, Tensor]) -> str:
    """One hash of the bits of many tensors, in their order."""
    return hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in values.values())).hexdigest()


def io_nbytes() -> tuple[int, int]:
    """Bytes that this process has had read from drives and written to them, by the kernel's count."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def swap_files(nvme: Path | str) -> list[Path]:
    """Return the engines' files in a folder that need not exist."""
    folder = Path(nvme)
    return sorted(folder.iterdir()) if folder.exists() else []


def states_on(engine: Engine, nvme: Path | str) -> int:
    """Check that what the plan puts on NVMe lies in this rank's file, byte for byte; returns the number of extents."""
    planned = [spec for spec in engine.plan.partitions if spec.home is Tier.NVME and spec.nbytes]
    if not planned:
        assert engine.plan.nvme_nbytes == 0
        return 0
    engine.store.settle()
    (path,) = [file for file in swap_files(nvme) if file.name.endswith(f"-rank{engine.global_rank}.bin")]
    assert path.stat().st_size == engine.plan.nvme_nbytes
    assert path.stat().st_blocks * 512 >= engine.plan.nvme_nbytes
    content = path.read_bytes()
    for spec in planned:
        assert spec.extent is not None
        with engine.store.read(spec.key) as (partition,):
            for section in spec.sections:
                start = spec.extent.offset + section.offset
                held = partition.view(section.kind).view(torch.uint8).numpy().tobytes()
                assert content[start : start + section.nbytes] == held, f"{spec.key}: {section.kind} is not in the file"
    return len(planned)
