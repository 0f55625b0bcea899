#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""nvidia_library.py NAME CUDA-ROOT: prints `LIBRARY;INCLUDE-FOLDER` of one of NVIDIA's libraries (cublas, cudnn, nccl), or
`;REASON` if it was not found.

It is looked for in the CUDA Toolkit, then in Python's packages (nvidia-cudnn-cu13 and so on), then where the linker looks.
Python's packages have libNAME.so.9 without libNAME.so, for which the linker's own search asks: LIBRARY is a file. cudnn_frontend
has headers only, and LIBRARY is the header.
"""
import ctypes.util
import pathlib
import re
import site
import sys


def package_roots():
    """Folders that have Python's packages."""
    return list(dict.fromkeys([*sys.path, *site.getsitepackages(), site.getusersitepackages()]))


def package_folders():
    """Folders of Python's NVIDIA packages: nvidia/cudnn, nvidia/cu13."""
    return [f for root in package_roots() for f in sorted(pathlib.Path(root, "nvidia").glob("*")) if (f / "lib").is_dir()]


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


def find_header(header, cuda, package):
    """(header, its folder, why not) of a library without binaries. A Python package has it in its root's include folder."""
    folders = [cuda / "include", *(pathlib.Path(root, "include") for root in package_roots()),
               pathlib.Path("/usr/include"), pathlib.Path("/usr/local/include")]
    for folder in folders:
        if (folder / header).is_file():
            return folder / header, folder, ""
    return None, None, f"no {header} in {cuda}, in Python's package {package} or in /usr"


HEADERS = {"cudart": "cuda_runtime.h", "cublas": "cublas_v2.h", "cublasLt": "cublasLt.h", "cusolver": "cusolverDn.h"}


def main():
    name, cuda = sys.argv[1], pathlib.Path(sys.argv[2])
    if name == "cudnn_frontend":
        library, include, reason = find_header("cudnn_frontend.h", cuda, "nvidia-cudnn-frontend")
    else:
        library, include, reason = find(name, cuda, HEADERS.get(name, f"{name}.h"))
    print(f"{library};{include}" if library else f";{reason}")


if __name__ == "__main__":
    main()
