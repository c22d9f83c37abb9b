"""The golden fixture itself: it must be able to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from goldens import Golden


def test_update_writes_what_the_next_run_compares(tmp_path: Path) -> None:
    Golden(tmp_path, update=True)("deep/step.txt", "one\ntwo\n")
    assert (tmp_path / "deep" / "step.txt").read_bytes() == b"one\ntwo\n"
    Golden(tmp_path, update=False)("deep/step.txt", "one\ntwo\n")


def test_a_changed_line_is_shown_as_a_unified_diff(tmp_path: Path) -> None:
    (tmp_path / "step.txt").write_text("one\ntwo\n", encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)-two\n\+three\n.*--update-golden"):
        Golden(tmp_path, update=False)("step.txt", "one\nthree\n")


def test_a_missing_newline_at_the_end_is_a_difference(tmp_path: Path) -> None:
    (tmp_path / "step.txt").write_text("one\n", encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match="no newline at the end"):
        Golden(tmp_path, update=False)("step.txt", "one")


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"no golden file step\.txt.*--update-golden"):
        Golden(tmp_path, update=False)("step.txt", "one\n")
    assert not (tmp_path / "step.txt").exists()
