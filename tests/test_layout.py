"""House rules that a machine can hold: where tests stand, what no committed file may contain, what documents promise."""

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

WITHOUT_TEST: Final = {
    "__main__.py": "calls the command line, which tests/test_cli.py runs as a process",
    "http2/events.py": "plain values, which tests/http2/test_connection.py compares with what a connection returns",
    "protocol/events.py": "plain values, which every dialogue of tests/protocol/test_session.py passes to the session",
}
"""Modules without behaviour of their own to test, or tested elsewhere: the reason, and where. Better than a stub."""

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


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_every_folder_says_what_lives_there(folder: Path) -> None:
    init = folder / "__init__.py"
    assert init.exists(), f"{name_of(folder)} has no __init__.py"
    said = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
    assert said, f"{name_of(init)}: say what lives here, and what does not"


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

PROSE_COLUMNS: Final = 120
README_LINES: Final = 150


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


def test_paths_named_in_documents_exist() -> None:
    missing = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        named = re.findall(
            r"`((?:extproc(?!/v1)|envoy|docs|bench|tests|gateway-api|requirements|scripts)/[\w./-]*\w)`", text
        )
        inside = re.findall(
            r"`((?:edge|http2|pool|prefix|protocol|request|routing|config|sim)/[\w/-]*\w(?:\.py)?)`", text
        )
        missing += [f"{name_of(path)}: {name}" for name in named if not (ROOT / name).exists()]
        # Design and ADRs name modules as the code does, from the package on.
        missing += [f"{name_of(path)}: {name}" for name in inside if not _of_the_package(name)]
    assert missing == []


PLANNED: Final = {"edge/sharing", "edge/kv_events"}
"""Folders that docs/develop/design.md reserves for what comes."""


def _of_the_package(name: str) -> bool:
    return name in PLANNED or (PACKAGE / name).exists() or (ROOT / "tests" / name).exists()


def test_prose_wraps() -> None:
    """Outside tables, code, headings, comments and lines that hold one link or image."""
    long = []
    for path in documents():
        text = without_code(path.read_text(encoding="utf-8"))
        for line in text.splitlines():
            free = re.match(r"\s*(?:\||#|<!--|    )|\s*(?:[-*] )?!?\[[^\]]*\]\([^)]*\)\S*$", line)
            if len(line) > PROSE_COLUMNS and not free:
                long.append(f"{name_of(path)}: {line[:60]} ...")
    assert long == [], f"wrap prose at {PROSE_COLUMNS} columns"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_what_troubleshooting_quotes_exists() -> None:
    """Texts of the log and of `/readyz`, and metrics: whoever changes one changes the page."""
    page = without_code((ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"))
    metrics = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    source = "\n".join(module.read_text(encoding="utf-8") for module in MODULES)
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # literals that go on in the next line
    gone = []
    for quoted in (" ".join(match.split()) for match in re.findall(r"`([^`]+)`", page)):
        if quoted.startswith("extproc_"):
            gone += [quoted] if re.match(r"\w+", quoted)[0] not in metrics else []  # type: ignore[index]
        elif len(quoted.split()) > 2 and not quoted.startswith(("curl", "extproc ", "port ")) and quoted not in source:
            gone.append(quoted)
    assert gone == [], "docs/troubleshooting.md quotes what is not in extproc/ any more"


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


# Docstrings

FIGURE: Final = re.compile(r"\d\s?(?:us|ns|µs)\b|\bcosts?\b[^.;]*\d\s?ms\b|\d\s?ms\b[^.;]*\bcosts?\b", re.IGNORECASE)
"""A time that was measured: it belongs into docs/develop/cost.md, where it is measured again."""


def docstrings(module: Path) -> list[str]:
    """Every text that stands alone: docstrings, and what is said of attributes and constants."""
    statements = [
        node for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))) if isinstance(node, ast.Expr)
    ]
    values = [statement.value for statement in statements]
    return [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_docstrings_have_no_figures_that_rot(module: Path) -> None:
    found = [said for said in docstrings(module) if FIGURE.search(said)]
    assert found == []
