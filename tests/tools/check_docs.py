#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check_docs.py ROOT

Code shown in the documentation is code that is built: a fenced block right below a line `<!-- code: PATH -->` must
stand in that file, line for line (common indentation aside); below `<!-- code: PATH TAG -->` it must be all that
stands there between two lines `// [TAG]`. A block of C++ without such a line is an error in
README.md, where code is what people copy. Links to files of the repository must lead somewhere.
"""
import pathlib
import re
import sys
import textwrap

BLOCK = re.compile(r"(?:<!-- code: (?P<path>\S+)(?: (?P<tag>\S+))? -->\n)?^```(?P<kind>[\w+]*)\n(?P<text>.*?)^```$",
                   re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


def plain(text):
    return "\n".join(line.rstrip() for line in textwrap.dedent(text).strip("\n").splitlines())


def contains(source, block):
    """True if the block's lines stand in the source one after another, at any indentation."""
    lines = [line.rstrip() for line in source.splitlines()]
    wanted = plain(block).splitlines()
    count = len(wanted)
    return any(plain("\n".join(lines[i : i + count])) == "\n".join(wanted) for i in range(len(lines) - count + 1))


def between(source, tag):
    """What stands between the two marks; None if there are not two."""
    parts = re.split(rf"^[ \t]*(?://|#) \[{re.escape(tag)}\][ \t]*\n", source, flags=re.MULTILINE)
    return parts[1] if len(parts) == 3 else None


def shows(source, tag, block):
    if tag is None:
        return contains(source, block)
    part = between(source, tag)
    return part is not None and plain(part) == plain(block)


def check(root, path):
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(root)
    problems = []
    blocks = 0
    for match in BLOCK.finditer(text):
        if match["path"]:
            blocks += 1
            source = root / match["path"]
            if not source.is_file():
                problems.append(f"{name}: shows code of {match['path']}, which does not exist")
            elif not shows(source.read_text(encoding="utf-8"), match["tag"], match["text"]):
                problems.append(f"{name}: the code shown is not what {match['path']} says")
        elif path.name == "README.md" and match["kind"] in ("cpp", "c++", "cxx"):
            problems.append(f"{name}: a block of C++ without a line `<!-- code: PATH -->` above it")
    for target in LINK.findall(BLOCK.sub("", text)):
        if not (path.parent / target).exists():
            problems.append(f"{name}: link to {target} leads nowhere")
    return problems, blocks


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    files = sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")])
    results = [check(root, path) for path in files]
    problems = [p for found, _ in results for p in found]
    print("\n".join(problems))
    print(f"{len(files)} files, {sum(b for _, b in results)} blocks of code compared, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
