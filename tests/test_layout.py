"""Layouts: what is filled in, what is refused, and the nearest values that are offered instead."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.errors import InputError, Problem
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.model import Model
from stepgraph.lowering.resolution import dp_from_gpus, resolve_layout, uneven_stages_note
from stepgraph.lowering.splitting import deal_evenly

LLAMA = load_model("llama-3-8b")  # 32 heads, 8 key/value heads, ffn 14336, vocab 128256, 32 layers, 8192 positions
GPT3 = load_model("gpt-3-175b")  # 96 heads, 2048 learned positions
GPT2_XL = load_model("gpt2-xl")  # 25 heads, vocab 50257, 1024 learned positions


def refused(model: Model = LLAMA, **fields: Any) -> dict[str, Problem]:
    with pytest.raises(InputError) as caught:
        resolve_layout(attrs.evolve(Layout(), **fields), model)
    return {problem.code: problem for problem in caught.value.problems}


def test_the_smallest_layout_is_filled_in_and_says_so() -> None:
    layout, notes = resolve_layout(Layout(), LLAMA)
    assert (layout.sp, layout.tp_regather, layout.seq, layout.global_batch) == (False, False, 4096, 1)
    assert layout.gpus == 1
    assert layout.n_microbatches == 1
    assert [note.split(":")[0] for note in notes] == ["seq", "global_batch"]


def test_defaults_follow_the_sizes() -> None:
    layout, notes = resolve_layout(Layout(tp=8, pp=4, dp=2, micro_batch=3), LLAMA)
    assert (layout.sp, layout.tp_regather) == (True, True)
    assert layout.gpus == 8 * 4 * 2
    assert layout.global_batch == 64 * 3  # a micro-batch per GPU
    assert layout.n_microbatches == 8 * 4
    assert [note.split(":")[0] for note in notes] == ["sp", "tp_regather", "seq", "global_batch"]


def test_what_the_user_said_is_kept_and_needs_no_note() -> None:
    said = Layout(tp=2, sp=False, tp_regather=False, seq=1024, global_batch=8, dp=4, schedule="1f1b")
    assert resolve_layout(said, LLAMA) == (said, ())
    assert said.n_microbatches == 8 // 4


def test_an_unresolved_layout_has_no_microbatches_yet() -> None:
    with pytest.raises(InputError, match="layout-unresolved"):
        _ = Layout().n_microbatches


def test_default_sequence_is_capped_by_the_positions() -> None:
    assert resolve_layout(Layout(), GPT2_XL)[0].seq == 1024


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"tp": 0}, "layout-value"),
        ({"pp": -1}, "layout-value"),
        ({"dp": True}, "layout-value"),
        ({"tp": "8"}, "layout-value"),
        ({"tp": 8.0}, "layout-value"),
        ({"dp": 10**5000}, "layout-value"),
        ({"micro_batch": None}, "layout-value"),
        ({"seq": 0}, "layout-value"),
        ({"global_batch": False}, "layout-value"),
        ({"sp": 1}, "layout-value"),
        ({"tp_regather": "yes"}, "layout-value"),
        ({"zero": -1}, "layout-value"),
        ({"zero": True}, "layout-value"),
        ({"recompute": "ful"}, "layout-choice"),
        ({"recompute": ["full"]}, "layout-choice"),
        ({"schedule": "zb-h2"}, "schedule"),
        ({"schedule": ["1f1b"]}, "schedule"),
        ({"schedule": "interleaved"}, "vpp-needs-pp"),
        ({"schedule": "zbv"}, "vpp-needs-pp"),
        ({"schedule": "zbv", "pp": 4, "vpp": 3}, "schedule-chunks"),
        ({"schedule": "1f1b", "pp": 4, "vpp": 2}, "schedule-chunks"),
        ({"zero": 3}, "layout-not-modelled"),
        ({"cp": 2}, "layout-not-modelled"),
        ({"ep": 2}, "ep-needs-experts"),
        ({"etp": 2}, "ep-needs-experts"),
        ({"capacity_factor": 0}, "layout-value"),
        ({"expert_imbalance": 0.5}, "layout-value"),
        ({"pad_vocab": 0}, "layout-value"),
        ({"mtp": -1}, "layout-value"),
        ({"sp": True}, "sp-needs-tp"),
        ({"tp": 2, "sp": False, "tp_regather": True}, "regather-needs-sp"),
        ({"tp": 3}, "tp-heads"),
        ({"tp": 12}, "tp-kv-heads"),
        ({"tp": 5}, "tp-ffn"),
        ({"tp": 512}, "tp-vocab"),
        ({"tp": 8, "seq": 4095}, "sp-seq"),
        ({"pp": 33}, "pp-layers"),
        ({"dp": 4, "global_batch": 6}, "batch-multiple"),
    ],
)
def test_each_impossible_layout_has_its_code(fields: dict[str, Any], code: str) -> None:
    assert code in refused(**fields)


def test_everything_wrong_is_said_at_once() -> None:
    found = refused(tp=3, pp=40, dp=4, global_batch=7, cp=2, micro_batch=0, recompute="some")
    expected = {"tp-heads", "tp-kv-heads", "tp-ffn", "sp-seq", "pp-layers", "batch-multiple"}
    assert expected | {"layout-not-modelled", "layout-value", "layout-choice"} == set(found)


def test_nearest_tp_fits_every_width() -> None:
    # 32 heads, 14336 = 2**11 * 7 and 128256 = 2**8 * 3 * 167 are divided by 1, 2, 4, 8, 16 and 32 only
    assert refused(tp=3)["tp-heads"].fix.endswith("2 or 4")
    assert refused(tp=12)["tp-kv-heads"].fix.endswith("8 or 16")
    assert refused(tp=64)["tp-heads"].fix.endswith(" 32")


def test_key_value_heads_are_dealt_out_or_repeated() -> None:
    for tp in (1, 2, 4, 8, 16, 32):  # 8 key/value heads: 16 ranks hold each head twice
        assert resolve_layout(Layout(tp=tp), LLAMA)[0].tp == tp
    six = load_model("llama-3-8b", {"num_attention_heads": 48, "num_key_value_heads": 6, "head_dim": 128})
    assert refused(six, tp=4)["tp-kv-heads"].expected == "a multiple of 6, or tp that divides it: 1, 2, 3, 6"


def test_every_kind_of_layer_is_checked() -> None:
    # latent attention has 128 heads; the dense layers are 18432 wide, the shared expert 2048; 129280 = 2**8 * 5 * 101
    found = refused(load_model("deepseek-v3"), tp=3)
    assert set(found) == {"tp-heads", "tp-ffn", "tp-vocab", "sp-seq"}
    assert "2048" in found["tp-ffn"].what
    assert resolve_layout(Layout(tp=128), load_model("deepseek-v3"))[0].tp == 128
    # gpt-oss has 64 heads; its experts are 2880 wide, and the tensor axis leaves them whole
    assert resolve_layout(Layout(tp=64), load_model("gpt-oss-20b"))[0].tp == 64


def test_an_odd_vocabulary_names_its_divisors_and_the_padding_that_helps() -> None:
    problem = refused(GPT2_XL, tp=5)["tp-vocab"]
    assert problem.expected.endswith("1, 29, 1733, 50257")  # 29 * 1733 = 50257
    assert problem.fix.endswith("or pad the vocabulary: --pad-vocab 128")
    assert "not modelled" not in str(problem)
    padded, notes = resolve_layout(Layout(tp=5, seq=1000, pad_vocab=128), GPT2_XL)
    assert padded.sp
    assert "vocab: 50257 padded to 50560, a multiple of 128 x tp" in notes  # 79 * 640


def test_a_padding_longer_than_the_vocabulary_is_refused() -> None:
    assert refused(GPT2_XL, pad_vocab=10**9)["pad-vocab"].expected == "1 to 50257"
    assert "pad-vocab" in refused(GPT2_XL, pad_vocab=50258)
    assert resolve_layout(Layout(pad_vocab=50257), GPT2_XL)[0].pad_vocab == 50257


def test_nearest_batches_and_sequences() -> None:
    assert refused(dp=4, micro_batch=2, global_batch=20)["batch-multiple"].fix == "nearest: 16 or 24"
    assert refused(dp=4, micro_batch=2, global_batch=3)["batch-multiple"].fix == "nearest: 8"
    assert refused(tp=8, seq=1001)["sp-seq"].fix == "nearest: 1000 or 1008"
    assert refused(pp=33)["pp-layers"].fix == "nearest possible: 32"


def test_a_position_table_is_a_limit_and_rotary_positions_are_not() -> None:
    assert "2048" in refused(GPT3, seq=4096)["seq-positions"].fix
    _, notes = resolve_layout(Layout(seq=16384, global_batch=1), LLAMA)
    assert len(notes) == 1
    assert "16384" in notes[0]


def test_data_parallel_size() -> None:
    assert dp_from_gpus(64, tp=8, cp=1, pp=4) == 2
    assert dp_from_gpus(7) == 7


def test_gpus_that_do_not_divide_name_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        dp_from_gpus(100, tp=8, cp=1, pp=1)
    assert caught.value.problems[0].code == "gpus-multiple"
    assert "gpus 96 or 104" in caught.value.problems[0].fix
    assert "tp 5 or 10" in caught.value.problems[0].fix


@pytest.mark.parametrize("bad", [0, -8, True, "8", 8.0, None])
def test_sizes_that_are_no_sizes(bad: Any) -> None:
    with pytest.raises(InputError, match="layout-value"):
        dp_from_gpus(bad)


def test_remaining_layers_go_to_the_middle() -> None:
    assert deal_evenly(32, 4) == (8, 8, 8, 8)
    assert deal_evenly(33, 4) == (8, 9, 8, 8)
    assert deal_evenly(34, 4) == (8, 9, 9, 8)
    assert deal_evenly(35, 4) == (9, 9, 9, 8)
    assert deal_evenly(126, 16) == (7, *[8] * 14, 7)
    assert deal_evenly(3, 2) == (2, 1)
    assert deal_evenly(7, 1) == (7,)


@given(n_layers=st.integers(1, 400), stages=st.integers(1, 400))
def test_every_split_is_balanced_and_complete(n_layers: int, stages: int) -> None:
    if stages > n_layers:
        return
    counts = deal_evenly(n_layers, stages)
    assert len(counts) == stages
    assert sum(counts) == n_layers
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == n_layers // stages


def test_uneven_stages_are_said() -> None:
    assert uneven_stages_note((8, 8, 8, 8)) == ""
    assert "34 layers over 4 stages are uneven (8 9 9 8)" in uneven_stages_note((8, 9, 9, 8))


values = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 40), st.integers(), st.floats(), st.text(max_size=3), st.just([1])
)


@given(fields=st.dictionaries(st.sampled_from([field.name for field in attrs.fields(Layout)]), values, max_size=5))
def test_any_layout_is_resolved_or_refused(fields: dict[str, Any]) -> None:
    try:
        layout, _ = resolve_layout(Layout(**fields), GPT3)
    except InputError as error:
        assert error.problems
        return
    assert layout.n_microbatches >= 1
    assert layout.seq is not None
    assert layout.sp is not None
    assert layout.tp_regather is not None


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"ep": 3, "dp": 3}, "ep-experts"),  # 8 experts
        ({"etp": 3, "tp": 3}, "etp-experts"),  # 14336 columns
        ({"ep": 8, "dp": 4}, "ep-ranks"),
        ({"tp": 2, "sp": False}, "moe-needs-sp"),
    ],
)
def test_each_impossible_expert_layout_has_its_code(fields: dict[str, Any], code: str) -> None:
    assert code in refused(load_model("mixtral-8x7b"), **fields)


def test_expert_groups_must_be_unions_of_blocks() -> None:
    twelve = load_model("mixtral-8x7b", {"num_local_experts": 12})
    assert "mesh-nesting" in refused(twelve, tp=2, dp=6, ep=3)  # cuts at 2 and at 3 ranks: 3 / 2 is no block
    assert resolve_layout(Layout(tp=2, dp=6, ep=6), twelve)[0].ep == 6


def test_experts_with_biases_cannot_be_split() -> None:
    assert "etp-bias" in refused(load_model("gpt-oss-20b"), tp=2, etp=2)


def test_padding_and_copies_are_said() -> None:
    layout, notes = resolve_layout(Layout(tp=4, pad_vocab=128, seq=1024), load_model("gpt-oss-20b"))
    assert layout.load == (1, 1)
    assert "vocab: 201088 padded to 201216, a multiple of 128 x tp" in notes  # 201088 / 512 = 392.75, 393 x 512
    _, notes = resolve_layout(Layout(tp=8), load_model("qwen3-30b-a3b"))
    assert any(note.startswith("kv_heads: fewer than tp = 8") for note in notes)


def test_load_is_a_fraction() -> None:
    assert Layout(capacity_factor=1.25).load == (5, 4)
    assert Layout(expert_imbalance=1.5).load == (3, 2)
    assert Layout(capacity_factor=3).load == (3, 1)


def test_a_load_keeps_all_its_digits() -> None:
    assert Layout(capacity_factor=0.0012).load == (3, 2500)
    assert Layout(expert_imbalance=1.0004).load == (2501, 2500)


@pytest.mark.parametrize("factor", [0.0004, 0.0, 1e-300, -1.0])
def test_a_capacity_that_leaves_nothing_is_refused(factor: float) -> None:
    problem = refused(load_model("mixtral-8x7b"), capacity_factor=factor)["layout-value"]
    assert (problem.where, problem.expected) == ("capacity_factor", "a number from 0.001 to 1000")


def test_capacity_and_imbalance_exclude_each_other() -> None:
    mixtral = load_model("mixtral-8x7b")
    assert "capacity-conflict" in refused(mixtral, capacity_factor=1.25, expert_imbalance=1.5)
    assert resolve_layout(Layout(capacity_factor=1.25, expert_imbalance=1.0), mixtral)[0].load == (5, 4)
