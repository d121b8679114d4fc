"""Whatever stands in a file: a configuration, or a ConfigError."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinity.config import ResolveContext, load_config, resolve
from infinity.config.section import leaves
from infinity.errors import ConfigError

SHIPPED = [json.loads(path.read_text()) for path in sorted(Path(__file__).parents[2].glob("examples/configs/*.json"))]
PLACES = sorted({leaf.path for raw in SHIPPED for leaf in leaves(load_config(raw))})

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
        again = load_config(resolved.config.model_dump_json())
        assert resolve(again, context).config == resolved.config
        assert again == resolved.config or again.provenance.autos
