"""An estimate, a choice or a comparison as text for people: aligned, and as wide as the page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap

from estimators.estimate import (
    CONTEXT_NBYTES,
    DRIVE_SHARE,
    GAPS,
    PROCESS_NBYTES,
    SYSTEM_NBYTES,
    Estimate,
    complete_values,
)
from estimators.phases import Phase, state_dict_nbytes
from estimators.search import (
    DAYS_MIN,
    HOURS_A_DAY,
    NAMES,
    PARAMETERS,
    STATES,
    Advice,
    Choice,
    Near,
    days_of_training,
    tokens_a_second,
)
from estimators.traffic import Link
from infinity.base import palette
from infinity.base.sizes import format_bytes
from infinity.plan.sequence_axis import possible_parts
from infinity.plan.shards import Replica
from infinity.plan.types import Kind, Tier

WIDTH = 100
_PLACES = {Tier.GPU: "on the GPU", Tier.CPU: "in CPU memory", Tier.NVME: "on NVMe"}
# Kinds without which it would fit, and what there is to say of them.
_WHY = {
    Kind.GRAD: "each trained parameter has one. With parameters or states on NVMe, gradients without room go there, "
    "too; or train fewer parameters (--lora RANK), on more ranks",
}
_UNIT = re.compile(r"(\d) ([kMGT]?B\b|%|s\b|ms\b|days\b|min\b)")


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}" if seconds >= 1000 * size else f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def folded(text: str, width: int = WIDTH) -> str:
    """The text with its sentences broken to a width; tables and JSON are left as they are."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if len(line) <= width or line.lstrip().startswith(('"', "{", "}")):
            lines.append(line)
        else:
            # A number stays beside its unit.
            line = _UNIT.sub("\\1\xa0\\2", line)
            lines += wrap(line, width, subsequent_indent=" " * (indent + 2), break_on_hyphens=False)
    return "\n".join(lines).replace("\xa0", " ")


def format_report(found: Estimate, near: Near | None = None) -> str:
    """Everything that one estimate says; `near`: of one that does not fit, the nearest configuration that does."""
    lines = headline(found)
    if found.excess:
        excess = (f"{format_bytes(nbytes)} too much {_place(found, tier)}" for tier, nbytes in found.excess.items())
        lines += ["", f"It does not fit: {', '.join(excess)}.", *_missing(found)]
        if near:
            time = near.estimate.outline
            lines += [
                "",
                f"The nearest that fits takes {duration(time.seconds)} a step, "
                f"{time.tokens_a_second * near.estimate.plan.topology.dp:,.0f} tokens/s, with these keys changed. "
                + _summary(near.estimate),
                as_json(near.keys),
            ]
    elif found.machine.known:
        lines += ["", f"It fits{'' if found.activations else ' as far as is known'}. {_summary(found)}"]
    return "\n".join([*lines, "", *tables(found), "", *_activations(found), *_step(found), *_notes(found)])


def headline(found: Estimate) -> list[str]:
    """What is sized, in two lines."""
    plan, request, work = found.plan, found.plan.request, found.work
    topology = plan.topology
    ranks = topology.in_words()
    nodes = topology.world_size // topology.local_size
    where = f"{ranks} on {nodes} nodes" if nodes > 1 else ranks
    checkpointed = ", activations recomputed" if work.checkpointing else ""
    checkpointed += f", loss{' and MLPs' if work.tiled_mlps else ''} in tiles" if work.tiled_loss else ""
    accumulated = f" x {found.accumulation} accumulated" if found.accumulation > 1 else ""
    lines = [
        f"{found.model.name}: {found.numel / 1e9:.2f} B parameters, {request.compute_dtype}, stage {request.stage}, "
        f"{where}; {work.batch} x {work.sequence:,} tokens{accumulated}{checkpointed}",
        f"parameters {_where(found, *PARAMETERS)}, optimizer states {_where(found, *STATES)}, gradients "
        f"({request.grad_dtype}) {_where(found, Kind.GRAD)}; {len(plan.layouts)} units, "
        f"{len(plan.sub_groups):,} sub-groups",
    ]
    lines += [*_tensor(found), *_pipeline(found)]
    if found.lora is not None and found.model.lora is not None:
        named = "" if found.model.lora.targets else ", peft's default"
        lines.append(
            f"LoRA of rank {found.lora['rank']} on {', '.join(found.lora['targets'])}{named}: "
            f"{found.trained_numel / 1e6:,.1f} M parameters are trained, the others are frozen"
        )
    if found.model.quantized:
        lines.append(
            f"its config.json says that the weights are quantized ({found.model.quantized}): sized are plain ones in "
            f"{request.compute_dtype}, which is what trains here. Take the model that was quantized"
        )
    return lines


def _tensor(found: Estimate) -> list[str]:
    """What the tensor or sequence axis leaves a rank, what it costs, and what stays whole against the model's plan."""
    if found.work.parts > 1:
        return [
            f"sequence axis of {found.work.parts}: a rank has {found.work.tokens:,} tokens of a micro-batch; attention "
            f"sends {format_bytes(found.exchanged_nbytes * found.accumulation)} a step to the others"
        ]
    if found.axis.size == 1:
        return []
    replicated = sum(layout.numel for layout in found.plan.layouts if layout.replica is not Replica.NONE)
    line = (
        f"tensor axis of {found.axis.size}: a rank has {found.plan.numel / 1e9:.2f} B parameters, "
        f"{replicated / 1e6:,.1f} M of them on every rank; it sends "
        f"{format_bytes(found.exchanged_nbytes * found.accumulation)} a step for {len(found.axis.regions)} divided "
        f"modules{', along the sequence' if found.axis.sequence else ''}"
    )
    return [line, *(f"tensor axis: {remark}" for remark in found.axis.remarks)]


def _pipeline(found: Estimate) -> list[str]:
    """The stages of a pipeline, and what each place on its axis holds and waits."""
    part, schedule = found.plan.pipeline, found.schedule
    if part is None or schedule is None:
        return []
    split, passed = part.split, found.of_micro_batch
    virtual = f", {split.virtual} stages a rank" if split.virtual > 1 else ""
    boundary = ""
    if passed is not None and passed.blocks is not None:
        boundary = f"; {format_bytes(passed.blocks.boundary_nbytes)} cross each boundary in a micro-batch, and go back"
    lines = [
        f"pipeline of {split.pp}, {split.schedule}{virtual}, {split.micro_batches} micro-batches: bubble "
        f"{100 * schedule.times.bubble:.0f} %{boundary}. The tables below are of place {part.index}, the scarcest",
    ]
    near = [tier for tier in found.tiers if not tier.on_drive]
    names = [tier_name(found, tier, short=True) for tier in near]
    rows = [["  place", "blocks", "parameters", "in flight", "activations", *names, "sent", "micro-batch", "waits"]]
    for own, idle, (each, _) in zip(found.stages, schedule.times.idle, schedule.seconds, strict=True):
        assert own.plan.pipeline is not None
        held, counts = own.activations, [split.cut.counts[stage] for stage in own.plan.pipeline.stages]
        rows.append(
            [f"  {own.plan.pipeline.index}", "+".join(map(str, counts)), f"{own.plan.numel / 1e9:.2f} B",
             str(own.held.in_flight) if own.held else "-", format_bytes(held.nbytes) if held else "-",
             *(format_bytes(own.peak(tier)) for tier in near), format_bytes(own.passed_nbytes), duration(each),
             duration(idle)]
        )  # fmt: skip
    return [*lines, *_aligned(rows)]


def tables(found: Estimate) -> list[str]:
    """A table for each tier that holds anything: kinds by phases, in GB."""
    columns = found.columns
    rows: list[list[str]] = []
    for tier in found.tiers:
        kinds = [kind for kind in Kind if any(table[tier].get(kind) for table in columns.values())]
        if not kinds:
            continue
        rows += [[]] if rows else []
        rows.append([f"{tier_name(found, tier)}, GB a rank", *columns])
        rows += [[f"  {kind.label}", *(_gb(table[tier].get(kind, 0)) for table in columns.values())] for kind in kinds]
        totals = [sum(table[tier].values()) for table in columns.values()]
        rows.append(["  total", *map(_gb, totals)])
        ranks = found.plan.topology.local_size
        if ranks > 1 and not tier.on_device:
            rows.append([f"  of a node ({ranks} ranks)", *(_gb(ranks * total) for total in totals)])
        limit = found.capacity.of(tier)
        if limit is not None:
            verdict = "too much by " + format_bytes(found.excess[tier]) if tier in found.excess else "fits"
            rows.append(["  a rank may have", _gb(limit), "  " + verdict])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right; words at the end stand as they are."""
    full = max(map(len, rows))
    whole = [row for row in rows if len(row) == full]
    widths = [max(len(row[0]) for row in rows if row), *(max(len(row[i]) for row in whole) + 2 for i in range(1, full))]
    return [
        "".join(
            f"{cell:<{width}}" if index == 0 or cell.startswith("  ") else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]


def compare_estimates(rows: Sequence[tuple[str, Estimate]], *, title: str = "", width: int = WIDTH) -> str:
    """Several estimates side by side, one a line: the most that each tier holds, and the step."""
    first = rows[0][1]
    # Columns for what the comparison mixes.
    columns: dict[str, Callable[[Estimate], str]] = {
        "batch": lambda each: f"{each.work.batch} x {each.accumulation}",
        "precision": lambda each: each.config.compute_dtype,
    }
    differing = {name: own for name, own in columns.items() if len({own(found) for _, found in rows}) > 1}
    cells = [[title, *(tier_name(first, tier, short=True) for tier in first.tiers), "step", "tokens/s", *differing]]
    bounds = ["bound by"]
    for name, found in rows:
        time = found.outline
        peaks = (
            (format_bytes(peak) if (peak := found.peak(tier)) else "-") + ("!" if tier in found.excess else "")
            for tier in found.tiers
        )
        speed = f"{time.tokens_a_second * found.plan.topology.dp:,.0f}"
        cells.append([name, *peaks, duration(time.seconds), speed, *(own(found) for own in differing.values())])
        bounds.append(time.bound_by.value.partition(" (")[0])
    lines = _aligned(cells)
    if max(map(len, lines)) + 2 + max(map(len, bounds)) <= width:
        widest = max(map(len, lines))
        lines = [f"{line:<{widest}}  {bound}" for line, bound in zip(lines, bounds, strict=True)]
    if any(found.excess for _, found in rows):
        lines.append("! more than a rank may have there")
    return "\n".join(lines)


def chosen(choice: Choice, ways: Sequence[tuple[str, Choice]] = ()) -> str:
    """A found configuration: whether it fits, what it is, and what it takes; `ways`: what else would fit."""
    found = choice.estimate
    lines = headline(found)
    if found.fits:
        known = "It fits." if found.activations else "It fits as far as is known: activations are not counted."
        lines += ["", f"{known} {_summary(found)}", *_turned_on(found), "", "Configuration:", as_json(choice.config)]
        lines += to_choose(choice)
    else:
        lines += ["", "It does not fit, and no other placement that was tried does. What lacks the least is shown.", ""]
        lines += _missing(found)
        lines += [f"It would fit with {words}: {_one_line(way)}. {_summary(way.estimate)}" for words, way in ways]
    device = f"{format_bytes(CONTEXT_NBYTES)} and {100 * GAPS:.0f} % of an accelerator for its context and allocator, "
    reserved = (
        f"Set aside: {device if found.machine.accelerator else ''}{format_bytes(SYSTEM_NBYTES)} of a node's memory and "
        f"{format_bytes(PROCESS_NBYTES)} for each process, {100 * DRIVE_SHARE:.0f} % of a drive."
    )
    lines += ["", *tables(found), "", reserved]
    return "\n".join([*lines, *_activations(found), *_step(found), *_notes(found)])


def _turned_on(found: Estimate) -> list[str]:
    """What is done to hold less of activations, and why: one line each."""
    tier, lines = found.tiers[0], [f"  {name}: {format_bytes(nbytes)}" for name, nbytes in found.turned_on.items()]
    room = f"{format_bytes(found.capacity.of(tier) or 0)} {_place(found, tier)}"
    head = f"Turned on for activations, and what a rank, which may have {room}, would hold there without each:"
    return ["", head, *lines] if lines else []


def advised(advice: Advice, ways: Sequence[tuple[str, Choice]] = ()) -> str:
    """The best configuration as a search shows it, under the three best with what each gives for what."""
    if not advice.best.estimate.fits:
        return chosen(advice.best, ways)
    near = advice.best.estimate.tiers[:-1]
    names = [tier_name(advice.best.estimate, tier, short=True) for tier in near]
    tiled = any(choice.estimate.work.tiled_loss for choice in advice.choices)
    divided = any(choice.estimate.plan.topology.world_size > 1 for choice in advice.choices)
    shared = any(choice.estimate.work.parts > 1 for choice in advice.choices)
    axes = ["axes", "schedule", "step", "bubble"] if divided else []
    head = ["parameters, optimizer", *axes, "tokens/s", "batch", "recompute", *(["in tiles"] if tiled else [])]
    worn = any(days_of_training(choice) for choice in advice.choices) or not divided
    rows = [[*head, *names, *(["drive lasts"] if worn else [])]]
    for choice in advice.choices:
        found, days = choice.estimate, days_of_training(choice)
        homes = ("+".join(tier_name(found, t, short=True) for t in found.homes(*k)) for k in (PARAMETERS, STATES))
        held = (format_bytes(found.peak(tier)) if found.peak(tier) else "-" for tier in near)
        batch, again = f"{found.work.batch} x {found.accumulation}", ["yes" if found.work.checkpointing else "no"]
        again += [_tiles_in_words(found)] if tiled else []
        again[0] += f", {tier_name(found, found.offloaded.tier, short=True)}" if found.offloaded else ""
        own = _axes(found, with_sequence=shared) if divided else []
        row = [", ".join(homes), *own, f"{tokens_a_second(choice):,.0f}", batch, *again, *held]
        rows.append([*row, *([duration(days * 86_400) if days else "-"] if worn else [])])
    said = f"axes: data x {'sequence x ' if shared else ''}tensor x pipeline; " if divided else ""
    lines = [
        f"The best for this machine, and the next that differ ({said}batch: sequences at a time x accumulated):", "",
    ]
    lines += [*_aligned(rows), ""]
    year = f"{DAYS_MIN} days of {HOURS_A_DAY} hours"
    if not advice.lasting:
        lines.append(
            f"None lets the drive last {year}: these last the longest. More memory, or a larger endurance "
            "(`infinity bench --tbw`), would help."
        )
    elif advice.best.estimate.outline.nvme_written_nbytes:
        lines.append(f"Faster ones that wear the drive out within {year} are left out.")
    return "\n".join([*lines, "", chosen(advice.best)])


def _axes(found: Estimate, *, with_sequence: bool) -> list[str]:
    """The axes that ranks are divided among, the schedule of a pipeline, a step's time, and the bubble in it."""
    topology, part, schedule = found.plan.topology, found.plan.pipeline, found.schedule
    shared = f" x {topology.sp}" if with_sequence else ""
    axes = f"{topology.replicas}{shared} x {topology.tp} x {topology.pp}"
    if part is None or schedule is None:
        return [axes, "-", duration(found.outline.seconds), "-"]
    chunks = f" x {part.split.virtual}" if part.split.virtual > 1 else ""
    bubble = f"{100 * schedule.times.bubble:.0f} %"
    return [axes, part.split.schedule + chunks, duration(found.outline.seconds), bubble]


def to_choose(choice: Choice) -> list[str]:
    """What a search cannot know of its own configuration."""
    rate = choice.config["optimizer"]["params"]["lr"]
    lines = [f"Choose optimizer.params.lr yourself: {rate:g} stands there so that the file trains as it is."]
    model, changed = choice.estimate.model, []
    if choice.estimate.work.tiled_loss:
        changed.append(f"infinity.tile_sequence(model{'' if choice.estimate.work.tiled_mlps else ', mlps=False'})")
    if model.lora is not None:
        code = model.lora.code(str((model.values or {}).get("model_type")))
        changed.append(code)
    if changed:
        tiles = f"its {_tiles_in_words(choice.estimate)} in tiles"
        what = "its adapters" if model.lora is not None else tiles
        what = f"{tiles} and its adapters" if len(changed) > 1 else what
        lines += [f"Give infinity.initialize the model with {what}:", *(f"  {line}" for line in changed)]
    config = choice.estimate.config
    paths = [*(config.nvme_path or ()), *(config.checkpoint_nvme_path or ())]
    if paths and not all(map(os.path.isabs, paths)) and choice.estimate.outline.nvme_written_nbytes:
        lines.append("nvme_path is a folder beside the program: --nvme-path FOLDER puts one on your fast drive there.")
    return lines


def tiles_by_call(found: Estimate) -> str:
    """What a sentence adds of tiles: nothing, or the call that makes them."""
    call = "infinity.tile_sequence(model)" if found.work.tiled_mlps else "infinity.tile_sequence(model, mlps=False)"
    return f", {_tiles_in_words(found)} in tiles ({call})" if found.work.tiled_loss else ""


def _tiles_in_words(found: Estimate) -> str:
    """What is computed in tiles: "no", "loss" or "loss and MLPs"."""
    return "no" if not found.work.tiled_loss else "loss and MLPs" if found.work.tiled_mlps else "loss"


def largest_found(member: Choice | None, deepest: Choice) -> str:
    """The largest known model and the deepest of one width, each in one line, and the larger one's configuration."""
    lines = ["the largest known model of the family that fits: " + (_one_line(member) if member else "none")]
    values = deepest.estimate.model.values or {}
    layers = values.get("n_layer", values.get("num_hidden_layers"))
    if not deepest.estimate.fits:
        return "\n".join([*lines, "not even one layer of this width fits", "", *_missing(deepest.estimate)])
    lines.append(f"the most layers of this width that fit: {layers:,}; {_one_line(deepest)}")
    best = deepest if member is None or deepest.estimate.plan.numel > member.estimate.plan.numel else member
    return "\n".join([*lines, "", chosen(best)])


def _one_line(choice: Choice) -> str:
    found = choice.estimate
    return f"{found.model.name}: {found.numel / 1e9:.2f} B parameters, a step in {duration(found.outline.seconds)}"


def as_json(value: object, indent: int = 0) -> str:
    """JSON in which what fits a short line stands in one."""
    text = json.dumps(value)
    if not isinstance(value, Mapping) or (indent and len(text) + indent < 72):
        return text
    inside = " " * (indent + 2)
    members = ",\n".join(f"{inside}{json.dumps(key)}: {as_json(part, indent + 2)}" for key, part in value.items())
    return "{\n" + members + "\n" + " " * indent + "}"


def _summary(found: Estimate) -> str:
    parts = [
        f"{format_bytes(found.peak(tier))} of {format_bytes(found.capacity.of(tier) or 0)} {_place(found, tier)}"
        for tier in found.tiers
        if found.peak(tier) and found.capacity.of(tier) is not None
    ]
    return "At the peak a rank holds " + ", ".join(parts) + "."


def _missing(found: Estimate) -> list[str]:
    """What the machine would need."""
    ranks = found.plan.topology.local_size
    needed = []
    if Tier.GPU in found.excess and not found.machine.accelerator:
        needed.append(f"memory.gpu.max_bytes of at least {format_bytes(found.plan.nbytes_by_tier()[Tier.GPU])}")
    elif Tier.GPU in found.excess:
        needed.append(f"accelerators of {format_bytes((found.peak(Tier.GPU) + CONTEXT_NBYTES) / (1 - GAPS))}")
    if Tier.CPU in found.excess:
        own = found.peak(Tier.CPU)
        needed.append(f"{format_bytes((own + PROCESS_NBYTES) * ranks + SYSTEM_NBYTES)} of CPU memory a node")
    if Tier.NVME in found.excess:
        needed.append(f"{format_bytes(found.peak(Tier.NVME) * ranks / (1 - DRIVE_SHARE))} of NVMe a node")
    added = [tier for tier in found.excess if tier not in _PLACES]
    needed += [f"{format_bytes(found.peak(tier))} on {tier.value} for each rank" for tier in added]
    lines = [f"It takes {' and '.join(needed)}, more ranks, or a smaller model: --max says which would fit."]
    for tier, nbytes in found.excess.items():
        # Where ranks compute on the CPU, the tables count the device's as the CPU's.
        kinds = [table.get(tier, {}) for table in found.columns.values()]
        for kind, why in _WHY.items():
            if (held := max(table.get(kind, 0) for table in kinds)) >= nbytes:
                name = f"{kind.label} ({found.plan.request.grad_dtype})" if kind is Kind.GRAD else kind.label
                lines.append(f"Of what is too much {_place(found, tier)}, {name} are {format_bytes(held)}: {why}.")
        held = max(table.get(Kind.ACTIVATION, 0) for table in kinds)
        if held >= nbytes:
            lines.append(
                f"Of what is too much {_place(found, tier)}, activations are {format_bytes(held)}: "
                f"{_fewer_activations(found, tier, 1 - nbytes / held)}."
            )
    return lines


def _fewer_activations(found: Estimate, tier: Tier, share: float) -> str:
    """What to do where a share of a tier's activations has room: fewer tokens, or more ranks to each sequence."""
    work, topology, away = found.work, found.plan.topology, found.offloaded
    parts = dict(found.activations.parts) if found.activations is not None else {}
    if away is not None:
        inputs = f"inputs of {away.count} blocks"
        parts = {inputs: away.nbytes} if tier is away.tier else {**parts, inputs: away.each_nbytes}
    largest = max(parts, key=lambda name: parts[name], default="")
    words = f"most of them {largest} ({format_bytes(parts[largest])}); " if largest else ""
    words += "a smaller batch has fewer, " if work.batch > 1 else ""
    tokens = int(share * work.sequence) // 1024 * 1024
    words += f"sequences of about {tokens:,} tokens (--sequence) fit" if tokens else "shorter sequences have fewer"
    values = complete_values(found.model) or {}
    wider = range(work.parts + 1, values.get("num_attention_heads", 1) + 1)
    sizes = possible_parts(values, [size for size in wider if share * size >= work.parts])
    if sizes and tier.on_device and topology.tp == topology.pp == 1:
        words += f", or {sizes[0]} ranks that share each sequence (--ranks {sizes[0]} --sp {sizes[0]})"
    return words


def _activations(found: Estimate) -> list[str]:
    if found.activations is None or found.activations_otherwise is None:
        return ["activations: not known for this model"]
    kept, recomputed = found.activations, found.activations_otherwise
    if found.work.checkpointing:
        kept, recomputed = recomputed, kept
    line = (
        f"activations: {format_bytes(kept.nbytes)} kept, or {format_bytes(recomputed.nbytes)} where every layer is "
        f"computed again ({kept.source.partition(',')[0]})"
    )
    whole = found.with_tiles(False)
    if found.work.tiled_loss and whole.activations is not None:
        # The busiest moment need not be the loss in either of them.
        line += (
            f"; the {_tiles_in_words(found)} in tiles spare{'' if found.work.tiled_mlps else 's'} "
            f"{format_bytes(max(whole.activations.nbytes - found.activations.nbytes, 0))} "
            f"of {'intermediates' if found.work.tiled_mlps else 'logits'} for "
            f"{100 * (found.flops / whole.flops - 1):.0f} % more operations"
        )
    if (away := found.offloaded) is not None:
        line += f"; inputs of {away.count} layers, {format_bytes(away.nbytes)}, lie on {away.tier.value} until backward"
    if found.work.sparse is not None:
        keys, half = found.seen_keys, found.work.sequence / 2
        line += f"; with sparse attention a query meets {keys:,.0f} keys on average instead of {half:,.0f}"
    return [line]


def _step(found: Estimate) -> list[str]:
    """Time, traffic and wear, on a machine that is named."""
    time, total = found.time, found.traffic.total
    topology = found.plan.topology
    world = topology.world_size
    lines = [
        f"a step: {duration(time.seconds)}, {time.tokens_a_second * topology.dp:,.0f} tokens/s of {world} "
        f"rank{'s' if world > 1 else ''}, bound by {time.bound_by.value}",
        *_list("  alone: ", [f"{part.value} {duration(s)}" for part, s in time.parts.items() if s > 1e-4]),
        *_list("  moved: ", [f"{link.value} {format_bytes(total(link))}" for link in Link if total(link)]),
    ]
    if found.plan.nvme_nbytes:
        hides = "never" if time.tokens_to_hide is None else f"from {time.tokens_to_hide:,} tokens a micro-batch on"
        lines.append(f"  I/O hides behind computation {hides}")
    if time.nvme_written_nbytes_a_day:
        days = time.days_to_endurance
        if days is not None and time.endurance_nbytes is not None:
            rated = "assumed" if time.endurance_assumed else "rated"
            lines.append(
                f"  the drive: {format_bytes(time.nvme_written_nbytes_a_day)} written a day; {rated} endurance of "
                f"{format_bytes(time.endurance_nbytes)} reached in {duration(days * 86_400)}"
            )
    machine = "an assumed machine" if found.profile.source == "assumed" else f"{found.profile.host}, measured"
    lines.append(
        f"  rates of {machine}: {found.profile.accelerator or 'no accelerator'}; {found.profile.processor}. "
        + ("Measure yours with `infinity bench` and give --profile." if found.profile.source == "assumed" else "")
    )
    return lines


def _notes(found: Estimate) -> list[str]:
    """What would surprise later."""
    notes = []
    saved = sum(found.shown(found.phases[Phase.STEP])[Tier.CPU].values()) + state_dict_nbytes(found.plan)
    limit = found.capacity.of(Tier.CPU)
    if limit is not None and saved > limit and Tier.CPU not in found.excess:
        notes.append(
            f"state_dict() makes the whole model on rank 0 and would take {format_bytes(saved)} there, which is not "
            "free: use engine.save_checkpoint() or engine.export(), which stream."
        )
    if sum(found.plan.bytes_by_tier()[Tier.NVME].values()):
        notes.append(
            "Build the model under infinity.Init(config=...), or load a folder with its weights by "
            "infinity.load_hf(folder, config): then it never lies in memory as a whole."
        )
    return ["note: " + note for note in notes]


def _list(label: str, parts: Sequence[str]) -> list[str]:
    return [label + ", ".join(parts)] if parts else []


def _where(found: Estimate, *kinds: Kind) -> str:
    """The tiers of what lies between two steps, with shares where it is divided."""
    shares = found.homes(*kinds)
    apart = len(shares) > 1
    names = [_place(found, tier) + (f" ({round(100 * share)} %)" if apart else "") for tier, share in shares.items()]
    return " and ".join(names) or _place(found, found.tiers[0])


def tier_name(found: Estimate, tier: Tier, *, short: bool = False) -> str:
    """A tier's name; memory is memory where ranks compute on the CPU."""
    if tier.addressable and not found.machine.accelerator:
        return "memory"
    return NAMES.get(tier, tier.value) if short else palette.TIERS.get(tier.value, tier.value)


def _place(found: Estimate, tier: Tier) -> str:
    if tier.addressable and not found.machine.accelerator:
        return "in memory"
    return _PLACES.get(tier, f"on {tier.value}")


def _gb(nbytes: int) -> str:
    if not nbytes:
        return "-"
    return f"{nbytes / 1e9:,.2f}" if nbytes >= 5e6 else "<0.01"
