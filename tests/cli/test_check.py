"""``lockstep check``: its table, its JSON, its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.check import assert_equal_to_one_process
from lockstep.cli.main import main

ROOT = Path(__file__).parents[2]
DIGITS = f"{ROOT / 'examples' / 'check_digits.py'}:case"


def page_case(folder):
    """The first program of docs/not_equal.md, whose model is README's."""
    code = re.search(r"^```python\n(.*?)^```$", (ROOT / "docs" / "not_equal.md").read_text(), re.M | re.S)[1]
    model = "torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))"
    assert model in code
    assert model in (ROOT / "README.md").read_text()
    (folder / "case.py").write_text(code)
    return f"{folder / 'case.py'}:case"


def test_readmes_model_is_equal(tmp_path, capsys):
    assert main(["check", page_case(tmp_path), "--wrap", "ddp"]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks, wrapped by ddp, beside one process, in float64" in printed
    assert re.search(r"^gradients in step 2 +\d\.\de-1\d  0 of 4$", printed, re.M)
    assert "\nequal: the largest difference is" in printed


def test_the_network_of_the_digits_is_equal_with_statistics_of_all_ranks(capsys):
    assert main(["check", DIGITS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True
    assert main(["check", DIGITS.replace(":case", ":with_statistics"), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["cause"] == "batch-statistics"


WRONG = {
    "case.py": "expected FILE.py:FUNCTION",
    "nowhere.py:case": "there is no file nowhere.py",
    f"{DIGITS} --wrap dpp": "there is no wrap 'dpp'",
    f"{DIGITS} --split 1,2,3": "has 3 numbers for 2 ranks",
    f"{DIGITS} --split odd": "there is no split 'odd'",
    f"{DIGITS} --ranks 1": "compares nothing",
    f"{DIGITS} --backend shn": "shn",
    f"{DIGITS} --wrap x.py:wrap": "there is no file x.py",
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.items())
def test_a_wrong_argument_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["check", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_case_that_fails_in_one_process_cannot_be_checked(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("def case():\n    raise ValueError('no data')\n")
    assert main(["check", f"{tmp_path / 'broken.py'}:case"]) == 2
    assert "ValueError: no data" in capsys.readouterr().err


def test_a_function_inside_another_cannot_be_given():
    with pytest.raises(Exception, match="other processes cannot import"):
        assert_equal_to_one_process(lambda: None)
