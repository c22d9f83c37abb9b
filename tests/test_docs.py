"""What README, CONTRIBUTING and docs/ show is what happens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from snippets import SnippetError, blocks, commands, run_document, same_output

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_shows_happens(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_document(document.relative_to(ROOT).as_posix(), document.read_text(encoding="utf-8"), tmp_path)


# The runner itself: each way in which a document can be wrong has to be seen.


def run(text: str, folder: Path) -> int:
    return run_document("guide.md", text, folder)


def test_python_blocks_share_one_namespace(tmp_path: Path) -> None:
    text = "```python\nhalf = 21\n```\nand then\n```python\nassert half * 2 == 42\n```\n```bash\nexit 1\n```\n"
    assert run(text, tmp_path) == 2  # the bash block is not run


def test_a_python_block_that_fails_names_the_line_of_the_document(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as failure:
        run("# Title\n\n```python\nfine = 1\n1 / 0\n```\n", tmp_path)
    last = failure.traceback[-1]
    assert (last.frame.code.raw.co_filename, last.lineno + 1) == ("guide.md", 5)


def test_what_a_python_block_prints_is_compared_with_the_output_block_after_it(tmp_path: Path) -> None:
    text = "```python\nprint(6 * 7)\n```\n\nIt says\n\n```output\n{}\n```\n"
    assert run(text.format("42"), tmp_path) == 1
    with pytest.raises(SnippetError, match=r"guide\.md:7: the block above\nprints\n42\n\nbut the document shows\n43"):
        run(text.format("43"), tmp_path)


def test_a_file_is_written_and_can_be_imported(tmp_path: Path) -> None:
    text = "```python file=answers.py\nANSWER = 42\n```\n```python\nfrom answers import ANSWER\nprint(ANSWER)\n```\n"
    assert run(f"{text}```output\n42\n```\n", tmp_path) == 2
    assert (tmp_path / "answers.py").read_text() == "ANSWER = 42\n"
    assert "answers" not in sys.modules and str(tmp_path) not in sys.path


def test_a_test_file_is_run(tmp_path: Path) -> None:
    text = "```python file=test_it.py\ndef test_it() -> None:\n    assert {}\n```\n```console\n$ pytest -q test_it.py\n```\n"
    assert run(text.format("True"), tmp_path) == 2
    with pytest.raises(SnippetError, match="exits with 1, not 0"):
        run(text.format("False"), tmp_path)


def test_a_skipped_block_needs_a_reason(tmp_path: Path) -> None:
    block = "```python\n1 / 0\n```\n"
    assert run(f"<!-- not run: needs a cluster -->\n{block}", tmp_path) == 0
    assert run(f"<!-- not run: needs a cluster -->\n\n{block}", tmp_path) == 0
    with pytest.raises(SnippetError, match=r"guide\.md:1: 'not run' needs a reason"):
        run(f"<!-- not run: -->\n{block}", tmp_path)


def test_a_comment_above_no_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SnippetError, match=r"guide\.md:1: .* stands above no block"):
        run("<!-- not run: slow -->\nSome text.\n```python\n```\n", tmp_path)


def test_a_fence_that_is_never_closed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SnippetError, match=r"guide\.md:2: the fence is never closed"):
        run("text\n```python\npass\n", tmp_path)


def test_commands_are_cut_from_a_session() -> None:
    text = "```console\n$ stepgraph ops \\\n    --json\n[]\n\n$ cat x\nx\n$ stepgraph doctor  # what is there\n```\n"
    (block,) = blocks("guide.md", text)
    first, second = commands(block)
    assert (first.line, first.words, first.shown) == (2, ("stepgraph", "ops", "--json"), ("[]",))
    assert (second.line, second.words, second.shown) == (8, ("stepgraph", "doctor"), ())


def test_shell_syntax_is_refused() -> None:
    (block,) = blocks("guide.md", "```console\n$ stepgraph ops | head\n```\n")
    with pytest.raises(SnippetError, match=r"guide\.md:2: pipes"):
        commands(block)


def test_a_block_inside_a_list_loses_its_indentation() -> None:
    (block,) = blocks("guide.md", "- so:\n\n  ```python\n  if True:\n      pass\n  ```\n")
    assert block.lines == ("if True:", "    pass")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a"], ["a", "b"], False),
        (["a", "b"], ["a"], False),
        (["a", "..."], ["a", "b", "c"], True),
        (["...", "c"], ["a", "b", "c"], True),
        (["a", "...", "c"], ["a", "c"], True),
        (["a", "...", "c"], ["a", "b"], False),
        (["..."], [], True),
        (["a ..."], ["a b"], False),
    ],
)
def test_dots_stand_for_any_number_of_lines(shown: list[str], printed: list[str], same: bool) -> None:
    assert same_output(shown, printed) is same


def test_a_command_is_run_and_its_output_compared(tmp_path: Path) -> None:
    assert run("```console\n$ stepgraph --help\n...\n```\n", tmp_path) == 1
    with pytest.raises(SnippetError, match=r"guide\.md:2: \$ stepgraph --help\nprints\n"):
        run("```console\n$ stepgraph --help\nno such help\n```\n", tmp_path)


def test_a_refused_command_is_an_error_unless_the_document_says_so(tmp_path: Path) -> None:
    block = "```console\n$ stepgraph --no-such-option\n```\n"
    with pytest.raises(SnippetError, match="exits with 2, not 0"):
        run(block, tmp_path)
    assert run(f"<!-- exits: 2 -->\n{block}", tmp_path) == 1
