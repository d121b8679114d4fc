"""Whatever stands in a file: a configuration, or a ConfigError."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinity.config import ResolveContext, load_config, resolve
from infinity.config.section import section_leaves
from infinity.errors import ConfigError

SHIPPED = [json.loads(path.read_text()) for path in sorted(Path(__file__).parents[2].glob("examples/configs/*.json"))]
PLACES = sorted({leaf.path for raw in SHIPPED for leaf in section_leaves(load_config(raw))})

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("auto")
junk = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=500, deadline=None)
@given(raw=st.sampled_from(SHIPPED), place=st.sampled_from(PLACES), value=junk, depth=st.integers(1, 4))
@example(raw=SHIPPED[0], place="zero_optimization.offload_optimizer.device", value="auto", depth=3)
def test_junk_anywhere_is_a_configuration_or_a_config_error(
    raw: dict[str, Any], place: str, value: Any, depth: int
) -> None:
    document = section = copy.deepcopy(raw)
    *path, name = place.split(".")[:depth]
    for part in path:
        section = section.setdefault(part, {})
    section[name] = value
    with contextlib.suppress(ConfigError):
        context = ResolveContext(world_size=2, hidden_size=8)
        resolved = resolve(load_config(document), context)
        assert resolved.explain()
        # What was accepted can be written down and read again. "auto" devices stay that, until a plan is made.
        again = load_config(resolved.sections.model_dump_json())
        assert resolve(again, context).sections == resolved.sections
        assert again == resolved.sections or again.provenance.autos


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


ITSELF: dict[str, Any] = {"zero_optimization": {}}
ITSELF["zero_optimization"]["x"] = ITSELF

# What is given, and what the error says of it.
BEYOND = {
    "deep objects in a text": ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    "deep lists in a text": ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "deep lists of a key": ({"optimizer": {"params": {"lr": json.loads("[" * 900 + "]" * 900)}}}, "deeper than 64"),
    "deep dictionaries": (nested(5000), "deeper than 64"),
    "deep dictionaries of a key": ({"train_batch_size": nested(5000)}, "train_batch_size.a.a.a"),
    "a structure in itself": (ITSELF, "contain itself"),
    "thousands of digits in a text": ('{"train_batch_size": ' + "9" * 5000 + "}", "thousands of digits"),
    "hundreds of digits in a text": ('{"train_batch_size": ' + "9" * 4000 + "}", "an integer of 13288 bits"),
    "a great integer": ({"memory": {"cpu": {"max_bytes": 10**5000}}}, "memory.cpu.max_bytes: an integer of 16610 bits"),
    "an integer that no float holds": ({"gradient_clipping": 10**400}, "gradient_clipping: an integer of 1329 bits"),
    "NaN": ('{"gradient_clipping": NaN}', "gradient_clipping: nan is not usable"),
    "infinity": ('{"optimizer": {"type": "SGD", "params": {"lr": 1e999}}}', "optimizer.params.lr: inf is not usable"),
    "too many values": ({str(index): 1 for index in range(20_000)}, "at most 10,000 values"),
    "many unknown keys": ({f"k{index}": 1 for index in range(200)}, "and 150 more"),
    "a long value": ({"wall_clock_breakdown": "x" * 10**6}, "wall_clock_breakdown: 'xxx"),
    "a key that stands twice": ('{"bf16": {}, "bf16": {}}', "bf16: the key stands twice"),
    "a long text": ('{"bf16": {}' + " " * (5 << 20) + "}", "5,242,892 bytes are too many"),
    "a file without an end": ("/dev/zero", "/dev/zero: 4,194,305 bytes are too many"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_no_configuration_holds_is_refused_in_one_short_error(name: str) -> None:
    given_, said = BEYOND[name]
    with pytest.raises(ConfigError) as caught:
        load_config(given_)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 10_000


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="1,099,511,627,776 bytes are too many"):
        load_config(path)
