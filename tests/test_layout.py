"""House rules that a machine can hold: where tests stand, how long modules are, what no committed file may contain."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "extproc"
MODULES: Final = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
FOLDERS: Final = sorted({path.parent for path in MODULES})
MOST_LINES: Final = 600

WITHOUT_TEST: Final = {
    "__main__.py": "calls the command line, which tests/test_cli.py runs as a process",
}
"""Modules that have no test file of their own, and why."""

# Spelled in pieces, so that this file passes its own test.
MACHINE_PATHS: Final = re.compile("|".join(rf"/{name}/(?!x\b)" for name in ("work/main", "work/shared", "home", "Users", "root")))  # fmt: skip
REGISTRIES: Final = re.compile("|".join(("pypi" + r"\.org", "python" + r"hosted\.org", "registry" + r"\.npmjs", "arti" + "factory", "index" + "-url")))  # fmt: skip
BINARY: Final = {".png", ".jpg", ".gif", ".pdf", ".whl", ".gz", ".so", ".pyc"}


def committed() -> list[Path]:
    """Every file that is committed or would be; without git (an unpacked archive) every file but what `make` makes."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(argv, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


def mirrored(module: Path) -> Path:
    inside = module.relative_to(PACKAGE)
    return ROOT / "tests" / inside.parent / f"test_{inside.name}"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_has_its_test_file() -> None:
    missing = [
        name_of(module)
        for module in MODULES
        if module.name != "__init__.py"
        and str(module.relative_to(PACKAGE)) not in WITHOUT_TEST
        and not mirrored(module).exists()
    ]
    assert missing == [], "write tests/**/test_X.py for each extproc/**/X.py"


def test_the_list_of_exceptions_is_no_longer_than_it_must_be() -> None:
    for name in WITHOUT_TEST:
        assert (PACKAGE / name).exists()
        assert not mirrored(PACKAGE / name).exists()


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_modules_are_short(module: Path) -> None:
    lines = len(module.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{lines} lines: divide it"


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_every_folder_says_what_lives_there(folder: Path) -> None:
    init = folder / "__init__.py"
    assert init.exists(), f"{name_of(folder)} has no __init__.py"
    said = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
    assert said, "two or three sentences: what lives here, and what does not"
    assert said.count(".") >= 2


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_names_say_something(module: Path) -> None:
    assert not re.search("util|manager|helper|misc|common", module.stem)


def test_committed_files_are_text_and_name_no_machine() -> None:
    wrong = []
    for path in committed():
        assert path.suffix not in BINARY, f"{name_of(path)}: a binary file"
        text = path.read_text(encoding="utf-8")
        wrong += [f"{name_of(path)}: {found.group()}" for found in MACHINE_PATHS.finditer(text)]
        wrong += [f"{name_of(path)}: {found.group()}" for found in REGISTRIES.finditer(text)]
    assert wrong == []


# Prose


def documents() -> list[Path]:
    return [path for path in committed() if path.suffix == ".md"]


def anchor(heading: str) -> str:
    """How GitHub makes an anchor of a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return kept.replace(" ", "-")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def test_links_of_documents_resolve() -> None:
    broken = []
    for path in documents():
        text = without_code(path.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, fragment = target.partition("#")
            found = (path.parent / file).resolve() if file else path
            if not found.exists():
                broken.append(f"{name_of(path)}: {target}")
            elif fragment and found.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", without_code(found.read_text(encoding="utf-8")), flags=re.MULTILINE)
                if fragment not in map(anchor, headings):
                    broken.append(f"{name_of(path)}: {target}")
    assert broken == []


def test_paths_named_in_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:extproc|envoy|docs|bench|tests|gateway-api|requirements|scripts)/[\w./-]+)`", readme)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_make_targets_named_in_documents_exist() -> None:
    targets = set(
        re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    unknown = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"(?:`|^|\n)make ([a-z][a-z0-9-]*)", text)
        unknown += [f"{name_of(path)}: make {name}" for name in named if name not in targets]
    assert unknown == []
