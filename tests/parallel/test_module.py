"""A model in layers: what a program lists, its ties, its seeds, and that a cut changes no bit."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError, StateError
from infinity.parallel.layers import LayerSpec, PipelineModule, StagedLayers, TiedLayerSpec
from infinity.plan.spec import UnitRules, find_units, module_tree
from infinity.plan.stages import find_blocks
from tests.parallel.layered import (
    WIDTH,
    WORDS,
    Block,
    Head,
    Words,
    cut_of,
    gradients,
    layers_with,
    loss_of,
    make,
    mixed_layers,
    project,
    staged_step,
    token_batches,
    turn,
    whole_step,
)

CUTS = [(1, 12), (5, 8), (6, 7), (2, 1, 1, 2, 1, 1, 5), (3, 3, 5, 2), (11, 1, 1), (1,) * 13]


def test_the_layers_run_as_a_program_would_run_them():
    model = make(mixed_layers())
    inputs, labels = token_batches(1)[0]
    hidden = model.layers[0](inputs)
    for layer in model.layers[1:-1]:
        value = layer(hidden)
        hidden = value[0] if isinstance(value, tuple) and len(value) == 1 else value
    outputs = F.linear(hidden, model.layers[0].weight)
    assert torch.equal(model(inputs), outputs)
    assert torch.equal(model(inputs, labels), loss_of(outputs, labels))
    # As torch's default collation gives them.
    assert torch.equal(model([inputs], [labels]), loss_of(outputs, labels))
    assert torch.equal(model.forward_range(0, model.num_layers, inputs), outputs)
    assert torch.equal(model.loss(outputs, labels), loss_of(outputs, labels))


@pytest.mark.parametrize("counts", CUTS, ids=str)
def test_stages_give_the_losses_and_gradients_of_the_whole(counts):
    """Bit for bit; a weight tied across stages is the sum of two, each over all micro-batches."""
    batches = token_batches(4)
    model = make(mixed_layers())
    losses, whole = whole_step(copy.deepcopy(model), batches)
    cut_losses, cut = staged_step(model, counts, batches)
    assert all(map(torch.equal, losses, cut_losses))
    owners = {name: layers_with(model, counts, name) for name in whole}
    assert [name for name, stages in owners.items() if len(stages) > 1] == ["layers.0.weight"]
    for stage, found in enumerate(cut):
        assert set(found) == {name for name, stages in owners.items() if stage in stages}
    for name, grad in whole.items():
        parts = [found[name] for found in cut if name in found]
        if len(parts) == 1:
            assert torch.equal(parts[0], grad), name
        else:
            assert torch.allclose(sum(parts[1:], parts[0]), grad, rtol=0, atol=1e-6)


def test_each_stage_is_a_call_of_the_model_and_of_its_own_layers():
    model = make(mixed_layers())
    called: list[str] = []
    for path, module in model.named_modules():
        if path in ("", *model.blocks):
            module.register_forward_hook(lambda *_, path=path: called.append(path))
    staged = StagedLayers(model, cut_of(model, (5, 7, 1)), own=(0, 2))
    (boundary,) = staged.forward(0, None, token_batches(1)[0], {})
    assert called == [*model.blocks[:5], ""]
    called.clear()
    inputs, labels = token_batches(1)[0]
    received = (boundary.detach().transpose(0, 1).contiguous(),)
    assert staged.forward(2, received, (), {"inputs": inputs, "labels": labels}).ndim == 0
    assert called == ["layers.12", ""]
    # Without labels, what the last layer returns; without a loss function, that is the loss.
    assert staged.forward(2, received, (inputs,), {}).shape == (*inputs.shape, WORDS)
    model.loss_fn = None
    assert staged.forward(2, received, (inputs, labels), {}).shape == (*inputs.shape, WORDS)


def test_a_boundary_that_is_no_tensor_is_refused_and_between_layers_of_a_stage_it_is_not():
    layers = [nn.Linear(4, 4), lambda hidden: {"hidden": hidden}, lambda named: named["hidden"], nn.Linear(4, 4)]
    model = PipelineModule(layers)
    inputs = torch.randn(2, 4)
    assert model(inputs).shape == (2, 4)
    staged = StagedLayers(model, cut_of(model, (2, 2)), own=(0, 1))
    with pytest.raises(ConfigError, match=r"layers.1 \(<lambda>\) is the last layer of stage 0 and returns dict"):
        staged.forward(0, None, (inputs,), {})
    with pytest.raises(StateError, match="a cut of 4 blocks is not one of these 13 layers"):
        StagedLayers(make(mixed_layers()), cut_of(model, (2, 2)), own=(0,))
    with pytest.raises(StateError, match="stage 1 takes the tensors of the stage before it"):
        staged.forward(1, None, (inputs,), {})
    staged.remove()
    with pytest.raises(StateError, match="stage 0 is not run here, but none"):
        staged.forward(0, None, (inputs,), {})


def test_the_tree_names_a_tied_weight_once_and_gathers_it_at_each_layer_that_uses_it():
    model = make(mixed_layers())
    tree = module_tree(model, compute_dtype="fp32")
    spec = tree.all_params()["layers.0.weight"]
    assert spec.tied == ("layers.12.weight",)
    assert sum(spec.numel for spec in tree.all_params().values()) == sum(p.numel() for p in model.parameters())
    assert find_blocks(tree) == model.blocks
    # Of all units, one needs hooks at both; a small one would be part of the root's.
    units = find_units(tree, UnitRules(merge_numel_max=0)).units
    assert [unit.modules for unit in units if "layers.0.weight" in [each.name for each in unit.params]] == [
        ("layers.0", "layers.12")
    ]
    assert sorted(model.state_dict())[:2] == ["layers.0.weight", "layers.11.bias"]
    assert "layers.12.weight" in model.state_dict()


def test_a_key_shares_the_module_or_where_the_classes_differ_the_weight():
    tied = partial(TiedLayerSpec, "words", Words, WORDS, WIDTH)
    model = make([
        tied(tied_weight_attr="words_weight"), Block(),
        tied(forward_fn=lambda module, hidden: hidden @ module.weight.t()), lambda logits: logits.argmax(-1),
        tied(), TiedLayerSpec("words", Head, tied_weight_attr=["words_weight"]),
    ])  # fmt: skip
    weight = model.layers[0].weight
    assert model.layers[5].words.weight is weight
    assert {name for name, param in model.named_parameters(remove_duplicate=False) if param is weight} == {
        f"layers.{path}" for path in ("0.weight", "2.weight", "4.weight", "5.words.weight")
    }
    inputs = token_batches(1)[0][0]
    found = (model.layers[1](F.embedding(inputs, weight)) @ weight.t()).argmax(-1)
    expected = F.linear(model.layers[5].norm(F.embedding(found, weight)), weight)
    assert torch.equal(model(inputs), expected)
    # In a copy they are tied, too, and to nothing of the original.
    other = copy.deepcopy(model)
    assert other.layers[4]._used[0] is other.layers[0] and other.layers[5].words.weight is other.layers[0].weight
    assert other.layers[0].weight is not weight
    other.to(torch.float64)
    assert {param.dtype for param in other.parameters()} == {torch.float64}
    other.layers[0].weight = nn.Parameter(torch.zeros(WORDS, WIDTH))
    assert other.layers[2].weight is other.layers[4].weight is other.layers[0].weight
    assert model.layer_names == ("Words", "Block", "Words", "<lambda>", "Words", "Head")


def test_a_nested_module_that_is_used_again_has_its_parameters_there_by_their_names():
    model = make([
        TiedLayerSpec("block", Block), TiedLayerSpec("block", Block, forward_fn=lambda block, hidden: block(hidden))
    ])  # fmt: skip
    names = dict(model.named_parameters(remove_duplicate=False))
    assert names["layers.1.inner.weight"] is names["layers.0.inner.weight"]
    assert len(names) == 2 * len(dict(model.named_parameters()))
    units = find_units(module_tree(model, compute_dtype="fp32"), UnitRules(merge_numel_max=0)).units
    assert all(unit.modules[-1] == "layers.1" for unit in units), units


def test_a_module_that_is_listed_twice_is_two_layers_with_one_weight():
    block, activation = Block(), nn.GELU()
    model = make([block, activation, block, activation])
    assert len({id(layer) for layer in model.layers}) == 4
    assert len(list(model.parameters())) == len(list(block.parameters()))
    hidden = torch.randn(2, 5, WIDTH)
    assert torch.equal(model(hidden), F.gelu(block(F.gelu(block(hidden)))))
    assert model.layer_names == ("Block", "GELU", "Block", "GELU")


def test_counts_follow_the_method_and_a_shared_weight_counts_in_each_layer():
    layers = [TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH), *[LayerSpec(nn.Linear, 16, 16) for _ in range(4)]]
    layers += [turn, TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=project)]
    counts = {method: make(layers, partition_method=method).stage_counts(3) for method in ("parameters", "type:linear")}
    assert counts == {"parameters": (1, 3, 3), "type:linear": (2, 1, 4)}
    assert make(layers, partition_method="uniform").stage_counts(7) == (1,) * 7
    with pytest.raises(ConfigError, match="7 layers cannot be divided among 8 stages"):
        make(layers).stage_counts(8)


@pytest.mark.parametrize("counts", [(13,), (6, 7), (3, 3, 5, 2)], ids=str)
@pytest.mark.parametrize("interval", [0, 1])
def test_seeded_layers_have_their_values_and_dropout_however_they_are_divided(counts, interval):
    batches = token_batches(3)
    options = {"seed_layers": True, "base_seed": 7}
    model = make(mixed_layers(dropout=0.3), seed=1, **options)
    again = make(mixed_layers(dropout=0.3), seed=2, **options, activation_checkpoint_interval=interval)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    other = make(mixed_layers(dropout=0.3), seed=1, seed_layers=True, base_seed=8)
    assert not torch.equal(model.layers[0].weight, other.layers[0].weight)
    losses, whole = whole_step(copy.deepcopy(model), batches)
    cut_losses, cut = staged_step(again, counts, batches)
    assert all(map(torch.equal, losses, cut_losses))
    for found in cut:
        assert all(torch.equal(grad, whole[name]) for name, grad in found.items() if name != "layers.0.weight")


def test_seeds_differ_by_micro_batch_leave_the_programs_numbers_and_can_be_continued():
    model = make(mixed_layers(dropout=0.3), seed_layers=True)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    batch = token_batches(1)[0]
    first, second, third = (model(*batch).item() for _ in range(3))
    assert torch.equal(torch.rand(4), expected)
    assert len({first, second, third}) == 3
    model.count_from(1)
    assert model(*batch).item() == second
    # Evaluation has no dropout and counts for nothing.
    model.eval()
    assert model(*batch).item() == model(*batch).item()
    model.train()
    assert model(*batch).item() == third


def test_a_seed_function_is_called_before_each_layer():
    seen: list[int] = []
    model = make([nn.Linear(4, 4), nn.GELU()], seed_layers=True, seed_fn=seen.append, base_seed=100)
    model(torch.randn(1, 4))
    model(torch.randn(1, 4))
    assert seen == [100, 101, 102, 103, 104, 105]


def times_weight(module: nn.Linear, hidden: Tensor) -> Tensor:
    """Multiply with a layer's weight, unlike the layer itself."""
    return hidden @ module.weight


class Counted(Block):
    """A block that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(hidden)


def test_layers_are_computed_again_in_groups_within_a_stage():
    batches = token_batches(2)

    def layers() -> list[Any]:
        blocks = [LayerSpec(Counted) for _ in range(5)]
        return [LayerSpec(nn.Embedding, WORDS, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, WORDS)]

    plain = make(layers())
    losses, expected = whole_step(plain, batches)
    assert [layer.calls for layer in plain.layers[1:6]] == [2] * 5
    groups: list[int] = []

    def noted(run: Any, *tensors: Tensor) -> Any:
        groups.append(len(tensors))
        return torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False)

    again = make(layers(), activation_checkpoint_interval=3, activation_checkpoint_func=noted)
    found_losses, found = whole_step(again, batches)
    assert all(map(torch.equal, losses, found_losses))
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())
    assert [layer.calls for layer in again.layers[1:6]] == [4] * 5
    # Layers 0 to 2, 3 to 5 and 6, of each micro-batch; stages begin groups of their own.
    assert groups == [1] * 6
    groups.clear()
    staged_step(make(layers(), activation_checkpoint_interval=3, activation_checkpoint_func=noted), (4, 3), batches)
    assert groups == [1] * 6
    with torch.no_grad():
        again(*batches[0])
    assert len(groups) == 6
    only = make(
        layers(), activation_checkpoint_interval=2, activation_checkpoint_func=noted, checkpointable_layers=["Counted"]
    )
    groups.clear()
    only(*batches[0])
    # Of the groups 0-1, 2-3, 4-5 and 6, two are of these classes alone.
    assert groups == [1] * 2


def test_a_tuple_is_computed_again_from_its_tensors():
    batches = token_batches(2)
    losses, expected = whole_step(make(mixed_layers()), batches)
    # As anywhere in torch, a module that changes its input in place cannot be the first that is computed again.
    found_losses, found = whole_step(make(mixed_layers(), activation_checkpoint_interval=4), batches)
    assert all(map(torch.equal, losses, found_losses))
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())


class Topology:
    """What a program may pass as a topology."""

    def get_dim(self, axis: str) -> int:
        return {"pipe": 4}[axis]


def test_what_the_program_asks_for_is_kept():
    topology = Topology()
    model = PipelineModule([nn.Linear(2, 2)], topology=topology)
    assert (model.num_stages, model.topology()) == (4, topology)
    assert PipelineModule([nn.Linear(2, 2)], num_stages=2).num_stages == 2
    assert PipelineModule(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).num_layers == 2
    assert PipelineModule([nn.Linear(2, 2)]).num_stages is None
    assert isinstance(make([nn.Linear(2, 2)]).forward_funcs[0], nn.Linear)
    spec = LayerSpec(nn.Linear, 2, out_features=3)
    assert repr(spec) == "LayerSpec(Linear, 2, out_features=3)"
    assert (spec.typename, spec.module_args, spec.module_kwargs) == (nn.Linear, (2,), {"out_features": 3})


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: PipelineModule([]), "needs at least one layer"),
        (lambda: PipelineModule([nn.Linear(2, 2), "linear"]), "layer 1 of a PipelineModule is 'linear'"),
        (lambda: PipelineModule([nn.ReLU]), "list modules, LayerSpec"),
        (lambda: LayerSpec(turn), "takes the class of a torch.nn.Module"),
        (lambda: TiedLayerSpec("words", nn.Linear, 2, 2, forward_fn="head"), "forward_fn must be a function"),
        (lambda: PipelineModule([nn.ReLU()], num_stages=0), "num_stages is 0; it must be at least 1"),
        (lambda: PipelineModule([nn.ReLU()], num_stages=2, topology=Topology()), "num_stages is 2 and the topology"),
        (
            lambda: PipelineModule([TiedLayerSpec("a", nn.Linear, 2, 2), TiedLayerSpec("a", nn.Embedding, 3, 2)]),
            r"weight is \(2, 2\) in Linear and \(3, 2\) in Embedding",
        ),
        (
            lambda: PipelineModule([TiedLayerSpec("a", nn.Linear, 2, 2), TiedLayerSpec("a", Block)]),
            "Block has no parameter 'weight'",
        ),
    ],
)
def test_what_is_no_layer_is_said(build, said):
    with pytest.raises(ConfigError, match=said):
        build()


@pytest.mark.parametrize("built", ["ordinary", "init"])
@pytest.mark.parametrize("interval", [0, 2])
def test_an_engine_trains_it_as_torch_does_and_knows_the_order_of_its_weights(built, interval, tmp_path: Path):
    """Stage 3 with everything on NVMe; tied weights are used by a function, by their module again and as a head's."""
    layers = [
        TiedLayerSpec("words", Words, WORDS, WIDTH), TiedLayerSpec("mixed", nn.Linear, WIDTH, WIDTH), LayerSpec(Block),
        LayerSpec(Block), TiedLayerSpec("mixed", nn.Linear, WIDTH, WIDTH, forward_fn=times_weight),
        LayerSpec(Block), TiedLayerSpec("mixed", nn.Linear, WIDTH, WIDTH), turn, LayerSpec(Block), turn,
        TiedLayerSpec("words", Head, tied_weight_attr="words_weight"),
    ]  # fmt: skip
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_batch_size": 3, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": drive, "offload_optimizer": drive,
            "stage3_max_live_parameters": 8000, "stage3_max_reuse_distance": 0,
        },
    }  # fmt: skip
    batches = token_batches(4)
    plain = make(layers)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        loss = plain(*batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    if built == "init":
        with infinity.Init(config=config):
            model = make(layers, activation_checkpoint_interval=interval)
    else:
        model = make(layers, activation_checkpoint_interval=interval)
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        found = []
        for batch in batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        assert found == pytest.approx(expected, abs=1e-5)
        values = engine.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.allclose(values[name], value, rtol=0, atol=2e-5), name
        gathered = {layout.name: layout.modules for layout in engine.plan.layouts}
        assert gathered["layers.0"] == ("layers.0", "layers.10.words")
        assert gathered["layers.1"] == ("layers.1", "layers.4", "layers.6")
        # The plan knows the order; what is computed again is recorded in the first step.
        assert engine.coordinator.mismatches == (1 if interval else 0)
    assert gradients(model) == {}
