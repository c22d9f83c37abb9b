"""Numbers that many predictions rest on, each worked out by hand: memory, transfers, tied tables, windows."""

from __future__ import annotations

import pytest

import stepgraph
from stepgraph.ir.op import Op
from stepgraph.ir.rows import attention_pairs
from stepgraph.lowering.lowering import count_parts
from stepgraph.passes.collective import comm_bytes
from stepgraph.passes.footprint import static_bytes
from stepgraph.passes.modelflops import count_flops, count_params


def program_of(name: str, **layout: int | bool | str) -> stepgraph.Program:
    return stepgraph.lower(stepgraph.load_model(name), stepgraph.Layout(**layout))  # type: ignore[arg-type]


@pytest.mark.parametrize(("dp", "zero", "per_parameter"), [(1, 1, 18), (8, 1, 7.5), (8, 0, 18)])
def test_static_memory_is_weights_gradients_and_state(dp: int, zero: int, per_parameter: float) -> None:
    program = program_of("llama-3-8b", dp=dp, zero=zero, seq=512)
    held = static_bytes(program[program.stages[0].step], "bf16")
    # bf16 weights 2, fp32 gradients 4; two moments and the master copy 12, over data ranks with ZeRO-1
    assert held == pytest.approx(8_030_261_248 * per_parameter, rel=1e-6)


@pytest.mark.parametrize(("tp", "sp", "size"), [(1, False, 1), (4, True, 1 / 4), (4, False, 1)])
def test_a_stage_hands_over_its_part_of_the_stream(tp: int, sp: bool, size: float) -> None:
    program = program_of("llama-3-8b", tp=tp, sp=sp, pp=2, seq=4096, micro_batch=2, global_batch=4)
    sends = [op for graph in program.templates for op in graph.ops if op.kind == "send"]
    assert sends
    assert {comm_bytes(op) for op in sends} == {int(2 * 4096 * 4096 * 2 * size)}  # b s d, bf16; sp splits s


def test_a_tied_table_is_summed_over_both_ends_of_the_pipeline_only() -> None:
    program = program_of("gpt2-xl", pp=4, global_batch=4)
    sums = [
        [op for op in program[stage.step].ops if op.name == "step.tied_grads.all_reduce"] for stage in program.stages
    ]
    assert [len(found) for found in sums] == [1, 0, 0, 1]
    assert comm_bytes(sums[0][0]) == 50257 * 1600 * 4  # fp32


def test_an_untied_table_is_not_summed() -> None:
    program = program_of("llama-3-8b", pp=4, global_batch=4, seq=512)
    assert not [op for stage in program.stages for op in program[stage.step].ops if "tied" in op.name]


@pytest.mark.parametrize("tokens", [64, 100])
@pytest.mark.parametrize("width", [1, 8, 33])
def test_pairs_in_windows_and_chunks_are_those_of_a_mask(tokens: int, width: int) -> None:
    def pairs(**attributes: int) -> int:
        return attention_pairs(
            Op("a", "sdpa", (), (), tuple(sorted({"causal": True, **attributes}.items()))), tokens, tokens
        )

    seen = [range(max(0, i - width + 1), i + 1) for i in range(tokens)]  # the mask of a sliding window
    # the diagonal counts half, as in s^2 / 2: a mask has up to half a token per query more
    assert 0 <= sum(map(len, seen)) - pairs(window=width) <= tokens / 2 + 1
    chunked = [range(i - i % width, i + 1) for i in range(tokens)]
    assert 0 <= sum(map(len, chunked)) - pairs(chunk=width) <= tokens / 2 + 1
    assert pairs(window=tokens) == pairs(chunk=tokens) == pairs() == tokens * tokens // 2


def test_padding_of_the_vocabulary_is_work_of_a_rank_and_not_of_the_model() -> None:
    model = stepgraph.load_model("gpt2-xl")
    padded = stepgraph.predict(model, stepgraph.Layout(tp=5, pad_vocab=128, seq=1000), "h100")
    assert padded.params == count_params(count_parts(model, 1, 1000))
    program = stepgraph.lower(model, stepgraph.Layout(tp=5, pad_vocab=128, seq=1000))
    assert (
        program["head"]["head.logits"].outputs[0].shape[-1] == 50560
    )  # 79 x 640: a multiple of 128 on each of 5 ranks
    plain = sum(family.total for family in count_flops(count_parts(model, 1, 1000)).values())
    tokens_per_s = 1000 * padded.layout.global_batch / padded.step_time_s  # type: ignore[operator]
    assert padded.mfu.model_flops == pytest.approx(plain / 1000 * tokens_per_s / (5 * 989.4e12), rel=1e-3)
