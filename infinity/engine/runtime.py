"""What `initialize` builds, in the order in which it builds it, and hands to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from infinity.config.resolve import ResolvedConfig
from infinity.distributed.process_groups import ProcessGroups
from infinity.memory.ledger import Ledger
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.optim.stepper import Stepper
from infinity.plan.plan import Plan
from infinity.zero.activation_checkpoint import Checkpointing
from infinity.zero.compiled import CompiledModules
from infinity.zero.coordinator import Coordinator
from infinity.zero.gradients import Gradients
from infinity.zero.hooks import ModuleHooks
from infinity.zero.unit import Unit


@dataclass
class Runtime:
    """Everything that an engine runs."""

    module: nn.Module
    config: ResolvedConfig
    plan: Plan
    device: Device
    groups: ProcessGroups
    ledger: Ledger
    store: TieredStore
    units: list[Unit]
    gradients: Gradients
    coordinator: Coordinator
    hooks: ModuleHooks
    stepper: Stepper
    checkpointing: Checkpointing
    compiled: CompiledModules
