"""Memory that a training process takes beside its plan, counted before the first step.

A plan counts the bytes that the engine places. A process also has the memory from before the engine, what torch and our
libraries add in their first steps, and activations. A plan that left them out would be killed in the first backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.config.units import format_bytes
from infinity.plan.filling import in_process, initial_nbytes
from infinity.plan.plan import Plan
from infinity.plan.types import Tier

# Memory of no file that the first steps of any model add to a process: 10 to 40 MB were measured. `OVERHEAD_NBYTES`
# counts pages of libraries, too, which the system drops at need.
ANONYMOUS_OVERHEAD_NBYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes of one rank beside its plan.

    taken_nbytes: in memory before the engine; what is free is without it. overhead_nbytes: what first steps add in CPU
    memory. activation_nbytes: on the device, at the busiest moment of a micro-batch; activations: where that figure is
    from, in words ("" while it is not known). product_nbytes: on the device, of a product of matrices that it computes
    in a wider type. checkpoint_nbytes: activation checkpoints in CPU memory, off an
    accelerator. gaps_nbytes: what the device's allocator takes beyond living tensors. model_dtype, model_nbytes_max:
    what the model was built in, and how much of it lies in CPU memory at a time (None: all of it) until its partitions
    are made.
    """

    taken_nbytes: int = 0
    overhead_nbytes: int = 0
    activation_nbytes: int = 0
    activations: str = ""
    product_nbytes: int = 0
    checkpoint_nbytes: int = 0
    gaps_nbytes: int = 0
    model_dtype: str = "fp32"
    model_nbytes_max: int | None = 0

    def by_tier(self) -> dict[Tier, int]:
        """Bytes that are still to come, by the tier that takes them."""
        on_device = self.activation_nbytes + self.product_nbytes + self.gaps_nbytes
        return {Tier.GPU: on_device, Tier.CPU: self.overhead_nbytes + self.checkpoint_nbytes}

    def initial_nbytes(self, plan: Plan) -> int:
        """CPU memory at the peak of filling the partitions, with what is left of the model."""
        most = initial_nbytes(plan, model_dtype=self.model_dtype, model_nbytes_max=self.model_nbytes_max)
        return most + self.overhead_nbytes

    def peak_nbytes(self, plan: Plan) -> int:
        """The peak of this process's anonymous memory by the plan. An accelerator's memory is not counted."""
        accelerator, beside = plan.request.accelerator, self.by_tier()
        training = in_process(plan.bytes_by_tier(), accelerator=accelerator)
        training += beside[Tier.CPU] + (0 if accelerator else beside[Tier.GPU])
        return self.taken_nbytes + max(training, self.initial_nbytes(plan))

    def in_words(self) -> str:
        """What is set aside: "50.3 MB for what a process's first steps add, ..."."""
        parts = {
            "for what a process's first steps add": self.overhead_nbytes,
            f"for activations ({self.activations})": self.activation_nbytes,
            "for products of 16-bit matrices, which this processor computes in fp32": self.product_nbytes,
            "for activation checkpoints in CPU memory": self.checkpoint_nbytes,
            "for gaps in the device's allocator": self.gaps_nbytes,
        }
        return ", ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in parts.items() if nbytes)
