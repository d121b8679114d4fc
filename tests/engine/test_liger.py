"""`kernels.liger`: which models get Liger-Kernel's layers, what is said otherwise, and the values of its kernels.

Most tests use a package that only records what it is asked for. The values need Liger-Kernel and Triton, whose
interpreter runs the kernels on the CPU: tests/support/liger_run.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine import liger
from infinity.engine.liger import apply_liger
from infinity.errors import CapacityError, ConfigError

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda", 0)
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
REAL = all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))

_FAKE = {
    "liger_kernel/__init__.py": "",
    "liger_kernel/transformers/__init__.py": """
calls, fails = [], []
def _apply_liger_kernel_to_instance(model, **options):
    calls.append((model, options))
    if fails:
        raise AttributeError("modeling_llama has no LlamaRMSNorm")
""",
    "liger_kernel/transformers/monkey_patch.py": "MODEL_TYPE_TO_APPLY_LIGER_FN = {'llama': None}",
    "liger_kernel-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: liger-kernel\nVersion: 9.9\n",
}


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Liger-Kernel that knows Llama, on a machine with a CUDA device; `calls` has what it was asked for."""
    for name, text in _FAKE.items():
        path = tmp_path / "fake" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    # Where the real one has been imported, it comes back afterwards.
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path / "fake"))
    # Triton is no package that a test may fake: torch and transformers look for it.
    monkeypatch.setattr(liger, "_is_there", lambda module: True)
    yield importlib.import_module("liger_kernel.transformers")
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def llama(kind: str = "LlamaForCausalLM") -> Any:
    return getattr(transformers, kind)(transformers.LlamaConfig(**SIZES))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))


class Wrapped(nn.Module):
    """Two models beside layers of a program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = llama()
        self.mine = nn.Linear(4, 4)
        self.encoder = llama("LlamaModel")
        self.other = gpt2()


def test_it_is_applied_to_the_models_that_it_knows_wherever_they_are(recorder: Any) -> None:
    model = Wrapped()
    (line,) = apply_liger(True, model, GPU, ())
    assert line == "Liger-Kernel 9.9 computes layers of LlamaForCausalLM (llama), LlamaModel (llama)"
    # A model without a head has no loss; torch's own cross_entropy is never replaced.
    assert recorder.calls == [
        (model.first, {"fused_linear_cross_entropy": True, "cross_entropy": False}),
        (model.encoder, {"fused_linear_cross_entropy": False, "cross_entropy": False}),
    ]


def test_it_is_applied_beneath_adapters(recorder: Any) -> None:
    peft = pytest.importorskip("peft")
    inner = llama()
    adapted = peft.get_peft_model(inner, peft.LoraConfig(target_modules=["q_proj", "gate_proj"], r=2))
    apply_liger("auto", adapted, GPU, ())
    assert [model for model, _ in recorder.calls] == [inner]


def test_a_head_in_tiles_keeps_its_loss(recorder: Any) -> None:
    apply_liger(True, llama(), GPU, [SimpleNamespace(is_tile=False), SimpleNamespace(is_tile=True)])
    assert recorder.calls[0][1]["fused_linear_cross_entropy"] is False


def test_nothing_is_done_unless_it_is_asked_for(recorder: Any) -> None:
    assert apply_liger(False, llama(), GPU, ()) == []
    engine, *_ = infinity.initialize(model=llama(), config={"train_micro_batch_size_per_gpu": 1})
    engine.close()
    assert recorder.calls == []


def refused(model: nn.Module, device: torch.device = GPU) -> str:
    """Return why it is not applied; true raises it, "auto" logs it."""
    with pytest.raises(ConfigError, match=r"^kernels\.liger is true, but ") as caught:
        apply_liger(True, model, device, ())
    (line,) = apply_liger("auto", model, device, ())
    reason = line.removeprefix('kernels.liger is "auto" and has no effect: ')
    assert str(caught.value) == f'kernels.liger is true, but {reason}, or set it to "auto" or false'
    return reason


def test_what_is_missing_is_named(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "trained on cpu, and Liger-Kernel needs a CUDA device" in refused(llama(), torch.device("cpu"))
    for missing, words in (({"triton"}, "triton is"), ({"liger_kernel", "triton"}, "liger-kernel and triton are")):
        monkeypatch.setattr(liger, "_is_there", lambda module, missing=missing: module not in missing)
        assert refused(llama()) == f"{words} not installed: run `pip install 'infinity-engine[liger]'`"
    assert recorder.calls == []


def test_a_model_that_it_does_not_know_is_named(recorder: Any) -> None:
    assert "Liger-Kernel 9.9 has no layers for GPT2LMHeadModel (gpt2)" in refused(gpt2())
    assert "has no layers for Linear: " in refused(nn.Linear(2, 2))
    assert recorder.calls == []


def test_a_forward_that_is_replaced_already_is_not_replaced_again(recorder: Any) -> None:
    model = infinity.tile_sequence(llama(), tile_tokens=4)
    assert "the forward of model.layers.0.mlp has been replaced, as by infinity.tile_sequence" in refused(model)
    assert recorder.calls == []
    # What Liger-Kernel itself has replaced, in an earlier engine or by transformers' Trainer, may be replaced again.
    again = llama()

    def forward(self: Any) -> None: ...

    forward.__module__ = "liger_kernel.transformers.model.llama"
    again.forward = forward.__get__(again)
    apply_liger(True, again, GPU, ())
    assert [model for model, _ in recorder.calls] == [again]


@pytest.mark.parametrize("wish", [True, "auto"])
def test_what_it_raises_names_versions_and_the_key(recorder: Any, wish: Any) -> None:
    recorder.fails.append(True)
    with pytest.raises(ConfigError, match=r"9\.9 cannot replace layers of LlamaForCausalLM .*LlamaRMSNorm.*to false"):
        apply_liger(wish, llama(), GPU, ())


def test_an_engine_applies_it_once_its_plan_fits(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("infinity"), "propagate", True)
    config = {"train_micro_batch_size_per_gpu": 1, "kernels": {"liger": "auto"}}
    with caplog.at_level(logging.INFO, logger="infinity"):
        engine, *_ = infinity.initialize(model=llama(), config=config)
    engine.close()
    said = 'kernels.liger is "auto" and has no effect: the model is trained on cpu'
    assert sum(said in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(ConfigError, match=r"^kernels\.liger is true, but the model is trained on cpu"):
        infinity.initialize(model=llama(), config={**config, "kernels": {"liger": True}})

    monkeypatch.setattr(liger, "_missing", lambda device: None)
    with pytest.raises(CapacityError):
        infinity.initialize(model=llama(), config={**config, "memory": {"cpu": {"max_bytes": 1000}}})
    assert recorder.calls == []
    model = llama()
    engine, *_ = infinity.initialize(model=model, config=config)
    engine.close()
    assert [each for each, _ in recorder.calls] == [model]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/support/liger_run.py measures, in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.liger_run", str(tmp_path_factory.mktemp("drive"))]
    reply = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment, check=False)
    assert reply.returncode == 0, reply.stderr[-3000:]
    return json.loads(reply.stdout.splitlines()[-1])


needs_liger = pytest.mark.skipif(not REAL, reason="needs liger-kernel and triton: pip install 'infinity-engine[liger]'")


@needs_liger
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "kernel",
    ["rms_norm", "layer_norm", "swiglu", "geglu", "rope", "cross_entropy", "fused_linear_cross_entropy"],
)
def test_a_kernel_has_torchs_values_and_gradients(report: dict[str, Any], kernel: str) -> None:
    # In fp32, of values around one.
    assert max(report["kernels"][kernel]) < 5e-6


@needs_liger
@pytest.mark.timeout(700)
@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_a_model_trains_as_with_plain_layers_and_alike_on_every_tier(report: dict[str, Any], family: str) -> None:
    runs = dict(report["models"][family])
    losses, digest = runs.pop("plain")
    assert {name for name, run in runs.items() if run[0] != pytest.approx(losses, rel=1e-5)} == set()
    # One digest over stages, tiers and recomputed blocks, and not that of the plain layers: Liger-Kernel did run.
    (other,) = {run[1] for run in runs.values()}
    assert other != digest
