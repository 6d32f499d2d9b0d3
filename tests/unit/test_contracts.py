"""Rules for the code base that no linter checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

import pytest

import vidspec_service

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_PATH = re.compile(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`")
_OURS = ("service", "models", "tests", "docs", "deploy", "examples")
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def _modules_after_importing(*names: str) -> set[str]:
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "name", ["vidspec_service.api.app", "vidspec_service.engine.frontend.local_engine", "vidspec_service.cli.serve"]
)
def test_the_api_process_imports_neither_torch_nor_transformers(name: str) -> None:
    assert not {"torch", "transformers", "av"} & _modules_after_importing(name)


def test_what_every_worker_needs_is_imported_before_workers_are_forked() -> None:
    name = "vidspec_service.engine.worker_main"
    loaded = _modules_after_importing(f"{name}; {name}.import_libraries(); import gc; assert gc.isenabled()")
    assert {"transformers.modeling_utils", "numba.np.arrayobj", "vidspec_models.backends.cpu.step"} <= loaded


def test_asking_a_server_needs_neither_its_settings_nor_its_models() -> None:
    loaded = _modules_after_importing("vidspec_service.__main__", "vidspec_service.cli.chat")
    assert not {"pydantic", "numpy", "httpx", "fastapi"} & loaded


@pytest.mark.parametrize("name", ["service", "models"])
def test_no_generic_import_name_is_ours(name: str) -> None:
    assert "vidspec" not in packages_distributions().get(name, ())


def test_the_source_roots_hold_one_uniquely_named_package_each() -> None:
    packages = {path.parent.relative_to(ROOT) for path in ROOT.glob("*/*/__init__.py")}
    packages = {package for package in packages if package.parts[0] != "tests"}
    assert packages == {Path("service/vidspec_service"), Path("models/vidspec_models")}


def test_the_console_script_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="vidspec")
    assert script.value == "vidspec_service.__main__:main"


def test_the_changelog_describes_this_version() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == vidspec_service.__version__


def test_the_readme_fits_in_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_link_to_files_that_exist(page: Path) -> None:
    missing = [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_pages_name_files_and_folders_that_exist() -> None:
    ours = [f"{path}/" if path.is_dir() else str(path) for folder in _OURS for path in (ROOT / folder).rglob("*")]
    ours += [f"{ROOT / folder}/" for folder in _OURS]
    named = {(page.name, name) for page in PAGES for name in _PATH.findall(page.read_text())}
    assert len(named) > 100
    assert sorted(one for one in named if not any(path.endswith(f"/{one[1]}") for path in ours)) == []


def test_the_way_of_a_request_leads_through_functions_that_exist() -> None:
    """A name in `docs/one-request.md` is defined in the last file named before it."""
    found, defined = set[str](), set[str]()
    for name in re.findall(r"`([\w./]+)`", (ROOT / "docs/one-request.md").read_text()):
        if name.endswith(".py"):
            (path,) = [path for root in ("service", "models") for path in (ROOT / root).glob(f"*/{name}")]
            defined = _defined(ast.parse(path.read_text()).body)
        else:
            assert name in defined, f"{name} is not in {path}"
            found.add(name)
    assert len(found) > 80


def _defined(body: Sequence[ast.stmt], holder: str = "") -> set[str]:
    """The functions, classes and methods in `body`."""
    found = set[str]()
    for each in body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(holder + each.name)
        if isinstance(each, ast.ClassDef):
            found |= _defined(each.body, f"{each.name}.")
    return found


def test_every_dependency_has_its_reason_written_down() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = sum(project["optional-dependencies"].values(), project["dependencies"])
    written = re.findall(r"`([\w-]+)", (ROOT / "docs/dependencies.md").read_text())
    assert {re.split(r"[^\w-]", requirement)[0] for requirement in required} - set(written) == set()
