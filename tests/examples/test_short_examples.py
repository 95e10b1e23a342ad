"""Examples that show one thing each, run small: what they print, and what they print nowhere else."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import lockstep
from example_programs import EXAMPLES, run_script_in_ranks
from processes import RankEndedError, run_processes


def percents(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy (?:on all digits )?([\d.]+)%", output)]


def test_examples_are_short():
    for file in EXAMPLES.rglob("*.py"):
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


def record(rank, folder):
    model = lockstep.replicate(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    model(torch.ones(2, 4)).sum().backward()  # in the first round, ranks wait for each other to compare what they have
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            loss = model(torch.ones(2, 4)).sum()
            torch.distributed.barrier()
            if rank.rank == 1:
                time.sleep(0.3)  # what is measured: rank 1 is late
            loss.backward()
    profiler.export_chrome_trace(f"{folder}/rank{rank.rank}.json")


def test_the_rank_for_which_the_others_waited(tmp_path):
    run_processes(2, record, str(tmp_path), backend="gloo")
    first, second = runpy.run_path(str(EXAMPLES / "waits.py"))["waited_for"](tmp_path).items()
    assert (first[0], second[0]) == ("rank0.json", "rank1.json")
    assert second[1] > first[1]


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
