"""Writes docs/benchmarks.md and its plots from the results in benchmarks/results: python docs/make_benchmarks.py

A topic is one JSON file: what is claimed, by which command it was measured, where and when, and rows of figures with
their limits. Files that a program wrote in another form (`units`, `startup`, `memory_cases`, `zoo`) are turned into
topics here. Whether a figure holds is computed here, never written down. A test compares page and plots with the
results.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from infinity.base import palette

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "pictures" / "benchmarks"

# In the order of the page, under their headings.
CHAPTERS = {
    "Speed": (
        "adam", "drive", "step", "training", "deepspeed", "pipeline_peers", "overlap", "early_step", "hooks",
        "tensor_functions", "pipeline_executor", "units", "startup", "predict", "muon", "adamw8bit", "experts",
    ),
    "Memory": (
        "resident", "memory_cases", "memory_floor", "memory_phases", "activations", "activation_offload", "tiling",
        "long_context", "long_sequences", "export",
    ),
    "Checkpoints": ("checkpoint", "checkpoint_async", "every_step"),
    "Everything else": ("traffic", "seeing", "zoo", "build"),
}  # fmt: skip

INTRODUCTION = """\
# Benchmarks

Check a claim about speed or memory here, or measure it again on your machine. Each topic states the claim, the figures
beside their limits, a plot, and the command that measured them. A figure that misses its limit says **no**.

`python docs/make_benchmarks.py` makes this page from `benchmarks/results/*.json`; change the results, not the page.

- Each table is of one machine and day. Results marked *transcribed* were copied by hand from earlier reports, which did
  not record the commit. A script with `--json FILE` writes its results itself.
- Each script runs ours and its rival or limit in turns, every contender in processes of its own, and compares medians.
  The machines have 2 virtual cores, no accelerator and a shared drive: compare ratios of one run, not seconds of two,
  and take ratios below 1.1 as equal.
- Bytes are the kernel's (`/proc/self/io`). Drive rates are fio's in the same run. Memory is the peak of resident memory
  (VmHWM).
- All contenders of a training benchmark start from the same weights, every rank sees its own data, and the first losses
  agree.
- Several figures in a cell are runs, or the lowest and the highest of them. The plot shows how many times better than
  its limit each is: a dot right of the line holds, and an arrow marks a figure beyond the scale.
- `make bench DRIVE=folder DEEPSPEED_PYTHON=interpreter` runs the scripts one after the other; it takes about an hour.
- Nothing here was measured on a GPU.
"""

ENDING = """
Next: [Lessons](design/lessons.md) says what was tried and did not help; [Seeing a run](monitoring.md) and
[the timeline](timeline.md) measure your own.
"""


@dataclass(frozen=True)
class Row:
    """One claim: its figures, each of a run or a size, and the limit that all are held to (`>= 0.95`, or none)."""

    what: str
    figures: tuple[float, ...]
    limit: str = ""
    unit: str = ""

    def margins(self) -> list[float]:
        """How many times better than the limit each figure is: at least 1 where it holds."""
        sign, _, bound = self.limit.partition(" ")
        better = [figure / float(bound) for figure in self.figures]
        return better if sign == ">=" else [1 / ratio if ratio > 0 else math.inf for ratio in better]

    @property
    def holds(self) -> bool:
        return all(margin >= 1 for margin in self.margins())

    def cells(self) -> list[str]:
        figures = [f"{figure:g}" for figure in self.figures]
        shown = ", ".join(figures)
        unit = f" {self.unit}" if self.unit else ""
        return [self.what, shown + unit, self.limit + unit if self.limit else "", self.verdict]

    @property
    def verdict(self) -> str:
        if not self.limit:
            return ""
        return "holds" if self.holds else "**no**"


@dataclass(frozen=True)
class Topic:
    """One screen of the page; the fields are those of its JSON file."""

    topic: str
    claim: str
    command: str
    machine: str
    date: str
    rows: tuple[Row, ...] = ()
    commit: str | None = None
    transcribed: bool = False
    how: str = ""
    columns: tuple[str, ...] = ()
    table: tuple[tuple[Any, ...], ...] = ()
    files: tuple[str, ...] = field(default=())


def read(name: str) -> Topic:
    """A topic by the name of its file."""
    raw = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    made = ADAPTERS[name](raw) if name in ADAPTERS else raw
    rows = tuple(Row(**{**row, "figures": tuple(row["figures"])}) for row in made.get("rows", ()))
    return Topic(**{**made, "rows": rows, "files": (f"{name}.json",)})


def _units(raw: dict[str, Any]) -> dict[str, Any]:
    rows, table = [], []
    timed = {"step": "a step", "cpu": "a step, CPU time", "initialize": "`initialize`"}
    for name, cases in raw["cases"].items():
        *smaller, large = sorted(map(int, cases))
        for key, text in timed.items():
            # As the script does: the garbage collector hardly ever collects all objects of a small model.
            small = smaller[-1 if key == "initialize" else 0]
            ratio = (cases[str(large)][key] / large) / (cases[str(small)][key] / small)
            what = f"{name}: cost of a unit in {text}, {large:,} units / {small:,}"
            rows.append({"what": what, "figures": [round(ratio, 2)], "limit": f"<= {raw['limit']:g}"})
        table += [
            [f"{name}, {int(count):,} units", *(round(case[key] / int(count) * 1e6) for key in timed)]
            for count, case in cases.items()
        ]
    date, _, machine = raw["machine"].partition(", ")
    return {
        "topic": "A unit in a deep model", "command": "python benchmarks/units.py --json FILE", "date": date,
        "claim": "A unit costs at most 1.3 times as much in a step of a model of 3,200 units as in one of 200, and in "
                 "`initialize` as in that of the next smaller model.",
        "machine": re.sub(r"-fc-\S+", "", machine), "rows": rows, "table": table,
        "columns": ["tiny layers, everything on NVMe, us a unit", "step", "CPU time of a step", "initialize"],
        "how": f"Medians of {raw['rounds']} rounds.",
    }  # fmt: skip


def _startup(raw: dict[str, Any]) -> dict[str, Any]:
    date, _, machine = raw["machine"].partition(", ")
    rows = [
        {"what": what, "figures": [round(median(raw["seconds"][what]), 2)], "limit": f"<= {limit:.2f}", "unit": "s"}
        for what, limit in raw["limits"].items()
    ]
    others = [name for name in raw["seconds"] if name not in raw["limits"]]
    return {
        "topic": "A model's start", "command": "python benchmarks/startup.py --folder DIR --json FILE",
        "claim": f"A Llama of {raw['numel'] / 1e6:.0f} M parameters in bf16, with everything on NVMe, is ready for its "
                 "first forward after 2 s and 1.5 times the longer of `from_pretrained` and writing 4 bytes a "
                 "parameter into a fresh file (for `Init`: plain construction and that write together).",
        "machine": re.sub(r"-fc-\S+", "", machine), "date": date, "rows": rows, "columns": ["beside it", "s"],
        "table": [[name, round(median(raw["seconds"][name]), 2)] for name in others],
        "how": f"Medians of {len(raw['seconds'][others[0]])} rounds.",
    }  # fmt: skip


def _memory_cases(raw: dict[str, Any]) -> dict[str, Any]:
    rows, table = [], []
    for case in raw["rows"]:
        name = f"{case['model']} model, {case['gib']:g} GiB"
        if "refused" in case:
            table.append([name, "refused", f"{case['unchecked']['peak'] / 1e9:.2f} GB, killed"])
        else:
            rows += [
                {"what": f"{name}: peak / prediction", "figures": [round(case["share"], 3)], "limit": "<= 1"},
                {"what": f"{name}: the same", "figures": [round(case["share"], 3)], "limit": ">= 0.9"},
            ]
    return {
        "topic": "A process stays within its limit", "command": raw["command"], "date": raw["date"],
        "claim": "Under a hard limit on the whole process the peak is never above what `initialize` predicts, the "
                 "prediction is at most 1/0.90 of the peak, and a run that is refused would have been killed.",
        "machine": f"2 cores of an {raw['processor']}", "rows": rows,
        "columns": ["model, limit", "answer", "the same run without the check"],
        "table": table, "how": f"Llamas of 136, 389 and 836 M parameters; torch {raw['torch']}.",
    }  # fmt: skip


def _memory_floor(raw: dict[str, Any]) -> dict[str, Any]:
    alike = [
        {"what": f"{case['gib']:g} GiB: {case['numel'] / 1e6:,.0f} M parameters, hash of a run without a limit",
         "figures": [int(case["ok"] and "sha256" in case)], "limit": ">= 1"}
        for case in raw["rows"]
    ]  # fmt: skip
    found = _memory_cases(raw)
    return {
        **found, "topic": "How little memory a model trains in", "rows": [*found["rows"], *alike],
        "claim": "With everything on NVMe and clipping, from `infinity.Init` to a checkpoint that is loaded again, a "
                 "process needs what the largest unit, windows and activations take, and computes what it computes "
                 "without a limit.",
        "how": f"Llamas in bf16, 1 x 128 tokens; torch {raw['torch']}.",
    }  # fmt: skip


def _long_sequences(raw: dict[str, Any]) -> dict[str, Any]:
    rows, table, cases = [], [], {row["case"]: row for row in raw["rows"] if row["case"] != "layers"}
    for name, row in cases.items():
        what = {"full": "131,072 tokens", "window": "1,048,576 tokens, window"}[name]
        rows += [
            {"what": f"{what}: peak / prediction", "figures": [round(row["peak"] / row["predicted"], 3)],
             "limit": "<= 1"},
            {"what": f"{what}: plain torch / the limit", "figures": [round(row["plain"] / row["limit"], 2)],
             "limit": ">= 4"},
            {"what": f"{what}: loss of the second step / the first's", "limit": "<= 1",
             "figures": [round(row["losses"][-1] / row["losses"][0], 3)]},
        ]  # fmt: skip
        table.append([
            what, f"{row['limit'] / 2**30:g} GiB", f"{row['peak'] / 1e9:.2f} GB", f"{row['plain'] / 1e9:.1f} GB",
            f"{row['nvme'] / 1e9:.2f} GB", " to ".join(f"{loss:.3f}" for loss in row["losses"]),
            ", ".join(f"{seconds:,.0f}" for seconds in row["seconds"]),
        ])  # fmt: skip
    few, many = (row for row in raw["rows"] if row["case"] == "layers")
    grown, foreseen = (many[name] - few[name] for name in ("peak", "predicted"))
    hidden = (many["words"][2] - few["words"][2]) * 4 * 128 * few["words"][0]
    rows.append(
        {"what": "65,536 tokens, window, 4 and 16 layers: growth beyond weights and their plan / hidden states",
         "figures": [round((grown - foreseen) / hidden, 3)], "limit": "<= 0.25"}
    )  # fmt: skip
    return {
        "topic": "Long sequences on one rank", "command": raw["command"], "date": raw["date"],
        "claim": "One rank trains on 131,072 tokens with full attention, and on a million with a window of 1,024, in a "
                 "quarter of the memory that plain torch keeps, which does not grow with the layers' hidden states.",
        "machine": f"a core each of an {raw['processor']}", "rows": rows,
        "columns": ["case", "limit", "peak", "plain torch", "on NVMe", "loss", "seconds of its steps"],
        "table": table,
        "how": "Llamas of five layers in fp32, 128 wide with one head of 64, on bytes of real text; everything on "
               "NVMe, the inputs of recomputed blocks as well; attention by `sparse_attention`, MLPs and loss in tiles "
               f"of 4,096 tokens; torch {raw['torch']}. Plain torch is what its graph keeps of an eighth of the "
               "length, times eight, with attention that keeps nothing of its own. What grows with layers are gaps of "
               "the C library's heap.",
    }  # fmt: skip


def _zoo(raw: dict[str, Any]) -> dict[str, Any]:
    runs = raw["rows"]
    return {
        "topic": "Families of transformers", "command": raw["command"], "date": raw["date"], "commit": raw["commit"],
        "machine": f"{raw['cores']} cores, {raw['machine']}, torch {raw['torch']}, transformers {raw['transformers']}",
        "claim": f"Small models of every family train for {raw['steps']} steps at stage {raw['stage']}, with "
                 "everything on NVMe, to the weights of plain torch.",
        "rows": [
            {"what": "largest difference of a weight", "figures": [max(run["error"] for run in runs)],
             "limit": f"<= {raw['error_max']:g}"},
            {"what": "models that train", "figures": [sum(run["ok"] for run in runs)], "limit": f">= {len(runs)}"},
            {"what": "of these with equal bits", "figures": [sum(run["bits"] for run in runs)]},
        ],
    }  # fmt: skip


ADAPTERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "units": _units, "startup": _startup, "memory_cases": _memory_cases, "memory_floor": _memory_floor, "zoo": _zoo,
    "long_sequences": _long_sequences,
}  # fmt: skip


def everything() -> dict[str, Topic]:
    """The topics that have been measured, in the order of the page."""
    named = [name for names in CHAPTERS.values() for name in names]
    return {name: read(name) for name in named if (RESULTS / f"{name}.json").exists()}


def render() -> str:
    """The whole page."""
    topics = everything()
    return "\n".join([INTRODUCTION, *_overview(topics), *_chapters(topics)]) + ENDING


def _overview(topics: dict[str, Topic]) -> Iterator[str]:
    yield "## At a glance\n"
    yield "| topic | rows with a limit | of these hold |\n|---|---|---|"
    for topic in topics.values():
        judged = [row for row in topic.rows if row.limit]
        if judged:
            yield f"| [{topic.topic}](#{_anchor(topic.topic)}) | {len(judged)} | {sum(row.holds for row in judged)} |"
    yield ""


def _anchor(title: str) -> str:
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _chapters(topics: dict[str, Topic]) -> Iterator[str]:
    for chapter, names in CHAPTERS.items():
        yield f"## {chapter}\n"
        for name in names:
            if name in topics:
                yield from _topic(name, topics[name])


def _topic(name: str, topic: Topic) -> Iterator[str]:
    yield f"### {topic.topic}\n"
    yield f"{topic.claim}\n"
    if topic.rows:
        yield _table(("what", "figure", "limit", ""), [row.cells() for row in topic.rows])
    if any(row.limit for row in topic.rows):
        yield f"![{topic.topic}: figures beside their limits](pictures/benchmarks/{name}.svg)\n"
    if topic.table:
        yield _table(topic.columns, topic.table)
    if topic.how:
        yield f"{topic.how}\n"
    commit = f"commit {topic.commit}" if topic.commit else "commit not recorded"
    kind = ", transcribed" if topic.transcribed else ""
    files = ", ".join(f"`benchmarks/results/{file}`" for file in topic.files)
    machine = topic.machine.removeprefix(f"{topic.date}, ")
    yield f"`{topic.command}`\n\n{topic.date}, {machine}; {commit}{kind}; {files}\n"


def _table(columns: tuple[str, ...], rows: Any) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)]) + "\n"


def _cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace("|", "\\|")


LABELS, WIDTH, HEIGHT, TOP, SCALE = 330, 760, 20, 26, (1 / 2, 1, 2, 4)


def plot(topic: Topic) -> str:
    """Every row with a limit as dots on a logarithmic scale of times better than the limit, as SVG."""
    rows = [row for row in topic.rows if row.limit]
    height = TOP + HEIGHT * len(rows) + 8

    def at(margin: float) -> float:
        low, high = math.log(SCALE[0]), math.log(SCALE[-1])
        return LABELS + (WIDTH - LABELS - 32) * (min(max(math.log(margin), low), high) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'font-family="system-ui, DejaVu Sans, sans-serif" font-size="12" fill="{palette.FAINT}">',
        f"<title>{escape(topic.topic)}: times better than the limit</title>",
    ]
    for mark in SCALE:
        stroke, width = (palette.FAINT, 1.5) if mark == 1 else (palette.RULE, 0.75)
        x = f"{at(mark):.1f}"
        line = f'x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{height - 4}" stroke="{stroke}" stroke-width="{width}"'
        parts.append(f"<line {line}/>")
        text = "the limit" if mark == 1 else f"{mark:g} times"
        parts.append(f'<text x="{x}" y="{TOP - 12}" text-anchor="middle">{text}</text>')
    for index, row in enumerate(rows):
        y = TOP + HEIGHT * index + 10
        parts.append(f'<text x="{LABELS - 14}" y="{y + 4}" text-anchor="end">{escape(_short(row.what))}</text>')
        parts += [_dot(at(margin), y, margin) for margin in row.margins()]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _dot(x: float, y: float, margin: float) -> str:
    colour = palette.CURVE if margin >= 1 else palette.COMPARED
    if margin > SCALE[-1]:
        return f'<path d="M{x - 4:.1f} {y - 5} l8 5 l-8 5 z" fill="{colour}"/>'
    if margin < SCALE[0]:
        return f'<path d="M{x + 4:.1f} {y - 5} l-8 5 l8 5 z" fill="{colour}"/>'
    return f'<circle cx="{x:.1f}" cy="{y}" r="4.5" fill="{colour}" fill-opacity="0.75"/>'


def _short(what: str, most: int = 46) -> str:
    text = what.replace("`", "")
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def plots() -> dict[Path, str]:
    """Every plot of the page, by its path."""
    topics = everything()
    judged = {name: topic for name, topic in topics.items() if any(row.limit for row in topic.rows)}
    return {PLOTS / f"{name}.svg": plot(topic) for name, topic in judged.items()}


if __name__ == "__main__":
    PLOTS.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
    for path, text in plots().items():
        path.write_text(text, encoding="utf-8")
