"""Examples that show one thing each, run small: what they print, and what they print nowhere else."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re

import pytest

from example_programs import EXAMPLES, run_script_in_ranks
from processes import RankEndedError, run_processes


def percents(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy (?:on all digits )?([\d.]+)%", output)]


def test_examples_are_short():
    for file in EXAMPLES.glob("*.py"):
        lines = file.read_text().count("\n")
        assert lines < 150, (file.name, lines)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("experts.py", ["--epochs", "1"]),
        ("lora.py", ["--epochs", "1"]),
        ("sharded.py", ["--epochs", "1", "--width", "32"]),
        ("characters.py", ["--steps", "2", "--batch-size", "8", "--length", "10"]),
        ("tensor_parallel.py", ["--epochs", "1", "--split", "1"]),
    ],
)
def test_an_example_runs_in_any_number_of_processes(script, arguments, world):
    first, *others = run_script_in_ranks(world, script, *arguments)
    assert first
    assert not any(others)


def test_a_network_that_cannot_be_split_between_so_many_processes_is_refused_in_one_line():
    with pytest.raises(RankEndedError, match="exit code 2") as ended:
        run_script_in_ranks(3, "tensor_parallel.py", "--split", "2")
    assert "error: --split divides 3, the number of processes" in str(ended.value.__cause__)


def test_experts_that_differ_by_rank():
    first, other = run_script_in_ranks(2, "experts.py", "--epochs", "2")
    assert not other
    on_a_rank, on_any = zip(
        *re.findall(r"experts ([\d.]+) had no image .* and ([\d.]+) on any rank", first), strict=True
    )
    assert len(on_a_rank) == 2
    assert float(on_a_rank[0]) > float(on_any[0]) > 0  # some steps used an expert on one rank alone
    assert percents(first)[-1] > 70


def test_tensor_parallel_below_replication():
    first, *others = run_script_in_ranks(4, "tensor_parallel.py", "--epochs", "1")
    assert not any(others)
    assert "2 replicas of 2 ranks; a matrix of (256, 64) is (128, 64) on each" in first
    assert percents(first)[-1] > 70


def test_adapters_first_and_more_layers_later():
    first, other = run_script_in_ranks(2, "lora.py", "--epochs", "3")
    assert not other
    assert re.findall(r"([\d,]+) of [\d,]+ weights trained", first) == ["26,122", "4,688", "5,978"]
    half, adapters, more = percents(first)
    assert half < 55 < adapters < more


def run_cells(rank, cells: list[str], folder: str) -> str:
    os.chdir(folder)
    os.environ["MPLBACKEND"] = "Agg"  # a picture is drawn, and shown nowhere
    space: dict = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for number, cell in enumerate(cells, start=1):
            exec(compile(cell, f"cell {number}", "exec"), space)
    return output.getvalue()


def test_two_replicas_in_a_notebook(tmp_path):
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (output,) = run_processes(1, run_cells, cells, str(tmp_path))
    assert percents(output)[-1] > 90
    assert (tmp_path / "digits.pt").exists()
