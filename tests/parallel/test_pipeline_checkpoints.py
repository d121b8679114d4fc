"""Checkpoints, exports and whole values of a model in stages: a cut of `tests.pipeline_checkpoints`.

One launch of four ranks (pipeline 2 x data 2) loads what one rank has saved, and saves what one rank then loads.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity.checkpoint.format import find, read_manifest
from infinity.errors import CheckpointError, StateError
from infinity.zero.parameter import is_elsewhere
from tests.conftest import RankPools
from tests.pipeline_checkpoints import folder_hash, next_loss, whole_digest
from tests.pipeline_matrix import build, configuration, exchanged
from tests.support.oracle import join

FROZEN = ("model.layers.0.input_layernorm.weight", "model.layers.3.mlp.up_proj.weight")
# By the stage whose rank runs its module: the last block is the second one's.
BUFFERS = {"model.layers.0.seen": 0, "model.layers.3.seen": 1, "seen": 0}
TIED = "model.embed_tokens.weight"


def model() -> nn.Module:
    """Four blocks, a head that is the embedding, parameters that are not trained, and buffers."""
    made = build("llama", num_hidden_layers=4, tie_word_embeddings=True)
    for name in FROZEN:
        made.get_parameter(name).requires_grad_(False)
    for name in BUFFERS:
        made.get_submodule(name.rpartition(".")[0]).register_buffer("seen", torch.zeros(3))
    return made


def engine_of(drive: Path, pipeline: int, data: int, **top: Any) -> Any:
    torch.set_num_threads(1)
    given = {"stage": 3, "param": "nvme", "optimizer": "nvme", "dtype": "bf16", "clip": 0.5}
    if pipeline * data == 1:
        given |= {"stage": 1, "param": "gpu", "optimizer": "gpu"}
    config = configuration(
        str(drive), {"pipeline": pipeline} if pipeline > 1 else {}, count=4 // data, **given
    )  # fmt: skip
    made = model()
    groups = [
        {"params": [param for param in made.parameters() if param.ndim > 1]},
        {"params": [param for param in made.parameters() if param.ndim == 1], "weight_decay": 0.0, "lr": 5e-4},
    ]
    return infinity.initialize(model=made, config=config | top, model_parameters=groups)[0]


def digest_of(engine: Any) -> tuple[str, list[float]]:
    """Hash of all states, and a value of each buffer as rank 0 has it."""
    whole = engine.state_dict()
    return whole_digest(engine), [float(whole[name][0]) for name in BUFFERS] if whole else []


def same_state(engine: Any) -> None:
    """`state_dict` is what `state` says of each parameter, which every rank hears alike."""
    whole = engine.state_dict()
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        if whole:
            assert torch.equal(whole[name], state.master.bfloat16()), name
        else:
            assert state.master.shape == param.shape
        assert state.trainable is (name not in FROZEN)
        assert not (is_elsewhere(param) and state.local("master").numel())
    assert whole.keys() == (engine.module.state_dict(keep_vars=True).keys() if engine.global_rank == 0 else set())


def change_states(engine: Any) -> None:
    """States are set from every rank; a kind that there is not is refused on every rank."""
    for name in (TIED, "model.layers.0.mlp.up_proj.weight", "model.norm.weight", FROZEN[1]):
        state = infinity.state(engine.module.get_parameter(name))
        value = torch.randn(state.master.shape, generator=torch.Generator().manual_seed(7))
        value = value if state.trainable else value.bfloat16().float()
        state.master = value
        assert torch.equal(state.master, value), name
        if state.trainable:
            state.exp_avg_sq = value.abs()
            state.grad = value
            assert torch.equal(state.exp_avg_sq, value.abs())
            # A sum in units of the average, which is exact for two ranks.
            assert torch.equal(state.grad, value), name
            with pytest.raises(ValueError, match="has no 'sum'"):
                state.full("sum")
        else:
            with pytest.raises(StateError, match="is frozen"):
                state.full("exp_avg")
    engine.zero_grad()


def change_weights(engine: Any, rank: int) -> None:
    """`modify` keeps the source's values on the ranks of each stage, and of a shared parameter the first stage's."""
    own = [param for param in engine.module.parameters() if not is_elsewhere(param)]
    others = [param for param in engine.module.parameters() if is_elsewhere(param)]
    tied, named = engine.module.get_parameter(TIED), dict(engine.module.named_parameters())
    with infinity.modify(engine.module, source=1):
        for param in own:
            param.fill_(rank)
        with pytest.raises(StateError, match="belongs to another stage"):
            others[0].fill_(1)
        with pytest.raises(StateError, match="belongs to another stage"):
            engine.module.load_state_dict({name: torch.ones(param.shape) for name, param in named.items()})
    with infinity.read(engine.module):
        found = [float(param.max()) for param in own if param is not tied]
        assert set(found) == {1.0 if rank < 2 else 3.0}
        assert float(tied.min()) == float(tied.max()) == 1.0
        with pytest.raises(StateError, match=r"infinity\.state"):
            others[0].sum()
    # A master that the same 16 bits stood for already stays as it was.
    assert set(infinity.state(tied).master.bfloat16().flatten().tolist()) == {1.0}


def trained(engine: Any, rank: int) -> None:
    """One step on, with what belongs to this stage's buffers."""
    next_loss(engine, 3)
    for at, (name, stage) in enumerate(BUFFERS.items()):
        engine.module.get_buffer(name).fill_(10 + at if rank // 2 == stage else -1)
    norms = engine.get_grad_norms()
    assert norms.keys() == {name for name, param in engine.module.named_parameters() if name not in FROZEN}
    assert len({tuple(sorted(each.items())) for each in exchanged(norms)}) == 1
    engine.optimizer.set_step_counts({"model.layers.3.mlp.down_proj.weight": 5, TIED: 4})
    engine.optimizer.param_groups[1]["lr"] = 1e-4


def refused(engine: Any, folder: Path) -> None:
    """What is missing or too much is said on every rank, whatever stage it is of."""
    weights = engine.state_dict()
    if weights:
        del weights["model.layers.3.mlp.down_proj.weight"], weights["lm_head.weight"]
        (folder / "weights").mkdir()
        save_file({**weights, "more": torch.zeros(1)}, str(folder / "weights" / "model.safetensors"))
    exchanged(None)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(folder / "weights"))
    assert "missing in the checkpoint: model.layers.3.mlp.down_proj.weight\n" in str(caught.value)
    assert "not in the model: more" in str(caught.value)
    engine.load_checkpoint(str(folder / "weights"), load_module_strict=False)


def on_four_ranks(rank: int, world: int, folder: Path, expected: tuple[str, list[float]], loss: float) -> Any:
    """Load what one rank has saved; train, save and export; then everything else that has whole values."""
    join(world)
    checkpoint = {"checkpoint": {"path": str(folder / "ended"), "on_signal": ["SIGUSR1"]}}
    engine = engine_of(folder / "drive", 2, 2, **checkpoint)
    assert engine.load_checkpoint(str(folder / "one"))[1] == {"saved": "by one"}
    assert engine.global_steps == 2
    found = digest_of(engine)
    assert found[0] == expected[0] and found[1] == (expected[1] if rank == 0 else [])
    assert abs(next_loss(engine, 2) - loss) < 1e-6
    trained(engine, rank)
    same_state(engine)
    digest = digest_of(engine)
    engine.save_checkpoint(str(folder / "four"), "behind", client_state={"saved": "by four"}, asynchronous=True)
    numbers = torch.rand(3)
    engine.export(str(folder / "exported"))
    engine.save_16bit_model(str(folder / "frozen out"), exclude_frozen_parameters=True)
    engine.finish_saving()
    engine.offload_states(device="nvme")
    engine.reload_states()
    assert digest_of(engine) == digest
    change_states(engine)
    change_weights(engine, rank)
    refused(engine, folder)
    with pytest.raises(StateError, match="2 ranks of the pipeline axis"):
        engine.close(keep_weights=True)
    path, state = engine.resume(str(folder / "four"))
    assert path == str(folder / "four" / "behind") and state == {"saved": "by four"}
    assert digest_of(engine) == digest
    assert torch.equal(torch.rand(3), numbers)
    engine.save_checkpoint(str(folder / "trained"), exclude_frozen_parameters=True)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended, engine:
        next_loss(engine, 4)
    assert ended.value.code == 0
    return digest


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_model_in_stages_and_a_whole_one_have_the_same_checkpoints(rank_pools: RankPools, tmp_path: Path) -> None:
    with engine_of(tmp_path / "drive", 1, 1) as engine:
        for step in range(2):
            next_loss(engine, step)
        for at, name in enumerate(BUFFERS):
            engine.module.get_buffer(name).fill_(at + 1)
        engine.save_checkpoint(str(tmp_path / "one"), client_state={"saved": "by one"})
        expected = digest_of(engine)
        loss = next_loss(engine, 2)
        digests = rank_pools[4].run(on_four_ranks, tmp_path, expected, loss, timeout=380)
        assert len({digest for digest, _ in digests}) == 1
        assert digests[0][1] == [10.0, 11.0, 12.0]

        assert engine.load_checkpoint(str(tmp_path / "four"))[1] == {"saved": "by four"}
        assert digest_of(engine) == digests[0]
        engine.export(str(tmp_path / "again"))
        assert folder_hash(tmp_path / "again") == folder_hash(tmp_path / "exported")
        engine.save_16bit_model(str(tmp_path / "frozen out again"), exclude_frozen_parameters=True)
        assert folder_hash(tmp_path / "frozen out again") == folder_hash(tmp_path / "frozen out")
        engine.load_checkpoint(str(tmp_path / "trained"))
        assert digest_of(engine) == digests[0]
        assert engine.resume(str(tmp_path / "ended"))[0] is not None
        assert engine.global_steps == 5
        manifests(tmp_path, engine)


def manifests(folder: Path, engine: Any) -> None:
    """What four ranks have written into the manifest is what one would, and each element was written once."""
    engine.load_checkpoint(str(folder / "four"))
    engine.save_checkpoint(str(folder / "whole"), client_state={"saved": "by four"})
    four, one = (read_manifest(found) for name in ("four", "whole") if (found := find(folder / name)) is not None)
    assert four.tensors == one.tensors and four.tied == one.tied and four.module == one.module
    assert four.engine["optimizer"] == one.engine["optimizer"]
    assert four.engine["optimizer"]["steps"]["model.layers.3.mlp.down_proj.weight"] == 5
    assert four.axes == (2, 2, 1)


