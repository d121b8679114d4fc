"""What a plan is asked for, in the plan's own words.

Optimizer states of an element beside its master weight, by type of optimizer: fp32 values with torch's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from infinity.config.training import Adagrad, Adam, Adamax, AdamW8bit, AnyOptimizer, Lion, Muon, Nadam, Rmsprop, Sgd
from infinity.errors import ConfigError
from infinity.plan.types import ADAM_MOMENTS, CODED_MOMENTS, DTYPE_NBYTES, Kind, Tier

# A sub-group on NVMe is one read and one write. This many elements keep the drive at its bandwidth; more only takes
# memory, and makes the first forward units wait longer for their step. It is also fine enough a grain to divide states
# between tiers by. The configuration's bound may be lower.
SPLIT_NUMEL = 1 << 21


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """What a plan has to know of one update rule.

    moments: what it keeps of an element, or of a block of elements, beside the master weight. matrix_width: of one that
    looks at whole matrices, bytes of an element in its products, else 0. name: as units show it where there are several
    rules.
    """

    moments: tuple[Kind, ...] = ADAM_MOMENTS
    matrix_width: int = 0
    name: str = ""

    @property
    def matrices(self) -> bool:
        """Whether it steps whole matrices."""
        return self.matrix_width > 0

    @property
    def block(self) -> int:
        """Elements that it looks at together: nothing that divides a parameter may cut them. 1: none."""
        return max((kind.block for kind in self.moments), default=1)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The configuration's decisions as numbers of elements, tiers and names of dtypes."""

    stage: int = 3
    # None: decided by budget ("auto").
    param_tier: Tier | None = Tier.GPU
    optimizer_tier: Tier | None = Tier.GPU
    # Share of the optimizer states' elements at `optimizer_tier`; the rest is on the GPU tier.
    optimizer_share: float = 1.0
    # Of gradients whose states are not all on the GPU tier. None: CPU memory, until the request is fitted to it.
    grad_tier: Tier | None = None
    # Share of the gradients' elements at `grad_tier`, if that is a drive; the rest is in CPU memory.
    grad_share: float = 1.0
    # Elements of this rank's parameters in CPU memory when `param_tier` is NVMe.
    param_cpu_numel: int = 0
    # Sub-groups whose states have memory at once where they live on NVMe, if that is more than the step needs.
    state_buffers: int = 0
    # Whether a drive is given, so that a budget may put on it what does not fit into memory.
    drive: bool = False
    compute_dtype: str = "fp32"
    grad_dtype: str = "fp32"
    communication_dtype: str = "fp32"
    # The optimizer's rules; a unit is stepped by one of them.
    rules: tuple[RuleSpec, ...] = (RuleSpec(),)
    sub_group_numel: int = 1_000_000_000
    # What a sub-group needs at most where states may move; see `SPLIT_NUMEL`.
    split_numel: int = SPLIT_NUMEL
    prefetch_numel: int = 50_000_000
    persistence_numel: int = 100_000
    persistent_total_numel: int = 2**63 - 1
    live_numel: int = 1_000_000_000
    reuse_numel: int = 1_000_000_000
    # Whether the device has memory of its own, so that copies between CPU and device need staging buffers.
    accelerator: bool = False
    # Whether the device has tensors of its own type in the CPU's memory. What is not on a drive then lies in such
    # tensors; what drives read and write is CPU memory, and needs staging buffers to be stepped.
    unified: bool = False
    # Whether the gradients of several micro-batches are added.
    accumulates: bool = False
    # Whether gradients are summed over ranks once a step at stages 2 and 3, too.
    reduces_once: bool = False
    # Whether transfers and the step may run beside the computation.
    overlap: bool = True
    # Whether a step may begin in backward, where it can be undone: because nothing has to be known of all gradients, or
    # on a guess about them.
    steps_early: bool = False
    speculates: bool = False
    # Elements in CPU memory whose old values have room beside them, so that their step may begin in backward, too.
    undo_numel: int = 0
    # Whether every value that is saved has places on the drive for its last version and for the next one, so that a
    # killed run goes on from there.
    recorded: bool = False


# For states of optimizers that this module does not know.
_NAMELESS = (Kind.STATE_1, Kind.STATE_2, Kind.STATE_3, Kind.STATE_4)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What a plan has to know of an optimizer."""

    rules: tuple[RuleSpec, ...] = (RuleSpec(),)
    # Whether it leaves elements alone whose gradient is not finite, so that a step may begin before all are known.
    guarded: bool = True
    # Whether a step can be undone by putting its values back: it keeps nothing beside them.
    undoable: bool = True
    # Whether there is one.
    trains: bool = True
    # By parameter group, the number of the rule that steps it. Empty: of two rules the first steps hidden matrices, or
    # parameters of at least so many elements but for some, by name.
    rule_of: tuple[int, ...] = ()
    numel_min: int = 0
    small: frozenset[str] = frozenset()
    # Of weights by name, how many matrices of as many rows each is, or the rows of each: for a rule of whole matrices.
    split: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, *moments: Kind, guarded: bool = True) -> OptimizerSpec:
        """Of an elementwise optimizer. What is not guarded is torch's, which keeps values of a parameter, too."""
        return cls((RuleSpec(moments),), guarded, undoable=guarded)


# Of a model that is only run: every parameter is frozen, whatever it says of itself.
NO_OPTIMIZER = OptimizerSpec((RuleSpec(()),), trains=False)


def optimizer_spec(section: AnyOptimizer | None) -> OptimizerSpec:
    """The optimizer that a configuration names, or NO_OPTIMIZER. Those that torch runs are not guarded."""
    match section:
        case None:
            return NO_OPTIMIZER
        case Adam():
            return OptimizerSpec()
        case Muon(params=params):
            muon = RuleSpec((Kind.MOMENTUM_BUFFER,), DTYPE_NBYTES[params.ns_dtype], "Muon")
            return OptimizerSpec((muon, RuleSpec(name="AdamW")), guarded=False, split=params.split or {})
        case AdamW8bit(params=params):
            least = max(params.min_8bit_size, 1) if params.optim_bits == 8 else 1 << 63
            return OptimizerSpec((RuleSpec(CODED_MOMENTS, name="AdamW8bit"), RuleSpec(name="AdamW")), numel_min=least)
        case Nadam():
            return OptimizerSpec.of(*ADAM_MOMENTS, guarded=False)
        case Lion():
            return OptimizerSpec.of(Kind.EXP_AVG)
        case Adagrad():
            return OptimizerSpec.of(Kind.SUM)
        case Sgd(params=params):
            kept = (Kind.MOMENTUM_BUFFER,) if params.momentum else ()
            return OptimizerSpec.of(*kept, guarded=bool(params.momentum))
        case Rmsprop(params=params):
            buffer = (Kind.MOMENTUM_BUFFER,) if params.momentum else ()
            mean = (Kind.GRAD_AVG,) if params.centered else ()
            return OptimizerSpec.of(Kind.SQUARE_AVG, *buffer, *mean, guarded=False)
        case Adamax():
            return OptimizerSpec.of(Kind.EXP_AVG, Kind.EXP_INF, guarded=False)


def kinds_of(names: tuple[str, ...]) -> tuple[Kind, ...]:
    """The kinds under which states of these names are kept; ConfigError where there are too many to keep."""
    others = (Kind.PARAM, Kind.GRAD, Kind.REMAINDER, Kind.MASTER, *CODED_MOMENTS)
    known = {kind.value: kind for kind in Kind if kind not in others}
    unknown = [name for name in names if name not in known]
    if len(unknown) > len(_NAMELESS):
        raise ConfigError(
            f"the optimizer keeps {len(names)} states an element ({', '.join(names)}); at most {len(_NAMELESS)} beside "
            "the known ones can be kept"
        )
    nameless = dict(zip(unknown, _NAMELESS, strict=False))
    return tuple(nameless.get(name) or known[name] for name in names)
