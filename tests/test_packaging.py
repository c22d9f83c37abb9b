"""What is installed is what stands in the repository: packages, data files, imports, start-up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
HEAVY_FOR_HELP = {
    "numpy",
    "networkx",
    "pandas",
    "scipy",
    "matplotlib",
    "pint",
    "pydantic",
    "rich",
    "cattrs",
    "graphviz",
}
HEAVY_FOR_PREDICT = {"pandas", "scipy", "matplotlib", "pint", "pydantic", "networkx", "graphviz"}
PREDICT = ("predict", "llama-3-8b", "--target", "h100", "--json")


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def mapped_folders() -> dict[str, str]:
    """The folders that stand at the top and are imported below stepgraph: {"ir": "stepgraph.ir", ...}."""
    mapping: dict[str, str] = pyproject()["tool"]["setuptools"]["package-dir"]
    return {folder: package for package, folder in mapping.items()}


def package_files() -> list[tuple[Path, Path]]:
    """Every file below a package's folder: (path in the repository, path in the installed package)."""
    found: list[tuple[Path, Path]] = []
    for top, package in {"stepgraph": "stepgraph", **mapped_folders()}.items():
        for folder, names, files in os.walk(ROOT / top):  # does not follow the links
            names[:] = [name for name in names if name != "__pycache__"]
            place = Path(folder)
            inside = Path(*package.split(".")) / place.relative_to(ROOT / top)
            found += [
                (place / file, inside / file)
                for file in files
                if not file.startswith(".") and not is_link(place / file)
            ]
    return found


def is_link(path: Path) -> bool:
    """Whether stepgraph/<name> stands for ../<name>; where links are not supported, git writes a file with the target."""
    if path.parent != ROOT / "stepgraph" or path.name not in mapped_folders():
        return False
    target = path.readlink() if path.is_symlink() else Path(path.read_text(encoding="utf-8").strip())
    return target == Path("..", path.name)


def run(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with `words` in `cwd`; what it inherits from the environment does not include PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


# The lists in pyproject.toml


def test_packages_are_the_folders_with_an_init() -> None:
    # A folder that is missing from the list works in an editable install and is silently absent from the wheel.
    found = [".".join(inside.parent.parts) for _, inside in package_files() if inside.name == "__init__.py"]
    assert sorted(pyproject()["tool"]["setuptools"]["packages"]) == sorted(found)


def test_the_links_are_the_mapped_folders_and_ruff_leaves_them_out() -> None:
    links = {path.name for path in (ROOT / "stepgraph").iterdir() if is_link(path)}
    assert links == set(mapped_folders())
    assert sorted(pyproject()["tool"]["ruff"]["extend-exclude"]) == sorted(f"stepgraph/{link}" for link in links)


def test_the_readme_tells_newcomers_what_ci_runs() -> None:
    (line,) = [
        line for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines() if "test_command=" in line
    ]
    command = line.removeprefix('test_command="').removesuffix('"')
    assert command in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


# The wheel: built and installed once, by one worker


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: building writes build/ and *.egg-info beside pyproject.toml."""
    copy, out = tmp_path_factory.mktemp("tree") / "copy", tmp_path_factory.mktemp("wheel")
    leave_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=leave_out)
    pip = ("-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(out), str(copy))
    done = run(*pip, cwd=out)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, to stand in front on the path."""
    folder = tmp_path_factory.mktemp("site")
    done = run("-m", "pip", "install", "-q", "--no-index", "--no-deps", "-t", str(folder), str(wheel), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A user's project with folders named like ours; importing any of them by accident ends the run."""
    for name in mapped_folders():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the {name}/ of the user was imported')\n")
    return tmp_path


@pytest.mark.xdist_group("wheel")
def test_the_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    ours = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert {name.split("/")[0] for name in ours} == {"stepgraph"}
    assert ours == {inside.as_posix() for _, inside in package_files()}
    assert "stepgraph/py.typed" in ours


@pytest.mark.xdist_group("wheel")
def test_the_installed_package_is_the_one_under_test(site: Path, users_folder: Path) -> None:
    code = (
        "import stepgraph, stepgraph.ir, stepgraph.passes; print(stepgraph.__file__, stepgraph.ir.__file__, sep='\\n')"
    )
    done = run("-c", code, cwd=users_folder, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    package = site / "stepgraph"
    assert done.stdout.splitlines() == [str(package / "__init__.py"), str(package / "ir" / "__init__.py")]


@pytest.mark.xdist_group("wheel")
@pytest.mark.parametrize("safe_path", [(), ("-P",)], ids=["folder-on-path", "safe-path"])
def test_help_works_beside_a_users_own_folders(site: Path, users_folder: Path, safe_path: tuple[str, ...]) -> None:
    done = run(*safe_path, "-m", "stepgraph", "--help", cwd=users_folder, PYTHONPATH=str(site))
    assert (done.returncode, done.stderr) == (0, "")
    assert "predict" in done.stdout


@pytest.mark.xdist_group("wheel")
@pytest.mark.parametrize("safe_path", [(), ("-P",)], ids=["folder-on-path", "safe-path"])
def test_predict_works_beside_a_users_own_folders(site: Path, users_folder: Path, safe_path: tuple[str, ...]) -> None:
    done = run(*safe_path, "-m", "stepgraph", *PREDICT, cwd=users_folder, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step_time_s"] > 0


# Imports


@pytest.mark.parametrize("folder", sorted(mapped_folders()))
def test_a_top_folder_refuses_its_bare_name(folder: str) -> None:
    done = run("-c", f"import {folder}", cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: import stepgraph.{folder} instead")


def modules_after(words: tuple[str, ...], folder: Path) -> set[str]:
    """The top-level modules that are loaded once `stepgraph <words>` has ended well."""
    code = f"""
import json, pathlib, runpy, sys
sys.argv = ["stepgraph", *{words!r}]
try:
    runpy.run_module("stepgraph", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
pathlib.Path("modules.json").write_text(json.dumps([*sys.modules]))
"""
    done = run("-c", code, cwd=folder)
    assert done.returncode == 0, done.stderr
    loaded = json.loads((folder / "modules.json").read_text())
    return {name.split(".")[0] for name in loaded}


@pytest.mark.parametrize(
    ("words", "heavy"), [(("--help",), HEAVY_FOR_HELP), (PREDICT, HEAVY_FOR_PREDICT)], ids=["help", "predict"]
)
def test_import_budget(words: tuple[str, ...], heavy: set[str], tmp_path: Path) -> None:
    loaded = modules_after(words, tmp_path)
    assert "stepgraph" in loaded
    assert loaded & heavy == set()
