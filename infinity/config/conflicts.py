"""Rules between keys; each message names both keys and how to resolve the conflict."""

from __future__ import annotations

from infinity.base.tiers import drive_names
from infinity.config.schema import Config
from infinity.config.training import OneCycleConfig, WarmupCosineLRConfig, WarmupDecayLRConfig


def conflicts(config: Config) -> list[str]:
    """Return one message for each pair of keys that contradict each other."""
    complaints = []
    if config.fp16.enabled and config.bf16.enabled:
        complaints.append(
            'fp16.enabled and bf16.enabled are both true: keep one of them, "bf16" unless the device lacks it'
        )
    for name, section in (("bf16", config.bf16), ("fp16", config.fp16)):
        if config.torch_autocast.enabled and section.enabled:
            complaints.append(
                f"torch_autocast.enabled and {name}.enabled are both true: autocast needs fp32 weights, and {name} "
                f"stores 16-bit weights: keep {name}, which needs less memory, or torch_autocast"
            )
    autocast = config.torch_autocast
    for name, scales in (
        ("fp16.enabled is true", config.fp16.enabled),
        ('torch_autocast.dtype is "fp16"', autocast.enabled and autocast.dtype == "fp16"),
    ):
        if scales and not config.check_grad_overflow:
            complaints.append(
                f"check_grad_overflow is false and {name}: the loss scaler has to check every gradient: remove "
                "check_grad_overflow, or use bf16"
            )
    if config.checkpoint.keep_every and not config.checkpoint.keep_last:
        complaints.append(
            f"checkpoint.keep_every is {config.checkpoint.keep_every} but checkpoint.keep_last 0 keeps all: set "
            "keep_last to the number of latest checkpoints to keep"
        )
    if config.checkpoint.on_signal and config.checkpoint.path is None:
        complaints.append(
            "checkpoint.on_signal is set but checkpoint.path is not: set checkpoint.path to a folder for the checkpoint"
        )
    return (
        complaints
        + _every_step(config)
        + _axis_names(config)
        + _param_dtype(config)
        + _workers(config)
        + _offload(config)
        + _checkpointing(config)
        + _schedule(config)
        + (config.sparse_attention.problems() if config.sparse_attention else [])
    )


def _every_step(config: Config) -> list[str]:
    name = f'checkpoint.every_step is "{config.checkpoint.every_step}"'
    if config.checkpoint.every_step == "off":
        return []
    complaints = []
    if config.checkpoint.path is None:
        complaints.append(
            f"{name} but checkpoint.path is not set: set it to the folder of the run's checkpoints, by which the run "
            "is known again"
        )
    if not any(section.nvme_path for section in config.zero_optimization.offloads):
        complaints.append(
            f"{name} but nothing has an nvme_path: name a folder on a drive in zero_optimization.offload_optimizer or "
            "offload_param; what stays in memory is copied there after each step"
        )
    others = drive_names() - {"nvme"}
    if other := next((each.device for each in config.zero_optimization.offloads if each.device in others), None):
        complaints.append(f'{name} but values are on the tier "{other}": records are of "nvme" alone')
    if config.aio.checksum is False:
        complaints.append(
            f"{name} but aio.checksum is false: what a killed run has left is only known to be whole by its checksums: "
            "remove aio.checksum"
        )
    if config.checkpoint.every_step == "power" and config.provenance.given.get("aio.checksum") == "sampled":
        complaints.append(
            f'{name} but aio.checksum is "sampled": a drive that loses power may lose any block: set aio.checksum to '
            "true, or remove it"
        )
    return complaints


def tensor_sizes(config: Config) -> dict[str, int]:
    """Return dotted path -> size, for the keys that say among how many ranks layers are divided."""
    section = config.tensor_parallel
    names = {"tensor_parallel.autotp_size": section.autotp_size, "tensor_parallel.tp.tp_size": section.tp.tp_size}
    found = {path: size for path, size in names.items() if section.enabled and size > 1}
    if config.parallel.tensor > 1 or "parallel.tensor" in config.provenance.given:
        found["parallel.tensor"] = config.parallel.tensor
    return found


def pipeline_sizes(config: Config) -> dict[str, int]:
    """Return dotted path -> size, for the keys that say among how many ranks blocks are divided."""
    found = {"pipeline.stages": config.pipeline.stages} if (config.pipeline.stages or 1) > 1 else {}
    if config.parallel.pipeline > 1 or "parallel.pipeline" in config.provenance.given:
        found["parallel.pipeline"] = config.parallel.pipeline
    return {path: size for path, size in found.items() if size is not None}


def _axis_names(config: Config) -> list[str]:
    complaints = []
    for kept, sizes in (("parallel.tensor", tensor_sizes(config)), ("parallel.pipeline", pipeline_sizes(config))):
        if len(set(sizes.values())) > 1:
            said = " and ".join(f"{path} is {size}" for path, size in sizes.items())
            complaints.append(f"{said}, but they are names of one size: keep {kept}")
    return complaints


def _param_dtype(config: Config) -> list[str]:
    asked, autos = config.data_types.param_dtype, config.provenance.autos
    if asked is None or {"bf16.enabled", "fp16.enabled"} & autos:
        return []
    computed = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    if asked == computed:
        return []
    return [
        f'data_types.param_dtype is "{asked}" but the parameters are {computed}: leave param_dtype out, or set '
        f"{'bf16.enabled and fp16.enabled to false' if asked == 'fp32' else f'{asked}.enabled to true'}"
    ]


def _workers(config: Config) -> list[str]:
    idle = {
        "dataloader_prefetch_factor": config.dataloader_prefetch_factor is not None,
        "dataloader_persistent_workers": config.dataloader_persistent_workers,
    }
    return [
        f"{key} is for the loader's processes, but dataloader_num_workers is 0: set it to 1 or more, or leave {key} out"
        for key, given in idle.items()
        if given and not config.dataloader_num_workers
    ]


def _offload(config: Config) -> list[str]:
    zero = config.zero_optimization
    complaints = []
    if zero.offload_param is not None and zero.offload_param.device not in ("none", "auto") and zero.stage != 3:
        complaints.append(
            f"zero_optimization.offload_param needs stage 3, but the stage is {zero.stage}: set "
            "zero_optimization.stage to 3, or offload only the optimizer with offload_optimizer"
        )
    for name, section in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if section is not None and section.device in drive_names() and section.nvme_path is None:
            complaints.append(_without_path(config, f"zero_optimization.{name}", section.device))
    optimizer = zero.offload_optimizer
    if optimizer is not None and optimizer.device == "auto" and optimizer.ratio != 1:
        complaints.append(
            f'zero_optimization.offload_optimizer.ratio is {optimizer.ratio:g} but device "auto" chooses the ratio: '
            "leave ratio out, or name a device"
        )
    return complaints + _gradients(config) + _drives(config)


def _gradients(config: Config) -> list[str]:
    """Complaints about the home of gradients."""
    name, zero = "zero_optimization.offload_gradients", config.zero_optimization
    section, states = zero.offload_gradients, zero.offload_optimizer
    if section is None or section.device == "auto":
        if section is not None and section.ratio != 1:
            return [f'{name}.ratio is {section.ratio:g} but device "auto" chooses the share: name a device']
        return []
    complaints = []
    if states is None or states.device == "none":
        complaints.append(
            f'{name}.device is "{section.device}" but the optimizer states are on the device, and their gradients lie '
            "beside them: set zero_optimization.offload_optimizer.device, or leave offload_gradients out"
        )
    if section.device in drive_names() and zero.folders_of_others(section.device) is None:
        complaints.append(
            f'{name}.device is "{section.device}" without a path: set {name}.nvme_path, or that of offload_optimizer '
            "or offload_param, to a folder on the drive"
        )
    return complaints


def _without_path(config: Config, section: str, device: str) -> str:
    given = config.provenance.given.get(f"{section}.nvme_path")
    # accelerate writes this word where its own settings have no path; its yaml file drops the one that stands there.
    why = "" if given is None else (
        f' (nvme_path is "{given}", which accelerate writes where it knows none: give it deepspeed_config_file, a JSON '
        "file with the path)"
    )  # fmt: skip
    return f'{section}.device is "{device}" without a path{why}: set {section}.nvme_path to a folder on the drive'


def _drives(config: Config) -> list[str]:
    zero, weights = config.zero_optimization, config.aio.drive_weights
    sections = {name: getattr(zero, name) for name in ("offload_param", "offload_optimizer", "offload_gradients")}
    tiers = {each.device for each in sections.values() if each is not None} & drive_names()
    paths = {name: path for name, each in sections.items() if (path := zero.drives(each)) is not None}
    used = [*paths.values()]
    if len(set(used)) > 1 and len(tiers) < 2:
        keys = " and ".join(f"{name}.nvme_path" for name in paths)
        named = " and ".join(", ".join(path) for path in used)
        every = "both" if len(paths) == 2 else "all of them"
        return [f"zero_optimization.{keys} differ ({named}): give {every} the same folder, or the same list of folders"]
    if used and weights and len(weights) != len(used[0]):
        return [
            f"aio.drive_weights has {len(weights)} numbers but nvme_path names {len(used[0])} folders: give one number "
            "for each folder, or leave it out so that infinity measures the drives"
        ]
    return []


def _checkpointing(config: Config) -> list[str]:
    section, zero = config.activation_checkpointing, config.zero_optimization
    complaints = []
    if section.keep_ops and not section.every:
        complaints.append(
            "activation_checkpointing.keep_ops is set but no block is recomputed, because every is 0: set "
            "activation_checkpointing.every to 1, or leave keep_ops out"
        )
    offload = section.offload
    on_drive = offload.device in drive_names()
    if on_drive and not (offload.nvme_path or zero.folders_of_others(offload.device)):
        complaints.append(_without_path(config, "activation_checkpointing.offload", offload.device))
    if section.cpu_checkpointing and on_drive:
        complaints.append(
            f'activation_checkpointing.cpu_checkpointing is true and offload.device is "{offload.device}": keep one of '
            "them"
        )
    return complaints


def _schedule(config: Config) -> list[str]:
    match config.scheduler:
        case OneCycleConfig(params=params):
            required = {"cycle_min_lr": params.cycle_min_lr, "cycle_max_lr": params.cycle_max_lr}
        case WarmupDecayLRConfig(params=steps) | WarmupCosineLRConfig(params=steps):
            required = {"total_num_steps": steps.total_num_steps}
        case _:
            return []
    return [
        f"scheduler.params.{name} is required by {config.scheduler.type}: give a number"
        for name, value in required.items()
        if value is None and f"scheduler.params.{name}" not in config.provenance.autos
    ]
