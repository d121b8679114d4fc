"""DeepSpeed's names: what clients import is there, from each of the three ways in, and nothing else is touched."""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import infinity
from infinity import deepspeed
from infinity.cli.main import main
from infinity.engine.deepspeed_names import CONFIGURED, REFUSED
from infinity.errors import ConfigError, StateError
from infinity.integrations.deepspeed.modules import MODULES, NO_MODULES
from infinity.integrations.deepspeed.refusals import Refusal

ROOT = Path(__file__).resolve().parents[1]
PATH_ENTRY = ROOT / "infinity" / "integrations" / "as_deepspeed"

# What transformers, accelerate, peft, trl and lightning reach for, by reading their sources.
CONTRACT = {
    "": (
        "__version__", "__infinity__", "initialize", "init_distributed", "zero", "comm", "ops", "utils", "runtime",
        "checkpointing", "accelerator", "DeepSpeedEngine", "tp_model_init", "add_config_arguments", "init_inference",
        "PipelineEngine", "PipelineModule", "pipe", "OnDevice", "log_dist", "logger",
    ),
    ".comm": ("is_initialized", "init_distributed", "get_rank", "get_world_size", "all_reduce", "barrier", "ReduceOp"),
    ".runtime.zero": ("Init", "GatheredParameters", "register_external_parameter"),
    ".runtime.zero.partition_parameters": (
        "zero_wrapper_for_fp_tensor_constructor", "_orig_torch_arange", "ZeroParamStatus", "get_accelerator",
    ),
    ".runtime.zero.offload_config": ("OffloadDeviceEnum", "OffloadStateTypeEnum"),
    ".runtime.lr_schedules": ("VALID_LR_SCHEDULES", "WarmupLR", "WarmupDecayLR"),
    ".runtime.base_optimizer": ("DeepSpeedOptimizer",),
    ".runtime.engine": ("DeepSpeedEngine",),
    ".runtime.utils": ("move_to_device", "set_random_seed"),
    ".pipe": ("PipelineModule", "LayerSpec", "TiedLayerSpec"),
    ".runtime.pipe": ("PipelineModule", "LayerSpec", "TiedLayerSpec", "ProcessTopology"),
    ".runtime.pipe.module": ("PipelineModule", "LayerSpec", "TiedLayerSpec"),
    ".runtime.pipe.engine": ("PipelineEngine", "DeepSpeedEngine"),
    ".runtime.pipe.topology": ("ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology"),
    ".runtime.dataloader": ("RepeatingLoader",),
    ".ops.adam": ("DeepSpeedCPUAdam", "FusedAdam"),
    ".ops.adagrad": ("DeepSpeedCPUAdagrad",),
    ".ops.lion": ("DeepSpeedCPULion", "FusedLion"),
    ".checkpoint.utils": ("clone_tensors_for_torch_save",),
    ".utils": ("logger", "safe_get_full_grad", "is_initialized", "groups", "RepeatingLoader"),
    ".utils.logging": ("logger",),
    ".checkpointing": ("configure", "checkpoint"),
    ".accelerator": ("get_accelerator",),
    ".launcher.runner": ("DEEPSPEED_ENVIRONMENT_NAME",),
}  # fmt: skip
ASK = """
import importlib, json, sys
package, contract = sys.argv[1], json.loads(sys.argv[2])
missing = [
    f"{package}{module}.{name}" for module, names in contract.items() for name in names
    if not hasattr(importlib.import_module(package + module), name)
]
print(json.dumps(missing))
"""


def python(text: str, *words: str, path: tuple[Path, ...] = (ROOT,)) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", text, *words], capture_output=True, text=True, timeout=100, env=env, check=False
    )


def test_every_name_of_the_contract_is_there():
    reply = python(ASK, "deepspeed", json.dumps(CONTRACT), path=(PATH_ENTRY, ROOT))
    assert reply.returncode == 0, reply.stderr
    assert json.loads(reply.stdout) == []
    for module, names in CONTRACT.items():
        found = importlib.import_module(f"infinity.deepspeed{module}")
        assert [name for name in names if not hasattr(found, name)] == []


def test_every_way_in_gives_the_same_objects_if_no_client_has_looked_before(tmp_path):
    """In one process: refused beside a client or another deepspeed, then installed; only then have parameters ds_id."""
    for client in ("accelerate", "deepspeed"):
        (tmp_path / f"{client}.py").write_text("")
    reply = python(
        "import infinity.deepspeed as ours, sys, torch\n"
        "assert 'deepspeed' not in sys.modules\n"
        "for client in ('accelerate', 'deepspeed'):\n"
        "    __import__(client)\n"
        "    try:\n        ours.install()\n    except Exception as error:\n        print(error)\n"
        "    del sys.modules[client]\n"
        "sys.path.remove(sys.argv[1])\n"
        "def attributes():\n"
        "    engine, *_ = ours.initialize(model=torch.nn.Linear(4, 4), config={\n"
        "        'train_batch_size': 1, 'zero_optimization': {'stage': 3}, 'optimizer': {'type': 'AdamW'}})\n"
        "    with engine:\n"
        "        return hasattr(engine.module.weight, 'ds_id')\n"
        "assert not attributes()\n"
        "ours.install(); ours.install()\n"
        "assert attributes()\n"
        "import deepspeed, deepspeed.ops.adam, infinity.deepspeed.ops.adam, importlib.metadata, importlib.util\n"
        "assert deepspeed is ours and deepspeed.ops.adam is infinity.deepspeed.ops.adam\n"
        "assert importlib.metadata.version('deepspeed') == deepspeed.__version__ == '0.19.8'\n"
        "assert importlib.util.find_spec('deepspeed') is not None\n"
        "assert deepspeed.__infinity__ == infinity.__version__\n",
        str(tmp_path), path=(tmp_path, ROOT),
    )  # fmt: skip
    assert reply.returncode == 0, reply.stderr
    for client, said in zip(("accelerate", "deepspeed"), reply.stdout.splitlines(), strict=True):
        assert f"comes too late: {client} is imported already" in said


@pytest.mark.matrix
def test_another_deepspeed_is_shadowed_in_the_tree_of_a_run_and_nowhere_else(tmp_path):
    """A stand-in for an installed DeepSpeed; children see what their parent sees."""
    other = tmp_path / "site" / "deepspeed"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("__version__ = 'the real one'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, deepspeed\n"
        "child = subprocess.run([sys.executable, '-c', 'import deepspeed; print(deepspeed.__version__)'],\n"
        "                       capture_output=True, text=True)\n"
        "print('SEEN', deepspeed.__version__, '|', child.stdout.strip(), '|', ' '.join(sys.argv[1:]))\n"
        "sys.exit(7)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "site")])}
    before = sorted((path, path.stat().st_mtime_ns) for path in other.parent.rglob("*.py"))

    def seen(*options: str) -> str:
        reply = subprocess.run(
            [sys.executable, "-m", "infinity", "run", *options, "--nproc", "1", str(script), "--lr", "1"],
            capture_output=True, text=True, timeout=100, env=env, check=False,
        )  # fmt: skip
        assert reply.returncode == 1, "torchrun's code for a script that failed"
        return next(line for line in reply.stdout.splitlines() if line.startswith("SEEN"))

    # Without --no_local_rank, with which tests.clients start theirs.
    assert seen("--as-deepspeed") == "SEEN 0.19.8 | 0.19.8 | --local_rank=0 --lr 1"
    assert seen() == "SEEN the real one | the real one | --lr 1"
    assert sorted((path, path.stat().st_mtime_ns) for path in other.parent.rglob("*.py")) == before


def test_a_shell_script_finds_deepspeeds_commands(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        'echo "PATH $PYTHONPATH"\n'
        "deepspeed --nproc 0 LICENSE\n"
        f"{sys.executable} -m deepspeed.launcher.runner --launcher slurm LICENSE\n"
    )
    reply = subprocess.run(
        [sys.executable, "-m", "infinity", "run", "--as-deepspeed", "sh", str(script)], capture_output=True, text=True,
        timeout=100, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, cwd=ROOT,
    )  # fmt: skip
    assert f"PATH {PATH_ENTRY}{os.pathsep}{ROOT}" in reply.stdout.splitlines(), reply.stderr
    first, second = reply.stderr.splitlines()
    assert "infinity run: --nproc 0: a machine has 1 to" in first
    assert "--launcher slurm: machines are started by ssh alone" in second


def test_one_machine_of_several_is_started_without_ssh(monkeypatch):
    started = []
    monkeypatch.setattr("infinity.cli.run._become", lambda command, added: started.append(command) or 0)
    words = "--no_ssh --num_nodes 2 --node_rank 1 --master_addr there --nproc 2 --enable_each_rank_log logs LICENSE x"
    monkeypatch.chdir(ROOT)
    assert main(["run", *words.split()]) == 0
    assert started[0][3:] == [
        "--nnodes=2", "--node-rank=1", "--master-addr=there", "--master-port=29500", "--nproc-per-node=2",
        "--log-dir=logs", "--redirects=3", "LICENSE", "x",
    ]  # fmt: skip


@pytest.mark.matrix
def test_machines_of_a_hostfile_are_started_over_ssh(tmp_path):
    """Two "machines" on this one, behind a stand-in for ssh that runs the command here."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\n[ "$1" = -tt ] || exit 9\nexec sh -c "$3"\n')
    ssh.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("# two\n127.0.0.1 slots=4\nlocalhost slots=4\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import infinity.deepspeed as deepspeed, infinity.deepspeed.comm as dist, torch\n"
        "deepspeed.init_distributed()\n"
        "value = torch.tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(value)\n"
        "import os\n"
        "os.write(1, f'SUM {value.item()} {dist.get_world_size()}\\n'.encode())\n"
    )
    reply = subprocess.run(
        [sys.executable, "-m", "infinity", "run", "--hostfile", str(hosts), "--nproc", "1", "--master_port", "29617",
         str(script)],
        capture_output=True, text=True, timeout=110, check=False, cwd=ROOT,
        env={**os.environ, "PATH": f"{ssh.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert reply.returncode == 0, reply.stderr[-3000:]
    assert [line for line in reply.stdout.splitlines() if line.startswith("SUM")] == ["SUM 3.0 2"] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a script to start"),
        (["no_such_script.py"], "there is no such file, nor a command of that name"),
        (["--nproc", "0", "README.md"], "--nproc 0: a machine has 1 to 65,536 processes"),
        (["--include", "elsewhere:0", "README.md"], "no machine 'elsewhere'; there is localhost"),
        (["--include", "localhost:7", "README.md"], "localhost has devices 0 to 0, not 7"),
        (["--include", "localhost:a", "README.md"], "'a' is not a list of devices"),
        (["--exclude", "localhost:0", "README.md"], "leaves no device"),
        (["--include", "localhost", "--exclude", "localhost", "README.md"], "keep one of the two"),
        (["--hostfile", "no_such_file", "README.md"], "cannot be read"),
        (["--node_rank", "1", "README.md"], "over ssh this command numbers the machines itself"),
        (["--no_ssh", "README.md"], "--no_ssh needs --node_rank, --master_addr, and --num_nodes or --hostfile"),
        (["--bind_core_list", "0-3", "README.md"], "start it under `taskset -c LIST`"),
        (["--launcher_args", "x", "README.md"], "machines are started by ssh alone"),
        (["--hostfile", "LICENSE", "README.md"], 'is not "name slots=8"'),
        (["--hostfile", "SLOTS", "README.md"], "line 1: 99999999999 slots: a machine has 1 to 65,536 devices"),
        (["--hostfile", "PIPE", "README.md"], "it is not a regular file"),
    ],
)
def test_a_wrong_option_is_one_sentence(words, said, capsys, monkeypatch, tmp_path):
    (tmp_path / "SLOTS").write_text("localhost slots=99999999999\n")
    os.mkfifo(tmp_path / "PIPE")
    words = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
    monkeypatch.chdir(ROOT)
    assert main(["run", *words]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert len(complaint.splitlines()) == 1


def refusals():
    """Every name of the tables that is refused, and one name below each module that is."""
    for module, names in MODULES.items():
        yield from ((module, name, value.why) for name, value in names.items() if isinstance(value, Refusal))
    yield from ((module, "Anything", refusal.why) for module, refusal in NO_MODULES.items())


def test_what_is_refused_can_be_imported_and_says_why_when_it_is_used():
    for module, name, why in refusals():
        place = f"{module}.{name}".lstrip(".")
        found = getattr(importlib.import_module(f"infinity.deepspeed.{module}".rstrip(".")), name)
        assert not isinstance(3, found)
        # What a file defines at its top.
        subclass = type("Own", (found,), {})
        for use in (found, subclass):
            for way in (lambda use: use(1, key=2), lambda use: 2 * use, iter):
                with pytest.raises(ConfigError, match=re.escape(f"deepspeed.{place}: {why}")):
                    way(use)
        assert not hasattr(found, "attribute")
    assert len(list(refusals())) > 80


@pytest.mark.parametrize(
    ("statement", "error", "said"),
    [
        ("import infinity.deepspeed.no.such", ImportError, "deepspeed.no: infinity has no such name"),
        ("from infinity.deepspeed.utils import safe_get_full_gard", ImportError, "did you mean safe_get_full_grad?"),
        ("from infinity.deepspeed.runtime.zero import Initt", ImportError, "deepspeed.runtime.zero.Initt: infinity"),
        ("deepspeed.no_such", AttributeError, "deepspeed.no_such: infinity has no such name"),
        ("deepspeed.comm.no_such", AttributeError, "deepspeed.comm.no_such: infinity has no such name"),
        ("deepspeed.get_accelerator().no_such", AttributeError, "get_accelerator().no_such: neither"),
        ("deepspeed.ops.op_builder.FusedLambBuilder().load()", ConfigError, "Lamb is not elementwise"),
        ("deepspeed.init_distributed('ccl')", ConfigError, "this torch has no back end 'ccl'; it has gloo"),
        ("deepspeed.init_distributed('cpu:gloo,xpu:zccl')", ConfigError, "no back end 'zccl'"),
        ("deepspeed.init_inference(None)", ConfigError, "there is no inference engine here"),
        ("deepspeed.initialize(model=deepspeed.tp_model_init(torch.nn.Linear(2, 2), 2, torch.bfloat16), config={})",
         ConfigError, "set tensor_parallel.autotp_size to 2 in it"),
        ("deepspeed.runtime.lr_schedules.WarmupLR(None, 0.1)", ConfigError, "name its other arguments"),
    ],
)
def test_no_other_name_ends_in_a_raw_error(statement, error, said):
    with pytest.raises(error, match=re.escape(said)):
        exec(statement, {"deepspeed": deepspeed, "torch": torch})


def test_an_engine_has_deepspeeds_getters_and_setters():
    config = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9]}}, "zero_optimization": {"stage": 2},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=torch.nn.Sequential(torch.nn.Linear(4, 4, device="cpu")), config=config)

    def run(micro_batches: int) -> int:
        for _ in range(micro_batches):
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()
        return engine.global_steps

    with engine:
        told = {name: getattr(engine, name)() for name in CONFIGURED}
        assert told["gradient_clipping"] == 0.5 and told["zero_optimization"] and not told["fp16_enabled"]
        assert (told["optimizer_name"], told["zero_optimization_stage"]) == ("Adam", 2)
        assert engine.loss_scale == engine.loss_scale() == 1.0 and told["dynamic_loss_scale"] is False
        engine.set_lr(0.2)
        assert (engine.get_lr(), engine.get_mom(), engine.get_batch_info()) == ([0.2], [(0.8, 0.9)], (2, 1, 2))
        assert engine.module_state_dict().keys() == engine.module.state_dict().keys()
        assert run(2) == 1
        engine.set_train_batch_size(3)
        assert (run(2), run(1)) == (1, 2) and engine.global_samples == 5
        run(1)
        with pytest.raises(StateError, match="1 micro-batches of a step are accumulated"):
            engine.set_train_batch_size(1)
        for name, why in {**REFUSED, "no_such": "neither the engine nor its module Sequential has it"}.items():
            assert not hasattr(engine, name)
            with pytest.raises(AttributeError, match=re.escape(f"engine.{name}: {why}")):
                getattr(engine, name)


def test_what_scripts_use_without_an_engine_works(caplog, capsys):
    runtime = deepspeed.runtime
    found = deepspeed.DeepSpeedConfig({"train_batch_size": 4, "zero_optimization": {"stage": 3}})
    assert (found.train_micro_batch_size_per_gpu, found.zero_optimization_stage) == (4, 3) and found.zero_enabled
    zero = runtime.zero.config.DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=7, cpu_offload=True)
    assert (zero.prefetch_bucket_size, zero.overlap_comm, zero.offload_optimizer.device) == (7, True, "cpu")
    model = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    estimates = runtime.zero.stage3
    estimates.estimate_zero3_model_states_mem_needs_all_live(model, 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "1M params in bf16, stage 3" in lines[0]
    # The states take 10 bytes a parameter and the gradients 2, on the CPU.
    cpu, gpu, largest = estimates.estimate_zero3_model_states_mem_needs(10**9, 10**8, 2, cpu_offload_params=False)
    assert 12e9 <= cpu < 15e9 and gpu > 1e9 and largest == 2 * 10**8
    timers = deepspeed.utils.timer.SynchronizedWallClockTimer()
    timers("step").start()
    with pytest.raises(RuntimeError, match="'step' has been started already"):
        timers("step").start()
    timers("step").stop(record=True)
    assert timers.get_mean(["step"])["step"] == timers("step").elapsed() > 0
    speed = deepspeed.utils.timer.ThroughputTimer(batch_size=4, start_step=1)
    for _ in range(3):
        speed.start()
        speed.stop(global_step=True)
    assert speed.avg_samples_per_sec() > 0
    with caplog.at_level("INFO", logger="infinity"):
        runtime.utils.see_memory_usage("here")
        runtime.utils.see_memory_usage("there", force=True)
    assert [record.message.split(":")[0] for record in caplog.records] == ["there"]
    parts = runtime.utils.partition_balanced
    assert parts([0, 1.1, 1.9, 3, 3, 3], 4) == [0, 3, 4, 5, 6] and runtime.utils.partition_uniform(5, 3) == [0, 2, 4, 5]
    assert parts([1, 2], 3) == [0, 1, 2, 2] and parts([1] * 8, 4) == [0, 2, 4, 6, 8]
    weight, rows = torch.randn(3, 4), torch.randn(2, 4)
    assert torch.equal(runtime.zero.linear.zero3_linear_wrap(rows, weight), rows @ weight.T)
    assert deepspeed.ops.op_builder.CPUAdamBuilder().load() and deepspeed.ops.__compatible_ops__["cpu_adam"]


def test_a_program_asks_the_launcher_and_writes_to_the_monitors(tmp_path):
    runner = importlib.import_module("infinity.deepspeed.launcher.runner")
    (tmp_path / "hosts").write_text("# two\na slots=2\nb slots=3\n")
    pool = runner.fetch_hostfile(tmp_path / "hosts")
    assert pool == {"a": 2, "b": 3} and runner.fetch_hostfile(tmp_path / "none") is None
    assert runner.parse_inclusion_exclusion(pool, "b:0@b:2", "") == {"b": [0, 2]}
    assert runner.parse_inclusion_exclusion(pool, "", "a@b:1@b:0") == {"b": [2]}
    assert runner.parse_resource_filter({"a": [0, 1]}, exclude_str="a") == {}
    for words in ({"include_str": "a", "exclude_str": "a"}, {"include_str": "c"}, {"exclude_str": "a:2"}):
        with pytest.raises(ValueError, match=r"--(in|ex)clude"):
            runner.parse_resource_filter({"a": [0, 1]}, **words)

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "own"}
    found = deepspeed.DeepSpeedConfig({"train_batch_size": 4, "csv_monitor": section}).monitor_config
    monitors = importlib.import_module("infinity.deepspeed.monitor.monitor")
    for monitor in (monitors.MonitorMaster(found), monitors.csvMonitor(found.csv_monitor)):
        assert monitor.enabled
        monitor.write_events([("Train/accuracy", 0.5, 4), ("Train/accuracy", 0.75, 8)])
    assert monitor.job_name == "own" and not monitors.TensorBoardMonitor(found.tensorboard).enabled
    rows = (tmp_path / "own" / "Train_accuracy.csv").read_text().split()
    assert rows == ["step,accuracy", *["4,0.5", "8,0.75"] * 2]


def test_the_optimizer_of_an_engine_tells_its_loss_scale_and_norm():
    dynamic = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    fixed = {"enabled": True, "loss_scale": 8.0}
    for section, scales in ((dynamic, [16.0, 32.0]), (fixed, [8.0, 8.0]), ({"enabled": False}, [1.0, 1.0])):
        config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "fp16": section}
        model = torch.nn.Linear(4, 1, bias=False, device="cpu")
        engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
        with engine:
            for scale in scales:
                scaler = optimizer.loss_scaler
                assert optimizer.loss_scale == optimizer.cur_scale == scaler.cur_scale == scaler.loss_scale == scale
                engine.backward(engine(torch.ones(1, 4, dtype=model.weight.dtype)).sum())
                engine.step()
            assert optimizer.dynamic_loss_scale == scaler.dynamic == (section is dynamic)
            assert optimizer._global_grad_norm == engine.get_global_grad_norm() == 2.0
            with pytest.raises(AttributeError, match=r"optimizer.fp32_groups: the optimizer of an engine has no such"):
                assert optimizer.fp32_groups


def test_a_model_of_an_engine_is_guarded_as_ours_and_goes_to_the_next_engine():
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
    model = torch.nn.Linear(4, 4)
    first, *_ = deepspeed.initialize(model=model, config=config)
    with pytest.raises(StateError, match="cannot pickle Linear"):
        pickle.dumps(model)
    assert torch.equal(copy.deepcopy(model).weight, first.state_dict()["weight"])
    second, *_ = deepspeed.initialize(model=model, config=config)
    with second, pytest.raises(StateError, match="this engine was closed"):
        first.step()


def test_an_engine_of_a_model_in_layers_is_told_from_others():
    from infinity.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    from infinity.parallel import layers
    from infinity.parallel import layers as module

    assert (LayerSpec, TiedLayerSpec, PipelineModule) == (layers.LayerSpec, layers.TiedLayerSpec, module.PipelineModule)
    torch.manual_seed(0)
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    data = [(torch.randn(4), torch.tensor(index % 3)) for index in range(8)]
    net = PipelineModule([LayerSpec(torch.nn.Linear, 4, 3)], loss_fn=torch.nn.CrossEntropyLoss())
    layered, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=config, training_data=data
    )
    plain, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 3), config=config)
    with layered, plain:
        assert isinstance(layered, deepspeed.PipelineEngine) and isinstance(layered, deepspeed.DeepSpeedEngine)
        assert not isinstance(plain, deepspeed.PipelineEngine)
        batches = deepspeed.utils.RepeatingLoader(loader)
        losses = []
        # Two batches are an epoch.
        for _ in range(20):
            loss = layered(*next(batches))
            layered.backward(loss)
            layered.step()
            losses.append(loss.item())
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])


@pytest.mark.parametrize(("pp", "dp", "tp"), [(2, 2, 2), (3, 2, 1), (1, 4, 3)])
def test_its_topologies_place_ranks_as_an_engine_does(pp, dp, tp):
    from infinity.deepspeed.runtime.pipe.topology import (
        PipeDataParallelTopology,
        PipeModelDataParallelTopology,
        ProcessTopology,
    )

    from infinity.plan.types import Topology

    theirs, ours = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp), Topology(pp=pp, dp=dp, tp=tp)
    assert theirs.world_size() == ours.world_size
    assert [tuple(theirs.get_coord(rank)) for rank in range(pp * dp * tp)] == [
        tuple(ours.coordinate(rank)) for rank in range(pp * dp * tp)
    ]
    assert all(theirs.get_rank(**theirs.get_coord(rank)._asdict()) == rank for rank in range(pp * dp * tp))
    for theirs_axis, axis in (("pipe", "pp"), ("data", "dp"), ("model", "tp")):
        assert theirs.get_axis_comm_lists(theirs_axis) == [list(members) for members in ours.axis_groups(axis)]
        assert theirs.get_dim(theirs_axis) == getattr(ours, axis)
    assert theirs.get_axis_list("pipe", pp - 1) == [*range((pp - 1) * dp * tp, pp * dp * tp)]
    assert theirs.get_axis_comm_lists("expert") == [] and theirs.get_dim("expert") == 0
    assert PipeDataParallelTopology(pp, dp).get_axis_names() == ["pipe", "data"]
    assert ProcessTopology(["a", "b"], [2, 3]).filter_match(b=1) == [1, 4]


def test_its_optimizers_keep_the_groups_and_are_stepped_natively():
    from infinity.deepspeed.ops import adagrad, adam, lion

    from infinity.optim.update_rules import native_rule_of
    from infinity.plan.types import Kind

    weights = [torch.nn.Parameter(torch.ones(3, device="cpu"))]
    groups = [{"params": weights, "lr": 0.5}]
    moments = {
        adam.DeepSpeedCPUAdam: 2, adam.FusedAdam: 2, adagrad.DeepSpeedCPUAdagrad: 1, lion.DeepSpeedCPULion: 1,
        lion.FusedLion: 1, torch.optim.AdamW: 2,
    }  # fmt: skip
    for kind, count in moments.items():
        optimizer = kind(groups)
        rule = native_rule_of(optimizer)
        assert rule is not None, kind
        assert len(rule.moments) == count
        # The very dictionaries: a schedule made for another optimizer over them stays alive.
        assert optimizer.param_groups[0] is groups[0]
        groups = [{"params": weights, "lr": 0.5}]
    assert native_rule_of(lion.FusedLion(weights)).moments == (Kind.EXP_AVG,)

    class Other(torch.optim.Adam):
        def step(self, closure=None):
            return None

    assert native_rule_of(Other(weights)) is None
    with pytest.raises(ConfigError, match="bias_correction"):
        adam.FusedAdam(weights, bias_correction=False)


def test_lion_by_itself_and_in_an_engine_steps_alike():
    from infinity.deepspeed.ops.lion import FusedLion

    import infinity.deepspeed as deepspeed

    torch.manual_seed(3)
    model = torch.nn.Linear(6, 5, device="cpu")
    alone = torch.nn.Linear(6, 5, device="cpu")
    alone.load_state_dict(model.state_dict())
    plain = FusedLion(alone.parameters(), lr=0.01, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=FusedLion(model.parameters(), lr=0.01, weight_decay=0.1),
        config={"train_batch_size": 4, "gradient_clipping": 0.0},
    )  # fmt: skip
    with engine:
        for step in range(4):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(batch).square().mean())
            engine.step()
            plain.zero_grad()
            alone(batch).square().mean().backward()
            plain.step()
        with infinity.read(model):
            assert torch.allclose(model.weight, alone.weight, rtol=0, atol=1e-6)


def test_one_seed_is_that_of_every_generator():
    from infinity.deepspeed.runtime.utils import set_random_seed

    def drawn(seed: int) -> list[float]:
        set_random_seed(seed)
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    first = drawn(3)
    assert drawn(3) == first
    assert all(one != other for one, other in zip(drawn(4), first, strict=True))
