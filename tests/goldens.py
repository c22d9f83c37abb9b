"""Golden files: what a text looked like when somebody last read it and found it good."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import attrs
import pytest

FOLDER = Path(__file__).parent / "golden"


@attrs.frozen
class Golden:
    """Compares a text with `tests/golden/<name>`, or writes that file when `update` is set.

    A test asks for the fixture `golden` and calls `golden("dense-forward.dot", text)`.
    """

    folder: Path
    update: bool

    def __call__(self, name: str, text: str) -> None:
        """Fail with a unified diff unless `text` is what the file `name` holds."""
        path = self.folder / name
        if self.update:
            return write(path, text)
        if not path.exists():
            pytest.fail(f"no golden file {name}: read the text below, then run `pytest --update-golden`\n{text}", False)
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            pytest.fail(f"{difference(name, expected, text)}\nright as it is now? run `pytest --update-golden`", False)
        return None


def write(path: Path, text: str) -> None:
    """Write a golden file; line ends are the same on every system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def difference(name: str, expected: str, text: str) -> str:
    """The unified diff from the golden file to the text; line ends and blanks at the end of a line count."""
    lines = unified_diff(expected.splitlines(True), text.splitlines(True), f"golden/{name}", "this run")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ no newline at the end\n" for line in lines)
