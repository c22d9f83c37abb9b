"""Order files: what is written is read back, torch's own cells are read, and everything that is wrong is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.errors import InputError, Problem
from stepgraph.passes.pipeline import orderfile
from stepgraph.passes.pipeline.orderfile import read_order, write_order
from stepgraph.passes.pipeline.schedules import SCHEDULES, schedule_of

Factory: TypeAlias = pytest.TempPathFactory
CELLS = ("0F0", "0B0", "0I0", "0W0", "1F0", "1B0", "0F1", "0B1", "(0F1;0B0)OVERLAP_F_B", "", "x", '"')
GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "order.csv"


def problems(file: Path, text: str | bytes) -> list[Problem]:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as refused:
        read_order(file)
    return list(refused.value.problems)


def said(file: Path, text: str | bytes) -> list[str]:
    """Each problem as `code, place within the file: what`."""
    found = problems(file, text)
    return [f"{one.code}{one.where.removeprefix(str(file))}: {one.what}" for one in found]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_is_read_back(name: str, file: Path) -> None:
    schedule = schedule_of(name)
    order = schedule.order(4, schedule.chunks or 2, 8)
    file.write_text(write_order(order))
    assert read_order(file) == order


@given(ranks=st.integers(1, 5), microbatches=st.integers(1, 12), name=st.sampled_from(["1f1b", "zbv", "zb-h1"]))
def test_every_shape_is_read_back(tmp_path_factory: Factory, ranks: int, microbatches: int, name: str) -> None:
    schedule = schedule_of(name)
    order = schedule.order(ranks, schedule.chunks or 1, microbatches)
    path = tmp_path_factory.getbasetemp() / "shape.csv"
    path.write_text(write_order(order))
    assert read_order(path) == order


def test_a_stage_belongs_to_the_rank_that_runs_it(file: Path) -> None:
    file.write_text("1F0,1B0\n0F0,0B0\n")
    order = read_order(file)
    assert order.stage_rank == (1, 0)
    assert order.ranks == ((((0, 1, 0),), ((1, 1, 0),)), (((0, 0, 0),), ((1, 0, 0),)))


def test_bubbles_blanks_and_line_ends_say_nothing(file: Path) -> None:
    file.write_text(GOOD)
    plain = read_order(file)
    file.write_bytes(b"\xef\xbb\xbf0F0, 0F1,,0B0 ,0B1\r\n,1F0,1B0,1F1,,1B1,\r\n\r\n,,\r\n")
    assert read_order(file) == plain


def test_a_pair_is_one_slot(file: Path) -> None:
    file.write_text("0F0,(0F1; 0B0)OVERLAP_F_B,0B1\n")
    assert read_order(file) == schedule_of("1f1b").combined.order(1, 1, 2)  # type: ignore[union-attr]


def test_cells_that_are_none_are_said_with_row_and_cell(file: Path) -> None:
    text = "0F0,0X1,0B0\n1F0,1B0,F1,1F,(1F1)OVERLAP_F_B,(1B1;1F1)OVERLAP_F_B,(1F1;1I1)OVERLAP_F_B,1F0000000001\n"
    assert said(file, text) == [
        "pipeline-file-cell, row 1, cell 2: '0X1' is no action",
        "pipeline-file-cell, row 2, cell 3: 'F1' is no action",
        "pipeline-file-cell, row 2, cell 4: '1F' is no action",
        "pipeline-file-cell, row 2, cell 5: '(1F1)OVERLAP_F_B' is no action",
        "pipeline-file-cell, row 2, cell 6: '(1B1;1F1)OVERLAP_F_B' is no action",
        "pipeline-file-cell, row 2, cell 7: '(1F1;1I1)OVERLAP_F_B' is no action",
        "pipeline-file-cell, row 2, cell 8: '1F0000000001' is no action",
    ]


@pytest.mark.parametrize("cell", ["0SEND_F0", "1RECV_B12", "3UNSHARD", "3RESHARD", "0REDUCE_GRAD"])
def test_the_lowered_form_is_refused(cell: str, file: Path) -> None:
    (problem,) = problems(file, f"0F0,{cell},0B0\n")
    assert problem.code == "pipeline-file-lowered"
    assert "compute_only" in problem.fix


def test_a_stage_on_two_ranks(file: Path) -> None:
    text = "0F0,0B0\n1F0,0F1,1B0,1F1,1B1\n".replace("0B0", "0B0,0B1")
    assert said(file, text)[-1] == "pipeline-file-stage: ranks with different numbers of stages: 1, 2"
    assert "pipeline-file-stage, row 2, cell 2: stage 0 stands on rank 1 and on rank 0" in said(file, text)


def test_stages_with_a_gap(file: Path) -> None:
    assert said(file, "0F0,0B0\n2F0,2B0\n") == ["pipeline-file-stage: stages up to 2, but none numbered 1"]


def test_ranks_that_do_nothing(file: Path) -> None:
    assert said(file, "0F0,0B0\n\n1F0,1B0\n") == ["pipeline-file-rank, row 2: rank 1 does nothing"]


def test_actions_that_are_missing(file: Path) -> None:
    assert said(file, "0F0,0F1,0B0\n1F0,1B0,1I1,1F2,1W2,1B3\n") == [
        "pipeline-file-missing: stage 0 lacks 0B1",
        "pipeline-file-missing: stage 1 lacks 1F1 and 1W1",
        "pipeline-file-missing: stage 1 lacks 1I2",
        "pipeline-file-missing: stage 1 lacks 1F3",
        "pipeline-file-missing: stage 0 takes 2 of 4 micro-batches; 2 is missing",
    ]


def test_actions_that_stand_twice(file: Path) -> None:
    assert said(file, "0F0,0F0,0B0,0B0\n") == [
        "pipeline-file-twice, row 1, cell 2: 0F0 stands in " + f"{file}, row 1, cell 1 already",
        "pipeline-file-twice, row 1, cell 4: 0B0 stands in " + f"{file}, row 1, cell 3 already",
    ]


def test_actions_in_the_wrong_turn(file: Path) -> None:
    assert said(file, "0B0,0F0,(0F1;0B1)OVERLAP_F_B,0W2,0F2,0I2\n") == [
        "pipeline-file-turn, row 1, cell 1: 0B0 does not come after 0F0",
        "pipeline-file-turn, row 1, cell 3: 0B1 does not come after 0F1",
        "pipeline-file-turn, row 1, cell 4: 0W2 does not come after 0I2",
    ]


def test_a_backward_in_whole_and_in_parts(file: Path) -> None:
    place = "pipeline-file-split, row 1, cell 3"
    assert said(file, "0F0,0B0,0W0\n") == [f"{place}: the backward stands in parts, and in whole as 0B0"]


def test_files_that_are_no_text(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(file, b"0F0,\xff\n") == ["pipeline-file: not UTF-8 text (byte 4)"]
    for empty in ("", "\n \n,,\n"):
        assert said(file, empty) == ["pipeline-file: the file is empty"]
    assert said(file, "0" * 200_000)[0].startswith("pipeline-file: not a CSV file: field larger than")
    monkeypatch.setattr(orderfile, "MAX_BYTES", 2**20)
    assert said(file, b"0F0," * 2**18 + b",") == ["pipeline-file: more than 1 MiB"]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path, "a\0b"):
        with pytest.raises(InputError, match="cannot be read"):
            read_order(path)


def test_a_file_of_another_kind_is_not_written_out(file: Path) -> None:
    found = problems(file, "some,words\n" * 500)
    assert len(found) == 20 + 1
    assert found[-1].what == "980 more problems"  # 1,000 cells


def test_huge_numbers_cost_nothing(file: Path) -> None:
    assert said(file, "0F0,0B0,999999F999999,999999B999999\n")[0].startswith("pipeline-file-stage: stages up to 999999")


@given(rows=st.lists(st.lists(st.sampled_from(CELLS), max_size=6), max_size=3))
def test_any_file_is_an_order_or_refused(tmp_path_factory: Factory, rows: list[list[str]]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text("\n".join(",".join(row) for row in rows))
    try:
        order = read_order(path)
    except InputError:
        return
    path.write_text(write_order(order))
    assert read_order(path) == order
