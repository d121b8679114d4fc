"""Plans that do not fit: each refusal has the table, and a configuration that does fit or the hardware that would."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from infinity.base.sizes import format_bytes
from infinity.config import ResolveContext, load_config, resolve
from infinity.errors import CapacityError
from infinity.plan.capacity import Capacity
from infinity.plan.capacity_report import account, nearest_fit, refuse, smallest
from infinity.plan.inputs import PlanInputs
from infinity.plan.spec import ModuleNode, ParamSpec
from infinity.plan.types import Tier, Topology
from tests.plan.test_plan import llama_70b
from tests.support.cells import kept
from tests.support.clock import fewest_seconds


def tree(chance: random.Random) -> ModuleNode:
    """Blocks of matrices between an embedding and a head; 1 M to 200 M parameters."""
    width = 64 * 2 ** chance.randrange(1, 5)

    def linear(path: str, outputs: int) -> ModuleNode:
        return ModuleNode(path, "Linear", {"weight": ParamSpec(f"{path}.weight", (outputs, width), "bf16")})

    def block(path: str) -> ModuleNode:
        children = {name: linear(f"{path}.{name}", outputs * width) for name, outputs in (("a", 4), ("b", 3))}
        return ModuleNode(path, "Block", children=children)

    layers = chance.randrange(1, 16)
    blocks = ModuleNode("layers", "ModuleList", children={str(at): block(f"layers.{at}") for at in range(layers)})
    ends = {name: linear(name, chance.choice([1000, 50_000, 250_000])) for name in ("embed", "head")}
    return ModuleNode("", "Model", children={"embed": ends["embed"], "layers": blocks, "head": ends["head"]})


def configuration(chance: random.Random) -> dict[str, Any]:
    stage = chance.randrange(4)
    devices = ["none", "cpu", "nvme", "auto"]
    zero: dict[str, Any] = {"stage": stage, "sub_group_size": chance.choice([10**7, 10**9])}
    for name in ("offload_param", "offload_optimizer"):
        device = chance.choice(devices) if stage == 3 or name == "offload_optimizer" else "none"
        zero[name] = {"device": device}
        if device == "nvme" or chance.random() < 0.5:
            zero[name]["nvme_path"] = "drive"
    return {chance.choice(["bf16", "fp16"]): {"enabled": chance.random() < 0.8}, "zero_optimization": zero}


def inputs(chance: random.Random) -> PlanInputs:
    """A model, a configuration and a machine, none of which knows of the others."""
    node, raw = tree(chance), configuration(chance)
    ranks = chance.choice([1, 2, 8])
    nbytes = [int(10 ** chance.uniform(6, 10)) for _ in range(3)]
    gpu, cpu, nvme = nbytes
    accelerator = chance.random() < 0.6
    memory = {"gpu": gpu, "cpu": cpu} if accelerator else {"process": cpu}
    context = ResolveContext(world_size=ranks)
    return PlanInputs(
        node, resolve(load_config(raw), context), Topology(dp=ranks), accelerator, Capacity(**memory, nvme=nvme)
    )


@pytest.mark.parametrize("count", kept([15, 100], [15]))
def test_plans_that_do_not_fit_are_refused_with_a_table_and_a_way_out(count):
    chance = random.Random(2)
    refused = fits = hardware = 0
    while refused < count:
        asked = inputs(chance)
        plan = asked.plan()
        if asked.limits.fits(plan.nbytes_by_tier()):
            refuse(asked, plan)
            continue
        refused += 1
        with pytest.raises(CapacityError) as caught:
            refuse(asked, plan, rank=3)
        text = str(caught.value)
        assert re.match(r"rank 3 plans [\d.,]+ (TB|GB|MB|kB) on (gpu|cpu|nvme|device \(cpu\))", text), text
        assert "tier" in text and "limit" in text and "too much" in text, "the table"
        assert str(account(plan, asked.limits)) in text
        found = nearest_fit(asked)
        if found is None:
            hardware += 1
            assert "The smallest plan of this model" in text, text
            assert re.search(r"needs [\d.,]+ (TB|GB|MB|kB) on", text), text
            assert not asked.limits.fits(smallest(asked).nbytes_by_tier())
        else:
            fits += 1
            assert "Nearest configuration that fits" in text
            assert asked.capacity.fits(found.plan.nbytes_by_tier())
            assert found.changes or found.ranks > asked.topology.world_size
            if found.changes:
                assert found.as_json() in text and json.loads(found.as_json())["zero_optimization"]
            if found.ranks != asked.topology.world_size:
                assert f"on {found.ranks} ranks" in text
    assert fits > count / 7 and hardware > count / 20, (fits, hardware)


def test_the_nearest_changes_the_fewest_keys():
    """One key is enough here: not two, and not the slowest tier."""
    raw = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    asked = PlanInputs(
        tree(random.Random(8)), resolve(load_config(raw), ResolveContext()), Topology(), True, Capacity(cpu=10**12)
    )
    held = asked.plan().nbytes_by_tier()[Tier.GPU]
    found = nearest_fit(replace(asked, capacity=Capacity(gpu=held // 2, cpu=10**12)))
    assert found is not None
    assert found.changes == {"zero_optimization.offload_optimizer.device": "cpu"}
    assert json.loads(found.as_json()) == {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def test_a_drive_that_nobody_named_is_asked_for_with_its_size():
    raw = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    asked = PlanInputs(
        llama_70b(), resolve(load_config(raw), ResolveContext()), Topology(dp=8), True,
        Capacity(gpu=20 * 10**9, cpu=40 * 10**9),
    )  # fmt: skip
    found = nearest_fit(asked)
    assert found is not None and found.ranks == 8
    path = json.loads(found.as_json())["zero_optimization"]["offload_optimizer"]["nvme_path"]
    assert path == f"a folder on a drive with {format_bytes(found.plan.nvme_nbytes)} free for each rank"


@pytest.mark.parametrize("device", ["none", "cpu", "nvme", "auto"])
def test_70_billion_parameters_are_refused_in_less_than_two_seconds(device):
    section = {"device": device, "nvme_path": "drive"}
    raw = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": section, "offload_optimizer": section},
    }

    def ask() -> None:
        asked = PlanInputs(
            llama_70b(), resolve(load_config(raw), ResolveContext()), Topology(), False,
            Capacity(process=20 * 10**9, nvme=80 * 10**9),
        )  # fmt: skip
        with pytest.raises(CapacityError, match=r"Nearest configuration that fits.*on .* ranks"):
            refuse(asked, asked.plan())

    assert fewest_seconds(ask, below=2.0) < 2.0
