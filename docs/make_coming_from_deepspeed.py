"""Writes docs/coming_from_deepspeed.md from the schema and the list of DeepSpeed's keys:
python docs/make_coming_from_deepspeed.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from infinity.config.schema import Config
from infinity.config.section import (
    Absent,
    Differs,
    NoEffect,
    Refused,
    Section,
    mark,
    reply_of,
    sections_of,
    spellings_of,
)
from infinity.config.training import OPTIMIZER_TYPES
from infinity.engine.deepspeed_names import CONFIGURED, REFUSED
from infinity.integrations.deepspeed.modules import MODULES, NO_MODULES, SAME
from infinity.integrations.deepspeed.refusals import Refusal

PAGE = Path(__file__).with_name("coming_from_deepspeed.md")
KEYS = Path(__file__).with_name("deepspeed_keys.txt")
# The names that DeepSpeed 0.19.8 has for `optimizer.type`, beside the classes of torch.optim.
OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion", "Lamb", "MuAdam", "MuAdamW", "MuSGD", "Muon")

_INTRODUCTION = """\
# Coming from DeepSpeed

Run a program that was written for DeepSpeed 0.19, with no line or one line changed. This page is made from the schema
by `python docs/make_coming_from_deepspeed.py`; change that script, not the page.

## Three ways in

| you have | you do | what changes |
|---|---|---|
| a script of your own | `import infinity.deepspeed as deepspeed` | one line; nothing outside the script |
| a script that you leave as it is, or one that uses Trainer, accelerate, peft, TRL or Lightning \
| `infinity run --as-deepspeed [--nproc N] script.py ...` \
| no line; `import deepspeed` finds infinity's names in the processes that this command starts, and other processes \
find an installed DeepSpeed as before |
| a notebook | `import infinity.deepspeed; infinity.deepspeed.install()`, before transformers is imported \
| `import deepspeed` finds infinity's names in this process |

`infinity run --as-deepspeed` has `--num_gpus`, `--hostfile`, `--include`, `--exclude` and `--master_port` of
DeepSpeed's launcher, `--no_ssh` with `--node_rank`, and starts other launchers too: `infinity run --as-deepspeed
accelerate launch train.py`. Inside it, `deepspeed train.py` and `python -m deepspeed.launcher.runner train.py` are
this command, so that a shell script runs as it is: `infinity run --as-deepspeed bash train.sh`.
`install()` raises an error if it comes too late. `infinity config explain FILE --as-deepspeed` shows what a run makes
of a configuration: every value with its source, then every key that it ignores.

## What differs in the configuration

A configuration is read with DeepSpeed's conventions (`infinity.config.DEEPSPEED`):

- A key that infinity does not have is a warning on rank 0, once, with its path and the key that was probably meant. In
  the sections that only infinity has (`parallel`, `memory`, `kernels`, `timeline`) it is an error.
- A setting that infinity lacks and that no result depends on is said and ignored. A setting that would change results
  is refused, with the reason and the next step.
- Dotted keys at the top level, such as `"zero_optimization.stage"`, count as keys of their sections. Comments and
  trailing commas are allowed.
- A section whose switch is missing is off.
- `"auto"` may stand for every value that a client fills in later. In a plain script, `initialize()` refuses an
  `"auto"` learning rate or number of steps that nothing else sets.
- A configuration and a program that name no optimizer mean none: the engine runs the model and holds weights only.

With infinity's own names (`import infinity`), an unknown key is an error and no optimizer means AdamW: see
[Configuration](configuration.md). What differs in the program is in
[Getting started](getting_started.md#coming-from-deepspeed).

## Pipelines

`PipelineModule`, `LayerSpec`, `TiedLayerSpec` and the topologies are there: a program like DeepSpeed's example, an
AlexNet in layers, trains with its import changed. Every stage of ZeRO and every tier works with them
([More ranks than one](parallelism.md#train-in-stages)).

| you have | you write |
|---|---|
| `engine.train_batch()`, `engine.train_batch(data_iter)`, `engine.eval_batch(data_iter)` | the same, or a list |
| `engine.set_dataloader(loader)`, `engine.set_dataiterator(iterator)` | `engine.train_batch(iterator)` |
| `engine.set_batch_fn(f)` | `engine.train_batch(map(f, iterator))` |
| `engine.eval_batch(..., return_logits=True)` | nothing: outputs stay on the last stage |
| `engine.grid`, `mpu=` of `initialize` | `engine.data_rank`, `data_size`, `is_first_stage()`, `is_last_stage()` |

<!-- names -->
## Every key of DeepSpeed 0.19.8

- **works**: the same meaning.
- **works differently**: the same purpose, with the difference that the row names.
- **said and ignored**: a line at the start gives the key and this reason. Its default is not mentioned.
- **refused**: a value that turns the feature on is an error with this reason. Its default is accepted.

"Removed" marks keys that DeepSpeed 0.19.8 itself refuses, because it has removed the feature.
"""

_NAMES = """\
## Names of modules

What a program may import. A name that is refused can be imported too, subclassed and asked for in `isinstance`: a use
of it is an error that says why. Any other name is an `ImportError`, or an `AttributeError`, that points here.
`deepspeed.comm` also has every name of torch.distributed, and `get_accelerator()` what torch has for the device.

Of 159 of DeepSpeed's own unit tests that need no GPU 67 pass and 23 skip themselves; 32 meet an error of ours that says
why, and most of the others look into DeepSpeed's own engine. `benchmarks/results/deepspeed_unit.json` lists each with
its cause.
"""

_MEMBERS = """\
## Members of an engine

Beside the methods of [the interface](api.md), an engine has DeepSpeed's `get_lr`, `set_lr`, `get_mom`, `get_type`,
`get_batch_info`, `set_train_batch_size`, `module_state_dict`, and these, which return a value of the configuration: {}.
`loss_scale` is the present scale, as a number and as a method. What neither the engine nor its module has is an
`AttributeError` that names the engine.

| refused | why |
|---|---|
"""

_ENDING = """
Next: [Configuration](configuration.md) has every key with its type and default, and
[Checkpoints](checkpoints.md) what a run saves.
"""

_GONE = "infinity does not have the key"


def listed_keys() -> list[tuple[str, bool]]:
    """Return (dotted path, whether DeepSpeed has removed it) for each key of the list."""
    lines = [line.split() for line in KEYS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [(path, rest == ["removed"]) for path, *rest in lines]


def disposition(path: str) -> str:
    """Return what becomes of a key under DeepSpeed's conventions."""
    if path == "optimizer.type":
        return "**works** for the values at the end of this page"
    fields = _fields(Config, path.split("."))
    if not fields:
        return f"**said and ignored**: {_GONE}"
    field = fields[0]
    reply = reply_of(field)
    if isinstance(reply, NoEffect):
        return f"**said and ignored**: {reply.why}"
    if isinstance(reply, Refused):
        if reply.ignored:
            return f"**said and ignored**: {reply.ignored}"
        return f"**refused**: {reply.why}. {reply.instead}"
    differs = mark(field, Differs)
    return f"**works differently**: {differs.how}" if differs else "**works**"


def _fields(section: type[Section], path: list[str]) -> list[FieldInfo]:
    """Return the fields of a key; several where a `type` chooses among sections that have it."""
    name, *rest = path
    names = spellings_of(section)
    if name not in names:
        return []
    field = section.model_fields[names[name]]
    if not rest or mark(field, Absent):
        return [field]
    return [found for inner in sections_of(field) for found in _fields(inner, rest)]


def render() -> str:
    """The whole page."""
    before, after = _INTRODUCTION.split("<!-- names -->\n")
    return before + _NAMES + _modules() + after + "".join(_tables()) + _optimizers() + _ENDING


def _modules() -> str:
    """Return the table of names that are here, and that of names that are refused by their reasons."""
    here, refused = [], {}
    for path, names in MODULES.items():
        others = [other for other, row in SAME.items() if row == path]
        found = [name for name, value in names.items() if not name.startswith("_") and not isinstance(value, Refusal)]
        if found:
            listed = _code(f"deepspeed.{each}".rstrip(".") for each in (path, *others))
            here.append(f"| {listed} | {_code(found)} |\n")
        for name, value in names.items():
            if isinstance(value, Refusal):
                refused.setdefault(value.why, []).append(f"{path}.{name}".lstrip("."))
    for path, refusal in NO_MODULES.items():
        refused.setdefault(refusal.why, []).append(f"{path}.*")
    rows = [f"| {_code(paths)} | {why} |\n" for why, paths in refused.items()]
    head = "\n| module | names that are here |\n|---|---|\n"
    tables = f"{head}{''.join(here)}\n| refused | why |\n|---|---|\n{''.join(rows)}\n"
    return tables + _members()


def _members() -> str:
    """Return what engines have of DeepSpeed's: getters of the configuration, and members that are refused."""
    refused: dict[str, list[str]] = {}
    for name, why in REFUSED.items():
        refused.setdefault(why, []).append(name)
    rows = [f"| {_code(names)} | {why} |\n" for why, names in refused.items()]
    return f"{_MEMBERS.format(_code(CONFIGURED))}{''.join(rows)}\n"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _tables() -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for path, gone in listed_keys():
        if not gone:
            sections.setdefault(path.rpartition(".")[0], []).append(path)
    for section, paths in sections.items():
        yield _table(f"`{section}`" if section else "Top level", section, paths)
    yield _table("Removed from DeepSpeed", "", [path for path, gone in listed_keys() if gone])


def _table(title: str, section: str, paths: list[str]) -> str:
    """Return a table with one row for each disposition, in the order of the first key that has it."""
    rows: dict[str, list[str]] = {}
    for path in paths:
        rows.setdefault(disposition(path), []).append(f"`{path.removeprefix(f'{section}.') if section else path}`")
    cells = [f"| {', '.join(names)} | {text} |\n" for text, names in rows.items()]
    return f"\n### {title}\n\n| key | becomes |\n|---|---|\n" + "".join(cells)


def _optimizers() -> str:
    known = {name.lower() for name in OPTIMIZER_TYPES}
    works = [name for name in OPTIMIZERS if name.lower() in known]
    others = [name for name in OPTIMIZERS if name.lower() not in known]
    more = [name for name in OPTIMIZER_TYPES if name not in (*OPTIMIZERS, "AdamW8bit")]
    return (
        "\n### Values of `optimizer.type`\n\n"
        f"{_named(works)} work, and {_named(more)} of torch's and `AdamW8bit` of bitsandbytes'. {_named(others)} and "
        "other classes of torch.optim are refused: set AdamW, or pass any elementwise optimizer to "
        "`initialize(optimizer=...)`. DeepSpeed's five schedules work.\n"
    )


def _named(names: list[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return ", ".join(quoted[:-1]) + f" and {quoted[-1]}" if len(quoted) > 1 else quoted[0]


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
