"""The tensor axis as a value: what becomes of each parameter, and what each module does at run time. No torch.

A model's own plan names a style for modules and parameters. From the styles follow, for every parameter, its shard or
that it is replicated; for every module with a part in it, its `Role`; and the regions: modules (an attention, an MLP)
between whose input and output ranks hold different parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from infinity.plan.shards import Replica, Shard
from infinity.plan.spec import ModuleNode, ParamSpec


class Role(Enum):
    """What a module does beside its own forward."""

    # Its outputs are this rank's columns. Its input is the region's, or, outside of regions, is copied.
    COLWISE = "colwise"
    # The same, and all ranks' columns are gathered behind it.
    COLWISE_GATHER = "colwise_gather_output"
    # Its inputs are this rank's columns; outputs are summed over ranks, and a bias is added to the sum.
    ROWWISE = "rowwise"
    # The same, of inputs that every rank has whole: each takes its columns of them.
    ROWWISE_SPLIT = "rowwise_split_input"
    # A lookup in this rank's rows: zero for the others' words, summed over ranks.
    EMBEDDING = "embedding_rowwise"
    # Packed experts: inputs are copied, outputs summed.
    EXPERTS = "moe_tp_experts"


@dataclass(frozen=True, slots=True)
class Region:
    """A module whose differentiable inputs are copied once (their gradients are summed over ranks).

    divided: ranks compute different things inside, so that each has random numbers of its own there.
    """

    path: str
    divided: bool = True


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """What the tensor axis makes of a model.

    params: by canonical name (the first one, of a tied parameter): its shard, if it has one, and its replica. Every
    parameter of the model is in it where `size` > 1. roles: by path. head: the module of which the outputs are this
    rank's words, where the loss may be computed without gathering them. blocks: the first and the last block between
    which activations are cut along the sequence; None without `sequence`. remarks: sentences for the log, on what stays
    whole against the model's plan.
    """

    size: int = 1
    params: Mapping[str, tuple[Shard | None, Replica]] = field(default_factory=lambda: MappingProxyType({}))
    roles: Mapping[str, Role] = field(default_factory=lambda: MappingProxyType({}))
    regions: tuple[Region, ...] = ()
    head: str | None = None
    blocks: tuple[str, str] | None = None
    remarks: tuple[str, ...] = field(default=(), compare=False)

    @property
    def sequence(self) -> bool:
        """Whether activations between regions are cut along the sequence."""
        return self.blocks is not None

    def divide(self, root: ModuleNode) -> ModuleNode:
        """The tree of what this axis leaves to a rank; `root` where it has one."""
        return root if self.size == 1 else root.with_params(self._divided)

    def _divided(self, spec: ParamSpec) -> ParamSpec:
        shard, replica = self.params[spec.name]
        shape = spec.shape if shard is None else shard.local_shape(spec.shape)
        return replace(spec, shape=shape, shard=shard, replica=replica)
