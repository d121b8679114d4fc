"""Units over random module trees, and the description of real modules."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.plan.spec import (
    ModelSpec,
    ModuleNode,
    ParamSpec,
    UnitRules,
    UnitSpec,
    dtype_name,
    find_units,
    module_tree,
)
from tests.support.hub import hf_model
from tests.support.models import tiny_llama

CLASSES = ["Linear", "Norm", "Block", "Attention", "ModuleList", "ModuleDict", "SparseMoeBlock", "Stack"]


def random_tree(rng: random.Random) -> ModuleNode:
    """Modules to a depth of four with random parameters, some tied to earlier ones, some frozen."""
    known: list[ParamSpec] = []

    def grow(path: str, depth: int) -> ModuleNode:
        container = rng.random() < 0.15 and depth > 0
        class_name = rng.choice(["ModuleList", "ParameterList"]) if container else rng.choice(CLASSES)
        node = ModuleNode(path, class_name)
        for index in range(rng.choice([0, 0, 1, 2])):
            if known and rng.random() < 0.15:
                node.params[f"p{index}"] = rng.choice(known)
                continue
            name = f"{path}.p{index}" if path else f"p{index}"
            trainable = rng.random() < 0.8
            dtype = "bf16" if trainable or rng.random() < 0.7 else "int8"
            spec = ParamSpec(
                name, (rng.choice([0, 1, 7, 50, 400, 3000]),), dtype, group=rng.randint(0, 1) if trainable else -1
            )
            known.append(spec)
            node.params[f"p{index}"] = spec
        if depth < 4:
            for index in range(rng.randint(0, 4)):
                node.children[f"c{index}"] = grow(f"{path}.c{index}" if path else f"c{index}", depth + 1)
        return node

    return grow("", 0)


def under(path: str, ancestor: str) -> bool:
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def holders(root: ModuleNode) -> list[tuple[ModuleNode, ParamSpec]]:
    return [(node, spec) for node in root.walk() for spec in node.params.values()]


RULES = [UnitRules(), UnitRules(unit_numel_max=500, merge_numel_max=50), UnitRules(unit_numel_max=1, merge_numel_max=0)]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(60))
def test_units_are_what_they_promise(seed, rules):
    root = random_tree(random.Random(seed))
    spec = find_units(root, rules)
    units = {param.name: unit for unit in spec.units for param in unit.params}
    # Every parameter once; a tied one, too.
    assert sorted(param.name for param in spec.params) == sorted(root.all_params()) == sorted(units)
    nodes = {node.path: node for node in root.walk()}
    for unit in spec.units:
        assert unit.params
        assert {param.dtype for param in unit.params} == {unit.dtype}
        assert {param.trainable for param in unit.params} == {unit.trainable}
        assert len(set(unit.modules)) == len(unit.modules)
        groups = [param.group for param in unit.params]
        assert groups == sorted(groups)
        # Nobody calls a list of modules: a hook on one would never run.
        assert not any(nodes[path].is_container for path in unit.modules if path)
    for node, param in holders(root):
        assert any(under(node.path, path) for path in units[param.name].modules)
    assert sorted(set(spec.uses)) == list(range(len(spec.units)))
    order = {path: index for index, path in enumerate(nodes)}
    begins = [min(order[path] for path in spec.units[index].modules) for index in dict.fromkeys(spec.uses)]
    assert begins == sorted(begins)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(60))
def test_a_data_dependent_module_is_never_cut(seed, rules):
    root = random_tree(random.Random(seed))
    spec = find_units(root, rules)
    leaves = [node for node in root.walk() if rules.is_leaf(node)]
    for unit in spec.units:
        for path in unit.modules:
            # A hook inside would run on some ranks only.
            assert not any(path != leaf.path and under(path, leaf.path) for leaf in leaves)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(60))
def test_a_unit_is_over_its_bound_only_where_the_tree_leaves_no_choice(seed, rules):
    root = random_tree(random.Random(seed))
    nodes = {node.path: node for node in root.walk()}
    for unit in find_units(root, rules).units:
        if unit.numel > rules.unit_numel_max and not rules.is_leaf(nodes[unit.modules[0]]):
            own = own_params(nodes[unit.modules[0]])
            assert {param.name for param in unit.params} <= own


def own_params(node: ModuleNode) -> set[str]:
    """What nobody below can own: a module's own parameters and those of its containers."""
    containers = [child for child in node.children.values() if child.is_container]
    return {spec.name for spec in node.params.values()}.union(*(own_params(child) for child in containers))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)


class FeedForward(nn.Module):
    """Routes to experts, and no class name but theirs says so."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(2))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(2))


def test_a_module_with_several_experts_is_one_unit():
    spec = find_units(module_tree(Routed(), compute_dtype="bf16"), UnitRules(unit_numel_max=10, merge_numel_max=0))
    assert [unit.modules for unit in spec.units] == [("layers.0",), ("layers.1",)]


@pytest.mark.parametrize(
    "rules", [{"leaf_classes": ("Linear",)}, {"leaf_names": ("layers",)}, {"leaf_suffixes": ("ers",)}]
)
def test_a_module_named_by_the_configuration_is_one_unit(rules):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])})
    holder = nn.Sequential()
    holder.add_module("layers", model["layers"])
    tree = module_tree(holder, compute_dtype="fp32")
    spec = find_units(tree, UnitRules(unit_numel_max=4, merge_numel_max=0, **rules))
    names = [unit.modules for unit in spec.units]
    # A list of modules is called by its owner.
    assert names == ([("layers.0",), ("layers.1.0",), ("layers.1.1",)] if "leaf_classes" in rules else [("",)])


def test_a_llama_is_cut_into_its_blocks():
    spec = find_units(module_tree(tiny_llama(), compute_dtype="bf16"), UnitRules(merge_numel_max=100))
    assert [unit.name for unit in spec.units] == ["(root)", "embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [param.name for param in spec.units[0].params] == ["norm.weight", "positions"] or {
        param.name for param in spec.units[0].params
    } == {"norm.weight", "positions"}
    assert spec.uses == (0, 1, 2, 3, 4, 5)


def test_a_tied_weight_is_one_parameter_that_two_modules_need():
    for model in (tiny_llama(tied=True), hf_model("gpt2")):
        tree = module_tree(model, compute_dtype="bf16")
        spec = find_units(tree, UnitRules(merge_numel_max=100))
        (unit,) = [unit for unit in spec.units if any(param.tied for param in unit.params)]
        (param,) = [param for param in unit.params if param.tied]
        assert unit.modules == (param.name.removesuffix(".weight"), param.tied[0].removesuffix(".weight"))
        assert spec.uses.count(spec.units.index(unit)) == 2
        assert spec.numel == sum(weight.numel() for weight in model.parameters())


class Twice(nn.Module):
    """One projection that stands in both blocks, as a module."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.first = nn.Sequential(nn.LayerNorm(8), shared)
        self.second = nn.Sequential(nn.LayerNorm(8), shared)


def test_a_shared_module_is_hooked_itself_where_another_calls_it():
    tree = module_tree(Twice(), compute_dtype="fp32")
    assert tree.children["first"].children["1"].shared and not tree.children["first"].children["0"].shared
    assert set(tree.children["second"].children) == {"0"}
    spec = find_units(tree, UnitRules(merge_numel_max=0))
    assert [unit.modules for unit in spec.units] == [("first", "first.1"), ("second",)]
    assert spec.units[0].params[-1].tied == ("second.1.bias",)


def test_a_description_is_the_same_on_the_meta_device():
    with torch.device("meta"):
        meta = tiny_llama()
    assert module_tree(meta, compute_dtype="bf16") == module_tree(tiny_llama(), compute_dtype="bf16")


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.whole = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
        self.precise = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_parameter("nothing", None)


def test_odd_parameters_are_described():
    odd = Odd()
    specs = module_tree(odd, compute_dtype="bf16").params
    assert {name: (spec.shape, spec.dtype, spec.group) for name, spec in specs.items()} == {
        "empty": ((0, 4), "bf16", 0), "scalar": ((), "bf16", 0), "whole": ((3,), "int32", -1),
        "precise": ((3,), "bf16", 0), "frozen": ((3,), "bf16", -1),
    }  # fmt: skip
    units = find_units(module_tree(odd, compute_dtype="bf16"), UnitRules()).units
    assert [(unit.name, unit.dtype, unit.trainable) for unit in units] == [
        ("(root)", "bf16", True), ("(root) (frozen)", "int32", False), ("(root) (frozen)", "bf16", False),
    ]  # fmt: skip


def test_groups_are_those_of_the_optimizer():
    odd = Odd()
    groups = {id(odd.scalar): 1, id(odd.precise): 0, id(odd.frozen): 0}
    specs = module_tree(odd, compute_dtype="fp32", groups=groups).params
    # What no group has, and what needs no gradient, is frozen.
    assert {name: spec.group for name, spec in specs.items()} == {
        "empty": -1, "scalar": 1, "whole": -1, "precise": 0, "frozen": -1,
    }  # fmt: skip


def test_a_dtype_that_no_plan_holds_is_refused_by_name():
    assert dtype_name(torch.bfloat16) == dtype_name("torch.bfloat16") == "bf16"
    with pytest.raises(ConfigError, match="complex64"):
        module_tree(nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), compute_dtype="bf16")


def test_small_left_overs_join_the_root_until_it_is_full():
    root = ModuleNode("", "Model")
    for index in range(10):
        spec = ParamSpec(f"c{index}.p", (40,), "bf16")
        root.children[f"c{index}"] = ModuleNode(f"c{index}", f"Class{index}", {"p": spec})
    units = find_units(root, UnitRules(unit_numel_max=100, merge_numel_max=50)).units
    assert units[0].name == "(root)" and units[0].numel == 80 and len(units) == 9


def test_a_model_without_parameters_has_no_units():
    assert find_units(module_tree(nn.ReLU(), compute_dtype="bf16"), UnitRules()) == ModelSpec(units=())


def test_totals_are_sums():
    unit = UnitSpec("u", ("u",), "bf16", True, (ParamSpec("a", (2, 3), "bf16"), ParamSpec("b", (), "bf16")))
    assert unit.numel == 7 and ModelSpec((unit, unit)).numel == 14
