"""From a name or a path to the raw keys of a config.json: everything that can be wrong with a *file*."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from stepgraph.errors import InputError, Problem, refuse

CONFIGS = Path(__file__).with_name("configs")
MAX_BYTES = 16 * 2**20  # a config.json has a few kilobytes; what is larger is a weight file or a device


def carried_names() -> tuple[str, ...]:
    """The names of the configs that come with the package, sorted."""
    return tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))


def locate(path_or_name: str | os.PathLike[str]) -> Path:
    """The file that a carried name (in any case) or a path means; a carried name comes first.

    Raises: InputError (config-missing) for an empty name, which would otherwise mean the working directory.
    """
    name = os.fspath(path_or_name)
    if not name.strip():
        raise refuse("config-missing", "model", "the name is empty", "a carried name or the path of a config.json")
    return CONFIGS / f"{name.lower()}.json" if name.lower() in carried_names() else Path(name)


def read_config(path: Path) -> dict[str, object]:
    """The top-level keys of a JSON file. NaN and Infinity are read, as the files in use contain them.

    Raises: InputError: config-missing, config-directory, config-unreadable, config-too-large, config-not-utf8,
    config-empty, config-json, config-too-deep, config-not-object, config-duplicate-key.
    """
    text = _decode(_read_bytes(path), path)
    if not text.strip():
        raise refuse("config-empty", str(path), "the file is empty", fix="download or write it again")
    repeated: list[str] = []
    config = _parse(text, path, repeated)
    if not isinstance(config, dict):
        found = "a list" if isinstance(config, list) else "a single value"
        raise refuse("config-not-object", str(path), f"the file holds {found}", "a JSON object: { ... }")
    if repeated:
        raise InputError(_repeated_problem(path, key) for key in dict.fromkeys(repeated))
    return config


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _missing(path) from None
    except IsADirectoryError:
        raise _directory(path) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise refuse("config-unreadable", ascii(str(path))[1:-1], f"cannot be read: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise refuse("config-too-large", str(path), f"more than {MAX_BYTES // 2**20} MiB", "a config.json")
    return raw


def _decode(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte {error.start})"
        raise refuse("config-not-utf8", str(path), what, "a config.json in UTF-8", "save it as UTF-8") from None


def _parse(text: str, path: Path, repeated: list[str]) -> object:
    def collect(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen: dict[str, object] = {}
        for key, value in pairs:
            if key in seen:
                repeated.append(key)
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=collect)
    except json.JSONDecodeError as error:
        raise _broken(error, text, path) from None
    except RecursionError:
        raise refuse("config-too-deep", str(path), "objects or lists are nested too deeply", "a config.json") from None
    except ValueError:  # the interpreter's own limit on the digits of an integer
        raise refuse("config-json", str(path), "a number has thousands of digits", "a config.json") from None


def _broken(error: json.JSONDecodeError, text: str, path: Path) -> InputError:
    place = f"line {error.lineno}, column {error.colno}"
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
        return refuse("config-json", str(path), f"the JSON ends too early, at {place}", fix="download it again")
    shown = text[error.pos : error.pos + 20].split("\n")[0]
    what = f"not valid JSON at {place}: {error.msg} (near {shown!r})"
    fix = "correct that line: quotes, commas and braces are the usual slips"
    return refuse("config-json", str(path), what, fix=fix)


def _repeated_problem(path: Path, key: str) -> Problem:
    return Problem("config-duplicate-key", f"{path}:{key[:60]}", "the key appears twice in one object", fix="keep one")


def _missing(path: Path) -> InputError:
    names = carried_names()
    near = get_close_matches(path.name.lower().removesuffix(".json"), names, n=2, cutoff=0.5)
    near += [str(path.parent / name) for name in get_close_matches(path.name, _json_names(path.parent), n=2)]
    fix = f"did you mean {' or '.join(near)}? " if near else ""
    fix += f"carried models: {', '.join(names)}; nothing is downloaded"
    expected = "a carried model or the path of a config.json"
    return refuse("config-missing", str(path), "no such model or file", expected, fix)


def _directory(path: Path) -> InputError:
    inside = path / "config.json"
    fix = f"name the file: {inside}" if inside.is_file() else _files_inside(path)
    return refuse("config-directory", str(path), "this is a directory", "the path of a config.json", fix)


def _files_inside(path: Path) -> str:
    names = sorted(_json_names(path))[:3]
    shown = f"; it has {', '.join(names)}" if names else ""
    return f"there is no config.json inside{shown}"


def _json_names(folder: Path) -> Iterable[str]:
    try:
        return [entry.name for entry in folder.glob("*.json")]
    except OSError:
        return []
