"""Errors reach whoever asked, across processes too: a pool whose worker's error cannot be rebuilt waits for ever."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest

from infinity import errors
from infinity.errors import CheckpointError, InfinityError, TierMemoryError, TransferError

PLAIN = [
    kind for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, InfinityError) and "__init__" not in vars(kind)
]  # fmt: skip
MADE: list[InfinityError] = [
    *(kind("what, where") for kind in PLAIN),
    CheckpointError("out/step3", "a block is damaged", "Load another one"),
    TierMemoryError("no room", tier="cpu", kind="pool", asked=3, used=2, limit=None, owners=(("states", 2),)),
    TransferError("write", path="drive/file", offset=4096, nbytes=512, errno=errno.ENOSPC, reason="No space left"),
]


def test_every_error_is_here() -> None:
    everyone = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, InfinityError)}
    assert {type(error) for error in MADE} == everyone


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_is_itself_again_after_a_copy_or_another_process(error: InfinityError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error) and again.args == error.args
        assert vars(again) == vars(error)
