"""What transformers' Trainer and accelerate need to be told of an engine: a method of each is wrapped for it.

`Trainer.train()` begins with accelerate's `free_memory()`, which destroys the engine and forgets it. Trainer then goes
on with the engine that it has in `model_wrapped`: it gives a model to accelerate only where `model_wrapped` is the
model itself. So a second training of one Trainer, or one behind an evaluation, would run a closed engine. Wrapped,
`train()` makes the model `model_wrapped` again, and where Trainer would go on with its optimizer, takes the engine out
of accelerate's hands, for `kept_engine` to find.

accelerate's `skip_first_batches()`, with which a run resumes, makes a loader anew: of parts of sequences it makes whole
batches.

`Accelerator.prepare()` divides batches by the ranks of a tensor group where it knows of one, by one of its names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from infinity.config import DEEPSPEED, Config
from infinity.config.conflicts import pipeline_sizes, tensor_sizes
from infinity.config.load import load_config
from infinity.engine.engine import Engine
from infinity.errors import ConfigError, StateError
from infinity.integrations.deepspeed.ulysses import skipping
from infinity.log import logger
from infinity.zero.guards import engines_of

# The sections that name axes of ranks.
_AXES = ("parallel", "pipeline", "tensor_parallel")
# What engines were made of, and those whose Trainer trains again.
_made_of: WeakKeyDictionary[Engine, Config] = WeakKeyDictionary()
_goes_on: WeakSet[Engine] = WeakSet()


def adapt() -> None:
    """Wrap the two methods and the function, where their modules are imported; idempotent."""
    for module, kind, method, around in (
        ("transformers.trainer", "Trainer", "train", _training),
        ("accelerate.accelerator", "Accelerator", "prepare", _preparing),
    ):
        owner = getattr(sys.modules.get(module), kind, None)
        if owner is not None and not hasattr(getattr(owner, method), "__infinity__"):
            setattr(owner, method, _wrapped(getattr(owner, method), around))
    for module in ("accelerate", "accelerate.data_loader", "accelerate.accelerator", "transformers.trainer"):
        names = vars(sys.modules[module]) if module in sys.modules else {}
        skip = names.get("skip_first_batches")
        if skip is not None and not hasattr(skip, "__infinity__"):
            names["skip_first_batches"] = skipping(skip)


def made(engine: Engine, config: Config) -> None:
    """Note what an engine was made of."""
    _made_of[engine] = config


def kept_engine(model: nn.Module | None, config: Config) -> Engine | None:
    """Return the engine with which the model's Trainer trains again, optimizer states and all; None for a new one."""
    for engine in engines_of(model) if isinstance(model, nn.Module) else ():
        if engine in _goes_on:
            _goes_on.discard(engine)
            if _made_of.get(engine) == config:
                return engine
            logger.warning("Trainer trains again with another configuration: the states of its optimizer begin anew")
    return None


def _wrapped(method: Callable[..., Any], around: Callable[[Any], AbstractContextManager[None]]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with around(self):
            return method(self, *args, **kwargs)

    vars(wrapped)["__infinity__"] = True
    return wrapped


@contextmanager
def _training(trainer: Any) -> Iterator[None]:
    engine = trainer.model_wrapped
    if not isinstance(engine, Engine) or engine.module is not trainer.model or trainer.model_init is not None:
        yield
        return
    tied = trainer.accelerator.deepspeed_engine_wrapped
    vars(trainer).update(model_wrapped=trainer.model)
    if not _is_trained_by(engine, trainer):
        # accelerate destroys it, and the model keeps the weights.
        yield
        return
    vars(trainer.accelerator).update(deepspeed_engine_wrapped=None)
    _goes_on.add(engine)
    try:
        yield
    finally:
        if engine in _goes_on:
            # An error came first.
            _goes_on.discard(engine)
            vars(trainer).update(model_wrapped=engine)
            vars(trainer.accelerator).update(deepspeed_engine_wrapped=tied)


def _is_trained_by(engine: Engine, trainer: Any) -> bool:
    """Whether an engine that can go on steps the optimizer that Trainer has."""
    tied = trainer.accelerator.deepspeed_engine_wrapped
    optimizer = getattr(trainer.optimizer, "optimizer", None)
    if tied is None or tied.engine is not engine or optimizer is None or optimizer is not engine.optimizer:
        return False
    try:
        engine.synchronize()
    except StateError:
        return False
    return True


@contextmanager
def _preparing(accelerator: Any) -> Iterator[None]:
    if accelerator.deepspeed_plugin is not None:
        _tell_axes(accelerator)
    yield


def _tell_axes(accelerator: Any) -> None:
    """Have accelerate know the tensor axis by its own name; ConfigError for axes that its programs cannot train on."""
    given = getattr(accelerator.parallelism_config, "tp_size", 1)
    if given > 1:
        raise ConfigError(
            f"accelerate's ParallelismConfig(tp_size={given}) is for models of DTensors, which DeepSpeed's engines and "
            "this one do not train: leave tp_size out, and set tensor_parallel.autotp_size to "
            f"{given} in the DeepSpeed configuration"
        )
    file = accelerator.deepspeed_plugin.deepspeed_config
    config = load_config({key: file[key] for key in _AXES if key in file}, conventions=DEEPSPEED)
    for name, stages in pipeline_sizes(config).items():
        if stages > 1:
            raise ConfigError(
                f"{name} is {stages}, and a program of accelerate's or Trainer's runs the whole model itself, forward "
                "and backward, which no rank of a pipeline has: leave it out, and divide layers with "
                "tensor_parallel.autotp_size; or write the loop with engine.train_batch(batches)"
            )
    for size in tensor_sizes(config).values():
        # The name that accelerate and Trainer read.
        file.setdefault("tensor_parallel", {}).setdefault("autotp_size", size)
