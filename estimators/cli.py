"""The command `infinity-estimate`: what a training run will hold on each tier, by the plan that the engine would make.

    infinity-estimate model/config.json --config offload.json --ranks 8
    infinity-estimate --layers 32 --hidden 4096 --intermediate 14336 --heads 32 --kv-heads 8 --vocab 128256
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from estimators.architectures import block_classes, model_tree
from infinity.config import ResolveContext, load_config, resolve
from infinity.errors import ConfigError
from infinity.plan.plan import Plan, make_plan
from infinity.plan.request import plan_request, unit_rules
from infinity.plan.spec import find_units
from infinity.plan.topology import Topology

# Command-line option -> the key of a config.json.
_PLAIN = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "intermediate": "intermediate_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "vocab": "vocab_size",
}  # fmt: skip
_REQUIRED = ("layers", "hidden", "intermediate", "heads", "vocab")


def estimate(
    model: Mapping[str, Any], *, config: str | Mapping[str, Any] | None, ranks: int, accelerator: bool
) -> Plan:
    """The plan of the causal language model whose config.json holds `model`, trained with `config` on `ranks` ranks."""
    hidden = model.get("hidden_size", model.get("n_embd"))
    resolved = resolve(load_config(config), ResolveContext(world_size=ranks, hidden_size=hidden))
    tree = model_tree(model, compute_dtype=resolved.compute_dtype)
    spec = find_units(tree, unit_rules(resolved, block_classes(model)))
    return make_plan(spec, Topology(dp=ranks), plan_request(resolved, accelerator=accelerator))


def as_json(plan: Plan) -> dict[str, Any]:
    """What a program wants to know about a plan; bytes are those of one rank."""
    return {
        "parameters": plan.numel,
        "ranks": plan.topology.world_size,
        "units": len(plan.layouts),
        "sub_groups": len(plan.sub_groups),
        "nbytes": {
            tier.value: {kind.value: nbytes for kind, nbytes in kinds.items()}
            for tier, kinds in plan.bytes_by_tier().items()
        },
        "gathered_nbytes_max": plan.schedule.peak_nbytes,
        "nvme_file_nbytes": plan.nvme_nbytes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the estimate; 2 and one sentence on standard error where the question cannot be answered."""
    args = _parser().parse_args(argv)
    try:
        plan = estimate(_model(args), config=args.config, ranks=args.ranks, accelerator=not args.no_gpu)
    except ConfigError as error:
        print(f"infinity-estimate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(plan), indent=2) if args.json else plan.explain())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity-estimate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a Hugging Face config.json, or the folder it is in")
    parser.add_argument("--config", help="the training configuration (JSON); default: every key's default")
    parser.add_argument("--ranks", type=_positive, default=1, help="data-parallel ranks (default: 1)")
    parser.add_argument("--no-gpu", action="store_true", help="ranks without an accelerator: no staging buffers")
    parser.add_argument("--json", action="store_true", help="numbers for programs instead of words")
    plain = parser.add_argument_group("a model of Llama's shape, instead of MODEL")
    for name, key in _PLAIN.items():
        plain.add_argument(f"--{name.replace('_', '-')}", type=_positive, metavar="N", help=key)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _model(args: argparse.Namespace) -> Mapping[str, Any]:
    """The values of a config.json: from the file, or from plain numbers."""
    given = {name: getattr(args, name) for name in _PLAIN if getattr(args, name) is not None}
    if args.model is None:
        missing = [f"--{name}" for name in _REQUIRED if name not in given]
        if missing:
            raise ConfigError(f"give a config.json, or plain numbers ({', '.join(missing)} missing)")
        return {"model_type": "llama", **{_PLAIN[name]: value for name, value in given.items()}}
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"give a config.json or plain numbers, not both ({args.model} and {options})")
    path = Path(args.model)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: the model's configuration cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a model's configuration is an object, not {type(values).__name__}")
    return values
