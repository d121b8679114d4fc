"""What a program keeps comes back as it was; what could only be pickled is refused with its place."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from infinity.checkpoint.run_state import NotSerializable, decode, encode

VALUES = [
    None, True, 3, -2.5, "text", [1, [2, "x"]], {"a": {"b": []}}, (1, (2, 3)), {1: "x", (2, 3): 4.0}, {"$tuple": [1]},
    math.inf, -math.inf, b"\x00\xff", Counter({30: 1, 60: 2}), 2**70, "snow ☃", {"": 0}, 0.1,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back(value):
    again = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert again == value
    assert type(again) is type(value)


def test_nan_comes_back():
    assert math.isnan(decode(encode(float("nan"))))
    assert decode(encode(np.float64(0.1))) == 0.1
    assert decode(encode(np.int64(3))) == 3


def test_tensors_and_arrays_go_by_their_path():
    value = {"a": [torch.arange(6).view(2, 3).t(), np.eye(2)], "b": torch.tensor(2.5), "c": np.array(3)}
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, tensors, "client_state"))
    assert set(tensors) == {"client_state.a[0]", "client_state.a[1]", "client_state.b", "client_state.c"}
    again = decode(json.loads(text), tensors)
    assert torch.equal(again["a"][0], value["a"][0]) and again["a"][0].shape == (3, 2)
    assert np.array_equal(again["a"][1], value["a"][1]) and isinstance(again["a"][1], np.ndarray)
    assert again["b"] == 2.5 and again["c"].shape == ()


def test_a_single_tensor_needs_no_file():
    again = decode(json.loads(json.dumps(encode({"step": torch.tensor(3.0), "mu": torch.tensor([0.1])}))))
    assert again["step"].dtype is torch.float32 and again["step"].shape == ()
    assert again["mu"].shape == (1,) and again["mu"] == torch.tensor([0.1])


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value", [object(), Path("x"), {1, 2}, Colour.RED, lambda: 0, 1j, np.array(["x"]), np.array([object()])],
    ids=lambda value: type(value).__name__,
)
def test_what_would_be_pickled_is_refused_with_its_place(value):
    with pytest.raises(NotSerializable, match=r"client_state\.a\[1\]\.b is a "):
        encode({"a": [0, {"b": value}]}, {}, "client_state")
