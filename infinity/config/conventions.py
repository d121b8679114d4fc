"""How a configuration is read where DeepSpeed and infinity differ: infinity's way, or DeepSpeed's for its programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Conventions:
    """The differences in meaning between two readers of the same configuration.

    foreign_keys: "refuse" raises ConfigError for a key that infinity does not have; "warn" logs it once and goes on.
    default_optimizer: whether a configuration and a program that name no optimizer mean AdamW, or if False none: such
        an engine runs its model and does not train it. `"optimizer": null` says the same in any configuration.
    parameter_attributes: whether parameters have DeepSpeed's attributes (`ds_id`, `ds_status`, ...) at stage 3, which
        make a program import deepspeed.
    init_dtype: the dtype of parameters made under `infinity.Init`: "own", what the constructor gives them, or
        "trained", the one that the configuration trains in, in which they are initialized and loaded.
    owned_model: what becomes of an engine that is open when its model is given to another: "refuse" raises ConfigError,
        "hand over" closes it and leaves the weights in the model, for a program that closes no engine.
    batch_of: whose samples `train_batch_size` counts beside a tensor or a pipeline axis: "data ranks", or "any", by
        which micro-batch x accumulation x all ranks is right, too, if all three are given: clients fill it in so.
    """

    foreign_keys: Literal["refuse", "warn"] = "refuse"
    default_optimizer: bool = True
    parameter_attributes: bool = False
    init_dtype: Literal["own", "trained"] = "own"
    owned_model: Literal["refuse", "hand over"] = "refuse"
    batch_of: Literal["data ranks", "any"] = "data ranks"


# infinity's own reading, and the default everywhere.
STRICT = Conventions()
# For programs written for DeepSpeed, whose clients add keys of their own and pass models without an optimizer.
DEEPSPEED = Conventions(
    foreign_keys="warn", default_optimizer=False, parameter_attributes=True, init_dtype="trained",
    owned_model="hand over", batch_of="any",
)  # fmt: skip
