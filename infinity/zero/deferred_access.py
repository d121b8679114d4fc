"""Whole parameters before an engine has them: `read` and `modify` of what `infinity.Init` built, and of ordinary ones.

Both are collective. [Note: slices] in `deferred_init` says what ranks keep after such a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from infinity.distributed.collectives import broadcast_to_all
from infinity.distributed.consistency import on_any_rank
from infinity.distributed.meeting import all_ranks_after
from infinity.errors import ConfigError, StateError
from infinity.zero import parameter
from infinity.zero.deferred_init import DeferredInit, spools_of
from infinity.zero.value_versions import fingerprint

_ON_EVERY_RANK = (
    "After it rank `source` sends its values to all ranks, so every rank must enter the block with the same "
    "parameters. A parameter that neither infinity.Init nor an engine has can be changed without the block, on each "
    "rank for itself; infinity.initialize() then takes rank 0's values"
)


def listed_params(params: Any) -> list[nn.Parameter]:
    """Return the parameters of a module, a parameter or anything iterable of these, each once.

    None is left out, and so are tensors that are no parameters (buffers, which no rank partitions).
    """
    found: dict[int, nn.Parameter] = {}
    for param in _flat(params):
        found.setdefault(id(param), param)
    return list(found.values())


def _flat(params: Any) -> Iterator[nn.Parameter]:
    if isinstance(params, nn.Module):
        yield from params.parameters()
    elif isinstance(params, torch.Tensor):
        if isinstance(params, nn.Parameter):
            yield params
    elif isinstance(params, Mapping):
        yield from _flat(params.values())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes)):
        for each in params:
            yield from _flat(each)
    elif params is not None:
        raise ConfigError(f"a parameter, a module or an iterable of these is expected, got {type(params).__name__}")


def deferred_of(params: list[nn.Parameter]) -> list[tuple[DeferredInit, list[nn.Parameter]]]:
    """Group the parameters that no engine has yet by what keeps them, in the same order on every rank."""
    return [
        (spool, spool.in_order(found))
        for spool, group in spools_of(params).items()
        if (found := [param for param in group if spool.holds(param)])
    ]


@contextmanager
def read_deferred(spool: DeferredInit, params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Make parameters whole on every rank, with rank 0's values. Collective.

    Raises StateError on every rank if one of them was changed in place.
    """
    with _whole(spool, params):
        for param in params:
            if not spool.is_shared(param):
                spool.take_over(param, 0, used=True)
        before = [(param._version, spool.changes(param), fingerprint(param)) for param in params]
        with spool.groups.telling():
            yield
        changed = [
            spool.changes(param) == changes
            and (param._version != version or not torch.equal(values, fingerprint(param)))
            for param, (version, changes, values) in zip(params, before, strict=True)
        ]
        for param, flag in zip(params, on_any_rank(changed, spool.groups.world, "end of read()"), strict=True):
            if flag:
                raise StateError(
                    f"{parameter.name_of(param)} was changed inside infinity.read(); the change is undone: make it "
                    "inside infinity.modify()"
                )


@contextmanager
def modify_deferred(spool: DeferredInit, params: Sequence[nn.Parameter], source: int) -> Iterator[None]:
    """Make parameters whole on every rank for writing, and give every rank what rank `source` wrote. Collective.

    Inside, a parameter has rank 0's values on the source and the right shape elsewhere: there its values are what that
    rank itself built, until a first block has ended. An error in the block leaves parameters with a value.
    """
    size = spool.groups.world.size
    if not 0 <= source < size:
        raise ConfigError(f"modify: rank {source} is to be the source, but the job has {size} rank(s), numbered from 0")
    with _whole(spool, params):
        for param in params:
            if source and not spool.is_shared(param):
                spool.take_over(param, 0, used=True)
        with spool.groups.telling(), torch.no_grad():
            yield
        for param in params:
            spool.take_over(param, source)


@contextmanager
def _whole(spool: DeferredInit, params: Sequence[nn.Parameter]) -> Iterator[None]:
    with ExitStack() as stack:
        for param in params:
            spool.make_whole(param)
            stack.callback(spool.release_whole, param)
        yield


@contextmanager
def modify_ordinary(params: Sequence[nn.Parameter], source: int) -> Iterator[None]:
    """Let the block change parameters that nothing of ours keeps, and give every rank what rank `source` wrote.

    Collective if torch.distributed is open; the ranks list the same parameters in the same order. A rank whose others
    do not come ends with DesyncError.
    """
    sent = [param for param in params if not param.is_meta and not isinstance(param, nn.UninitializedParameter)]
    with torch.no_grad():
        if not sent:
            yield
            return
        more = f" and of {len(sent) - 1} more" if len(sent) > 1 else ""
        call = (
            f"infinity.modify(source={source}), or GatheredParameters(modifier_rank={source}), of a parameter of shape "
            f"{tuple(sent[0].shape)} that no engine has{more}"
        )
        with all_ranks_after(call, _ON_EVERY_RANK):
            yield
        for param in sent:
            broadcast_to_all(param.data, source)
