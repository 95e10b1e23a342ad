"""What goes to PyPI: what is in the wheel, what it says of itself, and README's first program, run from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

import lockstep

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=ROOT)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def environment(tmp_path_factory, wheel):
    """The interpreter of an environment that holds the wheel, PyTorch and what PyTorch needs, and nothing of ours."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        str(wheel),
    )
    # a line of a .pth file is a folder to import from; .pth files in there, that of `pip install -e .`, are not read
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


def run(*command: str, **options) -> str:
    """Return what a command prints; an error with all that it said if it fails."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=variables, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src" / "lockstep").rglob("*") if file.is_file()}
    assert names == {"lockstep_command.py", *(name for name in source if "__pycache__" not in name)}
    assert "lockstep/py.typed" in names


def test_it_needs_torch_and_nothing_else(metadata):
    needed = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert [re.split(r"[<>=!~ ]", each)[0] for each in needed] == ["torch"]


def test_one_version_everywhere(metadata):
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert {lockstep.__version__, PROJECT["version"], cited[1]} == {metadata["Version"]}


@pytest.mark.parametrize(
    ("tag", "heading", "status"),
    [
        (f"v{PROJECT['version']}", f"## [{PROJECT['version']}] - 2026-12-01", 0),
        (f"v{PROJECT['version']}", "## [Unreleased]", 1),
        ("v0.0.9", f"## [{PROJECT['version']}] - 2026-12-01", 1),
        (PROJECT["version"] + "0", f"## [{PROJECT['version']}] - 2026-12-01", 1),
    ],
)
def test_a_tag_is_released_if_the_metadata_and_the_changelog_have_its_version(tag, heading, status, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    changes = (ROOT / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(changes.replace("## [Unreleased]", heading))
    steps = (ROOT / ".github" / "workflows" / "release.yml").read_text().partition("run: |\n")[2].partition("\n\n")[0]
    done = subprocess.run(
        ["bash", "-e", "-c", textwrap.dedent(steps)],
        env={**os.environ, "GITHUB_REF_NAME": tag},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == status


def test_the_address_of_the_repository_is_in_few_places():
    """It is in pyproject.toml, from which the pages have it, and in files whose form wants it."""
    site = PROJECT["urls"]["Documentation"].removeprefix("https://")
    repository = PROJECT["urls"]["Repository"].removeprefix("https://")
    files = [*ROOT.glob("*.*"), *(ROOT / "docs").rglob("*.*"), *(ROOT / ".github").rglob("*.*")]
    texts = {f.name: f.read_text() for f in files if f.suffix in {".md", ".cff", ".yml", ".toml", ".py"}}
    found = {name for name, text in texts.items() if re.search(f"{site}|{repository}", text)}
    assert found == {"pyproject.toml", "CITATION.cff", "config.yml"}


def test_the_links_of_the_readme_are_absolute_on_pypi(metadata):
    links = re.findall(r"^\[[^\]]+\]: (\S+)$", metadata.get_payload(), re.MULTILINE)
    repository = PROJECT["urls"]["Repository"]
    assert len(links) > 20
    assert {link.removeprefix(repository).split("/")[1] for link in links} == {"blob", "raw"}
    assert f"{repository}/raw/main/docs/drift.svg" in links
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_what_is_claimed_is_what_the_workflow_tests():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    tested = re.search(r"^        python: \[(.+)\]$", workflow, re.MULTILINE)[1].replace('"', "").split(", ")
    claimed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", c)]
    assert tested == claimed
    assert PROJECT["requires-python"] == f">={tested[0]}"
    made = re.search(r"^TORCHES := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    oldest, newest = re.findall(r'torch: "(.+?)"', workflow)
    assert [oldest, newest] == [made[0], made[-1]]
    minor = int(newest.split(".")[1])
    assert PROJECT["dependencies"] == [f"torch>={oldest},<2.{minor + 1}"]


def test_the_first_program_of_the_readme_runs_from_the_wheel(environment, tmp_path):
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    (tmp_path / "this.py").write_text(program)
    where = run(str(environment), "-c", "import lockstep; print(lockstep.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(environment.parents[1])
    here = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    torchrun = [str(environment), "-m", "torch.distributed.run", *here, "--nproc-per-node", "2"]
    output = run(*torchrun, "this.py", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) on rank 0$", output, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
