"""`--svg FILE`: a layer before and after, side by side in one picture; ops whose kernel changed have a thick rim."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from stepgraph.commands.fusionrun import Fused, FusionRun
from stepgraph.errors import did_you_mean, refuse
from stepgraph.ir.graph import Graph
from stepgraph.ir.program import Program, seam_graph
from stepgraph.passes.fusing.programs import seam_counts

GAP = 40.0
"""Between both sides. Units: points."""

_SIZE = re.compile(r'<svg width="([0-9.]+)pt" height="([0-9.]+)pt"')


def drawn_part(program: Program, name: str | None) -> str:
    """The template, or the seam `left+right`, that a --template option names; the first layer's by default.

    Raises: InputError with a suggestion.
    """
    if name is None:
        return program.stages[0].runs[1].template
    known = [graph.name for graph in program.templates] + [f"{left}+{right}" for left, right in seam_counts(program)]
    if name not in known:
        raise refuse("template", "--template", f"no template or seam {name!r}", fix=did_you_mean(name, known))
    return name


def draw(run: FusionRun, part: str, path: Path) -> str:
    """Write the picture. Returns: the engine's name.

    Raises: InputError (image-format) unless the file ends in .svg, and what `render` refuses.
    """
    from stepgraph.ir.drawing import to_dot
    from stepgraph.opnotes import op_notes
    from stepgraph.passes.costing import costs
    from stepgraph.rendering import render

    if path.suffix.lower() != ".svg":
        raise refuse("image-format", str(path), f"--svg writes no {path.suffix!r}", ".svg", "`stepgraph graph -o` can")
    if not path.parent.is_dir():
        raise refuse("no-folder", str(path), f"there is no folder {path.parent}", fix="make the folder first")
    sides = (run.before, run.after)
    graphs = [_graph(side, part) for side in sides]
    changed = _changed(*graphs)
    pictures = []
    with tempfile.TemporaryDirectory() as folder:
        for side, graph in zip(sides, graphs, strict=True):
            title = f"{run.model.name}: {part}, fusions {side.name}"
            dot = to_dot(graph, notes=op_notes(costs(graph, run.chosen)), title=title, changed=changed)
            one = Path(folder) / "side.svg"
            engine = render(dot, one)
            pictures.append(one.read_text(encoding="utf-8"))
    try:
        path.write_text(beside(*pictures), encoding="utf-8")
    except OSError as error:
        raise refuse("not-written", str(path), f"cannot be written: {error.strerror}") from None
    return engine


def _graph(side: Fused, part: str) -> Graph:
    if part in side.program.by_name:
        return side.program[part]
    left, _, right = part.partition("+")
    return seam_graph(side.program, left, right)


def _changed(before: Graph, after: Graph) -> frozenset[str]:
    """Ops that are in another kernel than before, or in one for the first time."""
    return frozenset(op.name for op in after.ops if before.group_of.get(op.name) != after.group_of.get(op.name))


def beside(left: str, right: str) -> str:
    """Two SVG pictures as one, the second to the right of the first."""
    sizes = [_size(picture) for picture in (left, right)]
    width, height = sizes[0][0] + GAP + sizes[1][0], max(size[1] for size in sizes)
    head = (
        '<?xml version="1.0" encoding="UTF-8" standalone="no"?>\n'
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{width:g}pt" height="{height:g}pt" viewBox="0 0 {width:g} {height:g}">\n'
    )
    return f"{head}{_inner(left, 'before', 0)}{_inner(right, 'after', sizes[0][0] + GAP)}</svg>\n"


def _size(picture: str) -> tuple[float, float]:
    found = _SIZE.search(picture)
    if found is None:
        raise refuse("engine-failed", "--svg", "the engine wrote a picture without a size", fix="stepgraph doctor")
    return float(found[1]), float(found[2])


def _inner(picture: str, side: str, x: float) -> str:
    """A picture without its prologue, moved; names of elements get the side in front, so that none is there twice."""
    width, height = _size(picture)
    body = picture[picture.index("<svg ") :]
    body = _SIZE.sub(f'<svg x="{x:g}" y="0" width="{width:g}" height="{height:g}"', body, count=1)
    return re.sub(r'(<g id|<a id)="', rf'\1="{side}-', body)
