# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Plots by gnuplot for the pages that the benchmarks write."""
import shutil
import subprocess


def run(path, size, text):
    """Draws `path`, an SVG of `size` ("WIDTH,HEIGHT"), by commands. True if the file is there: without gnuplot, an earlier one."""
    if shutil.which("gnuplot") is None:
        return path.is_file()
    text = f"set terminal svg size {size} dynamic background rgb 'white'\nset output '{path.name}'\n{text}\n"
    return subprocess.run(["gnuplot"], input=text, text=True, cwd=path.parent, check=False).returncode == 0


def draw(path, size, settings, curves):
    """Draws curves after the commands `settings`. `curves`: (rows of numbers, how `plot` shows them), or (None, a formula)."""
    data, shown = "", []
    for i, (rows, how) in enumerate(curves):
        if rows is not None:
            data += f"$c{i} << EOD\n" + "".join(" ".join(f"{v:.7g}" for v in row) + "\n" for row in rows) + "EOD\n"
        shown.append(how if rows is None else f"$c{i} {how}")
    return run(path, size, f"set grid\n{settings}\n{data}plot {', '.join(shown)}")
