"""Runs what the documents show: python blocks and console sessions, in the order in which a reader meets them.

The word behind the fence tells blocks apart: `python` is run, and an `output` block right after it has to show what it
prints; `python file=NAME` is written to a file of that name instead; `console` is typed (the lines that begin with
`$ stepgraph` or `$ pytest`) and its output compared; everything else is left alone. The HTML comment
`<!-- not run: reason -->` above a block skips it; `<!-- exits: 2 -->` says that its commands are refused.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import attrs

PROMPT = "$ "
PROGRAMS = frozenset({"stepgraph", "pytest"})
ANY_LINES = "..."
SHELL_SYNTAX = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "2>&1"})
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[\w-]*)(?: file=(?P<file>[\w.-]+))?[^`]*$")
COMMENT = re.compile(r"^<!--\s*(?P<word>not run|exits):(?P<value>.*?)-->$")


class SnippetError(AssertionError):
    """A document promises something that does not happen; the message begins with `file:line`."""


@attrs.frozen
class Block:
    """One fenced block: where it stands, its language, its lines, and the comment above it.

    line: of the fence, counted from 1; file: where to write the lines, empty when they are run; skip: the reason of
    `not run`, None when the block is to be run; exit_code: what its commands have to return.
    """

    source: str
    line: int
    language: str
    lines: tuple[str, ...]
    file: str = ""
    skip: str | None = None
    exit_code: int = 0


@attrs.frozen
class Command:
    """One typed command: its line in the document, its words, and the output that the document shows (may be none)."""

    line: int
    words: tuple[str, ...]
    shown: tuple[str, ...]


def blocks(source: str, text: str) -> list[Block]:
    """Every fenced block of a document, in order.

    Raises: SnippetError for a fence that is never closed, a `not run` without a reason or a comment above no block.
    """
    found: list[Block] = []
    note: tuple[int, str, str] | None = None
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence, comment = FENCE.match(lines[at]), COMMENT.match(lines[at].strip())
        if fence:
            end = _closing(source, lines, at, fence)
            body = tuple(line.removeprefix(fence["indent"]) for line in lines[at + 1 : end])
            found.append(_noted(Block(source, at + 1, fence["language"], body, fence["file"] or ""), note))
            note, at = None, end
        elif comment:
            note = (at + 1, comment["word"], comment["value"].strip())
        elif lines[at].strip() and note:
            raise SnippetError(f"{source}:{note[0]}: the comment {note[1]!r} stands above no block")
        at += 1
    return found


def commands(block: Block) -> list[Command]:
    """The `stepgraph` and `pytest` commands of a console block; others (`$ cat ...`) are for the reader alone.

    Raises: SnippetError when a command needs a shell: the runner has none.
    """
    sessions: list[tuple[int, str, list[str]]] = []
    for line, text in _joined(block):
        if text.startswith(PROMPT):
            sessions.append((line, text.removeprefix(PROMPT), []))
        elif sessions:
            sessions[-1][2].append(text)
        else:
            raise SnippetError(f"{block.source}:{line}: a console block begins with a line '$ ...'")
    return [_command(block, *session) for session in sessions if session[1].split()[0] in PROGRAMS]


def same_output(shown: list[str], printed: list[str]) -> bool:
    """Whether the printed lines are the shown ones, a shown `...` standing for any number of lines (also none)."""
    if not shown:
        return not printed
    if shown[0].strip() == ANY_LINES:
        return any(same_output(shown[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and shown[0] == printed[0] and same_output(shown[1:], printed[1:])


def run_document(source: str, text: str, folder: Path) -> int:
    """Run a document's blocks from top to bottom in `folder`; how many were run.

    The python blocks share one namespace, a module of its own, so that classes defined in them behave as in a file, and
    can import what the document wrote. The caller makes `folder` the working directory.
    Raises: SnippetError at the first promise that is not kept; whatever a python block raises.
    """
    module = ModuleType("snippets_of_" + re.sub(r"\W", "_", source))
    sys.modules[module.__name__] = module
    found = blocks(source, text)
    end = Block(source, 0, "", ())
    try:
        with _importable(folder):
            return sum(_run(block, after, module, folder) for block, after in pairwise((*found, end)))
    finally:
        del sys.modules[module.__name__]


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """What stands in a folder can be imported, and is forgotten afterwards."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


def _closing(source: str, lines: list[str], start: int, fence: re.Match[str]) -> int:
    for at in range(start + 1, len(lines)):
        if lines[at].strip() == fence["fence"]:
            return at
    raise SnippetError(f"{source}:{start + 1}: the fence is never closed")


def _noted(block: Block, note: tuple[int, str, str] | None) -> Block:
    if note is None:
        return block
    line, word, value = note
    if word == "exits" and value.isdigit():
        return attrs.evolve(block, exit_code=int(value))
    if word == "not run" and value:
        return attrs.evolve(block, skip=value)
    raise SnippetError(f"{block.source}:{line}: {word!r} needs {'a number' if word == 'exits' else 'a reason'}")


def _joined(block: Block) -> list[tuple[int, str]]:
    """The block's lines with their numbers; a command that ends in a backslash takes the next line in."""
    joined: list[tuple[int, str]] = []
    for line, text in enumerate(block.lines, block.line + 1):
        if joined and joined[-1][1].startswith(PROMPT) and joined[-1][1].endswith("\\"):
            first, begun = joined[-1]
            joined[-1] = (first, f"{begun[:-1]} {text.removeprefix('>').strip()}")
        else:
            joined.append((line, text))
    return joined


def _command(block: Block, line: int, typed: str, shown: list[str]) -> Command:
    words = tuple(shlex.split(typed, comments=True))
    if SHELL_SYNTAX & set(words):
        raise SnippetError(f"{block.source}:{line}: pipes and redirections are not run; use an option or a bash block")
    return Command(line, words, tuple(_stripped(shown)))


def _run(block: Block, after: Block, module: ModuleType, folder: Path) -> int:
    if block.skip is not None or block.language not in {"python", "console"}:
        return 0
    if block.file:
        (folder / block.file).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
    elif block.language == "python":
        _run_python(block, after, module)
    else:
        for command in commands(block):
            _run_command(block, command, folder)
    return 1


def _run_python(block: Block, after: Block, module: ModuleType) -> None:
    # Empty lines in front, so that a traceback names the line of the document.
    code = "\n" * block.line + "\n".join(block.lines)
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, block.source, "exec"), module.__dict__)
    if after.language == "output":
        _compare(f"{block.source}:{after.line}: the block above", after.lines, printed.getvalue())


def _run_command(block: Block, command: Command, folder: Path) -> None:
    # Wide and without colour, whatever terminal the tests run in; both streams, as a terminal shows them.
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command.words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
        timeout=120,
    )
    place = f"{block.source}:{command.line}: $ {shlex.join(command.words)}"
    if done.returncode != block.exit_code:
        raise SnippetError(f"{place}\nexits with {done.returncode}, not {block.exit_code}, and prints\n{done.stdout}")
    if command.shown:
        _compare(place, command.shown, done.stdout)


def _compare(place: str, shown: tuple[str, ...], printed: str) -> None:
    if not same_output(_stripped(list(shown)), _stripped(printed.splitlines())):
        wanted = "\n".join(shown)
        raise SnippetError(f"{place}\nprints\n{printed}\nbut the document shows\n{wanted}")


def _stripped(lines: list[str]) -> list[str]:
    """Without blanks at the ends of lines and without empty lines at either end: editors strip both."""
    return "\n".join(line.rstrip() for line in lines).strip("\n").splitlines()
