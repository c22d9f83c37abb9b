"""From DOT text to a picture, by the first Graphviz engine that is found here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import IO

import attrs

from stepgraph.errors import InputError, refuse

TEXT_SUFFIXES = ("dot", "txt")
PICTURES = ("svg", "png", "pdf")
TIMEOUT_S = 20.0
_INSTALL = "pip install 'stepgraph[render]', or install Graphviz so that `dot` is on PATH"


@attrs.frozen
class Engine:
    """Something that lays out and draws. program: the executable; "" for one that runs inside this process."""

    name: str
    program: str
    found_by: str
    formats: tuple[str, ...] = PICTURES

    def __str__(self) -> str:
        where = f"{self.program}, " if self.program else ""
        return f"{self.name} ({where}{self.found_by}; {' '.join(self.formats)})"


def engines() -> tuple[Engine, ...]:
    """Every engine found, the preferred one first.

    `$STEPGRAPH_DOT`, `dot` on PATH, pygraphviz, graphviz-pure on PATH or beside this Python. What `$STEPGRAPH_DOT`
    names is listed even where it does not exist: `render` then says so, instead of drawing with another one.
    """
    return tuple(_found())


def find_engine(suffix: str = "svg") -> Engine | None:
    """The first engine that can write the format, or None."""
    return next((engine for engine in engines() if suffix in engine.formats), None)


def render(dot: str, path: Path) -> str:
    """Draw DOT text into `path`, in the format that its suffix names; `.dot` and `.txt` take the text itself.

    Forward is put on the left in SVG whichever side the engine chose. The file is there whole or not at all; when no
    picture can be made, the DOT text is written beside. Returns: the engine's name, "text" where none was needed.

    Raises: InputError (image-format, no-folder, no-engine, engine-format, engine-failed, engine-timeout).
    """
    suffix = suffix_of(path)
    if suffix not in (*PICTURES, *TEXT_SUFFIXES):
        known = ", ".join(f".{known}" for known in (*PICTURES, *TEXT_SUFFIXES))
        raise refuse("image-format", str(path), f"no format for the suffix {path.suffix!r}", f"one of {known}")
    if suffix in TEXT_SUFFIXES:
        return write_text(dot, path)
    _check_folder(path)
    engine = find_engine(suffix)
    if engine is None:
        raise _without_engine(dot, path, suffix)
    _write(path, _picture(dot, path, suffix, engine))
    return engine.name


def suffix_of(path: Path) -> str:
    """The format that a path asks for, in lower case and without the point."""
    return path.suffix.lower().removeprefix(".")


def write_text(text: str, path: Path) -> str:
    """Write a text into `path`, whole or not at all. Returns: "text". Raises: InputError (no-folder, not-written)."""
    _check_folder(path)
    _write(path, text.encode())
    return "text"


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise refuse("no-folder", str(path), f"there is no folder {path.parent}", fix="make the folder first")


def _found() -> Iterator[Engine]:
    chosen = os.environ.get("STEPGRAPH_DOT", "")
    if chosen:
        yield Engine("dot", shutil.which(chosen) or chosen, "$STEPGRAPH_DOT")
    on_path = shutil.which("dot")
    if on_path:
        yield Engine("dot", on_path, "PATH")
    if util.find_spec("pygraphviz"):
        yield Engine("pygraphviz", "", "Python package")
    pure = shutil.which("graphviz-pure") or shutil.which("graphviz-pure", path=sysconfig.get_path("scripts"))
    if pure:
        yield Engine("graphviz-pure", pure, "PATH", ("svg", "png"))


def _picture(dot: str, path: Path, suffix: str, engine: Engine) -> bytes:
    try:
        data = _by_program(dot, suffix, engine) if engine.program else _in_process(dot, suffix)
    except subprocess.TimeoutExpired:
        fix = f"draw fewer ops; {_beside(dot, path)}"
        what = f"{engine.name} took longer than {TIMEOUT_S:g} s"
        raise refuse("engine-timeout", str(path), what, fix=fix) from None
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        fix = f"`stepgraph doctor` lists the engines; {_beside(dot, path)}"
        raise refuse("engine-failed", str(path), f"{engine} failed: {reason}", fix=fix) from None
    return forward_left(data.decode()).encode() if suffix == "svg" else data


def _by_program(dot: str, suffix: str, engine: Engine) -> bytes:
    command = [engine.program, "-Kdot", f"-T{suffix}"]
    done = subprocess.run(command, input=dot.encode(), capture_output=True, timeout=TIMEOUT_S, check=False)
    if done.returncode or not done.stdout:
        raise RuntimeError(done.stderr.decode(errors="replace") or f"exit code {done.returncode}, no picture")
    return done.stdout


def _in_process(dot: str, suffix: str) -> bytes:
    with _stderr_kept() as log:
        import pygraphviz

        data = pygraphviz.AGraph(string=dot).draw(format=suffix, prog="dot")
        log.seek(0)
        said = log.read().decode(errors="replace")
    if not data:
        raise RuntimeError(said or "no picture")
    return bytes(data)


@contextmanager
def _stderr_kept() -> Iterator[IO[bytes]]:
    """What C libraries write to stderr goes to a file: fontconfig warns of a missing configuration that it can spare."""
    sys.stderr.flush()
    usual = os.dup(2)
    try:
        with tempfile.TemporaryFile() as log:
            os.dup2(log.fileno(), 2)
            yield log
    finally:
        os.dup2(usual, 2)
        os.close(usual)


def _without_engine(dot: str, path: Path, suffix: str) -> Exception:
    others = engines()
    written = _beside(dot, path)
    if others:
        what = f"{others[0].name} cannot write {suffix}"
        formats = " or ".join(f".{known}" for known in others[0].formats)
        return refuse("engine-format", str(path), what, formats, f"{_INSTALL}; {written}")
    what = f"no Graphviz engine here; {written}"
    return refuse("no-engine", str(path), what, fix=_INSTALL)


def _beside(dot: str, path: Path) -> str:
    """Where the DOT text went instead of a picture. That it could not be written is not what was asked about."""
    beside = path.with_suffix(".dot")
    try:
        _write(beside, dot.encode())
    except InputError as refused:
        return f"the DOT text could not be written beside it either ({refused.problems[0].what})"
    return f"the DOT text is in {beside}"


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: into a file beside it, which then takes its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise refuse("not-written", str(path), f"cannot be written: {error.strerror}") from None


_NUMBER = r"-?[0-9.]+(?:e[-+]?[0-9]+)?"
_POINT = re.compile(rf"({_NUMBER}),({_NUMBER})")
_WIDTH = re.compile(rf'viewBox="{_NUMBER} {_NUMBER} ({_NUMBER}) {_NUMBER}".*?translate\(({_NUMBER})[ ,]', re.DOTALL)
_PLACED = re.compile(r'( points="| d="| c?x="| text-anchor=")([^"]*)')


def forward_left(svg: str) -> str:
    """The SVG with the forward column on the left: mirrored, texts excepted, where the engine put it on the right."""
    forward, backward = _left_of(svg, "forward"), _left_of(svg, "backward")
    size = _WIDTH.search(svg)
    if forward is None or backward is None or size is None or forward < backward:
        return svg
    width = float(size[1]) - 2 * float(size[2])  # x' = width - x; the margin lies on both sides
    return _PLACED.sub(lambda match: match[1] + _mirrored(match[2], width), svg)


def _left_of(svg: str, phase: str) -> float | None:
    shape = re.search(
        rf'<title>cluster_{phase}</title>.*?<(?:path|polygon) [^>]*?(?:points| d)="([^"]*)"', svg, re.DOTALL
    )
    return min((float(x) for x, _ in _POINT.findall(shape[1])), default=None) if shape else None


def _mirrored(value: str, width: float) -> str:
    if value.isalpha():
        return {"start": "end", "end": "start"}.get(value, value)
    if "," in value:
        return _POINT.sub(lambda point: f"{width - float(point[1]):.2f},{point[2]}", value)
    return f"{width - float(value):.2f}"
