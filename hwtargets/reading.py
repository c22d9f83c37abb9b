"""Target files -> `Target` records: by name, or from a file of the user's."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from stepgraph.errors import InputError, Problem, did_you_mean, refuse
from stepgraph.hwtargets.links import DEFAULT_ALPHA
from stepgraph.hwtargets.schema import FAMILIES, KINDS, TEXTS, checked_figure, required
from stepgraph.hwtargets.target import (
    Compute,
    EtaConstants,
    Figure,
    GemmShapeLaw,
    Hbm,
    Launch,
    LinkLevel,
    RoleEtas,
    SdpaLaw,
    SdpaLaws,
    Target,
)

_DATA = Path(__file__).with_name("data")
_LARGEST_FILE_BYTES = 2**20
_SDPA_LAWS = ("fwd_64", "fwd_128", "dx")


def target_names() -> tuple[str, ...]:
    """Names of the targets that come with the package, in alphabetical order."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.toml")))


def load_target(name_or_path: str | os.PathLike[str]) -> Target:
    """The target of that name (in any case), or the one that a file describes.

    A file with `base = "h100"` holds only the figures that differ from that target's.
    Raises: InputError with every problem of the file, or with a suggestion for an unknown name.
    """
    text = os.fspath(name_or_path)
    if text.lower() in target_names():
        return _load_file(_DATA / f"{text.lower()}.toml")
    if text.lower().endswith(".toml") or (text.strip() and _exists(text)):
        return _load_file(Path(text))
    names = target_names()
    expected = f"one of {', '.join(names)}, or the path of a .toml file"
    raise refuse("target-unknown", "target", f"unknown target {text!r}", expected, did_you_mean(text.lower(), names))


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # a name that is too long for the file system is no file
        return False


def _load_file(path: Path) -> Target:
    document = _document(path)
    problems: list[Problem] = []
    texts, base = _texts(document, path, problems)
    leaves = dict(_leaves(document, "", path, problems))
    inherited = dict(base.figures()) if base else {}
    figures = inherited | _figures(leaves, path, problems)
    if base or "base" not in document:  # behind an unknown base everything would seem missing
        problems.extend(_missing(leaves.keys() | inherited.keys(), path))
    if problems:
        raise InputError(problems)
    return _target(texts["name"], texts["title"], figures)


def _document(path: Path) -> dict[str, object]:
    """The file as TOML says it. Raises: InputError where it cannot be read or is not TOML."""
    if path.is_dir():
        raise refuse("target-file", str(path), "this is a directory", "a .toml file")
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise refuse("target-file", str(path), what, "a readable .toml file") from None
    if len(content) > _LARGEST_FILE_BYTES:
        raise refuse("target-file", str(path), "is larger than 1 MiB", "a target file")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise refuse("target-toml", str(path), f"is not valid TOML: {error}", "a TOML file") from None


def _texts(document: dict[str, object], path: Path, problems: list[Problem]) -> tuple[dict[str, str], Target | None]:
    """Name, title and the base target; a name that is left out is the file's, a title with a base says what it is."""
    texts: dict[str, str] = {"name": path.stem}
    for key in TEXTS:
        value = document.get(key)
        if isinstance(value, str) and value.strip():
            texts[key] = value
        elif key in document:
            problems.append(Problem("target-text", f"{path}: {key}", f"found {value!r}", "a text that is not empty"))
    base = _base(texts["base"], path, problems) if "base" in texts else None
    if base:
        texts.setdefault("title", f"{base.title}, changed by {path.name}")
    elif "title" not in texts and not {"title", "base"} & document.keys():
        problems.append(Problem("target-missing", f"{path}: title", "not given", "what the target is called"))
    return texts, base


def _base(name: str, path: Path, problems: list[Problem]) -> Target | None:
    names = target_names()
    if name.lower() in names:
        return load_target(name)
    expected = f"one of {', '.join(names)}"
    problems.append(
        Problem("target-base", f"{path}: base", f"unknown target {name!r}", expected, did_you_mean(name.lower(), names))
    )
    return None


def _figures(leaves: Mapping[str, object], path: Path, problems: list[Problem]) -> dict[str, Figure]:
    kinds = dict(KINDS)
    figures: dict[str, Figure] = {}
    for key, raw in leaves.items():
        figure, wrong = checked_figure(kinds[key], raw, f"{path}: {key}")
        problems.extend(wrong)
        if figure:
            figures[key] = figure
    return figures


def _leaves(
    table: dict[str, object], section: str, path: Path, problems: list[Problem]
) -> Iterator[tuple[str, object]]:
    """(dotted key, raw value) of every figure; an unknown key becomes a problem."""
    known, kinds = _known(section), dict(KINDS)
    for name, raw in table.items():
        key = f"{section}{name}"
        if name not in known:
            hint = did_you_mean(name, known)
            problems.append(Problem("target-key", f"{path}: {key}", f"unknown key {name!r}", "", hint))
        elif key in kinds:
            yield key, raw
        elif isinstance(raw, dict):
            yield from _leaves(raw, f"{key}.", path, problems)
        elif key not in TEXTS:
            problems.append(Problem("target-key", f"{path}: {key}", f"found {raw!r}", f"a table [{key}]"))


def _known(section: str) -> frozenset[str]:
    """Names that may stand in a section ("eta." -> constant, shape, sdpa_shape)."""
    inside = frozenset(key.removeprefix(section).split(".")[0] for key, _ in KINDS if key.startswith(section))
    return inside if section else inside | frozenset(TEXTS)


def _missing(present: AbstractSet[str], path: Path) -> Iterator[Problem]:
    fix = "add it, or name a similar target with base = ..."
    for key, kind in KINDS:
        if key not in present and required(key, present):
            yield Problem("target-missing", f"{path}: {key}", "not given", kind.value, fix)


def _target(name: str, title: str, read: Mapping[str, Figure]) -> Target:
    """The records over figures that are complete; alpha has a default law, and so a default figure."""
    defaults = {f"{level}.alpha": DEFAULT_ALPHA for level in ("scale_up", "nic")}
    figures = {key: read.get(key) or defaults[key] for key, _ in KINDS if key in read or key in defaults}
    number = {key: figure.value for key, figure in figures.items() if isinstance(figure.value, float)}
    dtypes = (key for key in number if key.startswith("peak_flops_per_s."))
    families = (family for family in FAMILIES if f"eta.constant.{family}.fwd" in number)
    return Target(
        name=name,
        title=title,
        peaks_flops_per_s=tuple((key.rpartition(".")[2], number[key]) for key in dtypes),
        hbm=Hbm(**_section(number, "hbm")),
        compute=Compute(sms=int(number["compute.sms"]), l2_bytes=number["compute.l2_bytes"]),
        topk_bytes_per_s=number["topk.bytes_per_s"],
        scale_up=_level(figures, number, "scale_up", int(number["scale_up.domain"])),
        nic=_level(figures, number, "nic", None),
        launch=Launch(**_section(number, "launch")),
        eta_constant=EtaConstants(
            gemm=number["eta.constant.gemm"],
            families=tuple((family, _roles(number, f"eta.constant.{family}")) for family in families),
        ),
        eta_shape=_gemm_law(number),
        eta_sdpa_shape=SdpaLaws(*(SdpaLaw(**_section(number, f"eta.sdpa_shape.{law}")) for law in _SDPA_LAWS)),
        sourced=tuple(figures.items()),
    )


def _section(number: Mapping[str, float], section: str) -> dict[str, float]:
    """The numbers that stand directly in a section, under their own names."""
    split = ((key.rpartition("."), value) for key, value in number.items())
    return {name: value for (head, _, name), value in split if head == section}


def _level(figures: Mapping[str, Figure], number: Mapping[str, float], section: str, domain: int | None) -> LinkLevel:
    alpha = figures[f"{section}.alpha"].value
    assert isinstance(alpha, tuple)  # checked_figure gives break points for this kind
    rates = {key: value for key, value in _section(number, section).items() if key != "domain"}
    return LinkLevel(**rates, alpha=alpha, domain=domain)


def _roles(number: Mapping[str, float], section: str) -> RoleEtas:
    """Three roles; attention has no dw of its own, its backward is one kernel."""
    roles = _section(number, section)
    return RoleEtas(roles["fwd"], roles["dx"], roles.get("dw", roles["dx"]))


def _gemm_law(number: Mapping[str, float]) -> GemmShapeLaw:
    constants = _section(number, "eta.shape")
    largest_tile = int(constants.pop("largest_tile"))
    return GemmShapeLaw(**constants, largest_tile=largest_tile, layout=_roles(number, "eta.shape.layout"))
