"""Activations of transformers by closed forms: what one micro-batch's forward and backward need beside parameters and
their gradients.

Each form lists what torch's autograd keeps of a block as transformers writes it, storage by storage (a tensor that two
operations keep counts once); Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022), count the same way for Megatron's blocks. On top comes the busiest of two moments: the loss, whose fp32 logits
lie there three times, or the backward of one block. Where a model is at hand, `infinity.measure_activations` measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.errors import ConfigError
from infinity.plan.activations import Activations, BlockActivations
from infinity.plan.sequence_axis import key_heads
from infinity.plan.spec import TILE_TOKENS, TILE_WORDS
from infinity.plan.types import DTYPE_NBYTES

__all__ = ["Activations", "activations"]

# At the loss: log-probabilities, their gradient, and that of the logits, all in fp32.
_LOSS_COPIES = 3
# What transformers' GPT-2 takes where its config.json names none.
_GPT2_DROPOUT = 0.1
# What files call the number of experts, and whose blocks are not like Llama's.
_EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")
# Layers that take what the norm before attention gives, and what the one before the feed-forward gives.
_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa")
_BRANCHES = ("gate_proj", "up_proj", "gate_up_proj")
_NAMES = {"gpt2": "GPT-2", "deepseek_v3": "DeepSeek-V3", "gemma2": "Gemma 2", "gemma3_text": "Gemma 3"}


@dataclass(frozen=True, slots=True)
class _Pass:
    """What is run: tokens and bytes of an element, and how attention and dropout are computed."""

    batch: int
    sequence: int
    width: int
    attention: str
    accelerator: bool
    # The names of the layers with adapters, and their rank, where all else is frozen; None where all is trained.
    adapted: frozenset[str] | None = None
    rank: int = 0
    # Ranks that have a part each, along the sequence, of what lies between regions of a tensor axis.
    sequence_ranks: int = 1
    # Whether MLPs run a tile of tokens at a time, and again in backward.
    tiled_mlps: bool = False
    # Ranks that share each sequence: a part of the tokens each, and in attention of the heads.
    parts: int = 1

    @property
    def tokens(self) -> int:
        """Of this rank."""
        return self.batch * -(-self.sequence // self.parts)

    def keeps(self, *layers: str) -> bool:
        """Whether linear layers of these names keep their input, which they do for the gradient of a weight."""
        return self.adapted is None or not self.adapted.isdisjoint(layers)

    def deferred_nbytes(self, *inputs: tuple[int, Mapping[str, int]]) -> int:
        """What linear layers hold between the two parts of a split backward: of each input its columns, and those of
        the outputs of the layers that take it, by name.
        """
        columns = 0
        for width, outputs in inputs:
            if own := [rows for name, rows in outputs.items() if self.keeps(name)]:
                columns += width + sum(own)
        return self.tokens * columns * self.width

    def scores(self, heads: int) -> int:
        """Elements of one matrix of attention scores, of all heads that the rank computes."""
        return self.batch * heads * self.sequence * self.sequence // self.parts

    def noise_nbytes(self, numel: int, probability: float) -> int:
        """What dropout keeps: a flag an element on an accelerator, a factor in the tensor's dtype on the CPU."""
        return numel * (1 if self.accelerator else self.width) if probability else 0


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes that a repeated block keeps by part, those of its input, and what its backward adds at its busiest.

    deferred_nbytes: what its linear layers hold between the two parts of a split backward. saves_input: whether what it
    keeps contains its input as it comes.
    """

    parts: Mapping[str, int]
    input_nbytes: int
    backward_nbytes: int
    deferred_nbytes: int = 0
    saves_input: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


def activations(
    values: Mapping[str, Any], *, batch: int, sequence: int, compute_dtype: str, checkpointing: bool = False,
    every: int = 1, attention: str = "sdpa", accelerator: bool = False, adapted: frozenset[str] | None = None,
    rank: int = 0, tiled_loss: bool = False, tiled_mlps: bool = False, sequence_ranks: int = 1, parts: int = 1,
) -> Activations:  # fmt: skip
    """Bytes of a micro-batch of `batch` sequences for the causal language model of a config.json.

    values: the keys of config.json: Llama's family (also Mistral, Qwen, Mixtral, Gemma, DeepSeek-V3) or "gpt2".
    compute_dtype: "fp32", "bf16" or "fp16". checkpointing: every `every`-th block keeps its input only and is computed
    again in backward. attention: "sdpa" or "eager" (always Gemma 2's). accelerator: whether it runs on one. The program
    is taken to keep the loss of a forward, not its logits. adapted, rank: where all but low-rank adapters is frozen,
    the names of the layers that have them; then layers without keep no input. tiled_loss: the logits are computed a
    tile at a time, as `infinity.tile_sequence` does it; tiled_mlps: MLPs as well (`may_tile_mlps`). sequence_ranks:
    among so many, activations between the regions of a tensor axis are cut along the sequence; `values` are then one
    rank's (`local_values`). parts: ranks that share each sequence, of which the bytes are one's and `values` the whole
    model's. ConfigError where a size is missing, and for what cannot be tiled.
    """
    kind, width = values.get("model_type"), DTYPE_NBYTES[compute_dtype]
    # transformers computes Gemma 2's attention in no other way, for its scores are capped.
    attention = "eager" if kind == "gemma2" else attention
    run = _Pass(batch, sequence, width, attention, accelerator, adapted, rank, sequence_ranks, tiled_mlps, parts)
    gpt2 = kind == "gpt2"
    blocks = _blocks(values, run)
    ahead = blocks[::every] if checkpointing else []
    whole = [block for index, block in enumerate(blocks) if not (checkpointing and index % every == 0)]
    logits = run.tokens * _size(values, "vocab_size") * DTYPE_NBYTES["fp32"]
    ending = run.tokens * _size(values, "n_embd" if gpt2 else "hidden_size")
    kept = _kept(whole, ahead)
    # The last norm keeps its input, and what the head, or a loss in tiles, takes; Llama's the normalized values, too.
    head = run.keeps("lm_head") or tiled_loss
    last = {"last norm": ending * (run.width * (1 + head) if gpt2 else _norm_nbytes(values, run, output=head))}
    # A cap of logits keeps them once more.
    capped = logits // DTYPE_NBYTES["fp32"] * run.width if values.get("final_logit_softcapping") else 0
    again = [block.nbytes + block.backward_nbytes for block in ahead]
    moments = (
        {**kept, **last, "loss in tiles": _tiles_nbytes(values, run, ending)} if tiled_loss else
        {**kept, **last, "logits and loss": _LOSS_COPIES * logits + capped},
        # What lies behind the last block is gone by then.
        {
            **kept, "one block, computed again" if checkpointing else "backward of a block":
            max([*again, *(block.backward_nbytes for block in whole)]),
        },
    )  # fmt: skip
    busiest = max(moments, key=lambda moment: sum(moment.values()))
    form = f"closed form of {_NAMES.get(str(kind), 'Llama')}'s blocks, {attention} attention"
    saved = sum(kept.values()) + sum(last.values()) + (0 if tiled_loss else logits)
    return Activations(
        nbytes=sum(busiest.values()), parts=busiest, saved_nbytes=saved,
        source=f"{form}, {'blocks computed again' if checkpointing else 'nothing computed again'}",
        # No gradient goes to the first block's where all before it is frozen: autograd does not save it.
        inputs=len(ahead) - (1 if ahead and adapted is not None else 0), input_nbytes=blocks[0].input_nbytes,
        blocks=_by_block(
            blocks, [checkpointing and index % every == 0 for index in range(len(blocks))],
            # What lies behind the last block between the passes, and what the loss has at its busiest.
            head=sum(last.values()) + (0 if tiled_loss else logits), loss=sum(moments[0].values()) - sum(kept.values()),
            head_deferred=0 if tiled_loss or not run.keeps("lm_head") else
            (ending + run.tokens * _size(values, "vocab_size")) * run.width,
        ),
    )  # fmt: skip


def _kept(whole: Sequence[_Block], ahead: Sequence[_Block]) -> dict[str, int]:
    """Bytes by name of what blocks keep for backward; those of `ahead`, which are computed again, their input only."""
    kept = {}
    for name in dict.fromkeys(name for block in whole for name in block.parts):
        held = [block.parts[name] for block in whole if name in block.parts]
        kept[f"{name} of {len(held)} blocks"] = sum(held)
    if ahead:
        kept[f"inputs of {len(ahead)} blocks"] = sum(block.input_nbytes for block in ahead)
    return kept


def _by_block(
    blocks: Sequence[_Block], recomputed: Sequence[bool], *, head: int, loss: int, head_deferred: int
) -> BlockActivations:
    """What stages of the model have their part of."""
    each = list(zip(blocks, recomputed, strict=True))
    return BlockActivations(
        saved=tuple(block.input_nbytes if again else block.nbytes for block, again in each),
        deferred=tuple(block.deferred_nbytes for block in blocks),
        saves_input=tuple(again or block.saves_input for block, again in each), recomputed=tuple(recomputed),
        working=tuple(block.backward_nbytes + (block.nbytes if again else 0) for block, again in each),
        boundary_nbytes=blocks[0].input_nbytes, head_nbytes=head, loss_nbytes=loss, head_deferred=head_deferred,
    )  # fmt: skip


def may_tile_loss(values: Mapping[str, Any]) -> bool:
    """Whether the model's loss may be computed in tiles: nothing may change logits between the head and the loss."""
    return not values.get("final_logit_softcapping")


def may_tile_mlps(values: Mapping[str, Any]) -> bool:
    """Whether the bytes of its MLPs in tiles are known: of Llama's, not of experts, which stay whole."""
    return may_tile_loss(values) and values.get("model_type") != "gpt2" and not _count(values)


def _tiles_nbytes(values: Mapping[str, Any], run: _Pass, ending: int) -> int:
    """What `tiled_cross_entropy` has beside its input in backward: two tiles of logits in fp32, each with its copy in
    the head's dtype, the sum of the head's gradient for one block of words, and the gradient of the input, in fp32 and
    then in its own dtype. `ending`: elements of the input.
    """
    if not may_tile_loss(values):
        raise ConfigError(
            f"{values.get('model_type')} caps its logits, so that its loss cannot be computed in tiles: leave "
            "--tiled-loss out"
        )
    full, vocabulary = DTYPE_NBYTES["fp32"], _size(values, "vocab_size")
    copy = run.width if run.width != full else 0
    words = min(vocabulary, TILE_WORDS)
    first = min(run.tokens, TILE_TOKENS)
    # The next one in the order in which they are made: of the tokens that follow, or of the words.
    second = min(run.tokens - first, TILE_TOKENS) or (first if vocabulary > words else 0)
    # Alone, a tile has its exponentials or a copy of its gradient beside it.
    tiles = words * max((first + second) * (full + copy), first * (2 * full + copy))
    if run.keeps("lm_head"):
        # In 16 bits each product is made beside the sum that it is added to.
        tiles += words * (ending // run.tokens) * full * (2 if copy else 1)
    return ending * full + max(tiles, ending * copy)


def _blocks(values: Mapping[str, Any], run: _Pass) -> list[_Block]:
    """The repeated blocks in their order."""
    kind = values.get("model_type")
    if kind == "gpt2":
        return [_gpt2_block(values, run)] * _size(values, "n_layer")
    layers = _size(values, "num_hidden_layers")
    attention = _latent_attention(values, run) if values.get("kv_lora_rank") else _attention(values, run)
    # The first are dense in DeepSeek's models, all are without experts.
    dense = min(int(values.get("first_k_dense_replace") or 0), layers) if kind == "deepseek_v3" else 0
    dense = dense if _count(values) else layers
    found: list[_Block] = []
    for count, mixing in ((dense, _feed_forward), (layers - dense, _experts)):
        found += [_block(values, run, attention, mixing(values, run))] * count if count else []
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """One half of a block: what it keeps, and what its backward adds at its busiest."""

    name: str
    kept_nbytes: int
    backward_nbytes: int
    deferred_nbytes: int = 0


def _block(values: Mapping[str, Any], run: _Pass, attention: _Part, mixing: _Part) -> _Block:
    """RMSNorm, attention with rotary positions, RMSNorm, gated feed-forward or experts; Gemma has norms behind both."""
    hidden = _size(values, "hidden_size")
    elements = run.tokens * hidden // run.sequence_ranks
    norms = elements * sum(_norm_nbytes(values, run, output=False) for _ in range(2))
    # What layers of a region take is whole on each rank.
    norms += run.tokens * hidden * run.width * sum(run.keeps(*layers) for layers in (_INPUTS, _BRANCHES))
    if _wide_norms(values):
        # Nothing keeps what comes out of those behind.
        norms += 2 * elements * _norm_nbytes(values, run, output=False)
    parts = {"norms": norms, attention.name: attention.kept_nbytes, mixing.name: mixing.kept_nbytes}
    if run.adapted is not None:
        parts["adapters"] = run.tokens * len(run.adapted) * run.rank * run.width
    # In backward of attention what the other half kept is gone.
    return _Block(
        parts, elements * run.width, max(mixing.backward_nbytes, attention.backward_nbytes - mixing.kept_nbytes),
        attention.deferred_nbytes + mixing.deferred_nbytes,
        # Norms save it in fp32.
        saves_input=run.width == DTYPE_NBYTES["fp32"],
    )  # fmt: skip


def _attention(values: Mapping[str, Any], run: _Pass) -> _Part:
    """Queries, keys, values and what comes out. Written out, each query head has keys and values of its own."""
    heads = _size(values, "num_attention_heads")
    head = values.get("head_dim") or _size(values, "hidden_size") // heads
    own = values.get("num_key_value_heads") or heads
    queries, keys = heads * head, key_heads(own, run.parts) * head
    kept = run.tokens * 2 * (queries + (queries if run.attention == "eager" else keys)) * run.width
    if run.attention == "eager" and not run.keeps("o_proj"):
        # Fused attention itself keeps what comes out.
        kept -= run.tokens * queries * run.width
    if run.parts > 1 and run.attention == "sdpa" and run.keeps("o_proj"):
        # What comes out is exchanged, and kept on both sides.
        kept += run.tokens * queries * run.width
    elif run.parts == 1 and values.get("model_type") == "phi3" and run.attention == "sdpa":
        # Values are a view of one product with queries and keys, and what comes out is kept in two layouts.
        kept += run.tokens * ((2 if run.keeps("o_proj") else 1) * queries + keys) * run.width
    if values.get("model_type") in ("qwen3", "qwen3_moe", "gemma3_text"):
        # Norms of queries and keys, a head at a time: nothing keeps what comes out.
        kept += run.tokens * (queries + own * head) * _norm_nbytes(values, run, output=False)
    if values.get("attn_logit_softcapping"):
        kept += run.scores(heads) * run.width
    hidden = _size(values, "hidden_size")
    outputs = {"q_proj": queries, "k_proj": own * head, "v_proj": own * head}
    outputs = {"qkv_proj": queries + 2 * own * head} if values.get("model_type") == "phi3" else outputs
    deferred = run.deferred_nbytes((hidden, outputs), (queries, {"o_proj": hidden}))
    kept += _scores_nbytes(run, heads, 0.0)
    behind = max(_scores_backward_nbytes(run, heads), _exchange_nbytes(run, queries + 2 * keys, hidden) - kept)
    return _Part("attention", kept, behind, deferred)


def _exchange_nbytes(run: _Pass, columns: int, hidden: int) -> int:
    """What backward has where the gradients of queries, keys and values go back to their tokens: these, what is sent of
    them, what arrives, and that in its order, beside the residual's gradient. What attention keeps is gone by then.
    """
    return run.tokens * (4 * columns + hidden) * run.width if run.parts > 1 else 0


def _latent_attention(values: Mapping[str, Any], run: _Pass) -> _Part:
    """DeepSeek's: queries and keys of two pieces, put together; values are a view of what keys are made from."""
    heads, latent = _size(values, "num_attention_heads"), _size(values, "kv_lora_rank")
    plain, rope, value = (_size(values, f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
    keys, tokens, width = plain + rope, run.tokens, run.width
    normed = tokens * latent * _norm_nbytes(values, run, output=run.keeps("kv_b_proj"))
    normed += tokens * (values.get("q_lora_rank") or 0) * _norm_nbytes(values, run, output=run.keeps("q_b_proj"))
    # Queries, keys, what values are a view of, and what comes out, in two layouts: the last for the next layer alone.
    # Of parts, values are not a view.
    after = value if run.keeps("o_proj") else 0
    each = (2 * keys + plain * (run.parts == 1) + value + value + after) * width
    scores, behind = _scores_nbytes(run, heads, 0.0), _scores_backward_nbytes(run, heads)
    if run.attention == "eager":
        each = (2 * keys + value + after) * width
    elif not run.accelerator and keys != value:
        # torch has no fused attention of two widths on the CPU: it is written out in fp32 there.
        each = (2 * keys + value) * DTYPE_NBYTES["fp32"] + after * width
        scores = run.scores(heads) * DTYPE_NBYTES["fp32"]
        behind = 2 * scores
    hidden, lower = _size(values, "hidden_size"), int(values.get("q_lora_rank") or 0)
    outputs = {"q_a_proj": lower} if lower else {"q_proj": heads * keys}
    deferred = run.deferred_nbytes(
        (hidden, {**outputs, "kv_a_proj_with_mqa": latent + rope}), (latent, {"kv_b_proj": heads * (plain + value)}),
        *([(lower, {"q_b_proj": heads * keys})] if lower else []), (heads * value, {"o_proj": hidden}),
    )  # fmt: skip
    return _Part("attention", normed + tokens * heads * each + scores, max(behind, tokens * heads * each), deferred)


def _feed_forward(values: Mapping[str, Any], run: _Pass) -> _Part:
    """In and out of the activation function, the other branch, and their product."""
    inner, hidden = _size(values, "intermediate_size"), _size(values, "hidden_size")
    # Two gradients of the feed-forward's width, and two of the residual stream.
    busy = run.tokens * (2 * inner + 2 * hidden) * run.width
    kept = run.tokens * _branches(run) * inner * run.width
    if run.tiled_mlps and not may_tile_mlps(values):
        raise ConfigError(f"the MLPs of {values.get('model_type')} are not sized in tiles: leave --tiled-mlps out")
    if run.tiled_mlps and run.tokens > TILE_TOKENS:
        # Its input is kept, which the norm counts where a trained layer keeps it; the rest is there for one tile.
        # Gradients of all tiles' inputs are there once apart and once together.
        tile = TILE_TOKENS * (_branches(run) * inner + 2 * inner) * run.width
        kept = 0 if run.keeps(*_BRANCHES) else run.tokens * hidden * run.width
        return _Part("feed-forward in tiles", kept, tile + 3 * run.tokens * hidden * run.width)
    return _Part("feed-forward", kept, busy, _gated_deferred(values, run, inner))


def _gated_deferred(values: Mapping[str, Any], run: _Pass, inner: int) -> int:
    """What a gated feed-forward of linear layers holds between the two parts of a split backward."""
    hidden = _size(values, "hidden_size")
    outputs = {"gate_proj": inner, "up_proj": inner}
    outputs = {"gate_up_proj": 2 * inner} if values.get("model_type") == "phi3" else outputs
    return run.deferred_nbytes((hidden, outputs), (inner, {"down_proj": hidden}))


def _branches(run: _Pass) -> int:
    """How many tensors of a gated feed-forward's width it keeps: their product only for the gradient of the way down.
    """
    return 4 if run.keeps("down_proj") else 3


def _count(values: Mapping[str, Any]) -> int:
    """Experts of a mixture; 0 where there are none."""
    return next((int(values[name]) for name in _EXPERT_COUNTS if values.get(name)), 0)


def _experts(values: Mapping[str, Any], run: _Pass) -> _Part:
    """What the chosen experts keep of each token, the router, and what every token passes beside."""
    hidden, width = _size(values, "hidden_size"), run.width
    chosen = int(values.get("num_experts_per_tok") or 2)
    inner = int(values.get("moe_intermediate_size") or values.get("intermediate_size") or 0)
    routing = 3 * _count(values) * DTYPE_NBYTES["fp32"]
    beside, over, weight = 0, 0, width
    if values.get("model_type") == "deepseek_v3":
        # The router takes a copy in fp32, and what comes out of experts is weighed in fp32.
        beside = over = _branches(run) * inner * int(values.get("n_shared_experts") or 0) * width
        weight = DTYPE_NBYTES["fp32"]
        routing += hidden * DTYPE_NBYTES["fp32"] if run.adapted is None else 0
    elif values.get("model_type") == "qwen2_moe":
        # What comes out is multiplied with a gate.
        beside = (_branches(run) * _size(values, "shared_expert_intermediate_size") + hidden) * width
    # Frozen, they keep neither their inputs nor the products that go into the way down.
    kept = 2 * hidden + 4 * inner if run.adapted is None else hidden + 3 * inner
    each = chosen * kept * width + routing + beside
    # Three gradients of the residual stream's width for each expert of a token, before they are added. DeepSeek's
    # shared expert comes last in forward, and so is over by then.
    busy = chosen * max(2 * inner * width, 3 * hidden * weight) + 2 * hidden * width
    # Experts in stacked weights compute all in the first part; those that every token passes are linear layers.
    every = {"deepseek_v3": inner * int(values.get("n_shared_experts") or 0)}.get(str(values.get("model_type")), 0)
    every = every or int(values.get("shared_expert_intermediate_size") or 0)
    deferred = _gated_deferred(values, run, every) if every else 0
    return _Part("experts", run.tokens * each, run.tokens * (busy - over), deferred)


def _gpt2_block(values: Mapping[str, Any], run: _Pass) -> _Block:
    """LayerNorm, attention with biases, LayerNorm, feed-forward with GELU, dropout behind both."""
    hidden, heads = _size(values, "n_embd"), int(values.get("n_head") or 12)
    inner = int(values.get("n_inner") or 4 * hidden)
    tokens, width = run.tokens, run.width
    noise = run.noise_nbytes(tokens * hidden, values.get("resid_pdrop", _GPT2_DROPOUT) or 0.0)
    function = values.get("activation_function") or "gelu_new"
    dropout = values.get("attn_pdrop", _GPT2_DROPOUT) or 0.0
    # torch has no fused attention with dropout on the CPU: it computes in fp32 there.
    inputs_width = DTYPE_NBYTES["fp32"] if dropout and run.attention == "sdpa" and not run.accelerator else width
    normed = 2 + run.keeps("c_attn") + run.keeps("c_fc")
    functions = (5 if function == "gelu_new" else 2) - (not run.keeps("c_proj"))
    parts = {
        "norms": normed * tokens * hidden * width,
        # Queries, keys, values, and what comes out, of parts on both sides of the exchange.
        "attention": tokens * hidden * (3 * inputs_width + width * min(run.parts, 2))
        + _scores_nbytes(run, heads, dropout),
        # transformers writes this GELU out: its input, tanh, one more than that, half the input, and the product.
        "feed-forward": tokens * functions * inner * width,
        "dropout": 2 * noise,
    }  # fmt: skip
    if run.adapted is not None:
        parts["adapters"] = tokens * len(run.adapted) * run.rank * width
    behind = _scores_backward_nbytes(run, heads) - parts["feed-forward"]
    # Its layers are no linear ones to a split backward.
    return _Block(parts, tokens * hidden * width, max(tokens * 2 * inner * width, behind), saves_input=True)


def _norm_nbytes(values: Mapping[str, Any], run: _Pass, *, output: bool) -> int:
    """Bytes an element that an RMSNorm keeps: its input in fp32, the normalized values for its weight's gradient, and
    what comes out where the next layer keeps that.
    """
    normalized = DTYPE_NBYTES["fp32"] if _wide_norms(values) else run.width
    return DTYPE_NBYTES["fp32"] + (normalized if run.adapted is None else 0) + (run.width if output else 0)


def _wide_norms(values: Mapping[str, Any]) -> bool:
    """Whether norms multiply with their weights in fp32, and stand behind attention and feed-forward as well."""
    return values.get("model_type") in ("gemma2", "gemma3_text")


def _scores_nbytes(run: _Pass, heads: int, dropout: float) -> int:
    """What attention keeps beside queries, keys, values and output."""
    statistics = run.tokens * heads * DTYPE_NBYTES["fp32"]
    if run.attention == "eager":
        # Softmax in fp32, its copy in the dtype of the values where that is another, and dropout's two.
        copies = DTYPE_NBYTES["fp32"] + (run.width if run.width != DTYPE_NBYTES["fp32"] else 0)
        copies += run.width if dropout else 0
        return run.scores(heads) * copies + run.noise_nbytes(run.scores(heads), dropout)
    if dropout and not run.accelerator:
        # Probabilities, the noise, their product.
        return run.scores(heads) * 3 * DTYPE_NBYTES["fp32"]
    return statistics


def _scores_backward_nbytes(run: _Pass, heads: int) -> int:
    """Gradients of attention scores at once in backward, where they are written out: before and behind softmax. What
    softmax gave in 16 bits is gone by then.
    """
    copy = run.width if run.width != DTYPE_NBYTES["fp32"] else 0
    return run.scores(heads) * (2 * DTYPE_NBYTES["fp32"] - copy) if run.attention == "eager" else 0


def _size(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"the model's {name} is {value!r}: activations need it as a positive whole number")
    return value
