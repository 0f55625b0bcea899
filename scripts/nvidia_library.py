#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""nvidia_library.py NAME CUDA-ROOT: prints `LIBRARY;INCLUDE-FOLDER` of one of NVIDIA's libraries (cublas, cudnn, nccl), or
`;REASON` if it was not found.

It is looked for in the CUDA Toolkit, then in Python's packages (nvidia-cudnn-cu13 and so on), then where the linker looks.
Python's packages have libNAME.so.9 without libNAME.so, for which the linker's own search asks: LIBRARY is a file.
"""
import ctypes.util
import pathlib
import re
import site
import sys


def package_folders():
    """Folders of Python's NVIDIA packages: nvidia/cudnn, nvidia/cu13."""
    roots = [*sys.path, *site.getsitepackages(), site.getusersitepackages()]
    return [f for root in dict.fromkeys(roots) for f in sorted(pathlib.Path(root, "nvidia").glob("*")) if (f / "lib").is_dir()]


def candidates(name, cuda):
    """Pairs of a folder with libraries and one with headers."""
    for lib in ["lib64", "lib", "targets/x86_64-linux/lib"]:
        yield cuda / lib, cuda / "include"
    for folder in package_folders():
        yield folder / "lib", folder / "include"
    for root in [pathlib.Path("/usr"), pathlib.Path("/usr/local")]:
        for lib in ["lib/x86_64-linux-gnu", "lib64", "lib"]:
            yield root / lib, root / "include"


def library_in(folder, name):
    """libNAME.so, else the highest libNAME.so.N."""
    plain = folder / f"lib{name}.so"
    if plain.exists():
        return plain
    numbered = [f for f in folder.glob(f"lib{name}.so.*") if re.fullmatch(r"[0-9.]+", f.name[len(f"lib{name}.so."):])]
    return max(numbered, key=lambda f: ([int(n) for n in f.name.split(".so.")[1].split(".")], f.name), default=None)


def find(name, cuda, header):
    """(library, include folder, why not)."""
    header_only = library_only = None
    for lib, include in candidates(name, cuda):
        library, headers = library_in(lib, name), (include / header).is_file()
        if library and headers:
            return library, include, ""
        library_only = library_only or library
        header_only = header_only or (include / header if headers else None)
    if library_only and header_only:
        return library_only, header_only.parent, ""
    if library_only:
        return None, None, f"{library_only} is there, but no {header}"
    if header_only:
        return None, None, f"{header_only} is there, but no lib{name}.so"
    known = ctypes.util.find_library(name)
    return None, None, f"{known} is there, but no {header}" if known else \
        f"no lib{name}.so in {cuda}, in Python's packages or in /usr"


HEADERS = {"cudart": "cuda_runtime.h", "cublas": "cublas_v2.h", "cublasLt": "cublasLt.h", "cusolver": "cusolverDn.h"}


def main():
    name, cuda = sys.argv[1], pathlib.Path(sys.argv[2])
    library, include, reason = find(name, cuda, HEADERS.get(name, f"{name}.h"))
    print(f"{library};{include}" if library else f";{reason}")


if __name__ == "__main__":
    main()
