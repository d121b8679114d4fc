"""The colours and the words of every picture: the timeline, the estimator's SVG and the plots of the examples.

A kind of bytes (parameters, gradients, ...) has one colour and one label, wherever it is drawn or named. The keys are
the values of `Kind` and `Tier`, so that this module imports nothing and everything may import it.

Six colours are those of Okabe and Ito, "Color Universal Design" (2008); the seventh, vermilion, is kept for waiting.
The others were chosen beside them: two kinds that can lie in one picture differ for readers with any colour vision
(simulated after Machado et al., 2009), and every colour of a kind stands out from a dark ground.
"""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    """How one kind of bytes is named and drawn."""

    label: str
    colour: str


class Activity(NamedTuple):
    """How the timeline names and draws what a thread does; `note` explains the label in a legend."""

    label: str
    light: str
    dark: str
    note: str = ""


# By the value of `Kind`, in the order in which pictures stack them, from the bottom. Kinds that no run holds at once
# (the states of different optimizers) may share a colour.
KINDS = {
    "param": Look("parameters", "#0072B2"),
    "full": Look("gathered parameters", "#56B4E9"),
    "grad": Look("gradients", "#E69F00"),
    "full_grad": Look("whole gradients", "#F0E442"),
    "activation": Look("activations", "#9C5200"),
    "remainder": Look("master remainders", "#7A3DE0"),
    "master": Look("master weights", "#7A3DE0"),
    # By torch's names, which the states of an optimizer have everywhere.
    "exp_avg": Look("exp_avg", "#009E73"),
    "exp_avg_sq": Look("exp_avg_sq", "#CC79A7"),
    "sum": Look("sum", "#009E73"),
    "square_avg": Look("square_avg", "#009E73"),
    "momentum_buffer": Look("momentum_buffer", "#CC79A7"),
    "exp_inf": Look("exp_inf", "#CC79A7"),
    "grad_avg": Look("grad_avg", "#A8E6A1"),
    "state_1": Look("state_1", "#009E73"),
    "state_2": Look("state_2", "#CC79A7"),
    "state_3": Look("state_3", "#A8E6A1"),
    "state_4": Look("state_4", "#77AA55"),
    "state1": Look("state1", "#009E73"),
    "absmax1": Look("absmax1", "#A8E6A1"),
    "state2": Look("state2", "#CC79A7"),
    "absmax2": Look("absmax2", "#77AA55"),
    "states": Look("optimizer states", "#009E73"),
    "pool": Look("pools", "#B0B0B0"),
    "model": Look("the model being built", "#E4E4E4"),
}

# The arenas of CPU memory in a timeline, where their use is known at each moment.
POOLS = {"pool_used": Look("pools, in use", "#707070"), "pool_free": Look("pools, free", KINDS["pool"].colour)}

# What a thread does at a moment, by the names of `infinity.base.trace`, and what goes on beside it ("flight").
ACTIVITIES = {
    "wait": Activity("waiting", "#D55E00", "#FF7A1A"),
    "compute": Activity("computing", "#A9C7E2", "#3A5F80"),
    "copy": Activity("copying", "#6FB9D6", "#2F7C99"),
    "engine": Activity("engine", "#C3C8CD", "#555C63", "hooks, bookkeeping"),
    "outside": Activity("outside the engine", "#E9ECEF", "#24292E"),
    "flight": Activity("under way beside the program", "#8FB8A8", "#3F6B5B"),
}

# What a rank of a pipeline does, by the values of `ActionKind`; between these it waits.
ACTIONS = {
    "F": Look("forward", "#56B4E9"),
    "B": Look("backward", "#0072B2"),
    "I": Look("backward, inputs", "#0072B2"),
    "W": Look("backward, weights", "#E69F00"),
}

TIERS = {"gpu": "GPU", "cpu": "CPU memory", "nvme": "NVMe"}

# Curves of figures that are no bytes: what is followed, and what it is compared with.
CURVE, COMPARED = "#0072B2", "#D55E00"

# Of pictures on white paper: the paper, text and outlines, lines of a scale, and text beside the matter.
PAPER, INK, RULE, FAINT = "#FFFFFF", "#222222", "#DDDDDD", "#808080"
