"""Keys that a family does not read, but that look like, or mean in other families, one that it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from stepgraph.errors import Problem
from stepgraph.lowering.configkeys import Keys
from stepgraph.lowering.families import ExpertKeys, Family
from stepgraph.lowering.unsupported import FEATURE_KEYS, FEATURES

CLOSE = 0.85
"""How alike two keys are before one counts as a slip of the other: a letter or two of a dozen."""

MOST_KEYS, LONGEST_KEY = 500, 60
SAMPLING_DEFAULT = 50
"""Older files carry `top_k` as a setting of text generation, mostly with this value."""

EXPERT_NAMES = MappingProxyType[str, tuple[str, ...]](
    {
        "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "top_k": (
            *("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
            *("moe_topk", "moe_top_k", "top_k"),
        ),
        "width": ("moe_intermediate_size",),
        "shared": ("n_shared_experts", "num_shared_experts"),
    }
)
"""What families call the number of experts, of those that a token visits, an expert's width, the shared ones."""

EXPERT_FEATURE_KEYS = frozenset(key for row in FEATURES if row.code == "config-experts" for key in row.keys)


def namesakes(family: Family, values: Mapping[str, object], known: frozenset[str]) -> dict[str, str]:
    """What each unread key of a file probably means: key -> the family's own key.

    A name that other families use for the same thing comes first, then a name that is almost the family's. known: keys
    that are read or already spoken for.
    """
    shown = [key for key in list(values)[:MOST_KEYS] if isinstance(key, str) and len(key) <= LONGEST_KEY]
    given = [key for key in shown if values[key]]
    found = {key: _own_name(family, key) for key in given if key not in family.keys_read}
    close = {key: _close(family, key) for key, own in found.items() if not own and key not in known}
    meant = {**found, **close}
    return {key: own for key, own in meant.items() if own and not _is_sampling(key, values[key])}


def expert_problems(family: Family, keys: Keys) -> list[Problem]:
    """A problem for each key that means experts elsewhere and that this family, which has experts, does not read.

    A required key that is missing says the same by itself, naming what the file has instead.
    """
    if family.experts is None:
        return []
    unread = sorted(EXPERT_FEATURE_KEYS - family.keys_read)
    return [problem for key in unread if keys.values.get(key) for problem in _expert_problem(family, keys, key)]


def _expert_problem(family: Family, keys: Keys, key: str) -> Iterable[Problem]:
    own = _own_name(family, key)
    if not own:
        what = f"{key} is set, which {family.model_type} models do not read"
        yield Problem("config-experts", keys.where(key), what, fix=f"set {key} to null to leave it out")
    elif keys.values.get(own) is not None:
        what = f"{key} is set: {family.model_type} calls it {own}, which is set too"
        yield Problem("config-experts", keys.where(key), what, fix=f"keep {own} alone")
    elif key in EXPERT_NAMES["shared"]:
        what = f"{key} is set: {family.model_type} calls it {own}"
        yield Problem("config-experts", keys.where(key), what, fix=f"rename it to {own}")


def _own_name(family: Family, key: str) -> str:
    """What the family calls the thing that the key means elsewhere; "" when it has no such thing."""
    role = next((role for role, names in EXPERT_NAMES.items() if key in names), "")
    return next(iter(_names(family.experts, role)), "") if role and family.experts else ""


def _names(experts: ExpertKeys, role: str) -> tuple[str, ...]:
    if role == "shared":
        return experts.shared_count or experts.shared_width
    return {"experts": experts.experts, "top_k": experts.top_k, "width": experts.width}[role]


def _close(family: Family, key: str) -> str:
    return next(iter(get_close_matches(key, sorted(family.keys_read), n=1, cutoff=CLOSE)), "")


def _is_sampling(key: str, value: object) -> bool:
    return key == "top_k" and (value == SAMPLING_DEFAULT or not isinstance(value, int))


def spoken_for(families: Iterable[Family]) -> frozenset[str]:
    """Keys that some family knows, or that ask for a feature: no slips of others."""
    return FEATURE_KEYS.union(*(row.keys_read | row.inert_keys for row in families))
