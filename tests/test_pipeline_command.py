"""`stepgraph pipeline` as its users meet it: JSON, tables, pictures, order files, and one clear error for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from stepgraph.cli import main
from stepgraph.passes.pipeline.orderfile import write_order
from stepgraph.passes.pipeline.schedules import SCHEDULES, schedule_of

DOCUMENT = Path(__file__).parents[1] / "docs/pipeline.md"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("pipeline", *arguments))


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def refused(*arguments: str) -> str:
    """Standard error of a refused command: exit code 2, nothing on standard output, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def order_file(folder: Path, name: str = "1f1b", ranks: int = 4, chunks: int = 1, microbatches: int = 8) -> str:
    path = folder / "order.csv"
    path.write_text(write_order(schedule_of(name).order(ranks, chunks, microbatches)), encoding="utf-8")
    return str(path)


def test_defaults_are_1f1b_on_four_ranks_with_eight_micro_batches() -> None:
    found = run_json()
    n, p, tf, tb = 8, 4, 1, 2
    assert found["makespan"] == (n + p - 1) * (tf + tb)
    assert found["bubble_over_ideal"] == pytest.approx((p - 1) / n)
    assert found["peak_activations"] == [4, 3, 2, 1]  # P - r warm-up forwards and the one that runs
    assert found["tw"] == tb / 2
    named = {key: found[key] for key in ("schedule", "pp", "vpp", "micro_batches", "p2p", "mode")}
    assert named == {"schedule": "1f1b", "pp": 4, "vpp": 1, "micro_batches": 8, "p2p": 0, "mode": "async"}
    assert "jitter" not in found


@pytest.mark.parametrize(
    ("name", "vpp", "makespan"),
    [
        ("gpipe", 1, (8 + 3) * (1 + 2)),
        ("interleaved", 2, 8 * 3 + 3 * 3 / 2),  # the bubble of 1F1B over V
        ("looped-bfs", 2, 8 * 3 + 3 * 3 / 2),
        ("zb-h1", 1, 8 * 3 + 3 * (1 + 1 - 1)),  # (P - 1) (t_f + t_i - t_w), Qi et al. 2023, table 2
    ],
)
def test_schedules_come_with_the_stages_that_they_need(name: str, vpp: int, makespan: float) -> None:
    found = run_json("--schedule", name.upper())
    assert (found["schedule"], found["vpp"]) == (name, vpp)
    assert found["makespan"] == pytest.approx(makespan)


@pytest.mark.parametrize("name", SCHEDULES)
def test_accounts_of_a_rank_add_up_to_the_makespan(name: str) -> None:
    found = run_json("--schedule", name, "--p2p", "0.1")
    for rank in found["ranks"]:
        parts = ("compute", "transfer", "wait_send", "wait_recv")
        assert rank["end"] == pytest.approx(sum(rank[part] for part in parts))
        assert rank["end"] + rank["idle"] == pytest.approx(found["makespan"])
        assert rank["compute"] == pytest.approx(8 * 3)
        assert rank["longest_wait"] <= rank["wait_send"] + rank["wait_recv"] + 1e-9


def test_any_unit_works() -> None:
    """Results have the unit of the times: milliseconds give milliseconds."""
    small, large = run_json("--p2p", "0.1"), run_json("--tf", "1000", "--tb", "2000", "--p2p", "100")
    assert large["makespan"] == pytest.approx(1000 * small["makespan"])
    assert large["bubble_over_ideal"] == pytest.approx(small["bubble_over_ideal"])


def test_a_long_step_is_quick_because_its_steady_state_repeats() -> None:
    n = 10**6
    found = run_json("--micro-batches", str(n))
    assert found["makespan"] == pytest.approx((n + 4 - 1) * 3)
    assert found["peak_activations"] == [4, 3, 2, 1]


def test_every_field_of_the_json_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    found = run_json("--jitter", "0.1")
    names = {*found, *found["ranks"][0], *found["jitter"]}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_jitter_is_a_mean_between_two_ends_and_follows_the_seed() -> None:
    first, again, other = (run_json("--jitter", "0.2", "--seed", seed) for seed in ("1", "1", "2"))
    spread = first["jitter"]
    assert set(spread) == {"mean", "low", "high"}
    assert spread["low"] <= spread["mean"] <= spread["high"]
    assert first == again
    assert first["jitter"] != other["jitter"]
    assert first["makespan"] == other["makespan"]  # without jitter
    assert "jitter     " in run("--jitter", "0.2").stdout


def test_the_table_has_a_line_per_rank_and_the_picture_below() -> None:
    lines = run("--pp", "2", "--micro-batches", "3").stdout.splitlines()
    assert lines[0] == "1f1b: pp 2, 3 micro-batches"
    assert [line.split() for line in lines if line.lstrip().startswith(("0  ", "1  "))] == [
        # compute 3 (1 + 2); rank 1 waits for F0; rank 0 for B0 and for B2
        ["0", "9", "0", "3", "2", "0", "12", "2"],
        ["1", "9", "0", "1", "1", "2", "10", "1"],
        ["0", "F0F1....B0==F2B1==..B2=="],
        ["1", "..F0B0==F1B1==F2B2==...."],
    ]
    assert lines[-2:] == ["makespan   12", "bubble     33.3% over n (tf + tb) = 9"]
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_picture_too_wide_for_text_is_left_out() -> None:
    lines = run("--micro-batches", "64").stdout
    assert "F0" not in lines
    assert "bubble     4.7% over n (tf + tb) = 192" in lines  # 3/64


def test_a_picture_is_written_and_said(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.SVG"
    result = run("--schedule", "interleaved", "--mode", "blocking", "--p2p", "0.1", "-o", str(path), "--json")
    assert result.exit_code == 0, result.output
    root = ElementTree.parse(path).getroot()
    computed = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("class") in ("F", "B")]
    assert len(computed) == 4 * 2 * 8 * 2
    assert json.loads(result.stdout)["mode"] == "blocking"
    assert result.stderr.startswith(f"{path}: ")
    assert result.stderr.endswith(" boxes (svg)\n")
    title = root.findtext("{http://www.w3.org/2000/svg}title")
    assert title == "interleaved: pp 4, vpp 2, 8 micro-batches"


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_order_file_is_run_as_the_schedule_that_it_holds(name: str, tmp_path: Path) -> None:
    chunks = run_json("--schedule", name)["vpp"]
    path = order_file(tmp_path, name, 4, chunks, 8)
    found, known = (run_json("--schedule", what, "--p2p", "0.05") for what in (path, name))
    assert (found.pop("schedule"), known.pop("schedule")) == (path, name)
    assert found == known


def test_sizes_that_agree_with_the_file_may_be_given_and_others_are_refused(tmp_path: Path) -> None:
    path = order_file(tmp_path)
    assert run_json("--schedule", path, "--pp", "4", "--vpp", "1", "--micro-batches", "8")["makespan"] == 33
    said = refused("--schedule", path, "--pp", "8", "--vpp", "2", "--micro-batches", "16")
    assert said.count("[pipeline-file-shape]") == 3
    assert f"--pp: 8, but {path} has 4. Leave out --pp." in said


def test_a_name_is_a_schedule_even_where_a_file_has_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpipe").write_text("0F0,0B0\n", encoding="utf-8")
    assert run_json("--schedule", "gpipe")["pp"] == 4
    assert run_json("--schedule", "./gpipe")["pp"] == 1


def test_the_readers_own_order_gets_stuck_and_is_told_where(tmp_path: Path) -> None:
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n", encoding="utf-8")
    assert "[pipeline-" in refused("--schedule", str(path))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--tf", "-1"), "--tf: -1; expected a finite number, zero or more [pipeline-times]"),
        (("--tb", "nan"), "--tb: nan; expected"),
        (("--p2p", "inf"), "--p2p: inf; expected"),
        (("--jitter", "-0.1"), "--jitter: -0.1; expected 0 to 1, as in 0.1 [pipeline-jitter]"),
        (("--jitter", "nan"), "--jitter: nan; expected"),
        (("--jitter", "0.1", "--seed", "-1"), "--seed: -1; expected 0 or more [pipeline-jitter]"),
        (("--jitter", "0.1", "--micro-batches", "100000"), "--jitter: 800000 computations"),
        (("--tw", "2.5"), "--tw: tw = 2.5; expected at most tb = 2, the whole backward"),
        (("--tf", "0", "--tb", "0"), "--tf, --tb: both are zero"),
        (("--tf", "1e308", "--tb", "1e308"), "too large to be added up"),
        (("--tf", "1e-320", "--tb", "0", "--p2p", "1"), "too far apart to be compared"),
        (("--schedule", "zvb"), "Did you mean 'zbv'? [pipeline-schedule]"),
        (("--schedule", "nowhere.csv"), "[pipeline-file]"),
        (("--schedule", "no/where"), "[pipeline-file]"),
        (("--schedule", "."), "[pipeline-file]"),
        (("--schedule", "x" * 5000), "[pipeline-schedule]"),
        (("--mode", "blockng"), "[pipeline-mode]"),
        (("--mode", "joint:0"), "[pipeline-mode]"),
        (("--mode", "overlap"), "[pipeline-mode]"),
        (("--pp", "0"), "--pp: 0; expected 1 or more [pipeline-count]"),
        (("--schedule", "interleaved", "--pp", "0", "--micro-batches", "0"), "[pipeline-count]"),
        (("--schedule", "zbv", "--vpp", "3"), "[pipeline-chunks]"),
        (("--schedule", "dualpipev", "--micro-batches", "7"), "[pipeline-microbatches]"),
        (("--schedule", "gpipe", "--micro-batches", "100000000"), "[pipeline-size]"),
        (("--pp", "16", "--micro-batches", "100000", "-o", "x.svg"), "3200000 boxes to draw; expected at most 10000"),
        (("--micro-batches", "2", "--max-boxes", "15", "-o", "x.svg"), "16 boxes to draw; expected at most 15"),
        (("--micro-batches", "1", "--max-boxes", "9", "-o", "x.svg"), "boxes to draw; expected at most 9"),  # and waits
        (("-o", "x.png"), "as SVG only; expected .svg [image-format]"),
        (("-o", "x"), "[image-format]"),
        (("-o", "no/folder/x.svg"), "[no-folder]"),
        (("-o", "folder.svg"), "[not-written]"),
    ],
)
def test_bad_input_is_refused_in_words(
    arguments: tuple[str, ...], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.svg").mkdir()
    assert code in refused(*arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.svg"]


def test_everything_that_is_wrong_is_said_at_once() -> None:
    said = refused("--schedule", "zvb", "--mode", "no", "--tf", "-1", "--tb", "-2", "-o", "x.gif")
    codes = ("pipeline-schedule", "pipeline-mode", "image-format")
    assert all(f"[{code}]" in said for code in codes)
    assert said.count("[pipeline-times]") == 2
    assert len(said.splitlines()) == 5


def test_the_picture_in_the_documents_is_what_the_command_draws(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.svg"
    assert run("--schedule", "dualpipev", "--mode", "joint:0.8", "-o", str(path)).exit_code == 0
    assert path.read_text(encoding="utf-8") == (DOCUMENT.parent / "images/pipeline.svg").read_text(encoding="utf-8")


def test_all_schedules_are_compared_the_fastest_first() -> None:
    lines = run("--schedule", "all", "--p2p", "0.1", "--pp", "8", "--micro-batches", "32").stdout.splitlines()
    rows = [line.split() for line in lines[4:11]]
    assert {row[0] for row in rows} == set(SCHEDULES)
    makespans = [float(row[2]) for row in rows]
    assert makespans == sorted(makespans)
    for name, makespan in ((row[0], float(row[2])) for row in rows):
        alone = run_json("--schedule", name, "--p2p", "0.1", "--pp", "8", "--micro-batches", "32")
        assert alone["makespan"] == pytest.approx(makespan, rel=1e-5)


def test_what_does_not_run_is_listed_with_its_reason() -> None:
    found = {own["schedule"]: own for own in run_json("--schedule", "all", "--micro-batches", "6")["schedules"]}
    assert "nearest possible: 8" in found["dualpipev"]["refused"].lower()
    assert found["1f1b"]["makespan"] == (6 + 3) * 3
    result = CliRunner().invoke(main, ["pipeline", "--schedule", "all", "--micro-batches", "6"])
    assert result.exit_code == 0
    assert "refused: dualpipev: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--tf", "-1"), "a finite number"), (("-o", "all.svg"), "--schedule NAME with -o"), (("--pp", "0"), "1 or more")],
)
def test_a_comparison_of_nothing_is_refused(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["pipeline", "--schedule", "all", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
