"""Pictures: which engine draws, and what is said and left behind when none can."""

from __future__ import annotations

import sys
import sysconfig
from importlib import util
from pathlib import Path

import pytest

from samples import small
from stepgraph import rendering
from stepgraph.errors import InputError, Problem
from stepgraph.ir.drawing import to_dot
from stepgraph.rendering import engines, find_engine, forward_left, render

DOT = "digraph { a -> b }"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any engine; the folder returned is its PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("STEPGRAPH_DOT", raising=False)
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(programs))
    return programs


def program(folder: Path, name: str, body: str) -> Path:
    """An executable Python script; `fmt` is the format asked for, `dot` the text."""
    path = folder / name
    head = f"#!{sys.executable}\nimport sys, time\nfmt = sys.argv[2][2:]\ndot = sys.stdin.read()\n"
    path.write_text(head + body)
    path.chmod(0o755)
    return path


def refused(path: Path) -> Problem:
    with pytest.raises(InputError) as caught:
        render(DOT, path)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_dot_on_the_path_draws(bare: Path, tmp_path: Path, suffix: str) -> None:
    program(bare, "dot", "print(fmt, dot, end='')")
    target = tmp_path / f"out.{suffix}"
    assert render(DOT, target) == "dot"
    assert target.read_text() == f"{suffix} {DOT}"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [target.name]  # nothing left beside it


def test_the_environment_names_the_engine(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare, "dot", "print('usual')")
    monkeypatch.setenv("STEPGRAPH_DOT", str(program(tmp_path, "mine", "print('mine')")))
    render(DOT, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_text() == "mine\n"
    assert [engine.found_by for engine in engines()] == ["$STEPGRAPH_DOT", "PATH"]


def test_an_engine_that_was_named_and_is_missing_is_not_replaced(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bare, "dot", "print('usual')")
    monkeypatch.setenv("STEPGRAPH_DOT", "/nowhere/dot")
    problem = refused(tmp_path / "out.png")
    assert problem.code == "engine-failed"
    assert "$STEPGRAPH_DOT" in problem.what
    assert not (tmp_path / "out.png").exists()


def test_engines_come_in_order(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare, "graphviz-pure", "")
    program(bare, "dot", "")
    monkeypatch.setattr(util, "find_spec", lambda name: name)
    assert [engine.name for engine in engines()] == ["dot", "pygraphviz", "graphviz-pure"]
    assert str(engines()[0]) == f"dot ({bare / 'dot'}, PATH; svg png pdf)"


def test_without_an_engine_the_text_is_kept(bare: Path, tmp_path: Path) -> None:
    assert find_engine() is None
    problem = refused(tmp_path / "step.svg")
    assert problem.code == "no-engine"
    assert str(tmp_path / "step.dot") in problem.what
    assert "pip install 'stepgraph[render]'" in problem.fix
    assert (tmp_path / "step.dot").read_text() == DOT
    assert not (tmp_path / "step.svg").exists()


def test_an_engine_without_pdf_is_said(bare: Path, tmp_path: Path) -> None:
    program(bare, "graphviz-pure", "print(fmt)")
    assert render(DOT, tmp_path / "out.png") == "graphviz-pure"
    problem = refused(tmp_path / "out.pdf")
    assert problem.code == "engine-format"
    assert problem.expected == ".svg or .png"


@pytest.mark.parametrize("name", ["out.dot", "out.txt", "OUT.DOT"])
def test_text_needs_no_engine(bare: Path, tmp_path: Path, name: str) -> None:
    assert render(DOT, tmp_path / name) == "text"
    assert (tmp_path / name).read_text() == DOT


@pytest.mark.parametrize("name", ["out.gif", "out", ".svg"])
def test_an_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    problem = refused(tmp_path / name)
    assert problem.code == "image-format"
    assert ".svg, .png, .pdf, .dot, .txt" in problem.expected


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "none" / "out.svg").code == "no-folder"


def test_a_failure_leaves_the_old_picture_and_the_text(bare: Path, tmp_path: Path) -> None:
    program(bare, "dot", "sys.exit('syntax\\nerror')")
    (tmp_path / "out.png").write_text("old")
    problem = refused(tmp_path / "out.png")
    assert problem.code == "engine-failed"
    assert "syntax error" in problem.what
    assert (tmp_path / "out.png").read_text() == "old"
    assert (tmp_path / "out.dot").read_text() == DOT


def test_an_engine_that_hangs_is_stopped(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare, "dot", "time.sleep(60)")
    monkeypatch.setattr(rendering, "TIMEOUT_S", 0.2)
    problem = refused(tmp_path / "out.png")
    assert problem.code == "engine-timeout"
    assert "0.2 s" in problem.what


def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.dot").mkdir()
    assert refused(tmp_path / "out.dot").code == "not-written"
    assert [p.name for p in tmp_path.iterdir()] == ["out.dot"]


def test_the_asked_file_is_named_when_the_text_beside_it_cannot_be_written_either(bare: Path, tmp_path: Path) -> None:
    program(bare, "dot", "sys.exit(3)")
    (tmp_path / "out.dot").mkdir()
    problem = refused(tmp_path / "out.svg")
    assert (problem.code, problem.where) == ("engine-failed", str(tmp_path / "out.svg"))
    assert "could not be written beside it" in problem.fix


def svg(forward_x: int, backward_x: int) -> str:
    """A page 108 wide, 4 of margin on each side: x runs from 0 to 100."""
    return (
        '<svg width="108pt" viewBox="0.00 0.00 108.00 50.00"><g transform="scale(1 1) rotate(0) translate(4 46)">'
        f'<title>cluster_forward</title><polygon points="{forward_x},0 {forward_x + 10},-5"/>'
        f'<title>cluster_backward</title><g><a><path fill="none" d="M{backward_x},0C{backward_x + 10},-5 3,4 5,6"/>'
        '<text text-anchor="start" x="20.5" y="7">x="1" 1,2</text><ellipse cx="30" cy="8"/></a></g></g></svg>'
    )


def test_forward_on_the_left_stays() -> None:
    assert forward_left(svg(0, 50)) == svg(0, 50)
    assert forward_left("<svg/>") == "<svg/>"


def test_forward_on_the_right_is_mirrored() -> None:
    page = forward_left(svg(50, 0))
    assert 'points="50.00,0 40.00,-5"' in page  # 100 - 50, 100 - 60
    assert 'd="M100.00,0C90.00,-5 97.00,4 95.00,6"' in page
    assert '<text text-anchor="end" x="79.50" y="7">' in page  # 100 - 20.5
    assert 'cx="70.00" cy="8"' in page
    assert ' width="108pt"' in page


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only pygraphviz is there."""
    pytest.importorskip("pygraphviz")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("STEPGRAPH_DOT", raising=False)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_pygraphviz_draws_and_is_quiet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], suffix: str, start: bytes
) -> None:
    target = tmp_path / f"out.{suffix}"
    assert render(to_dot(small()), target) == "pygraphviz"
    assert target.read_bytes().startswith(start)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("in_process")
def test_pygraphviz_puts_forward_on_the_left(tmp_path: Path) -> None:
    render(to_dot(small()), tmp_path / "out.svg")
    page = (tmp_path / "out.svg").read_text()
    assert forward_left(page) == page


@pytest.mark.usefixtures("in_process")
def test_text_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        render("digraph {", tmp_path / "out.svg")
    assert caught.value.problems[0].code == "engine-failed"
