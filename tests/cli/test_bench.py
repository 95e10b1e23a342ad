"""`lockstep bench`: the user's own model in every way, the picture, and what it refuses."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from lockstep.cli.findings import usable_backends
from lockstep.cli.main import main

MODEL = """
import torch

def build():
    model = torch.nn.Linear(8, 4)
    return model, lambda model: model(torch.ones(2, 8)).sum()

def broken():
    raise ValueError("no such data set")
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)


def test_a_model_in_every_way_with_a_picture(model, tmp_path, capsys):
    picture = tmp_path / "steps.svg"
    arguments = ["--model", "my_model:build", "--rounds", "1", "--json", "--picture", str(picture)]
    assert main(["bench", *arguments, "--timeout", "250"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["ways"]) == {"alone", *(f"{kind}, {b}" for kind in ("DDP", "lockstep") for b in usable_backends())}
    for way in told["ways"].values():
        assert way["seconds"] > 0
        assert way["exposed_seconds"] == pytest.approx(way["seconds"] - told["ways"]["alone"]["seconds"])
    texts = [each.text for each in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("lockstep, gloo: ") for text in texts)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "0"], "--ranks 0"),
        (["--rounds", "0"], "--rounds 0"),
        (["--picture", "a.png"], "expected a name that ends with .svg"),
        (["--model", "my_model:nothing", "--ranks", "1"], "Expected MODULE:FUNCTION"),
    ],
)
def test_what_makes_no_sense_is_told_and_the_exit_code_is_1(model, arguments, told, capsys):
    assert main(["bench", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
