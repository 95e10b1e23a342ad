"""What the documentation says of the library is so: classes of errors, files, pictures, commands."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import lockstep
from lockstep import errors
from lockstep.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def load(file: Path):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_class_of_errors_is_in_the_index():
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)} - {"LockstepError"}
    headings = re.findall(r"^## (\w+)$\n", (DOCS / "errors.md").read_text(), re.M)
    listed = re.findall(r"^<!-- messages: (\w+) -->$", (DOCS / "errors.md").read_text(), re.M)
    assert set(listed) == classes == set(headings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_easy_to_read_in_an_editor_and_for_a_stranger(page):
    text = page.read_text()
    lines = [line for line in text.splitlines() if len(line) > 120 and " " in line.strip() and line[0] != "|"]
    assert lines == [], "lines have at most 120 characters, except for rows of tables"
    read = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    assert re.findall(r"\b(ours|theirs|that of DDP)\b", read) == []


def test_what_is_installed_comes_from_where_it_is():
    """Until the package is on PyPI, pip installs a clone."""
    assert [page.name for page in PAGES if re.search(r"pip install [\"']?torch-lockstep", page.read_text())] == []
    assert "pip install ." in (DOCS / "start.md").read_text()


def test_no_page_hides_code():
    """Blocks run as printed, each as a program of its own."""
    assert [page.name for page in PAGES if "<!-- python\n" in page.read_text()] == []


def readme_links() -> list[str]:
    return re.findall(r"^\[[^\]]+\]: (\S+)$", (ROOT / "README.md").read_text(), re.M)


def test_links_and_the_picture_of_the_readme_lead_to_files():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^\[([^\]]+)\]: ", text, re.M))
    used = {" ".join(name.split()) for name in re.findall(r"\]\[([^\]]+)\]", text)}
    assert used == named
    assert "](" not in text
    for link in readme_links():
        file, _, anchor = link.partition("#")
        assert (ROOT / file).is_file(), link
        headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), re.M) if anchor else []
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, link


def test_the_readme_has_the_names_at_the_top():
    names = re.findall(r"^\| `(\w+)", (ROOT / "README.md").read_text().partition("## What you get")[0], re.M)
    assert len(names) == 16
    assert sorted(names) == sorted(lockstep.__all__)


def test_pictures_are_as_they_are_drawn():
    for name, draw in load(DOCS / "pictures" / "draw.py").PICTURES.items():
        assert (DOCS / name).read_text() == draw(), "run docs/pictures/draw.py"


def test_the_text_of_a_picture_is_one_line_of_words():
    expand = load(DOCS / "_ext" / "pages.py").expand
    assert (
        expand("![Lines part, and go\non.\nA later](x.svg)\nand go")
        == "![Lines part, and go on. A later](x.svg)\nand go"
    )
    for page in DOCS.glob("*.md"):
        assert all(len(text.split()) > 8 for text in re.findall(r"!\[([^\]]*)\]\(", page.read_text())), page


def test_the_chart_shows_what_was_measured():
    for name, draw in load(ROOT / "benchmarks" / "chart.py").PICTURES.items():
        assert (DOCS / name).read_text() == draw(), "run benchmarks/chart.py"


PROMISES = load(DOCS / "list_promises.py")
FILES = load(DOCS / "list_files.py")


def test_each_promise_has_tests_that_exist():
    page, tests = PROMISES.read()
    assert PROMISES.problems(page, tests) == []
    assert len([each for each in page if each.heading == "What is promised"]) > 10
    assert len(tests) > 20


def test_what_is_wrong_with_a_map_of_promises_is_found():
    page = PROMISES.statements("# Page\n\nNo promise.\n\n## A\n\nOne two.\n\n- Three\n  four.\n- Five.\n")
    assert [each.text for each in page] == ["One two.", "Three four.", "Five."]
    tests = {"A": {"One": ["docs/test_pages.py::test_there_are_commands"], "Three four": [], "Five": []}}
    assert PROMISES.problems(page, tests) == []
    tests["A"] |= {"One": ["docs/test_pages.py::test_none", "docs/test_none.py"], "Three": [], "Six": []}
    assert PROMISES.problems(page, tests) == [
        "2 entries for: A: Three four.",
        "no such test: docs/test_pages.py::test_none",
        "no such test: docs/test_none.py",
        "0 statements begin with: A: Six",
    ]
    assert PROMISES.problems(page, {}) == [f"0 entries for: A: {each}" for each in ("One two.", "Three four.", "Five.")]


def test_promises_are_listed_with_links_to_their_tests():
    page = PROMISES.statements(
        "## A\n\n| when | what |\n|---|---|\n| now | [this](that.md) |\n| later | none |\n\n```\ncode\n```\n"
    )
    tests = {"A": {"now": ["docs/test_pages.py::test_x", "docs/test_start.py"], "later": []}}
    assert list(PROMISES.listed(page, tests)) == [
        "\n## A\n",
        "- now | this",
        "  - [`test_x`](../tests/docs/test_pages.py)",
        "  - [`docs/test_start.py`](../tests/docs/test_start.py)",
    ]


def test_every_file_is_listed_with_a_link():
    links = re.findall(r"^- \[`\w+\.py`\]\(\.\./src/lockstep/(\S+)\): \S", "\n".join(FILES.listed()), re.M)
    files = {file.relative_to(FILES.SOURCE).as_posix() for file in FILES.SOURCE.rglob("*.py")}
    assert sorted(links) == sorted(file for file in files if not file.endswith("__init__.py"))


def test_a_first_line_is_a_whole_sentence():
    lines = {str(file): FILES.first_line(file) for file in FILES.SOURCE.rglob("*.py")}
    assert [file for file, line in lines.items() if not line.endswith(".")] == []


def commands() -> list[str]:
    """Return what readers are told to type: lines of blocks of commands, after the prompt or at the beginning."""
    blocks = [
        block
        for page in PAGES
        for kind, block in re.findall(r"^```(\S*)\n(.*?)^```$", page.read_text(), re.M | re.S)
        if kind in ("", "console", "sh")
    ]
    lines = [line.removeprefix("$ ").partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return sorted({line for line in lines if re.match(r"(make|lockstep|python|torchrun|\.venv/bin/python) ", line)})


def test_there_are_commands():
    assert "make test" in commands()


@pytest.mark.parametrize("command", commands())
def test_a_command_that_a_page_shows_is_there(command, capsys):
    program, *arguments = command.split()
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert arguments[0] in targets
    elif program == "lockstep":
        with pytest.raises(SystemExit) as ended:
            main.main([arguments[0], "--help"])
        assert ended.value.code == 0
        options = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        assert all(option in capsys.readouterr().out for option in options[:1])
    else:
        files = [each for each in arguments if "/" in each and each.endswith(".py")]
        assert all((ROOT / file).exists() for file in files)


def test_messages_are_found_with_their_values_left_out():
    pages = load(DOCS / "_ext" / "pages.py")
    assert any("build the same module on every rank" in text for text in pages.messages()["AgreementError"])
    assert any("gave no weight in round ..." in text for text in pages.messages()["OptionError"])  # a rule's
