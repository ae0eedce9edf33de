"""Which linears belong together, told by their names alone: a table of rows, and the numbers of experts."""

from __future__ import annotations

from dataclasses import dataclass

# (what the linears are called when they are one, what they are called alone, in the order of their rows)
TOGETHER = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("wqkv", ("wq", "wk", "wv")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("w13", ("w1", "w3")),
    ("attn_qkv", ("attn_q", "attn_k", "attn_v")),
    ("ffn_gate_up", ("ffn_gate", "ffn_up")),
    ("ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")),
    ("ffn_gate_up_shexp", ("ffn_gate_shexp", "ffn_up_shexp")),
)
ROWS = {member: (fused, members) for fused, members in TOGETHER for member in members}
TWO_INPUTS = {"cross_attn", "encoder_attn"}
"""Blocks whose q reads something else than their k and v."""
EXPERTS = "experts"


@dataclass(frozen=True)
class Family:
    """Linears of one block that read the same x."""

    name: str
    """Of the one that they can become."""
    members: tuple[str, ...]


def family(name: str) -> Family | None:
    """``a.q_proj`` -> ``a.qkv_proj`` of ``a.q_proj``, ``a.k_proj``, ``a.v_proj``; None for what stands alone."""
    words = name.split(".")
    found = [i for i, word in enumerate(words) if word in ROWS]
    if not found or TWO_INPUTS & set(words):
        return None
    fused, members = ROWS[words[found[-1]]]

    def called(word: str) -> str:
        return ".".join((*words[: found[-1]], word, *words[found[-1] + 1 :]))

    return Family(called(fused), tuple(map(called, members)))


@dataclass(frozen=True)
class Seat:
    """One linear of one expert: ``a.experts.3.up_proj``."""

    block: str
    """``a.experts``"""
    expert: int
    rest: str

    @property
    def stack(self) -> str:
        """What such linears of all experts are called when they are one."""
        return f"{self.block}.{self.rest}"

    def of(self, expert: int) -> str:
        """What this one is called in another expert."""
        return f"{self.block}.{expert}.{self.rest}"


def seat(name: str) -> Seat | None:
    """None for a name without ``experts.<number>.``."""
    words = name.split(".")
    for i, word in enumerate(words[:-2]):
        number = words[i + 1]
        if word.endswith(EXPERTS) and number.isascii() and number.isdigit() and str(int(number[:9])) == number:
            return Seat(".".join(words[: i + 1]), int(number), ".".join(words[i + 2 :]))
    return None
