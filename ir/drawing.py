"""A graph as a picture: DOT text in the ladder layout.

Forward runs down in one column, backward runs up in the column beside it, and every op faces what belongs to it.
One box per module; saved tensors are dashed lines between the columns; parameters are not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from stepgraph.errors import refuse
from stepgraph.ir.dotlabels import (
    FONT,
    QUIET,
    RULE_FILLS,
    OpNote,
    facts,
    fill_of,
    heading,
    op_attributes,
    stream_attributes,
)
from stepgraph.ir.graph import Graph
from stepgraph.ir.ladder import Edge, Way, edges_of, entering, leaving, phase_of, rungs
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.table import row_of

if TYPE_CHECKING:
    from graphviz import Digraph

__all__ = ["OpNote", "to_dot"]

def to_dot(graph: Graph, *, notes: Mapping[str, OpNote] | None = None, title: str = "", max_ops: int = 400) -> str:
    _refuse_too_many(graph, max_ops)
    drawing = _canvas(graph, notes or {}, title)
    edges = edges_of(graph)
    for phase in Phase:
        _column(drawing, graph, phase, notes or {})
    for rung in rungs(graph, edges):
        _rung(drawing, rung, graph)
    for edge in edges:
        _draw_edge(drawing, edge)
    return str(drawing.source)

def _refuse_too_many(graph, max_ops): pass

def _canvas(graph, notes, title):
    from graphviz import Digraph
    import os
    rules = tuple(r for r in RULE_FILLS if any(row_of(o.kind).rule is r and fill_of(o, notes.get(o.name)) == RULE_FILLS[r] for o in graph.ops))
    d = Digraph(graph.name)
    d.attr("graph", label=heading(title, rules), labelloc="t", rankdir="TB", newrank="true", fontname=FONT, nodesep="0.25", ranksep="0.3", fontsize="14", tooltip=" ")
    d.attr("node", shape="box", style="filled,rounded", fontname=FONT, fontsize="11", fillcolor="white", color="#4b5563", margin="0.08,0.04", height="0.2", width="0.4")
    d.attr("edge", color="#374151", arrowsize="0.6", fontname=FONT)
    return d

def _id(name):
    return quote(name, safe="")
def node_id(n):
    if n.startswith("~"): return "~"+_id(n[1:])
    if n.endswith("~"): return _id(n[:-1])+"~"
    return _id(n)

def home(op):
    if not op.module: return ""
    head, found, rest = op.name.partition(op.module)
    return head + op.module if op.module and found else op.module

def _column(d, graph, phase, notes):
    ops = graph.phase(phase)
    if not ops: return
    with d.subgraph(name=f"cluster_{phase.value}") as c:
        c.attr(label=phase.value, style="rounded,filled", fillcolor="#fafafa",color="#d1d5db", fontsize="14")
        for t in entering(graph):
            if phase_of(graph,t) is phase: c.node(node_id("~"+t.name), **stream_attributes(t))
        for t in leaving(graph):
            if graph.producers[t.name].phase is phase: c.node(node_id(t.name+"~"), **stream_attributes(t))
        boxes={}
        for op in ops: boxes.setdefault(home(op),[]).append(op)
        for b,bops in boxes.items():
            def put(x):
                for op in bops:
                    short=op.name[len(b)+1:] if b and op.name.startswith(b+".") else op.name
                    x.node(node_id(op.name), **op_attributes(op, short, notes.get(op.name)))
            if b:
                with c.subgraph(name=f"cluster_{phase.value}_{_id(b)}") as x:
                    x.attr(label=b, labeljust="l" if phase is Phase.FORWARD else "r", fillcolor="white", fontsize="12"); put(x)
            else: put(c)

import os
def _rung(d, rung, graph):
    with d.subgraph() as s:
        s.attr(rank="same")
        for n in rung: s.node(node_id(n))
    from itertools import pairwise
    def key(n):
        o=graph.by_name.get(n)
        if o is None: return (0 if n.startswith("~") else 3)
        if o.phase is Phase.FORWARD: return 0
        if o.role=="recompute": return 1
        if o.role in("regather","dw"): return 2
        return 3
    for a,b in pairwise(sorted(rung,key=key)):
        d.edge(node_id(a), node_id(b), style="invis")

def _draw_edge(d, e):
    a,b=node_id(e.source),node_id(e.target)
    tip="\n".join(facts(t) for t in e.tensors)
    W="8" if e.main else "1"
    P={}
    if e.skip:
        c="e"
        P=dict(tailport=c, headport=c)
    if e.saved: d.edge(a,b,constraint="false",style="dashed",color="#9ca3af",tooltip=tip)
    elif e.way is Way.ACROSS: d.edge(a,b,constraint="false",tooltip=tip)
    elif e.way is Way.UP: d.edge(b,a,dir="back",tooltip=tip, weight=W, **P)
    else: d.edge(a,b,tooltip=tip, weight=W, **P)
