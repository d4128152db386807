"""Names of tensors in published checkpoints: data only (architecture section 10).

A tensor is described by two patterns of dims, as stored (`theirs`) and in the parameter tree
(`ours`), for instance ``"(n h) q"`` and ``"q n h"``: dims in parentheses are merged, a number is a
fixed place along a dim, so ``"d 0 f"`` is the gate half of a gate-and-up leaf. Families differ in
spelling, which :class:`Spelling` holds; whether a tensor exists in a layer follows from whether the
layer has the leaf.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """Where (a piece of) a stored tensor belongs: a leaf of the tree and the dims of that leaf."""

    leaf: str
    dims: str


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """One stored tensor of a layer, or of the model.

    Attributes:
      name: template below `model.layers.<i>.` (layer rules) or the whole name (model rules); `{}`
        fields are filled from the family's spelling, `{e}` counts experts.
      theirs: dims as stored.
      parts: the leaves it holds; several lie one after the other along `concat`.
      concat: the dim of `theirs` along which parts are laid.
      padded: stored longer than it is, zeros behind (A_log of K3), or with dims of one around it.
      optional_first: may be missing in layer 0, which does not read it.
    """

    name: str
    theirs: str
    parts: tuple[Part, ...]
    concat: str = ""
    padded: bool = False
    optional_first: bool = False


def _rule(
    name: str,
    theirs: str,
    leaf: str,
    ours: str,
    *,
    padded: bool = False,
    optional_first: bool = False,
) -> TensorRule:
    return TensorRule(
        name, theirs, (Part(leaf, ours),), padded=padded, optional_first=optional_first
    )


MODEL_RULES = (
    _rule("model.{embed}.weight", "v d", "embed.table", "v d"),
    _rule("lm_head.weight", "v d", "head.table", "v d"),
    _rule("model.norm.weight", "d", "final_norm.weight", "d"),
    _rule("model.output_attn_res_norm.weight", "d", "final_mix.norm", "d"),
    _rule("model.output_attn_res_proj.weight", "1 d", "final_mix.query", "d"),
)

_COMMON_RULES = (
    _rule("input_layernorm.weight", "d", "attn_norm.weight", "d"),
    _rule("post_attention_layernorm.weight", "d", "ffn_norm.weight", "d"),
    _rule("self_attention_res_norm.weight", "d", "attn_mix.norm", "d", optional_first=True),
    _rule("self_attention_res_proj.weight", "1 d", "attn_mix.query", "d", optional_first=True),
    _rule("mlp_res_norm.weight", "d", "ffn_mix.norm", "d"),
    _rule("mlp_res_proj.weight", "1 d", "ffn_mix.query", "d"),
    _rule("{attn}.{o}.weight", "d x", "attn.o", "x d"),
    _rule("{attn}.g_proj.weight", "x d", "attn.gate", "d x"),
)

KDA_RULES = (
    *(_rule(f"{{attn}}.{c}_proj.weight", "(n h) d", f"attn.{c}", "d n h") for c in "qkv"),
    *(_rule(f"{{attn}}.{c}_conv1d.weight", "(n h) 1 k", f"attn.{c}_conv", "k n h") for c in "qkv"),
    _rule("{attn}.f_a_proj.weight", "r d", "attn.decay_a", "d r"),
    _rule("{attn}.f_b_proj.weight", "x r", "attn.decay_b", "r x"),
    _rule("{attn}.f_proj.weight", "x d", "attn.decay", "d x"),
    _rule("{attn}.g_a_proj.weight", "r d", "attn.gate_a", "d r"),
    _rule("{attn}.g_b_proj.weight", "x r", "attn.gate_b", "r x"),
    _rule("{attn}.b_proj.weight", "n d", "attn.beta", "d n"),
    _rule("{attn}.A_log", "n", "attn.a_log", "n", padded=True),
    _rule("{attn}.dt_bias", "(n h)", "attn.dt_bias", "n h"),
    _rule("{attn}.o_norm.weight", "h", "attn.o_norm", "h"),
)

MLA_RULES = (
    _rule("{attn}.q_proj.weight", "(n h) d", "attn.q", "d n h"),
    _rule("{attn}.q_a_proj.weight", "q d", "attn.q_a", "d q"),
    _rule("{attn}.q_a_layernorm.weight", "q", "attn.q_norm.weight", "q"),
    _rule("{attn}.q_b_proj.weight", "(n h) q", "attn.q_b", "q n h"),
    _rule("{attn}.kv_a_proj_with_mqa.weight", "c d", "attn.kv_a", "d c"),
    _rule("{attn}.kv_a_layernorm.weight", "c", "attn.kv_norm.weight", "c"),
    TensorRule(
        "{attn}.kv_b_proj.weight",
        "(n h) c",
        (Part("attn.k_b", "c n h"), Part("attn.v_b", "c n h")),
        concat="h",
    ),
    _rule("{attn}.indexer.wq_b.weight", "x q", "attn.indexer.q", "q x"),
    _rule("{attn}.indexer.wk.weight", "u d", "attn.indexer.k", "d u"),
    _rule("{attn}.indexer.weights_proj.weight", "n d", "attn.indexer.weights", "d n"),
    _rule("{attn}.indexer.k_norm.weight", "u", "attn.indexer.k_norm", "u"),
    _rule("{attn}.indexer.k_norm.bias", "u", "attn.indexer.k_norm_bias", "u"),
)


def _glu(prefix: str, leaf: str, names: tuple[str, str, str], expert: str = "") -> tuple:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return (
        _rule(gate, "f d", f"{leaf}.gate_up", f"{expert}d 0 f"),
        _rule(up, "f d", f"{leaf}.gate_up", f"{expert}d 1 f"),
        _rule(down, "d f", f"{leaf}.down", f"{expert}f d"),
    )


_PLAIN = ("gate_proj", "up_proj", "down_proj")
DENSE_RULES = _glu("mlp", "ffn", _PLAIN)
_EXPERT_RULES = _glu("{moe}.experts.{e}", "ffn.experts", ("{w_gate}", "{w_up}", "{w_down}"), "e ")
_MOE_RULES = (
    _rule("{moe}.gate.weight", "e d", "ffn.router.weight", "d e"),
    _rule("{moe}.gate.{bias}", "e", "ffn.router.bias", "e"),
    _rule("{moe}.routed_expert_down_proj.weight", "l d", "ffn.latent_down", "d l"),
    _rule("{moe}.routed_expert_norm.weight", "l", "ffn.latent_norm.weight", "l"),
    _rule("{moe}.routed_expert_up_proj.weight", "d l", "ffn.latent_up", "l d"),
    *_glu("{moe}.shared_experts", "ffn.shared", _PLAIN),
)
MOE_RULES = _MOE_RULES + _EXPERT_RULES


def packed_rules(rule: TensorRule) -> tuple[TensorRule, TensorRule]:
    """Codes and scales of an expert's map that stays packed, as MXFP4 checkpoints name them."""
    codes, scales = (
        _rule(f"{rule.name}_{end}", rule.theirs, f"{rule.parts[0].leaf}{leaf}", rule.parts[0].dims)
        for end, leaf in (("packed", ""), ("scale", "_scales"))
    )
    return codes, scales


_PACKED_RULES = _MOE_RULES + tuple(one for rule in _EXPERT_RULES for one in packed_rules(rule))


def layer_rules(attention: str, ffn: str, *, packed: bool = False) -> tuple[TensorRule, ...]:
    """Rules that can apply to a layer of these kinds (`kda`, `mla`, `dsa`; `dense`, `moe`).

    Args:
      packed: routed experts are kept in MXFP4.
    """
    attention_rules = KDA_RULES if attention == "kda" else MLA_RULES
    moe_rules = _PACKED_RULES if packed else MOE_RULES
    return _COMMON_RULES + attention_rules + (DENSE_RULES if ffn == "dense" else moe_rules)


# The vision tower and its projector: whole names, the same in every family.
VISION_RULES = (
    _rule("vision_tower.patch_embed.proj.weight", "d c y x", "patch", "c y x d"),
    _rule("vision_tower.patch_embed.proj.bias", "d", "patch_bias", "d"),
    _rule("vision_tower.patch_embed.pos_emb.weight", "r c d", "grid", "r c d"),
    _rule("vision_tower.encoder.final_layernorm.weight", "d", "final_norm.weight", "d"),
    _rule("vision_tower.encoder.final_layernorm.bias", "d", "final_norm.bias", "d"),
    *(
        _rule(f"mm_projector.{name}.{end}", "d", f"projector.{name}.{end}", "d")
        for name in ("pre_norm", "post_norm")
        for end in ("weight", "bias")
    ),
    *(
        rule
        for place, leaf in ((0, "fc0"), (2, "fc1"))
        for rule in (
            _rule(f"mm_projector.proj.{place}.weight", "o i", f"projector.{leaf}", "i o"),
            _rule(f"mm_projector.proj.{place}.bias", "o", f"projector.{leaf}_bias", "o"),
        )
    ),
)
VISION_BLOCK = "vision_tower.encoder.blocks."
# Below a block of the tower.
VISION_BLOCK_RULES = (
    *(
        _rule(f"{name}.{end}", "d", f"{name}.{end}", "d")
        for name in ("norm0", "norm1")
        for end in ("weight", "bias")
    ),
    _rule("wqkv.weight", "(t n h) d", "qkv", "d t n h"),
    _rule("wqkv.bias", "(t n h)", "qkv_bias", "t n h"),
    *(
        rule
        for name, leaf in (("wo", "o"), ("mlp.fc0", "fc0"), ("mlp.fc1", "fc1"))
        for rule in (
            _rule(f"{name}.weight", "o i", leaf, "i o"),
            _rule(f"{name}.bias", "o", f"{leaf}_bias", "o"),
        )
    ),
)


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How a family writes the names; the fields fill the templates of the rules.

    Attributes:
      prefix: before every name of the language model.
      a_log: how A_log is stored: "n", "1 1 n 1", or "padded" to the width of a head with zeros.
      carried: first words of names outside the language model, kept as they are.
    """

    prefix: str = ""
    embed: str = "embed_tokens"
    attn: str = "self_attn"
    o: str = "o_proj"
    moe: str = "mlp"
    bias: str = "e_score_correction_bias"
    w_gate: str = "gate_proj"
    w_up: str = "up_proj"
    w_down: str = "down_proj"
    a_log: str = "n"
    carried: tuple[str, ...] = ()


DEEPSEEK = Spelling()
KIMI_LINEAR = Spelling(moe="block_sparse_moe", w_gate="w1", w_up="w3", w_down="w2", a_log="1 1 n 1")
KIMI_K3 = dataclasses.replace(
    KIMI_LINEAR,
    prefix="language_model.",
    a_log="padded",
    carried=("vision_tower.", "mm_projector."),
)
KIMI_K25 = Spelling(prefix="language_model.", carried=("vision_tower.", "mm_projector."))
BAILING = Spelling(embed="word_embeddings", attn="attention", o="dense", bias="expert_bias")


def known_names(spelling: Spelling) -> set[str]:
    """Names a family's tensors can have, numbers of layers and experts written as 0."""
    words = dataclasses.asdict(spelling) | {"e": "0"}
    rules = _COMMON_RULES + KDA_RULES + MLA_RULES + DENSE_RULES + MOE_RULES
    inner = {f"{spelling.prefix}model.layers.0.{rule.name.format_map(words)}" for rule in rules}
    return inner | {spelling.prefix + rule.name.format_map(words) for rule in MODEL_RULES}
