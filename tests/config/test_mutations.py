"""One slip of the finger in any key, at any level, of any shipped configuration is found, and the true key is named."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from infinity.config import load_config
from infinity.config.schema import Config
from infinity.config.section import Section, sections_of, spellings_of
from infinity.errors import ConfigError
from tests.support.cells import kept

SHIPPED = sorted(Path(__file__).parents[2].glob("examples/configs/*.json"))
# Of each kind, of each key.
SLIPS = pytest.mark.parametrize("count", kept([1, 4], [1]))

# Beside the shipped files: the sections that none of them has.
_EVERYTHING = {
    "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
    "data_types": {"grad_accum_dtype": "fp32"},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
    "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "pipeline": {"stages": "auto", "seed_layers": False},
    "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}},
    "zero_optimization": {"leaf_module": {"names": ["a"]}, "prefetch_bucket_size": 10, "cpu_offload": True},
    "memory": {"gpu": {"max_bytes": "1GB"}, "nvme": {"max_bytes": None}},
    "timeline": {"path": None, "step": 2},
    "kernels": {"liger": False},
    "wandb": {"enabled": False, "team": "x", "project": "y"},
    "csv_monitor": {"enabled": False, "output_path": "x", "job_name": "y"},
    "comet": {"enabled": False, "project": "y"},
    "elasticity": {"enabled": False, "min_gpus": 1},
    "compile": {"deepcompile": False, "debug_log": False},
    "flops_profiler": {"enabled": False, "profile_step": 1},
}


def _keys(raw: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in raw.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _keys(value, (*path, key))


def _slips(key: str, count: int, seed: int) -> set[str]:
    chance = random.Random(f"{key} {seed}")
    letters = string.ascii_lowercase + string.digits + "_"
    slips = set()
    for _ in range(count):
        at = chance.randrange(len(key))
        slips |= {
            key[:at] + key[at + 1 :],
            key[:at] + chance.choice(letters) + key[at:],
            key[:at] + chance.choice(letters) + key[at + 1 :],
            key[: at - 1] + key[at : at + 1] + key[at - 1 : at] + key[at + 1 :] if at else key,
        }
    return slips - {key}


def _renamed(raw: Mapping[str, Any], path: tuple[str, ...], slip: str) -> dict[str, Any]:
    head, *rest = path
    return {
        (slip if key == head and not rest else key): (
            _renamed(value, tuple(rest), slip) if key == head and rest else value
        )
        for key, value in raw.items()
    }


def _known_names(raw: Mapping[str, Any], path: tuple[str, ...]) -> set[str]:
    """The true keys of the section in which the last key of a path stands."""
    section: type[Section] = Config
    for name in path[:-1]:
        candidates = sections_of(section.model_fields[spellings_of(section)[name]])
        if not candidates:
            return set()
        section = candidates[0]
        for one in candidates if len(candidates) > 1 else ():
            if raw[name]["type"] in get_args(one.model_fields["type"].annotation):
                section = one
    return set(spellings_of(section))


@SLIPS
@pytest.mark.parametrize(
    "raw",
    [*(json.loads(path.read_text()) for path in SHIPPED), _EVERYTHING],
    ids=[*(path.stem for path in SHIPPED), "rest"],
)
def test_every_slip_in_every_key_is_named(raw: dict[str, Any], count: int) -> None:
    load_config(raw)
    tried = 0
    for path in _keys(raw):
        for slip in sorted(_slips(path[-1], count, seed=7)):
            if slip in _known_names(raw, path):
                # Such as "gpu" for "cpu": another key, not a mistyped one.
                continue
            with pytest.raises(ConfigError) as caught:
                load_config(_renamed(raw, path, slip))
            complaint = next(line for line in str(caught.value).splitlines() if "unknown key" in line)
            assert ".".join((*path[:-1], slip)) in complaint
            assert f"'{'.'.join(path)}'" in complaint, complaint
            tried += 1
    assert tried > 2 * count * len(list(_keys(raw)))
