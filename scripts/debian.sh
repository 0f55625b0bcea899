# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# shellcheck shell=bash
# Sourced by tests/run and examples/run: brings what a bare Debian 12 lacks. What is there already, from wherever it
# came, is left alone.

have_command() { command -v "$1" > /dev/null 2>&1; }
have_header() { printf '#include <%s>\n' "$1" | g++ -x c++ -std=c++20 -E "${@:2}" - > /dev/null 2>&1; }
have_pkg() { pkg-config --exists "$1" > /dev/null 2>&1; }
have_library() { printf 'int main() {}' | g++ -x c++ - -l"$1" -o /dev/null > /dev/null 2>&1; }
have_links() { # COMPILER FLAGS...: links and starts an empty program
  local scratch result
  scratch=$(mktemp -d)
  printf 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n' > "$scratch/a.cpp"
  "$@" "$scratch/a.cpp" -o "$scratch/a" > /dev/null 2>&1 && "$scratch/a" -runs=0 > /dev/null 2>&1
  result=$?
  rm -rf "$scratch"
  return $result
}
have_torch() { # for the first Python or for Debian's
  local python
  for python in python3 /usr/bin/python3; do
    "$python" -c 'import importlib.util as u; raise SystemExit(not (u.find_spec("numpy") and u.find_spec("torch")))' \
      2> /dev/null && return 0
  done
  return 1
}

# Debian package, then how to see that what it brings is there.
present() {
  case $1 in
    g++) have_command g++ ;;
    meson) have_command meson ;;
    ninja-build) have_command ninja ;;
    pkg-config) have_command pkg-config ;;
    python3) have_command python3 ;;
    python3-torch) have_torch ;;
    python3-venv) /usr/bin/python3 -c 'import ensurepip' 2> /dev/null ;;
    libtorch-dev) have_header torch/torch.h -isystem /usr/include/torch/csrc/api/include ;;
    cmake) have_command cmake ;;
    doctest-dev) have_header doctest/doctest.h ;;
    libeigen3-dev) have_pkg eigen3 ;;
    zlib1g-dev) have_header zlib.h ;;
    nlohmann-json3-dev) have_header nlohmann/json.hpp ;;
    libcli11-dev) have_header CLI/CLI.hpp ;;
    libopenmpi-dev) have_pkg ompi-c ;;
    openmpi-bin) have_command mpirun.openmpi || have_command mpirun ;;
    libmpich-dev) have_pkg mpich ;;
    mpich) have_command mpirun.mpich ;;
    clang) have_command clang++ ;;
    g++-aarch64-linux-gnu) have_command aarch64-linux-gnu-g++ ;;
    qemu-user) have_command qemu-aarch64 ;;
    clang-format) have_command clang-format ;;
    clang-tidy) have_command clang-tidy ;;
    libclang-rt-14-dev) have_links clang++ -fsanitize=fuzzer,address ;;
    doxygen) have_command doxygen ;;
    doxygen-awesome-css) [ -e /usr/share/doxygen-awesome-css ] ;;
    mkdocs-material) have_command mkdocs && [ -e /usr/share/mkdocs/themes/material ] ;;
    debhelper) have_command dh ;;
    lintian) have_command lintian ;;
    gnuplot-nox) have_command gnuplot ;;
    libdlib-dev) have_header dlib/algs.h ;;
    libonnx-dev) have_header onnx/checker.h -DONNX_ML=1 -DONNX_NAMESPACE=onnx ;;
    libjpeg62-turbo-dev) have_library jpeg ;;
    libturbojpeg0-dev) have_pkg libturbojpeg ;;
    libblas-dev) have_library blas ;;
    liblapack-dev) have_library lapack ;;
    *) dpkg-query -W -f '${Status}' "$1" 2> /dev/null | grep -q 'ok installed' ;;
  esac
}

missing_packages() {
  local package
  for package in "$@"; do present "$package" || printf '%s\n' "$package"; done
}

# Installs those of the given packages that are missing. Without root or apt: says which, and fails.
require_packages() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -eq 0 ] && return 0
  local command="apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" -ne 0 ] || ! have_command apt-get; then
    printf 'missing; would install with:\n  %s\n' "$command" >&2
    return 1
  fi
  printf 'installing: %s\n' "${missing[*]}"
  local log
  log=$(mktemp)
  export DEBIAN_FRONTEND=noninteractive
  if ! { apt-get update && $command; } > "$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
  hash -r
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -eq 0 ] || { printf 'installed, but still not found: %s\n' "${missing[*]}" >&2; return 1; }
}

# Open MPI refuses root and more ranks than cores unless told; it looks for ssh even where nothing is remote.
mpi_environment() {
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  have_command ssh || export OMPI_MCA_plm_rsh_agent=false
}

# Configures a build directory, or brings an existing one to the same options.
configure() { # BUILD OPTIONS...
  local build=$1
  shift
  if [ -f "$build/build.ninja" ]; then
    meson setup --reconfigure "$build" "$@"
  else
    meson setup "$build" "$@"
  fi
}

# Headers as scripts/carry has collected them, wherever there are some: a machine that has a Meson may still lack headers.
# Carried headers come after the compiler's own. Meson and ninja as collected only where one of them is missing.
use_carried() { # [FOLDER]
  local folder=${1:-$PWD/.carry}
  [ -d "$folder/include" ] || return 1
  export CPLUS_INCLUDE_PATH=$folder/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}
  { have_command meson && have_command ninja; } || export PATH=$PATH:$folder/bin
}
