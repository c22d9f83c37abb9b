"""Rule sets by name, and rules from a user's file: a file runs only when it is named."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import MappingProxyType, ModuleType

from stepgraph.errors import InputError, did_you_mean, refuse
from stepgraph.ir.rewriting import Rewrite
from stepgraph.passes.fusing.grouping import AnyRule
from stepgraph.passes.fusing.pattern import FusionRule, PatternError
from stepgraph.passes.fusing.rules import norms, pointwise

BASIC: tuple[FusionRule, ...] = (
    norms.rmsnorm_backward_add,
    norms.layernorm_backward_add,
    norms.rmsnorm_backward,
    norms.layernorm_backward,
    norms.bias_add_layernorm,
    pointwise.bias_add_residual,
    norms.add_rmsnorm,
    norms.add_layernorm,
    norms.qk_norm_rope,
    pointwise.bias_activation,
    pointwise.bias_glu,
    pointwise.activation_bias_backward,
    pointwise.rope_pair,
    pointwise.softcap_loss,
    pointwise.softcap_loss_backward,
    pointwise.router,
    pointwise.router_backward,
)
"""Kernels that public libraries have, larger patterns before the smaller ones that they contain."""

RULE_SETS = MappingProxyType({"none": (), "basic": BASIC})


def as_rules(fusions: str | Sequence[AnyRule]) -> tuple[AnyRule, ...]:
    """The rules that somebody named, or gave as they are.

    Raises: InputError as `rules_of`, and for something that is no rule.
    """
    if isinstance(fusions, str):
        return rules_of(fusions)
    strange = [rule for rule in fusions if not isinstance(rule, FusionRule | Rewrite)]
    if strange:
        raise refuse("fusions", "fusions", f"{strange[0]!r} is no fusion rule", "functions decorated with @fusion")
    return tuple(fusions)


def rules_of(text: str) -> tuple[AnyRule, ...]:
    """The rules that a --fusions value names: sets and files, comma-separated; `file.py:name+name` picks rules.

    Rewrites of a file come along, so that whoever tries to fuse by one is told what it is for. Raises: InputError for
    an unknown set, a missing file, a file that fails (with its line), a rule that is not there, two of one name.
    """
    found: dict[str, AnyRule] = {}
    for rule in (rule for part in text.split(",") for rule in _rules(part.strip())):
        if found.setdefault(rule.name, rule) is not rule:
            what = f"two rules are called {rule.name!r}"
            raise refuse("fusions", "--fusions", what, "one rule per name", "rename one, or pick rules: file.py:a+b")
    return tuple(found.values())


def _rules(part: str) -> tuple[AnyRule, ...]:
    if part in RULE_SETS:
        return RULE_SETS[part]
    path, _, chosen = part.partition(":")
    if not path.endswith(".py"):
        fix = did_you_mean(part, RULE_SETS)
        raise refuse("fusions", "--fusions", f"no rule set {part!r}", "a set, or a file that ends in .py", fix)
    found = _from_file(Path(path))
    if not chosen:
        return tuple(found.values())
    return tuple(_chosen(found, name.strip(), path) for name in chosen.split("+"))


def _chosen(found: Mapping[str, AnyRule], name: str, path: str) -> AnyRule:
    if name not in found:
        raise refuse("fusions", path, f"no rule {name!r}", ", ".join(found) or "rules", did_you_mean(name, found))
    return found[name]


def _from_file(path: Path) -> dict[str, AnyRule]:
    """Run a rule file and collect its rules by name. What it prints goes to standard error: the output is ours."""
    if not path.is_file():
        raise refuse("rules-file", str(path), "there is no such file", "a Python file with fusion rules")
    module = ModuleType(f"rules_{path.stem}")
    module.__file__ = str(path)
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        with redirect_stdout(sys.stderr):
            exec(code, module.__dict__)  # noqa: S102 - the user named it to be run
    except (Exception, SystemExit) as failed:
        raise broken(path, failed) from failed
    return _rules_in(module, path)


def _rules_in(module: ModuleType, path: Path) -> dict[str, AnyRule]:
    rules = {rule.name: rule for rule in vars(module).values() if isinstance(rule, FusionRule | Rewrite)}
    if not rules:
        raise refuse("rules-file", str(path), "defines no fusion rule", "functions decorated with @fusion")
    return rules


def broken(path: Path, failed: BaseException) -> InputError:
    """What went wrong in a user's file, and where: the last of its lines that was running."""
    if isinstance(failed, SyntaxError):
        where = f"{failed.filename or path}:{failed.lineno or 1}"
        return refuse("rules-file", where, f"is no Python: {failed.msg}")
    if isinstance(failed, PatternError):
        where, _, what = str(failed).partition(": ")
        return refuse("rules-file", where, what)
    frames = traceback.extract_tb(failed.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), 1)
    return refuse("rules-file", f"{path}:{line}", f"{type(failed).__name__}: {failed}")


def rule_names(rules: Sequence[AnyRule]) -> tuple[str, ...]:
    """Names of rules, in order."""
    return tuple(rule.name for rule in rules)
