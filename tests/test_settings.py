"""Settings from made-up environments."""

import re
from pathlib import Path

import pytest

from mpiddp import settings

pytestmark = pytest.mark.usefixtures("environ")


def test_values(environ):
    assert settings.pretended_nodes() is None
    assert settings.default_timeout_s() == 1800
    assert settings.debug_level() == "OFF"
    assert settings.takes_device_pointers() is None
    assert settings.deterministic() is False
    environ.setenv("MPIDDP_NODES", "0,0,1")
    environ.setenv("MPIDDP_TIMEOUT", "2.5")
    environ.setenv("MPIDDP_DEBUG", "info")
    environ.setenv("MPIDDP_CUDA_AWARE", "0")
    assert settings.pretended_nodes() == (0, 0, 1)
    assert settings.default_timeout_s() == 2.5
    assert settings.debug_level() == "INFO"
    assert settings.takes_device_pointers() is False
    for text, expected in (("", False), ("0", False), ("1", True)):
        environ.setenv("MPIDDP_DETERMINISTIC", text)
        assert settings.deterministic() is expected


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("NODES", settings.pretended_nodes),
        ("TIMEOUT", settings.default_timeout_s),
        ("DEBUG", settings.debug_level),
        ("WARN_AFTER", settings.warn_after_s),
        ("CUDA_AWARE", settings.takes_device_pointers),
        ("DETERMINISTIC", settings.deterministic),
    ],
)
def test_nonsense_is_named(environ, name, read):
    for text in ("nonsense", *(("0", "-3", "nan", "inf") if name == "TIMEOUT" else ())):
        environ.setenv(f"MPIDDP_{name}", text)
        with pytest.raises(ValueError, match=rf"MPIDDP_{name} must be .*(?i:{text})"):
            read()


def test_unknown_variables_are_told_with_the_nearest(environ):
    for name in ("MPIDDP_TIMEOUT", "MPIDDP_TEST_SEED", "MPIDDP_LAUNCH", "MPIDDP_MARKER"):
        environ.setenv(name, "1")
    assert settings.unknown_variables() == []
    for name in ("MPIDDP_WARNAFTER", "MPIDDP_XYZ"):
        environ.setenv(name, "1")
    near, far = settings.unknown_variables()
    assert near.startswith("MPIDDP_WARNAFTER is set") and near.endswith("did you mean MPIDDP_WARN_AFTER?")
    assert "MPIDDP_XYZ" in far and far.endswith("MPIDDP_TIMEOUT, MPIDDP_WARN_AFTER")


def test_every_variable_of_the_package_is_known_and_documented(environ):
    package = Path(settings.__file__).parent
    in_c = set(re.findall(r"MPIDDP_[A-Z_]*[A-Z]", (package / "data/mpiddp_stream.h").read_text()))
    for file in [*package.rglob("*.py"), *package.rglob("*.md")]:
        for name in re.findall(r"MPIDDP_(?!TEST)[A-Z_]*[A-Z]", file.read_text()):
            if name not in in_c:
                environ.setenv(name, "1")
    assert not settings.unknown_variables()
    described = re.findall(r"^\| `(MPIDDP_\w+)` \|", (package / "distributed/README.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted(settings._VARIABLES)
