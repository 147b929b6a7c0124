"""The site's own programs: pages that are made from the code, links, and what the menu leaves out.

`make docs` builds the site and checks every link in it. Here the pages are made, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gemserve.errors import GemserveError
from website.build import CONFIG, names_in
from website.check_links import check_site
from website.draw_pictures import FOLDER, PICTURES
from website.reference import options
from website.reference.errors import codes, status_of
from website.reference.example_server import example_server, stop_example_server
from website.reference.markdown import cell, code_with_bars
from website.reference.pages import PAGES, write_pages
from website.stage import DOCS, FROM_ROOT, LOG, ROOT, site_link, stage, with_links


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The generated pages, by name."""
    folder = tmp_path_factory.mktemp("pages")
    write_pages(folder)
    yield {name: (folder / name).read_text("utf-8") for name in PAGES}
    stop_example_server()


def test_every_option_of_every_command_is_on_its_page(reference: dict[str, str]) -> None:
    page = reference["reference/options.md"]
    for parser in (options.make_parser(), options.make_client_parser()):
        for name, _, command in options.commands_of(parser):
            section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
            flags = [f for action in command._actions for f in action.option_strings[-1:]]
            missing = [flag for flag in flags if flag != "--help" and f"`{flag}`" not in section]
            assert missing == [], name
    port = '<span id="serve--port"></span>`--port`'
    assert f"| {port} | port to listen on | `8000` | `GEMSERVE_PORT` |" in page
    assert "`--concurrency`" in page.split("\n## gemserve-client load\n")[1]


def test_a_page_explains_an_option_once(tmp_path: Path) -> None:
    page, option = tmp_path / "page.md", "[`--port 80`](../reference/options.md#serve--port)"
    text = "## `--port`\n\n`--port 80`, `--port`, `--nothing`\n```\n`--model`\n```\n"
    page.write_text(text)
    assert with_links(page, Path("guides/page.md")) == text.replace("`--port 80`", option)
    assert with_links(page, Path("project/page.md")) == text


def test_every_endpoint_and_object_is_on_its_page(reference: dict[str, str]) -> None:
    found = example_server()[1].openapi()
    for path, operations in found["paths"].items():
        for method in operations:
            assert f"\n## {method.upper()} `{path}` " in reference["reference/endpoints.md"]
    objects = set(re.findall(r"^## .*\{#(\w+)\}$", reference["reference/objects.md"], re.MULTILINE))
    assert objects == {name.lower() for name in found["components"]["schemas"]}
    linked = re.findall(r"objects\.md#(\w+)", "".join(reference.values()))
    assert set(linked) <= objects
    assert len(linked) > 100


def test_metrics_errors_and_python_are_on_their_pages(reference: dict[str, str]) -> None:
    metrics = reference["reference/metrics.md"]
    for row in (
        "| `gemserve_filter_requests_total` | counter | `method`, `outcome` |",
        "| `gemserve_document_cache_hits_total` | counter | `tier` |",
        "| `gemserve_replicas_ready` | gauge |",
    ):
        assert row in metrics
    errors = reference["reference/errors.md"]
    assert all(f"| {code} |" in errors for code, _, _ in codes())
    assert "| `QueueFull` | `GemserveError` | 503 | `queue_full` |" in errors
    assert "| `AdapterError` | `GemserveError` | 400 |" in errors  # by a route, not by default
    python = reference["reference/python.md"]
    assert "### LLM\n" in python
    assert "#### LLM.generate\n" in python
    assert "object at 0x" not in "".join(reference.values())
    assert str(ROOT) not in "".join(reference.values())


def test_the_status_of_an_error_is_that_of_its_reply() -> None:
    class Unknown(GemserveError):
        """An error that no reply knows."""

    assert status_of(Unknown) == "500"


def test_the_menu_has_every_page_once() -> None:
    """`make docs` looks, too; here it is seen by whoever adds a page and builds no site."""
    named = list(names_in(yaml.safe_load(CONFIG.read_text("utf-8"))["nav"]))
    pages = [path for path in DOCS.rglob("*.md") if not path.is_relative_to(LOG)]
    there = {str(path.relative_to(DOCS)) for path in pages}
    expected = there | set(PAGES) | {p for p in FROM_ROOT.values() if p.startswith("project/")}
    assert sorted(named) == sorted(expected)


def test_links_lead_to_where_the_site_has_the_pages() -> None:
    guide = DOCS / "guides/tune.md"
    assert site_link("../kernels.md#a", guide, Path("guides/tune.md")) == "../kernels.md#a"
    assert site_link("../../SECURITY.md", guide, Path("guides/tune.md")) == "../project/security.md"
    read_me = site_link("docs/serving.md", ROOT / "SECURITY.md", Path("project/security.md"))
    assert read_me == "../serving.md"
    with pytest.raises(ValueError, match=r"docs/guides/tune\.md: \.\./\.\./Makefile: leads to"):
        site_link("../../Makefile", guide, Path("guides/tune.md"))


def test_files_of_the_log_are_named_and_not_in_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("website.stage.write_pages", lambda folder: None)
    stage(tmp_path / "pages")
    assert not (tmp_path / "pages/log").exists()
    index = (tmp_path / "pages/log.md").read_text("utf-8")
    assert "| `docs/log/windows.md` |" in index
    assert "](log/" not in index
    measured = (tmp_path / "pages/benchmarks.md").read_text("utf-8")
    assert "log (`docs/log/gpu.md`)" in measured


def test_bars_in_code_of_a_table_are_seen_as_bars() -> None:
    """Python's Markdown shows the backslash of an escaped bar in code."""
    assert cell("`a|b<c>` and\n d|e") == "<code>a&#124;b&lt;c&gt;</code> and d\\|e"
    assert code_with_bars("`a` | `b` `c\\|d`") == "`a` | `b` <code>c&#124;d</code>"


def test_wrong_links_of_a_built_site_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>'
        '<a href="https://example.org/">4</a><script src="https://example.org/x.js"></script>'
        '<img src="missing.png"><link rel="stylesheet" href="style.css">'
    )
    (tmp_path / "b.html").write_text('<h1 id="there"></h1>')
    (tmp_path / "style.css").write_text("@font-face { src: url(//example.org/font) }")
    checked = check_site(tmp_path)
    assert (checked.num_pages, checked.num_links, checked.num_anchors) == (2, 3, 2)
    assert checked.external == ("https://example.org/",)
    assert set(checked.wrong) == {
        "a.html: b.html#gone: no such anchor",
        "a.html: c.html: no such page",
        "a.html: loads https://example.org/x.js",
        "a.html: missing.png: no such file",
        "style.css: loads //example.org/font",
    }


@pytest.mark.parametrize("draw", PICTURES, ids=lambda draw: draw.__name__)
def test_pictures_are_those_that_the_script_draws(draw: object) -> None:
    """Otherwise somebody has changed a picture by hand, and the next drawing undoes that."""
    picture = draw()  # type: ignore[operator]
    assert (FOLDER / f"{picture.name}.svg").read_text("utf-8") == picture.svg()
