"""Options that several commands share, and what they become."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import click

from stepgraph.errors import InputError, refuse
from stepgraph.hwtargets.reading import load_target
from stepgraph.hwtargets.target import Target
from stepgraph.lowering.huggingface import load_model, parse_override
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.model import Model
from stepgraph.lowering.resolution import dp_from_gpus

if TYPE_CHECKING:
    from stepgraph.passes.fusing.grouping import AnyRule

F = TypeVar("F", bound=Callable[..., Any])

LAYOUT_OPTIONS = (
    click.option("--gpus", type=int, help="GPUs in all; dp = gpus / (tp cp pp).  [default: tp cp pp dp]"),
    click.option("--dp", type=int, help="Data-parallel ranks.  [default: what --gpus leaves, or 1]"),
    click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks."),
    click.option("--sp/--no-sp", default=None, help="Sequence parallelism.  [default: on when tp > 1]"),
    click.option(
        "--tp-regather/--no-tp-regather",
        default=None,
        help="Gather sequence-split activations again in backward (Megatron) or keep them (DTensor).  [default: as --sp]",
    ),
    click.option("--cp", type=int, default=1, show_default=True, help="Context-parallel ranks."),
    click.option("--ep", type=int, default=1, show_default=True, help="Expert-parallel ranks."),
    click.option("--etp", type=int, default=1, show_default=True, help="Expert-tensor-parallel ranks."),
    click.option("--pp", type=int, default=1, show_default=True, help="Pipeline stages."),
    click.option("--vpp", type=int, default=1, show_default=True, help="Model chunks per pipeline stage."),
    click.option("--zero", type=int, default=1, show_default=True, help="ZeRO stage: 0 or 1."),
    click.option("--micro-batch", type=int, default=1, show_default=True, help="Sequences per micro-batch."),
    click.option("--global-batch", type=int, help="Sequences per step.  [default: a micro-batch per GPU]"),
    click.option("--seq", type=int, help="Tokens per sequence.  [default: 4096 or the model's limit]"),
    click.option("--recompute", default="none", show_default=True, help="none, selective (core attention) or full."),
    click.option(
        "--capacity-factor", type=float, help="Experts get this times an even share of tokens.  [default: dropless]"
    ),
    click.option(
        "--expert-imbalance",
        type=float,
        default=1.0,
        show_default=True,
        help="Tokens of the busiest rank over the mean.",
    ),
    click.option(
        "--pad-vocab", type=int, default=1, show_default=True, help="Pad the vocabulary to a multiple of this x tp."
    ),
    click.option("--pipeline-layout", help="Stages in Megatron's notation, as in 'Et*4|(t*4|)*14tL'."),
    click.option("--first-stage-layers", type=int, help="Layers of the first pipeline rank."),
    click.option(
        "--last-stage-layers", type=int, help="Layers of the last pipeline rank (in a V: the middle of the model)."
    ),
    click.option("--mtp", type=int, default=0, show_default=True, help="Multi-token prediction modules."),
    click.option(
        "--schedule",
        help="gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev or looped-bfs.  [default: 1f1b; interleaved if vpp > 1]",
    ),
)

COST_OPTIONS = (
    click.option(
        "--target", default="h100", show_default=True, help="Target name or TOML file; see `stepgraph targets`."
    ),
    click.option("--profile", default="reference", show_default=True, help="HBM passes: reference or exact."),
    click.option("--eta", default="constant", show_default=True, help="GEMM efficiency: constant per op, or shape."),
)

RUN_OPTIONS = (
    click.option(
        "--launch",
        default="both",
        show_default=True,
        help="Launch cost: additive (a gap per kernel), host (idle when its queue runs dry), or both.",
    ),
    click.option("--cuda-graphs", is_flag=True, help="The host issues CUDA graphs instead of kernels."),
    click.option(
        "--overlap",
        default="none",
        show_default=True,
        metavar="POLICY",
        help="What hides communication: none, megatron, or flags such as overlap-grad-reduce,tp-comm-overlap.",
    ),
    click.option(
        "--p2p-mode",
        default="auto",
        show_default=True,
        help="Transfers between stages: async, blocking, overlap or joint:X; auto is what is usual for the schedule.",
    ),
)

MODEL_OPTIONS = (
    click.argument("config"),
    click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the config; repeatable."
    ),
)

FUSIONS_HELP = "Fuse by a rule set (none, basic) or a Python file, as in my_rules.py:rule+other; several with commas."

JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def fusions_option(default: str) -> Callable[[F], F]:
    """The --fusions option."""
    return click.option("--fusions", default=default, show_default=True, metavar="SET|FILE", help=FUSIONS_HELP)


def options(*groups: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """Apply groups of options, first one first in the help."""

    def apply(function: F) -> F:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return apply


def model_from(config: str, overrides: tuple[str, ...]) -> Model:
    """The model of a CONFIG argument and its --set options."""
    return load_model(config, dict(parse_override(text) for text in overrides))


def target_from(name: str) -> Target:
    """The target of a --target option."""
    return load_target(name)


def rules_from(text: str) -> tuple[AnyRule, ...]:
    """The rules of a --fusions option. Raises: InputError."""
    if text == "none":
        return ()
    from stepgraph.passes.fusing.sets import rules_of

    return rules_of(text)


@contextmanager
def rule_faults(rules: Iterable[AnyRule]) -> Iterator[None]:
    """Run what calls the rules' own checks: one that fails is the fault of its file, and refused as such.

    Raises: InputError, naming the file and the line.
    """
    try:
        with redirect_stdout(sys.stderr):  # what a check prints is not our output
            yield
    except InputError:
        raise
    except (Exception, SystemExit) as failed:
        from stepgraph.passes.fusing.recorder import PatternError
        from stepgraph.passes.fusing.sets import broken

        cause = failed.__cause__ or failed
        if isinstance(cause, PatternError):
            raise broken(Path(), cause) from failed
        checks = (check for rule in rules for check in getattr(rule, "checks", ()))
        files = {code.co_filename for check in checks if (code := getattr(check, "__code__", None)) is not None}
        path = next((frame.filename for frame in extract_tb(cause.__traceback__) if frame.filename in files), None)
        if path is None:
            raise
        raise broken(Path(path), cause) from failed


def layout_from(values: Mapping[str, Any]) -> Layout:
    """The layout of the layout options. Raises: InputError when --gpus is not a multiple of what a replica needs."""
    names = {field.name for field in attrs.fields(Layout)} - {"dp"}
    chosen = {name: values[name] for name in names}
    chosen["schedule"] = values["schedule"] and values["schedule"].lower()
    gpus, dp = values["gpus"], values["dp"]
    if gpus is None:
        return Layout(dp=1 if dp is None else dp, **chosen)
    left = dp_from_gpus(gpus, **{name: values[name] for name in ("tp", "cp", "pp")})
    if dp not in (None, left):
        raise refuse("gpus-dp", "--dp", f"dp = {dp}, but {gpus} GPUs leave dp = {left}", fix="leave out --dp or --gpus")
    return Layout(dp=left, **chosen)
