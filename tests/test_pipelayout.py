"""Pipeline layouts: the notation, what is refused in it, and how layers are dealt to virtual stages."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.errors import InputError, Problem
from stepgraph.ir.program import Program, Run, Stage
from stepgraph.lowering.pipelayout import PipelineSplit, StageSpec, describe, parse_layout
from stepgraph.lowering.splitting import balanced_split, split_of
from stepgraph.lowering.stages import deal_layers

FIRST, LAST = StageSpec(embedding=True), StageSpec(head=True)


def stage(layers: int = 0, mtp: int = 0) -> StageSpec:
    return StageSpec(layers=layers, mtp=mtp)


def counts(split: PipelineSplit) -> list[int]:
    return [held.layers for held in split.stages]


def problems(call: Any, *args: Any, **more: Any) -> list[Problem]:
    with pytest.raises(InputError) as caught:
        call(*args, **more)
    return list(caught.value.problems)


# the notation


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", (StageSpec(True, 1, 0, True),)),
        ("Ett|tL", (StageSpec(True, 2), StageSpec(False, 1, 0, True))),
        ("Et*4|(t*4|)*14tmL", (StageSpec(True, 4), *[stage(4)] * 14, StageSpec(False, 1, 1, True))),
        ("Et*3|(tt|)*29,m|L", (StageSpec(True, 3), *[stage(2)] * 29, stage(0, 1), LAST)),
        ("Et*2|(tt|)*22t|(tt|)*7mL", (*[StageSpec(True, 2)], *[stage(2)] * 22, stage(1), *[stage(2)] * 7, None)),
        ("E|(t|)*3,m||L", (FIRST, stage(1), stage(1), stage(1), stage(0, 1), stage(), LAST)),
        ("E|(t|)*61|L", (FIRST, *[stage(1)] * 61, stage(), LAST)),
        ("E(tt|)*3mL", (StageSpec(True, 2), stage(2), stage(2), StageSpec(False, 0, 1, True))),
        ("Et|(t*2|tt,t|)*2L", (StageSpec(True, 1), stage(2), stage(3), stage(2), stage(3), LAST)),
        ("Et|*3L", (StageSpec(True, 1), stage(), stage(), LAST)),
        ("Et*0|L", (FIRST, LAST)),
    ],
)
def test_the_notation_says_what_each_stage_holds(text: str, stages: tuple[StageSpec | None, ...]) -> None:
    expected = [held or StageSpec(False, 0, 1, True) for held in stages]
    assert list(parse_layout(text).stages) == expected


def test_a_released_layout_has_the_layers_and_stages_of_its_model() -> None:
    split = parse_layout("Et*4|(t*4|)*14tmL")
    assert (len(split.stages), split.layers, split.mtp) == (1 + 14 + 1, 4 + 14 * 4 + 1, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Et*4|(xt|)*14tmL", "at character 7, after 'Et*4|(': 'x' means nothing here"),
        ("Et|t*4,(tt|)*3x*3t|L", "at character 15, after '...,(tt|)*3': 'x' means nothing here"),
        ("et|tL", "at character 1: 'e' means nothing here"),
        ("et|tL", "Did you mean 'E'?"),
        ("Et|TL", "Did you mean 't'?"),
        (r"Et*4\|tL", r"at character 5, after 'Et*4': '\\' means nothing here"),
        (r"Et*4\|tL", "Leave it out"),
        ("Et |tL", "at character 3, after 'Et': ' ' means nothing here"),
        ("Et4|t12L", "at character 3, after 'Et': '4' means nothing here; expected '*' before a number"),
        ("E(t|*4L", "at character 2, after 'E': the group is never closed"),
        ("E(t|)L", "at character 5, after 'E(t|': the group is not repeated"),
        ("E()*3tL", "at character 2, after 'E': the group is empty"),
        ("E((t|)*2|)*2L", "at character 3, after 'E(': a group opens inside a group"),
        ("Et)*2L", "at character 3, after 'Et': ')' means nothing here"),
        ("Et*|tL", "at character 3, after 'Et': '*' without a number"),
        ("Et*2*3L", "at character 5, after 'Et*2': '*' means nothing here"),
        ("Et*10001L", "at character 3, after 'Et': 10001 times are more than 10000 signs"),
        ("E(t*200|)*200L", "200 times are more than 10000 signs"),
        ("Et*" + "9" * 5000 + "L", "999999999 times are more"),
        ("E" + "t*9000|" * 9 + "L", "the whole says more than 10000 signs"),
    ],
)
def test_a_sign_that_makes_no_sense_is_shown_where_it_stands(text: str, says: str) -> None:
    (problem,) = problems(parse_layout, text)
    assert problem.code == "pipeline-syntax"
    assert says in str(problem)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ("there is no E", "there is no L")),
        ("tt|tL", ("there is no E",)),
        ("tE|tL", ("at character 1: the first sign is 't'",)),
        ("|Et|tL", ("at character 1: the first sign is '|'",)),
        ("Et|tL|", ("at character 6, after 'Et|tL': the last sign is '|'",)),
        ("Et|Lt", ("at character 5, after 'Et|L': the last sign is 't'",)),
        ("Et|EtL", ("at character 4, after 'Et|': E stands 2 times",)),
        ("EtL|tL", ("at character 3, after 'Et': L stands 2 times",)),
        ("E*2t|tL", ("at character 1: E stands 2 times",)),
        ("Etm|tL", ("at character 3, after 'Et': m stands before a t",)),
        ("E|(t|)*3,m|m||L", ("at character 12, after '...t|)*3,m|': m stands in several stages",)),
        ("mE|t", ("the first sign is 'm'", "there is no L", "m stands before a t")),
    ],
)
def test_what_stands_in_the_wrong_place_is_said_at_once(text: str, says: tuple[str, ...]) -> None:
    found = problems(parse_layout, text)
    assert {problem.code for problem in found} == {"pipeline-order"}
    assert len(found) == len(says)
    assert all(words in problem.what for words, problem in zip(says, found, strict=True))


def test_a_thousand_brackets_are_one_problem() -> None:
    nested, unclosed = problems(parse_layout, "E" + "(" * 5000 + "t" + ")*2" * 4999 + "L")
    assert nested.what.startswith("at character 3, after 'E(': a group opens inside a group")
    assert unclosed.what.startswith("at character 2, after 'E': the group is never closed")


def test_each_strange_sign_is_told_once() -> None:
    found = problems(parse_layout, "Exx|t12|ytL(")
    assert [problem.what.split(": ")[1][:3] for problem in found] == ["'x'", "'1'", "'y'", "the"]


@given(text=st.text("EtmL|(),*01239 x", max_size=24))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        split = parse_layout(text)
    except InputError as error:
        assert error.problems
        return
    assert parse_layout(describe(split)) == split


# the notation back


@st.composite
def splits(draw: st.DrawFn) -> PipelineSplit:
    """Stages with few different counts, so that they repeat; MTP layers in one stage after the last layer."""
    middle = draw(st.lists(st.integers(0, 4), max_size=4)) * draw(st.integers(1, 6))
    stages = [stage(layers) for layers in middle]
    last = draw(st.integers(0, 3))
    mtp = draw(st.integers(0, 3))
    tail = [stage(0, mtp), *[stage()] * draw(st.integers(0, 2)), LAST]
    tail = draw(st.sampled_from([tail, [StageSpec(False, last, mtp, True)]]))
    first = StageSpec(True, draw(st.integers(0, 3)))
    alone = StageSpec(True, last, mtp, True)
    return PipelineSplit((first, *stages, *tail)) if draw(st.booleans()) else PipelineSplit((alone,))


@given(split=splits())
def test_describe_is_read_back(split: PipelineSplit) -> None:
    assert parse_layout(describe(split)) == split


@pytest.mark.parametrize(
    "text",
    [
        "EtL",
        "Ett|tt|t*3L",
        "Et*4|(t*4|)*14tmL",
        "E|(t|)*61|L",
        "Et*3|(tt|)*29m|L",
        "Ett|(tt|)*22t|(tt|)*7mL",
        "E|(t|tt|t*3|)*4L",
    ],
)
def test_describe_is_short(text: str) -> None:
    assert describe(parse_layout(text)) == text


# dealing layers


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((32, 4), [8, 8, 8, 8]),
        ((34, 4), [8, 9, 9, 8]),
        ((32, 4, 2), [4] * 8),
        ((36, 4, 2), [4, 4, 5, 5, 5, 5, 4, 4]),
        ((61, 16, 1, None, 1), [4] * 15 + [1]),
        ((61, 8, 1, 7, 6), [7, *[8] * 6, 6]),
        ((30, 4, 1, 6, None), [6, 8, 8, 8]),
        ((28, 4, 2, 4, None), [2, 4, 4, 4, 2, 4, 4, 4]),  # rank 0 has chunks 0 and 4: 4 layers, 24 for the others
        ((28, 4, 2, 4, 8), [2, 4, 4, 4, 2, 4, 4, 4]),
        ((29, 4, 1, 6, 6), [6, 9, 8, 6]),  # 29 - 12 = 17 for two; the extra one at (2 - 1) // 2 = 0
        ((10, 2, 1, 6, 4), [6, 4]),
        ((10, 1, 1, 10, None), [10]),
    ],
)
def test_layers_are_dealt(args: tuple[Any, ...], expected: list[int]) -> None:
    split = balanced_split(*args)
    assert counts(split) == expected
    assert [held.embedding for held in split.stages] == [True] + [False] * (len(expected) - 1)
    assert [held.head for held in split.stages] == [False] * (len(expected) - 1) + [True]


@pytest.mark.parametrize(
    ("args", "where", "what", "fix"),
    [
        ((4, 5), "pp", "5 stages for 4 layers", "nearest possible: 4"),
        ((32, 4, 16), "vpp", "4 * 16 = 64 stages for 32 layers", "nearest possible: 8"),
        ((8, 16, 2), "pp", "16 * 2 = 32 stages for 8 layers", "nearest possible: 4"),
        ((32, 4, 2, 7), "first_stage_layers", "7 layers do not divide over the 2 stages", "nearest: 6 or 8"),
        ((32, 4, 4, None, 2), "last_stage_layers", "2 layers do not divide over the 4 stages", "nearest: 4"),
        ((32, 4, 1, 30), "first_stage_layers", "leave 2 layers for the other 3 stages", "first_stage_layers 29"),
        ((32, 4, 2, 30), "first_stage_layers", "leave 2 layers for the other 6 stages", "first_stage_layers 26"),
        ((32, 4, 1, 40), "first_stage_layers", "leave less than no layer", "first_stage_layers 29"),
        (
            (32, 4, 1, 20, 11),
            "first_stage_layers/last_stage_layers",
            "20 + 11 of 32 layers leave 1 layers for the other 2 stages",
            "first_stage_layers 19 or last_stage_layers 10",
        ),
        (
            (32, 2, 1, 20, 11),
            "first_stage_layers/last_stage_layers",
            "20 + 11 layers on the only ranks are not the model's 32",
            "first_stage_layers 21 or last_stage_layers 12",
        ),
        ((32, 1, 1, 20), "first_stage_layers", "20 layers on the only ranks", "first_stage_layers 32"),
        ((32, 1, 1, 16, 16), "last_stage_layers", "one rank, the first and the last", "leave last_stage_layers out"),
        ((4, 4, 2, 8, 8), "first_stage_layers/last_stage_layers", "less than no layer", "use fewer stages"),
    ],
)
def test_impossible_counts_name_the_nearest(args: tuple[Any, ...], where: str, what: str, fix: str) -> None:
    (problem,) = problems(balanced_split, *args)
    assert problem.where == where
    assert what in problem.what
    assert fix in problem.fix


def test_values_that_are_no_counts_are_named_together() -> None:
    found = problems(balanced_split, 32, 0, True, "8", -1)
    assert [problem.where for problem in found] == ["pp", "vpp", "first_stage_layers", "last_stage_layers"]
    assert {problem.code for problem in found} == {"layout-value"}


@given(
    n_layers=st.integers(1, 60),
    pp=st.integers(1, 6),
    vpp=st.integers(1, 3),
    ends=st.tuples(*[st.one_of(st.none(), st.integers(0, 20))] * 2),
)
def test_every_split_is_whole_or_refused(n_layers: int, pp: int, vpp: int, ends: tuple[int | None, int | None]) -> None:
    try:
        split = balanced_split(n_layers, pp, vpp, *ends)
    except InputError as error:
        assert error.problems
        return
    dealt = counts(split)
    assert len(dealt) == pp * vpp
    assert sum(dealt) == n_layers
    assert min(dealt) >= 1
    assert ends[0] in (None, sum(dealt[::pp]))
    assert ends[1] in (None, sum(dealt[pp - 1 :: pp]))
    free = [count for v, count in enumerate(dealt) if (v % pp, ends[0]) == (0, None) or 0 < v % pp < pp - 1]
    assert not free or max(free) - min(free) <= 1


# one door for all three


def test_without_a_notation_the_layers_are_dealt() -> None:
    assert split_of(32, 4, 2, None, None, None) == parse_layout("Et*4|(t*4|)*6t*4L")
    assert split_of(61, 16, 1, None, None, 1, mtp=1) == parse_layout("Et*4|(t*4|)*14tmL")


def test_a_notation_that_fits_is_taken() -> None:
    text = "Et*3|(tt|)*29,m|L"
    assert split_of(61, 8, 4, text, None, None, mtp=1) == parse_layout(text)
    assert split_of(61, 8, 4, text, None, None) == parse_layout(text)


def test_everything_that_does_not_fit_is_said_at_once() -> None:
    found = problems(split_of, 32, 4, 2, "Et*8|t*8|mt*8", 4, None, mtp=2)
    by_code = {(problem.code, problem.where): problem for problem in found}
    assert set(by_code) == {
        ("pipeline-order", "pipeline_layout"),
        ("pipeline-conflict", "first_stage_layers"),
        ("pipeline-stages", "pipeline_layout"),
        ("pipeline-layers", "pipeline_layout"),
        ("pipeline-mtp", "pipeline_layout"),
    }
    assert len(found) == len(by_code) + 1  # two of order: no L, and m before t
    assert "3 stages for pp * vpp = 4 * 2 = 8" in by_code["pipeline-stages", "pipeline_layout"].what
    assert by_code["pipeline-stages", "pipeline_layout"].fix == "add 5 stages"
    assert "t stands 24 times and the model has 32" in by_code["pipeline-layers", "pipeline_layout"].what
    assert by_code["pipeline-layers", "pipeline_layout"].fix == "add 8"
    assert "m stands 1 times and the model has 2" in by_code["pipeline-mtp", "pipeline_layout"].what


def test_the_number_of_stages_names_sizes_that_fit() -> None:
    (problem,) = problems(split_of, 8, 4, 2, "E(t|)*8|||L", None, None)  # 8 bars and 3 more: 12 stages
    assert problem.fix == "vpp 3 or pp 6, or drop 4 stages"


def test_mtp_layers_belong_in_the_last_chunk_of_a_rank() -> None:
    assert split_of(4, 2, 2, "Ett|tt|m|L", None, None).mtp == 1
    (problem,) = problems(split_of, 4, 2, 2, "Ett|ttm||L", None, None)
    assert problem.code == "pipeline-mtp"
    assert "stage 1, which is chunk 0 of rank 1" in problem.what
    assert problem.expected.endswith("stages 2 to 3")


@pytest.mark.parametrize("bad", [3, True, ["E", "L"], 1.5])
def test_a_layout_that_is_no_text(bad: Any) -> None:
    (problem,) = problems(split_of, 4, 2, 1, bad, None, None)
    assert (problem.code, problem.where) == ("layout-value", "pipeline_layout")


# stages


def test_every_virtual_stage_has_its_ends() -> None:
    names = ["dense"] * 3 + ["moe"] * 5
    runs = deal_layers(names, parse_layout("Ett|ttt||t*3|mL"))
    assert runs == (
        (Run("embedding"), Run("dense", 2), Run("send")),
        (Run("recv"), Run("dense"), Run("moe", 2), Run("send")),
        (Run("recv"), Run("send")),
        (Run("recv"), Run("moe", 3), Run("send")),
        (Run("recv"), Run("head")),
    )


def test_mtp_modules_stand_with_the_head() -> None:
    (problem,) = problems(deal_layers, ["dense"] * 5, parse_layout("Ett|ttt||m|L"))
    assert problem.code == "pipeline-mtp"


def test_a_number_of_stages_deals_evenly() -> None:
    assert deal_layers(["dense"] * 5, 2) == (
        (Run("embedding"), Run("dense", 3), Run("send")),
        (Run("recv"), Run("dense", 2), Run("head")),
    )
    assert deal_layers(["dense"] * 5, 1) == ((Run("embedding"), Run("dense", 5), Run("head")),)


def test_a_split_of_another_model_is_refused() -> None:
    (problem,) = problems(deal_layers, ["dense"] * 5, parse_layout("Et|tL"))
    assert problem.code == "pipeline-layers"
    assert "the split has 2 layers and the model 5" in problem.what


def test_a_rank_has_its_chunks() -> None:
    stages = [Stage(runs, "step", v % 2) for v, runs in enumerate(deal_layers(["dense"] * 8, balanced_split(8, 2, 2)))]
    program = Program("tiny", (), tuple(stages))
    assert program.chunks_of(0) == (stages[0], stages[2])
    assert program.chunks_of(1) == (stages[1], stages[3])
    assert program.chunks_of(2) == ()
    plain = attrs.evolve(program, stages=tuple(attrs.evolve(held, rank=v) for v, held in enumerate(stages)))
    assert [plain.chunks_of(rank) for rank in range(4)] == [(held,) for held in plain.stages]
