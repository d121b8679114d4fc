"""Which causal language models of the installed transformers can be cut into stages, unmodified?

`python -m tests.pipeline_families [--json FILE]` makes each family tiny, cuts it into three stages and compares loss
and gradients with those of the uncut model, bit for bit; each stage's copy has NaN for the weights of the others. A
family is right if it is equal, or refused by a ConfigError. Those of which the common names of sizes make no tiny model
are listed with the reason.
"""

from __future__ import annotations

import copy
import json
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from infinity.errors import ConfigError
from infinity.parallel.stage_check import record_cut
from infinity.plan.spec import module_tree
from infinity.plan.stages import cut_model, find_blocks
from tests.parallel.staged import Stage, batch, differences, run, run_back, take_chance_away
from tests.pipeline_matrix import run_parts
from tests.zoo.families import VOCABULARY

STAGES = 3
# What configurations call their sizes; each takes those that it knows.
SIZES = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers"), 5),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8, "sliding_window": 8, "moe_intermediate_size": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4), "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Instead of them, for latent attention.
LATENT = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"},
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 16), "num_key_value_heads": 4,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8), "index_n_heads": 4, "index_topk": 4,
}  # fmt: skip
MOST_PARAMETERS, SECONDS = 60_000_000, 60


class NotMade(Exception):
    """A family of which the common sizes make no small model that trains."""


def make(kind: str) -> nn.Module:
    """A tiny model of a family in fp32 and training mode, without dropout. NotMade with the reason."""
    try:
        known = _keys(kind)
        sizes = LATENT if "kv_lora_rank" in known else SIZES
        config = transformers.AutoConfig.for_model(kind, **{name: sizes[name] for name in sizes if name in known})
        take_chance_away(config)
        with torch.device("meta"):
            size = sum(param.numel() for param in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise NotMade(f"{size / 1e6:,.0f} M parameters")
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).train().float()
        torch.manual_seed(0)
        model(**batch()).loss.backward()
        copy.deepcopy(model)
    except (NotMade, TimeoutError):
        raise
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:100]}") from error
    if len(_blocks(model)) < STAGES:
        raise NotMade(f"less than {STAGES} blocks")
    return model


def _blocks(model: nn.Module) -> tuple[str, ...]:
    classes = tuple(getattr(model, "_no_split_modules", None) or ())
    return find_blocks(module_tree(model, compute_dtype="fp32"), classes)


def _keys(kind: str) -> set[str]:
    """The names that a family's configuration takes."""
    config = transformers.AutoConfig.for_model(kind)
    return {*config.to_dict(), *getattr(config, "attribute_map", {})}


def compare(model: nn.Module) -> str:
    """Cut a model that has had a backward into stages and run them; return what differs from it."""
    root = module_tree(model, compute_dtype="fp32")
    recorded = record_cut(model, _blocks(model), batch(8), torch.float32)
    inner = len(recorded.blocks) // STAGES
    counts = (len(recorded.blocks) - 2 * inner, inner, inner)
    where = cut_model(root, recorded.blocks, STAGES, after=recorded.after, counts=counts)
    stages = [Stage(model, [stage], where, recorded.answers) for stage in range(STAGES)]
    # Some routers draw numbers.
    torch.manual_seed(0)
    with torch.no_grad():
        expected = model(**batch()).loss
    torch.manual_seed(0)
    output, passed = run(stages, batch())
    run_back(passed, output.loss)
    wrong = [] if torch.equal(output.loss.detach(), expected) else [f"loss {output.loss} and not {expected}"]
    return ", ".join([*wrong, *differences(stages, model)][:4])


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """TimeoutError behind as many seconds."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def cut_family(kind: str) -> dict[str, Any]:
    """One row: what became of a family."""
    try:
        with within(SECONDS):
            found = compare(make(kind))
    except (NotMade, TimeoutError) as error:
        return {"family": kind, "result": "not made", "why": str(error), "right": True}
    except ConfigError as error:
        return {"family": kind, "result": "refused", "why": str(error), "right": True}
    except Exception as error:
        return {"family": kind, "result": "failed", "why": f"{type(error).__name__}: {error}"[:300], "right": False}
    return {"family": kind, "result": "differs" if found else "equal", "why": found, "right": not found}


def all_families() -> list[dict[str, Any]]:
    """A row for each causal language model that transformers names."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append(cut_family(kind))
        print(json.dumps(rows[-1]), flush=True)
    print(", ".join(f"{count} {result}" for result, count in Counter(row["result"] for row in rows).most_common()))
    return rows


if __name__ == "__main__":
    run_parts("python -m tests.pipeline_families", {"families": all_families})
