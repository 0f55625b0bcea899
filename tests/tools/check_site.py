#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check_site.py ROOT [SITE]

Builds the site with scripts/site in a temporary folder, or takes a site that is built already. Every link of its pages
that leads to the site itself must lead to a file, and its anchor to an element of that page. Links to other hosts are not
followed, but no page may load anything from one. No table of Markdown may be left as text, and every page must be in the
menu. Exit code 77 (skipped) where scripts/site lacks a program.
"""
import functools
import html.parser
import pathlib
import subprocess
import sys
import tempfile
import urllib.parse

LOADED = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("object", "data"), ("embed", "src")}
PAGES = ("index.html", "docs/choose.html", "docs/results/scaling.html", "reference/classpufferfish_1_1LowRankConv.html",
         "search/search_index.json")
# Classes with passes that they inherit (docs/doxygen.awk): their pages show them.
INHERITING = ("GELU", "LSTM", "LowRankConv", "LowRankLinear", "network")

NOT_IN_MENU = {"docs/results/exchange/notes.html"}  # a part of another page


class Page(html.parser.HTMLParser):
    """The anchors of a page, its links as (tag, attribute, address), and whether a table was left as text."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.unread = set(), [], False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif (tag, name) in LOADED or (tag == "a" and name == "href"):
                self.links.append((tag, name, value))

    def handle_data(self, data):
        self.unread = self.unread or "\n|---" in data


@functools.cache
def anchors_of(path):
    return Page(path).anchors


def problems_of(site, path):
    """What is wrong with the links of a page, and their number."""
    page = Page(path)
    problems = ["a table is left as text"] if page.unread else []
    for tag, attribute, address in page.links:
        parts = urllib.parse.urlsplit(address)
        if parts.scheme or parts.netloc:
            is_relation = tag == "link"  # rel="canonical" and the like load nothing
            if (tag, attribute) in LOADED and parts.scheme not in ("data", "javascript") and not is_relation:
                problems.append(f"loads {address}")
            continue
        target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
        if target.is_dir():
            target /= "index.html"
        anchor = urllib.parse.unquote(parts.fragment)
        if site not in target.parents:
            problems.append(f"{address} leaves the site")
        elif not target.is_file():
            problems.append(f"{address} leads nowhere")
        elif anchor and target.suffix == ".html" and anchor not in anchors_of(target):
            problems.append(f"{address}: the page has no such anchor")
    return problems, len(page.links)


def check(site):
    files = sorted(site.rglob("*.html"))
    problems = [f"{name} is missing" for name in PAGES if not (site / name).is_file()]
    problems += [f"reference of {name}: no backward()" for name in INHERITING if "backward()" not in
                 (site / f"reference/classpufferfish_1_1{name}.html").read_text(encoding="utf-8")]
    menu = {address.split("#")[0] for _, _, address in Page(site / "index.html").links}
    problems += [f"{name}: no menu names this page" for name in
                 (path.relative_to(site).as_posix() for path in (site / "docs").rglob("*.html")) if name not in menu | NOT_IN_MENU]
    links = 0
    for path in files:
        found, count = problems_of(site, path)
        problems += [f"{path.relative_to(site)}: {one}" for one in found]
        links += count
    print("\n".join(problems[:200]))
    print(f"{len(files)} pages, {links} links, {len(problems)} problems")
    sys.exit(1 if problems or links < 1000 else 0)


def main():
    if len(sys.argv) > 2:
        check(pathlib.Path(sys.argv[2]).resolve())
    with tempfile.TemporaryDirectory(prefix="pufferfish-site-") as scratch:
        built = subprocess.run([pathlib.Path(sys.argv[1]) / "scripts" / "site", scratch], check=False)
        if built.returncode != 0:
            sys.exit(built.returncode)
        check(pathlib.Path(scratch, "site").resolve())


if __name__ == "__main__":
    main()
