#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""joined_examples.py ROOT BUILD

Writes the example programs that share examples/common and examples/text as one source, each in a namespace of its own, to
BUILD/joined/examples.cpp, with a compile_commands.json beside it; prints the other sources of examples that BUILD
compiles. For clang-tidy: the headers that they share take it far longer than they do, and so it reads those once.
"""
import json
import pathlib
import re
import sys


def joined(root, sources):
    """The text of all sources: their includes first, then bodies whose `main` is a function of the namespace."""
    includes, bodies = [], []
    for source in sources:
        lines = source.read_text(encoding="utf-8").splitlines()
        last = max(i for i, line in enumerate(lines) if line.startswith("#include"))
        last += lines[last + 1].startswith("#endif")  # the end of an include with a condition
        for line in lines[: last + 1]:
            if line.startswith("#"):
                includes.append(re.sub(r'"(common|text)/', rf'"{root.as_posix()}/examples/\1/', line))
        name = source.stem
        body = "\n".join(lines[last + 1:])
        body = re.sub(r"^namespace \{$", "", body, flags=re.MULTILINE)
        body = re.sub(r"^\}  // namespace$", "", body, flags=re.MULTILINE)
        body = re.sub(r"^int main\(", f"int main_of_{name}(", body, flags=re.MULTILINE)
        bodies.append(f'namespace {name}_program {{\n#line {last + 2} "{source.as_posix()}"\n{body}\n}}  // namespace {name}_program\n')
    return "\n".join(includes) + "\n" + "\n".join(bodies) + "int main() {}\n"


def main():
    root, build = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        source = (pathlib.Path(entry["directory"]) / entry["file"]).resolve()
        if source.is_relative_to(root / "examples"):
            commands[source] = entry
    # Programs without options share little, and have code between their includes.
    shared = sorted(s for s in commands if "CLI::App" in s.read_text(encoding="utf-8"))
    if not shared:
        sys.exit(f"no examples in {build}")
    out = build / "joined" / "examples.cpp"
    out.parent.mkdir(exist_ok=True)
    out.write_text(joined(root, shared), encoding="utf-8")
    entry = commands[shared[0]]
    command = entry["command"].replace(entry["file"], str(out))
    out.with_name("compile_commands.json").write_text(
        json.dumps([{"directory": entry["directory"], "command": command, "file": str(out)}]), encoding="utf-8")
    print("\n".join(str(s.relative_to(root)) for s in sorted(commands) if s not in shared))


if __name__ == "__main__":
    main()
