"""The command `infinity-estimate`: what a training run will hold on each tier, and how fast it will be.

    infinity-estimate llama-3.1-70b --ranks 1 --gpu 24GB --ram 256GB --nvme 2TB    what fits, and its configuration
    infinity-estimate model/config.json --config offload.json --ranks 8            one configuration in detail
    infinity-estimate qwen3-8b                                                     the usual placements side by side
    infinity-estimate qwen3-8b --compare a.json b.json                             these configurations side by side
    infinity-estimate qwen3-8b --max --gpu 24GB --ram 64GB                         the largest model of its family
    infinity-estimate --layers 32 --hidden 4096 --intermediate 14336 --heads 32 --kv-heads 8 --vocab 128256
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimators.estimate import Estimate, Machine, estimate
from estimators.model import PRESETS, Lora, described
from estimators.picture import picture
from estimators.report import (
    WIDTH,
    advised,
    as_json,
    chosen,
    compare_estimates,
    folded,
    format_report,
    headline,
    largest_found,
    tier_name,
    tiles_by_call,
    to_choose,
)
from estimators.search import (
    OPTIMIZERS,
    Advice,
    Choice,
    Wish,
    advise,
    largest,
    nearest,
    search,
    sparingly,
    states_fit,
    usual,
    ways_out,
)
from estimators.trees import known
from infinity.base.command_line import Parser
from infinity.base.sizes import format_bytes
from infinity.config import parse_bytes
from infinity.errors import ConfigError
from infinity.plan.hardware import load_profile
from infinity.plan.pipeline import SCHEDULES

# Command-line option -> the key of a config.json.
_PLAIN = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "intermediate": "intermediate_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "vocab": "vocab_size",
}  # fmt: skip
_WIDTH_MIN = 60
# No machine has so little: a smaller number is one without its unit.
_NBYTES_MIN = 10**6
_REQUIRED = ("layers", "hidden", "intermediate", "heads", "vocab")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answer; 2 and one sentence on standard error where the question cannot be answered.

    1 where a search finds nothing that fits, or where a given configuration does not fit the given machine.
    """
    parser = Parser(prog="infinity-estimate", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    # A search makes millions of small objects without cycles: to look through them again and again took a fifth of it.
    gc.disable()
    try:
        if args.list:
            print("\n".join([*PRESETS, "", "and any config.json of these types:", "  " + ", ".join(known())]))
            return 0
        text, data, shown, fits = _answer(args)
        if args.picture is not None:
            _write(args.picture, picture(shown))
    except ConfigError as error:
        print(f"infinity-estimate: {error}", file=sys.stderr)
        return 2
    finally:
        gc.enable()
    try:
        print(json.dumps(data, indent=2) if args.json else folded(text, _width()), flush=True)
    except BrokenPipeError:
        # The reader has closed the pipe: nothing more may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0 if fits else 1


def _width() -> int:
    """Columns of the terminal, as far as sentences are read easily; of a file or a pipe, the widest."""
    return min(WIDTH, max(shutil.get_terminal_size().columns, _WIDTH_MIN)) if sys.stdout.isatty() else WIDTH


def _answer(args: argparse.Namespace) -> tuple[str, Any, Estimate, bool]:
    """The answer as text and as data, the estimate to draw, and whether it fits."""
    model = described(_model(args))
    if args.lora is None and args.lora_targets is not None:
        raise ConfigError("--lora-targets names the layers of adapters: give their rank, too, as --lora 16")
    lora = None if args.lora is None else Lora.of(args.lora, args.lora_targets)
    model, machine = model.with_adapters(lora), _machine(args)
    searches = args.fit or args.max or (args.config is None and not args.compare and machine.known)
    _refuse_idle(args, searches)
    options: dict[str, Any] = {
        "ranks": args.ranks, "ranks_per_node": args.ranks_per_node, "tp": args.tp, "pp": args.pp, "sp": args.sp,
        "schedule": args.schedule, "virtual_stages": args.virtual_stages, "micro_batches": args.micro_batches,
        "batch": args.batch, "sequence": args.sequence, "profile": load_profile(args.profile) if args.profile else None,
    }  # fmt: skip
    wish = Wish(
        model, machine, options, dtype=args.dtype or "bf16", optimizer=args.optimizer or "AdamW",
        checkpointing=args.checkpointing, tiled_loss=args.tiled_loss, tiled_mlps=args.tiled_mlps,
        nvme_path=os.path.abspath(args.nvme_path) if args.nvme_path else "nvme",
    )  # fmt: skip
    if args.max:
        member, deepest = largest(wish)
        both_found = [choice for choice in (member, deepest) if choice is not None]
        best = max(both_found, key=lambda choice: choice.estimate.plan.numel)
        _save(best, args.save, found=deepest.estimate.fits)
        both = {"known": _choice(member) if member else None, "deepest": _choice(deepest)} if args.json else None
        return largest_found(member, deepest), both, best.estimate, deepest.estimate.fits
    if searches:
        advice, lead = _advised(wish, args.optimizer) if args.fit else (Advice([search(wish)], lasting=True), "")
        choice = advice.best
        _save(choice, args.save, found=choice.estimate.fits)
        tried = bool(args.fit) and args.optimizer is None
        ways = [] if choice.estimate.fits else ways_out(wish, choice, with_8_bits=not tried)
        text = lead + (advised(advice, ways) if args.fit else chosen(choice, ways))
        found = {**_choice(choice), "ways_out": {words: _choice(way) for words, way in ways}} if args.json else None
        return text, found, choice.estimate, choice.estimate.fits

    def sized(config: str) -> Estimate:
        return estimate(
            model, config, machine=machine, checkpointing=bool(args.checkpointing),
            tiled_loss=bool(args.tiled_loss), tiled_mlps=bool(args.tiled_mlps), **options,
        )  # fmt: skip

    if args.config is None:
        rows = [(Path(path).stem, sized(path)) for path in args.compare] if args.compare else [*usual(wish)]
        data = [{"name": name, **found.as_dict()} for name, found in rows] if args.json else None
        title = "" if args.compare else "parameters, optimizer"
        table = compare_estimates(rows, title=title, width=_width())
        text = "\n".join([_compared_model(args, rows), "", table, *_hints(args, wish, rows[-1][1])])
        return text, data, rows[0][1], all(found.fits for _, found in rows)
    single = sized(args.config)
    near = None if single.fits or not machine.known else nearest(single, wish)
    told = single.as_dict() if args.json else None
    if told is not None and not single.fits:
        told["nearest"] = None if near is None else near.keys
    return format_report(single, near), told, single, single.fits


def _advised(wish: Wish, asked: str | None) -> tuple[Advice, str]:
    """The best that fits, with moments in 8 bits where nothing fits with AdamW's and no optimizer is asked for; and
    what is said of that.
    """
    # Where the states alone have no room, a search takes long to say so.
    advice = advise(wish) if asked is not None or states_fit(wish) else None
    if advice is not None and (advice.best.estimate.fits or asked is not None):
        return advice, ""
    with suppress(ConfigError):
        coded = advise(replace(wish, optimizer="AdamW8bit"))
        if coded.best.estimate.fits:
            return coded, (
                "With AdamW nothing fits here. With moments in 8 bits (AdamW8bit, which rounds them) it does; "
                "--optimizer AdamW says what AdamW lacks.\n\n"
            )
    return advice or advise(wish), ""


def _refuse_idle(args: argparse.Namespace, searches: bool) -> None:
    """ConfigError for an option that would do nothing."""
    if args.mixed and not args.compare:
        raise ConfigError("--mixed belongs to --compare")
    if args.save is not None and not searches:
        raise ConfigError("--save writes what a search has found: give --gpu and --ram, --fit or --max")
    if args.nvme_path is not None and not searches:
        raise ConfigError("--nvme-path is for a search: a configuration names its own drive")
    if args.dtype is not None and (args.config is not None or args.compare):
        raise ConfigError("--dtype is for placements that are searched: a configuration names its own, as bf16.enabled")
    if args.optimizer is not None and (args.config is not None or args.compare):
        raise ConfigError("--optimizer is for placements that are searched: a configuration names its own")


def _save(choice: Choice, path: str | None, *, found: bool) -> None:
    """Write a configuration that fits; where none was found, no file may look like one."""
    if path is not None and found:
        _write(path, as_json(choice.config) + "\n")
        print(f"infinity-estimate: {path} is written. {' '.join(to_choose(choice))}", file=sys.stderr)
    elif path is not None:
        print(f"infinity-estimate: nothing fits, and {path} is not written", file=sys.stderr)


def _compared_model(args: argparse.Namespace, rows: Sequence[tuple[str, Estimate]]) -> str:
    """The title of a comparison. Raises ConfigError if the rows are different work and --mixed is not given."""
    title = headline(rows[0][1])[0]
    if not args.compare:
        return title
    if not args.mixed:
        for what, own in (
            ("precision", lambda found: found.config.compute_dtype),
            ("batch of a step", lambda found: found.config.train_batch),
            ("micro-batch", lambda found: found.work.batch),
        ):
            values = [own(found) for _, found in rows]
            if len(set(values)) > 1:
                each = ", ".join(f"{value} in {name}" for (name, _), value in zip(rows, values, strict=True))
                raise ConfigError(
                    f"--compare: the {what} differs ({each}), so that bytes and tokens/s are of different work: make "
                    "it the same in all files, or say --mixed"
                )
    return title.partition(":")[0] + ":" + title.partition(":")[2].partition(",")[0]


def _hints(args: argparse.Namespace, wish: Wish, last: Estimate) -> list[str]:
    """What to ask next, and what becomes of the last line where activations are most of what it holds."""
    if args.compare:
        return []
    spared = []
    if wish.checkpointing is None and (sparing := sparingly(wish, last)) is not None:
        spared = [
            "", "Most of it is activations. Computed again in backward, with their inputs "
            f"{'on NVMe' if args.no_gpu else 'in CPU memory'} until then{tiles_by_call(sparing)}, the last line takes: "
            + ", ".join(f"{tier_name(sparing, tier)} {format_bytes(sparing.peak(tier))}" for tier in sparing.tiers)
            + ".",
        ]  # fmt: skip
    machine = "--ram 64GB --nvme 1TB" if args.no_gpu else "--gpu 24GB --ram 64GB --nvme 1TB"
    return [
        *spared,
        "",
        f"{'memory' if args.no_gpu else 'GPU, CPU'} and NVMe: the most that a rank holds there. Say what there is "
        f"({machine}) to have the best one chosen, or give --config FILE to see one in detail. Rates are "
        + (f"those of {args.profile}." if args.profile else "assumed: see --profile."),
    ]


def _choice(choice: Choice) -> dict[str, Any]:
    return {"config": choice.config, "estimate": choice.estimate.as_dict()}


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a name, a Hugging Face id, a config.json, or its folder"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--config", metavar="FILE", help="the training configuration (JSON) to look at")
    what.add_argument("--compare", nargs="+", metavar="FILE", help="several configurations side by side")
    parser.add_argument("--mixed", action="store_true", help="let --compare mix batches and precisions")
    what.add_argument(
        "--fit", action="store_true", help="search the best batch and placement, for this machine unless one is said"
    )
    what.add_argument("--max", action="store_true", help="search the largest model of the family that fits")
    what.add_argument("--list", action="store_true", help="names of known models")
    _add_machine(parser.add_argument_group("the machine"))
    work = parser.add_argument_group("the work of a rank")
    work.add_argument("--batch", type=_positive, metavar="N", help="sequences in a micro-batch (default: 1)")
    work.add_argument(
        "--micro-batches", type=_positive, metavar="N",
        help="micro-batches in a step (default: gradient_accumulation_steps, else 1)",
    )  # fmt: skip
    work.add_argument(
        "--sequence", "--tokens", type=_positive, metavar="N", help="tokens in a sequence (default: up to 4096)"
    )
    work.add_argument(
        "--checkpointing", action=argparse.BooleanOptionalAction,
        help="compute activations again in backward (a search: where it is needed)",
    )  # fmt: skip
    work.add_argument(
        "--tiled-loss", action=argparse.BooleanOptionalAction,
        help="never have all logits at once: infinity.tile_sequence(model, mlps=False) in the program (a search: where "
        "it is needed)",
    )  # fmt: skip
    work.add_argument(
        "--tiled-mlps", action=argparse.BooleanOptionalAction,
        help="run the MLPs a tile of tokens at a time as well: infinity.tile_sequence(model) in the program (a search: "
        "where it is needed)",
    )  # fmt: skip
    work.add_argument(
        "--lora", type=int, metavar="RANK", help="train peft's low-rank adapters of this rank; the model is frozen"
    )
    work.add_argument(
        "--lora-targets", metavar="NAMES",
        help="the layers that get them: names with commas between them, or all-linear (default: peft's, q_proj,v_proj "
        "for Llama and most others)",
    )  # fmt: skip
    work.add_argument("--optimizer", choices=tuple(OPTIMIZERS), help="for searches (default: AdamW)")
    work.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="for searches (default: bf16)")
    plain = parser.add_argument_group("a model of Llama's shape, instead of MODEL")
    for name, key in _PLAIN.items():
        plain.add_argument(f"--{name.replace('_', '-')}", type=_positive, metavar="N", help=key)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="numbers for programs instead of words")
    output.add_argument("--picture", metavar="FILE", help="write an SVG of the (first) estimate")
    output.add_argument("--save", metavar="FILE", help="write the configuration that a search has found")


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ranks", type=_positive, default=1, metavar="N", help="ranks in all (default: 1)")
    group.add_argument(
        "--tp", type=_positive, metavar="N",
        help="of them, ranks that divide each layer (default: the configuration's parallel.tensor, else 1)",
    )  # fmt: skip
    group.add_argument(
        "--pp", type=_positive, metavar="N",
        help="of them, ranks that divide the blocks among stages (default: parallel.pipeline, else 1)",
    )  # fmt: skip
    group.add_argument(
        "--sp", type=_positive, metavar="N",
        help="of them, ranks that share each sequence (default: sequence_parallel_size; a search: as it needs)",
    )  # fmt: skip
    group.add_argument("--schedule", choices=SCHEDULES, help="of that pipeline (default: parallel.schedule, else 1f1b)")
    group.add_argument(
        "--virtual-stages", type=_positive, metavar="N",
        help="stages of each rank of the pipeline (default: parallel.virtual_stages, else 1)",
    )  # fmt: skip
    group.add_argument("--ranks-per-node", type=_positive, metavar="N", help="default: all, at most 8")
    group.add_argument("--gpu", type=_bytes, metavar="SIZE", help="memory of each rank's accelerator: 24GB")
    group.add_argument("--ram", type=_bytes, metavar="SIZE", help="memory of each node: 128GB")
    group.add_argument("--nvme", type=_bytes, metavar="SIZE", help="room on the drives of each node: 2TB")
    group.add_argument("--nvme-path", metavar="FOLDER", help="a folder on that drive, for the configuration found")
    group.add_argument("--no-gpu", action="store_true", help="ranks compute on the CPU")
    group.add_argument("--profile", metavar="FILE", help="rates that `infinity bench` has measured (default: assumed)")


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _bytes(text: str) -> int:
    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if nbytes < _NBYTES_MIN:
        meant = f"did you mean {text}GB?" if text.replace(".", "").isdigit() and nbytes else "say how much: 24GB, 2TB"
        raise argparse.ArgumentTypeError(f"{text}: {meant}")
    return nbytes


def _machine(args: argparse.Namespace) -> Machine:
    """What was said of the machine; in a search about which nothing is said, this one."""
    if args.no_gpu and args.gpu is not None:
        raise ConfigError("--gpu and --no-gpu are both given: keep one")
    said = Machine(args.gpu, args.ram, args.nvme, accelerator=not args.no_gpu)
    if said.known or not (args.fit or args.max):
        return said
    return Machine.here(Path(args.nvme_path or ""), accelerator=not args.no_gpu)


def _model(args: argparse.Namespace) -> str | Mapping[str, Any]:
    """A name or path, or the values that plain numbers stand for."""
    given = {name: getattr(args, name) for name in _PLAIN if getattr(args, name) is not None}
    if args.model is None:
        missing = [f"--{name}" for name in _REQUIRED if name not in given]
        if missing:
            raise ConfigError(
                f"give a model's name (--list), a config.json, or plain numbers ({', '.join(missing)} missing)"
            )
        return {"model_type": "llama", **{_PLAIN[name]: value for name, value in given.items()}}
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"give a model or plain numbers, not both ({args.model} and {options})")
    return str(args.model)
