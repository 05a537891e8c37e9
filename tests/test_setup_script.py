"""What `scripts/setup` says on a machine that lacks something; that it works where nothing is lacking is CI's own run."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHELL = shutil.which("sh") or "sh"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which nothing was installed, and a path on which only what `setup` needs of the system is found."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("dirname", "cat", "cksum", "rm"):
        found = shutil.which(tool)
        assert found
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def python(checkout: Path, script: str) -> None:
    """Put a python3 on the path that behaves as asked."""
    path = checkout / "bin" / "python3"
    path.write_text(f"#!{SHELL}\n{script}\n")
    path.chmod(0o755)


def setup(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(checkout / "bin")}
    argv = [SHELL, str(checkout / "scripts" / "setup"), *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param(None, ["no python3 found", "apt-get install -y python3 python3-venv"], id="none"),
        pytest.param(
            'case $1 in --version) echo "Python 3.9.2";; *) exit 1;; esac',
            ["Python 3.9.2 is too old, 3.11 or newer is needed", "make PYTHON="],
            id="old",
        ),
        pytest.param(
            "case $2 in *ensurepip*) exit 1;; *) exit 0;; esac", ["apt-get install -y python3-venv"], id="without venv"
        ),
    ],
)
def test_a_python_that_will_not_do_is_named_with_the_remedy(
    checkout: Path, script: str | None, said: list[str]
) -> None:
    if script is not None:
        python(checkout, script)
    result = setup(checkout, "demo")
    assert result.returncode == 1
    for words in said:
        assert words in result.stderr
    assert not (checkout / ".venv").exists()


def test_an_unknown_set_is_refused(checkout: Path) -> None:
    result = setup(checkout, "everything")
    assert result.returncode == 2
    assert "unknown set 'everything': serve, demo or dev" in result.stderr


def test_what_is_installed_is_not_installed_again(checkout: Path) -> None:
    """The stamp holds: pip is not called, whatever it would do."""
    python(checkout, "exit 0")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    pip = checkout / ".venv" / "bin" / "pip"
    pip.write_text(f'#!{SHELL}\necho "$@" >>"{checkout}/called"\n')
    pip.chmod(0o755)
    first = setup(checkout, "serve")
    assert first.returncode == 0, first.stderr
    assert (checkout / "called").read_text().count("install") == 2
    assert setup(checkout, "serve").returncode == 0
    assert (checkout / "called").read_text().count("install") == 2
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert setup(checkout, "serve").returncode == 0
    assert (checkout / "called").read_text().count("install") == 4, "what decides has changed"
