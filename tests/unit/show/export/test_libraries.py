"""A format whose library is missing says what to install."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from paceline.base.errors import EnvironmentLacks
from paceline.show.export.run_data import require


def test_missing_modules_are_named_with_the_command():
    with pytest.raises(EnvironmentLacks) as raised:
        require("onnx", "json", "no_such_module")
    assert str(raised.value) == (
        "export to onnx: expected the packages json, no_such_module, not installed: "
        "no_such_module; `pip install 'onnx>=1.20' 'onnxscript>=0.7' 'onnxruntime>=1.24'` brings "
        "them"
    )
    assert raised.value.exit_code == 3
    require("onnx", "json")


def test_the_extra_is_asked_for(run):
    if find_spec("onnx") is not None:
        pytest.skip("onnx is installed")
    with pytest.raises(EnvironmentLacks, match=r"pip install 'onnx>=1.20'"):
        run.export("onnx")
