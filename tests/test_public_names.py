"""What `import extproc` offers: the library's names, each of them only when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import extproc


@pytest.mark.parametrize("name", extproc.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(extproc, name).__module__.startswith("extproc.")
    assert name in dir(extproc)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        extproc.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_imports_none_of_them() -> None:
    code = "import sys, extproc; print(*[name for name in sys.modules if name.startswith(('extproc.', 'msgspec'))])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == []
