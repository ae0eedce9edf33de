"""Names of linears that belong together, in the spellings that models use."""

from __future__ import annotations

import pytest
from warptile.convert.families import TOGETHER, Seat, family, seat


@pytest.mark.parametrize(
    ("member", "fused", "members"),
    [
        ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("model.layers.3.mlp.up_proj", "model.layers.3.mlp.gate_up_proj", ("gate_proj", "up_proj")),
        ("m.block_sparse_moe.experts.7.w3", "m.block_sparse_moe.experts.7.w13", ("w1", "w3")),
        ("layers.0.attention.wv", "layers.0.attention.wqkv", ("wq", "wk", "wv")),
        ("blk.0.attn_q", "blk.0.attn_qkv", ("attn_q", "attn_k", "attn_v")),
        ("blk.12.ffn_gate", "blk.12.ffn_gate_up", ("ffn_gate", "ffn_up")),
        ("blk.2.ffn_up_exps", "blk.2.ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")),
        ("a.self_attn.q_a_proj", "a.self_attn.fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
        ("model.layers.0.attn.v_proj.MatMul", "model.layers.0.attn.qkv_proj.MatMul", ("q_proj", "k_proj", "v_proj")),
    ],
)
def test_a_member_knows_its_family(member, fused, members):
    found = family(member)
    assert found is not None
    assert found.name == fused
    assert member in found.members
    word = next(word for word in members if word in member.split("."))
    assert found.members == tuple(member.replace(word, other) for other in members)


@pytest.mark.parametrize(
    "name",
    ["lm_head", "a.o_proj", "a.qkv_proj", "a.attn_q_norm", "a.encoder_attn.q_proj", "a.cross_attn.v_proj", "a.w2"],
)
def test_others_stand_alone(name):
    assert family(name) is None


def test_no_linear_is_in_two_rows():
    members = [member for _, row in TOGETHER for member in row]
    assert len(members) == len(set(members))
    assert not set(members) & {fused for fused, _ in TOGETHER}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.0.mlp.experts.3.up_proj", Seat("model.layers.0.mlp.experts", 3, "up_proj")),
        ("experts.0.w1", Seat("experts", 0, "w1")),
        ("a.local_experts.12.mlp.w1", Seat("a.local_experts", 12, "mlp.w1")),
        ("model.layers.0.mlp.shared_expert.up_proj", None),
        ("a.experts.up_proj", None),
        ("a.experts.03.up_proj", None),
        ("a.experts.-1.up_proj", None),
        ("a.experts.²", None),
        ("a.experts.3", None),
        ("model.layers.3.up_proj", None),
    ],
)
def test_an_expert_is_told_by_its_number(name, place):
    assert seat(name) == place


def test_seats_name_their_stack_and_their_neighbours():
    place = seat("a.experts.3.up_proj")
    assert place is not None
    assert (place.stack, place.of(4)) == ("a.experts.up_proj", "a.experts.4.up_proj")
