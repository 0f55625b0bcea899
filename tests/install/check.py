#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check.py ROOT WAY FOLDER -- COMPILER...

Installs the library into a scratch prefix (or copies its sources, for the ways that build from them), then builds
and runs the consumer program in ways its users do. Exit code 77 (skipped) where a way's build system is absent.
All of it happens in FOLDER/WAY, which is removed in the end: ccache knows a compilation again where paths are the same.
"""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

SKIP = 77
HERE = pathlib.Path(__file__).resolve().parent
CONSUMER = HERE / "consumer"
NO_PROGRAMS = ["-Dtests=disabled", "-Dexamples=disabled", "-Dbench=disabled"]


def run(*command, env=None, cwd=None, fails=False):
    """Runs a command that must succeed (or must fail); returns what it printed."""
    command = [str(c) for c in command]
    result = subprocess.run(command, env={**os.environ, **(env or {})}, cwd=cwd, check=False,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if (result.returncode != 0) != fails:
        sys.exit(f"{shlex.join(command)}\n{result.stdout}\n"
                 f"exit code {result.returncode}, expected {'a failure' if fails else 'success'}")
    return result.stdout


def require(*programs):
    for program in programs:
        if shutil.which(program) is None:
            print(f"{program} is not installed")
            sys.exit(SKIP)


def version(root):
    for line in (root / "include/pufferfish/core/version.hpp").read_text(encoding="utf-8").splitlines():
        if line.startswith("#define PUFFERFISH_VERSION_STRING"):
            return line.split('"')[1]
    sys.exit("no version found")


def install(root, scratch):
    prefix = scratch / "prefix"
    run("meson", "setup", scratch / "build", root, f"--prefix={prefix}", *NO_PROGRAMS)
    run("meson", "install", "-C", scratch / "build")
    installed = sorted(p.relative_to(prefix).as_posix() for p in prefix.rglob("*") if p.is_file())
    beside = [p for p in installed if not p.startswith("include/pufferfish/")]
    wanted = ["share/cmake/pufferfish/components.txt", "share/cmake/pufferfish/pufferfish-components.cmake",
              "share/cmake/pufferfish/pufferfish-config-version.cmake", "share/cmake/pufferfish/pufferfish-config.cmake",
              "share/pkgconfig/pufferfish-kernels.pc", "share/pkgconfig/pufferfish-mpi.pc", "share/pkgconfig/pufferfish-train.pc", "share/pkgconfig/pufferfish.pc"]
    if beside != wanted:
        sys.exit(f"installed beside the headers: {beside}")
    headers = {p.relative_to(root).as_posix() for p in (root / "include").rglob("*") if p.is_file()}
    if headers != set(installed) - set(beside):
        sys.exit(f"not all headers are installed: {sorted(headers ^ (set(installed) - set(beside)))}")
    return prefix


def copy_sources(root, target):
    """What a clone brings, without builds and history."""
    patterns = shutil.ignore_patterns("build*", ".git", "data", "__pycache__", ".cache")

    def ignored(folder, names):
        # Nor the folder that the copy is in.
        return patterns(folder, names) | {name for name in names if target.is_relative_to(pathlib.Path(folder) / name)}

    shutil.copytree(root, target, ignore=ignored)
    return target


def expect_version(root, *outputs):
    for output in outputs:
        if f"pufferfish {version(root)}" not in output:
            sys.exit(f"the consumer says {output!r}, expected version {version(root)}")


def pkg_config(root, scratch, compiler):
    require("pkg-config")
    env = {"PKG_CONFIG_PATH": str(install(root, scratch) / "share" / "pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", "pufferfish", env=env).split()
    if any(flag.startswith(("-m", "-O", "-std")) for flag in flags):
        sys.exit(f"flags of our own build leak to users: {flags}")
    if run("pkg-config", "--modversion", "pufferfish", env=env).strip() != version(root):
        sys.exit("pkg-config knows another version")

    def compiled(file, package):
        # ccache knows what is compiled, not what is linked at once.
        cflags = run("pkg-config", "--cflags", package, env=env).split()
        made = scratch / f"{file.stem}_of_{file.parent.name}.o"
        run(*compiler, "-std=c++20", *cflags, "-c", file, "-o", made)
        return made

    def linked(source, package, fails=False):
        libs = run("pkg-config", "--libs", package, env=env).split()
        own = run("pkg-config", "--variable=source", package, env=env).split()
        objects = [compiled(file, package) for file in [CONSUMER / f"{source}.cpp", *map(pathlib.Path, own)]]
        return run(*compiler, *objects, *libs, "-o", scratch / source, fails=fails)

    for source, package in [("main", "pufferfish"), *((name, f"pufferfish-{name}") for name in components())]:
        linked(source, package)
        expect_version(root, run(scratch / source))
    if "train" in components():
        output = linked("train", "pufferfish", fails=True)
        if "gzopen" not in output and "inflate" not in output:
            sys.exit(f"without the component another thing than zlib is missing:\n{output}")


def components():
    """Those of cmake/components.txt whose parties are installed; each has a program of its name."""
    lines = (HERE.parent.parent / "cmake" / "components.txt").read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines:
        if not line.startswith("#"):
            name, _, modules = line.split()[:3]
            if modules == "-" or all(subprocess.run(["pkg-config", "--exists", m], check=False).returncode == 0
                                     for m in modules.split(",")):
                found.append(name)
            else:
                print(f"not checked: component {name} (needs {modules})")
    return found


def cmake_project(scratch, name, compiler, lists, *arguments, wanted=None, parts=(), fails=False):
    """Builds the consumer in scratch/NAME with one of its lists; `wanted`: the version to ask for; `parts`: components to ask
    for, whose programs are built and started, too."""
    project = scratch / name
    project.mkdir(exist_ok=True)
    shutil.copy(CONSUMER / "main.cpp", project)
    text = (CONSUMER / lists).read_text(encoding="utf-8")
    if wanted is not None:
        text = re.sub(r"(find_package\(pufferfish) [0-9.]+", rf"\g<1> {wanted}", text)
    if parts:
        text = text.replace("CONFIG REQUIRED)", f"CONFIG REQUIRED COMPONENTS {' '.join(parts)})")
        text = text.replace("add_subdirectory(", f"set(PUFFERFISH_COMPONENTS {' '.join(parts)})\nadd_subdirectory(")
        for part in parts:
            if not fails:
                shutil.copy(CONSUMER / f"{part}.cpp", project)
            text += f"add_executable({part} {part}.cpp)\ntarget_link_libraries({part} PRIVATE pufferfish::{part})\n"
    (project / "CMakeLists.txt").write_text(text, encoding="utf-8")
    output = run("cmake", "-S", project, "-B", project / "build", f"-DCMAKE_CXX_COMPILER={';'.join(compiler)}", *arguments,
                 fails=fails)
    if fails:
        return output
    run("cmake", "--build", project / "build")
    return [run(project / "build" / program) for program in ["consumer", *parts]]


def cmake_find_package(root, scratch, compiler):
    require("cmake")
    prefix = install(root, scratch)
    lists = "find_package.cmake"
    found = f"-DCMAKE_PREFIX_PATH={prefix}"
    expect_version(root, *cmake_project(scratch, "found", compiler, lists, found, parts=components()))
    output = cmake_project(scratch, "unknown", compiler, lists, found, parts=["nn"], fails=True)
    if "pufferfish::nn needs to be one of the components: train;mpi;kernels" not in " ".join(output.split()):
        sys.exit(f"an unknown component was refused for another reason:\n{output}")
    if "train" in components():
        output = cmake_project(scratch, "without", compiler, lists, found, "-DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON",
                               parts=["train"], fails=True)
        if "pufferfish::train needs ZLIB" not in " ".join(output.split()):
            sys.exit(f"a component without its package was refused for another reason:\n{output}")
    major, minor = version(root).split(".")[:2]
    wrong = f"{major}.{int(minor) + 1}"
    output = cmake_project(scratch, "refused", compiler, lists, found, wanted=wrong, fails=True)
    if f'requested version "{wrong}"' not in " ".join(output.split()):
        sys.exit(f"version {wrong} was refused for another reason:\n{output}")
    moved = scratch / "elsewhere" / "copy"
    shutil.copytree(prefix, moved)
    shutil.rmtree(prefix)
    expect_version(root, *cmake_project(scratch, "moved", compiler, lists, f"-DCMAKE_PREFIX_PATH={moved}"))


def cmake_add_subdirectory(root, scratch, compiler):
    require("cmake")
    copy_sources(root, scratch / "added" / "pufferfish")
    expect_version(root, *cmake_project(scratch, "added", compiler, "add_subdirectory.cmake", parts=components()))


def meson_subproject(root, scratch, compiler):
    project = scratch / "project"
    shutil.copytree(CONSUMER, project)
    copy_sources(root, project / "subprojects" / "pufferfish")
    with open(project / "meson.build", "a", encoding="utf-8") as file:
        for name in components():
            file.write(f"executable('{name}', '{name}.cpp', "
                       f"dependencies: dependency('pufferfish-{name}', fallback: 'pufferfish'))\n")
    run("meson", "setup", scratch / "build", project, env={"CXX": shlex.join(compiler)})
    run("meson", "compile", "-C", scratch / "build")
    expect_version(root, *(run(scratch / "build" / program) for program in ["consumer", *components()]))
    destination = scratch / "destination"
    run("meson", "install", "-C", scratch / "build", "--destdir", destination)
    if any(p.is_file() for p in destination.rglob("*")):
        sys.exit("a subproject installs files into its parent's prefix")


def clone_of(root, scratch):
    """A repository with the sources, and its address."""
    require("git")
    sources = copy_sources(root, scratch / "origin")
    git = ["git", "-C", sources, "-c", "user.name=consumer", "-c", "user.email=consumer@localhost", "-c", "init.defaultBranch=main"]
    run(*git, "init", "--quiet")
    run(*git, "add", "--all", "--force")
    run(*git, "commit", "--quiet", "--message", "sources")
    return f"file://{sources}"


def cmake_fetch_content(root, scratch, compiler):
    require("cmake")
    address = clone_of(root, scratch)
    expect_version(root, *cmake_project(scratch, "fetched", compiler, "fetch_content.cmake", f"-DPUFFERFISH_ADDRESS={address}"))


def meson_wrap(root, scratch, compiler):
    project = scratch / "project"
    shutil.copytree(CONSUMER, project)
    wrap = (CONSUMER / "subprojects" / "pufferfish.wrap").read_text(encoding="utf-8")
    (project / "subprojects" / "pufferfish.wrap").write_text(
        re.sub("^url = .*$", f"url = {clone_of(root, scratch)}", wrap, flags=re.MULTILINE), encoding="utf-8")
    run("meson", "setup", scratch / "build", project, env={"CXX": shlex.join(compiler)})
    run("meson", "compile", "-C", scratch / "build")
    expect_version(root, run(scratch / "build" / "consumer"))


def debian_package(root, scratch, compiler):
    require("dpkg-buildpackage", "dh", "pkg-config", "cmake")
    sources = copy_sources(root, scratch / "sources")
    missing = subprocess.run(["dpkg-checkbuilddeps", sources / "packaging/debian/control"], check=False, stderr=subprocess.PIPE, text=True)
    if missing.returncode != 0:
        print(missing.stderr)
        sys.exit(SKIP)
    run(sources / "packaging" / "debian_package", scratch / "out")
    package, = (scratch / "out").glob("*.deb")
    if package.name != f"libpufferfish-dev_{version(root)}_all.deb":
        sys.exit(f"the package is called {package.name}")
    installed = scratch / "root"
    run("dpkg-deb", "--extract", package, installed)
    env = {"PKG_CONFIG_PATH": str(installed / "usr/share/pkgconfig"), "PKG_CONFIG_SYSROOT_DIR": str(installed)}
    flags = run("pkg-config", "--cflags", "--libs", "pufferfish", env=env).split()
    run(*compiler, "-std=c++20", CONSUMER / "main.cpp", *flags, "-o", scratch / "consumer")
    expect_version(root, run(scratch / "consumer"),
                   *cmake_project(scratch, "found", compiler, "find_package.cmake", f"-DCMAKE_PREFIX_PATH={installed / 'usr'}"))


def conan(root, scratch, _):
    require("conan", "cmake")
    sources = copy_sources(root, scratch / "sources")
    env = {"CONAN_HOME": str(scratch / "home")}
    run("conan", "profile", "detect", env=env)
    expect_version(root, run("conan", "create", sources / "packaging/conan", "--settings", "compiler.cppstd=20", "--no-remote", env=env))


WAYS = (pkg_config, cmake_find_package, cmake_add_subdirectory, cmake_fetch_content, meson_subproject, meson_wrap, debian_package, conan)


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    way = {f.__name__: f for f in WAYS}[sys.argv[2]]
    compiler = sys.argv[sys.argv.index("--") + 1:]
    scratch = pathlib.Path(sys.argv[3]).resolve() / sys.argv[2]
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        way(root, scratch, compiler)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
