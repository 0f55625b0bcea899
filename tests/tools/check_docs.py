#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check_docs.py ROOT

What the documentation shows is what is built and run. The line above a fenced block says where it comes from:

    <!-- code: PATH -->          its lines stand in that file one after another (common indentation aside)
    <!-- code: PATH TAG -->      it is all that stands there between two lines `// [TAG]` or `# [TAG]`
    <!-- diff: OLD NEW -->       how the second file differs from the first, as `diff -U1` says it, in ten lines at most
    <!-- packages: PATH -->      a line for apt-get that installs what the script PATH says is needed
    <!-- long -->                commands that take longer than a test may: their programs exist and know the options

Blocks of C++, CMake and Meson need the first form; shell commands one of them, and if the first, then a script in
tests/docs, which a test runs. Pages in docs/results are written by benchmarks, with the commands that they ran.
Links to files of the repository must lead somewhere. If all is well, every block is changed in memory, to see that
this would be noticed.
"""
import difflib
import functools
import pathlib
import re
import shlex
import sys
import textwrap

BLOCK = re.compile(r"(?:<!-- (?P<mark>code|diff|packages|long)(?:: (?P<path>\S+)(?: (?P<tag>\S+))?)? -->\n)?"
                   r"^```(?P<kind>[\w+]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
CODE = {"cpp", "c++", "cxx", "cmake", "meson"}
SHELL = {"sh", "bash", "shell", "console"}
TOOLS = {"cd", "meson", "ninja"}
MOST_CHANGED_LINES = 10


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


def code_problem(root, match):
    """What is wrong with a block that shows code of a file; nothing if all is well."""
    if match["kind"] in SHELL and not match["path"].startswith("tests/docs/"):
        return f"shows commands of {match['path']}, which is no script of tests/docs"
    source = root / match["path"]
    if not source.is_file():
        return f"shows code of {match['path']}, which does not exist"
    text = source.read_text(encoding="utf-8")
    if match["tag"] is None:
        same = contains(text, match["text"])
    else:
        part = between(text, match["tag"])
        same = part is not None and plain(part) == plain(match["text"])
    return None if same else f"the code shown is not what {match['path']} says at {match['tag'] or 'any place'}"


def diff_problem(root, match):
    try:
        old, new = ((root / match[name]).read_text(encoding="utf-8").splitlines() for name in ("path", "tag"))
    except OSError as e:
        return f"shows a difference of files that cannot be read: {e}"
    lines = list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:]
    if lines != match["text"].splitlines():
        return "the difference is another one:\n" + "\n".join(lines)
    changed = sum(line.startswith("+") for line in lines)
    return f"{changed} lines differ, more than {MOST_CHANGED_LINES}" if changed > MOST_CHANGED_LINES else None


def needed_packages(script):
    """The packages that a script needs without options."""
    found = (re.search(r"^packages=\(([^)]*)\)", script, re.MULTILINE)
             or re.search(r"^require_packages ((?:[^\\\n]|\\\n)*)$", script, re.MULTILINE))
    return set(found[1].replace("\\", " ").split()) if found else set()


def packages_problem(root, match):
    words = shlex.split(match["text"].replace("\\\n", " "))
    if words[:2] != ["apt-get", "install"]:
        return "is no line for apt-get install"
    shown = {word for word in words[2:] if not word.startswith("-")}
    needed = needed_packages((root / match["path"]).read_text(encoding="utf-8"))
    if shown != needed:
        return f"installs other packages than {match['path']}: {', '.join(sorted(shown ^ needed))}"
    return None


def command_lines(text):
    """The commands of a block, as words: without comments, settings of variables and launchers."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for command in " ".join(shlex.quote(w) if w != "&&" else w for w in words).split("&&"):
            words = shlex.split(command)
            while words and re.match(r"\w+=", words[0]):
                words = words[1:]
            if words and words[0] == "mpirun":
                while words and not re.match(r"(build(-\w+)?|bench|examples)/", words[0]):
                    words = words[1:]
                yield words or ["mpirun"]
            elif words[:1] in (["python3"], ["/usr/bin/time"]):
                # Whom they start is the last word before its own arguments that is a path of ours.
                yield next((words[i:] for i, w in enumerate(words) if "/" in w[1:] and not w.startswith("/")), words)
            elif words:
                yield words


@functools.lru_cache(maxsize=None)
def options_known_in(folder):
    """Of the programs in a folder, and of what they share."""
    files = [p for pattern in ("*", "common/*") for p in folder.glob(pattern)
             if p.is_file() and p.suffix in ("", ".cpp", ".hpp", ".py")]
    return {o for p in files for o in OPTION.findall(p.read_text(encoding="utf-8", errors="replace"))}


def long_problem(root, match):
    for words in command_lines(match["text"]):
        program = words[0]
        built = re.fullmatch(r"build(?:-\w+)?/(examples|bench)/(\w+)", program)
        if program in TOOLS:
            continue
        source = root / (f"{built[1]}/{built[2]}.cpp" if built else program)
        if built and not source.is_file():  # a_b may be b.cpp in a folder a
            source = root / built[1] / ("/".join(built[2].rsplit("_", 1)) + ".cpp")
        if not source.is_file():
            return f"runs {program}, which does not exist"
        if built:
            known = set(OPTION.findall(source.read_text(encoding="utf-8"))) | options_known_in(source.parent / "common")
        else:
            # Scripts hand options on to programs.
            known = options_known_in(source.parent) | options_known_in(root / "examples")
        unknown = {o for w in words[1:] for o in OPTION.findall(w)} - known
        if unknown:
            return f"gives {program} options that it does not know: {', '.join(sorted(unknown))}"
    return None


PROBLEMS = {"code": code_problem, "diff": diff_problem, "packages": packages_problem, "long": long_problem}


def check(root, path, text):
    """Problems of a page with this text, and the number of blocks that were compared."""
    name = path.relative_to(root)
    problems = []
    blocks = 0
    for match in BLOCK.finditer(text):
        first = f"{name}:{text.count(chr(10), 0, match.start('text'))}"
        problem = None
        if match["mark"]:
            blocks += 1
            problem = PROBLEMS[match["mark"]](root, match)
            if match["kind"] in CODE and match["mark"] != "code":
                problem = "code needs a line `<!-- code: PATH -->`"
        elif match["kind"] in CODE:
            problem = "a block of code without a line `<!-- code: PATH -->` above it"
        elif match["kind"] in SHELL and "results" not in name.parts:
            problem = "commands without a line `<!-- code: PATH TAG -->`, `<!-- packages: PATH -->` or `<!-- long -->` above them"
        if problem:
            problems.append(f"{first}: {problem}")
    for target in LINK.findall(BLOCK.sub("", text)):
        if not (path.parent / target).exists():
            problems.append(f"{name}: link to {target} leads nowhere")
    return problems, blocks


def unnoticed_changes(root, path, text):
    """Blocks that could be changed without a problem: this check does not see them."""
    for match in BLOCK.finditer(text):
        if match["mark"] is None:
            continue
        at = match.start("text")
        word = re.search(r"(?<!-)\b[a-z]\w+", match["text"])
        more = " --no-such-option" if match["mark"] == "long" else " no-such-word"
        for changed in (text[:at + word.end()] + "x" + text[at + word.end():],
                        text[:match.end("text") - 1] + more + text[match.end("text") - 1:]):
            if not check(root, path, changed)[0]:
                yield f"{path.relative_to(root)}: a change goes unnoticed in the block\n{match['text']}"


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    files = sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")])
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    results = [check(root, path, text) for path, text in texts.items()]
    problems = [p for found, _ in results for p in found]
    if not problems:
        problems = [p for path, text in texts.items() for p in unnoticed_changes(root, path, text)]
    print("\n".join(problems))
    print(f"{len(files)} files, {sum(b for _, b in results)} blocks compared, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
