"""Rule sets by name, and rules from a user's file: a file runs only when it is named."""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import MappingProxyType, ModuleType

from stepgraph.errors import InputError, did_you_mean, refuse
from stepgraph.ir.rewriting import Rewrite
from stepgraph.passes.fusing.grouping import AnyRule
from stepgraph.passes.fusing.pattern import FusionRule
from stepgraph.passes.fusing.recorder import PatternError
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

    A rule of a file takes the place of one of a set that has its name. Rewrites of a file come along, so that whoever tries to fuse by one is told what it is for. Raises: InputError for
    an unknown set, a missing file, a file that fails (with its line), a rule that is not there, two of one name.
    """
    found: dict[str, AnyRule] = {}
    for rule in (rule for part in text.split(",") for rule in _rules(part.strip())):
        if found.get(rule.name) in BASIC:
            del found[rule.name]
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
    if part.endswith(":"):
        raise refuse("fusions", "--fusions", f"{part!r} names no rule", "file.py, or file.py:rule+rule")
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
    sys.modules[module.__name__] = module  # where dataclasses and their like look for it
    try:
        text = path.read_bytes()
        _require_one_of_each(path, ast.parse(text, str(path)))
        code = compile(text, str(path), "exec", dont_inherit=True)
        with redirect_stdout(sys.stderr):
            exec(code, module.__dict__)  # noqa: S102 - the user named it to be run
    except InputError:
        raise
    except (Exception, SystemExit) as failed:
        raise broken(path, failed) from failed
    return _rules_in(module, path)


def _require_one_of_each(path: Path, tree: ast.Module) -> None:
    """Refuse a second rule under a name of the file: Python would forget the first without a word."""
    seen: dict[str, int] = {}
    for found in tree.body:
        if isinstance(found, ast.FunctionDef) and any(map(_is_fusion, found.decorator_list)):
            if found.name in seen:
                what = f"a second rule is called {found.name!r}; the first is in line {seen[found.name]}"
                raise refuse("rules-file", f"{path}:{found.lineno}", what, "one rule per name", "rename one")
            seen[found.name] = found.lineno


def _is_fusion(decorator: ast.expr) -> bool:
    """Whether a decorator is `fusion`, whatever stands before or behind the name."""
    named = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(named).rpartition(".")[2] == "fusion"


def _rules_in(module: ModuleType, path: Path) -> dict[str, AnyRule]:
    rules: dict[str, AnyRule] = {}
    for rule in vars(module).values():
        if isinstance(rule, FusionRule | Rewrite) and rules.setdefault(rule.name, rule) is not rule:
            fix = "rename one; a check goes under the rule's own name: @rule.check, def rule(m)"
            raise refuse("rules-file", str(path), f"two rules are called {rule.name!r}", "one rule per name", fix)
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
