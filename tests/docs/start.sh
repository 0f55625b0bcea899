#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# start.sh ROOT COMPILER...: runs what docs/start.md says, in a folder beside a copy of the library.
set -euo pipefail

root=$1
shift
for program in cmake meson pkg-config; do
  command -v "$program" > /dev/null || { echo "$program is not installed"; exit 77; }
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/bin" "$scratch/pufferfish" "$scratch/project/subprojects"
# The page says g++; the compiler is that of the build, perhaps called by ccache. Programs by their paths, or the script
# would call itself. The last -O is the one that counts: other tests run optimized code, which takes long to compile.
compiler=()
for word in "$@"; do compiler+=("$(command -v -- "$word" || printf '%s' "$word")"); done
printf '#!/bin/sh\nexec %s "$@" -O0\n' "${compiler[*]}" > "$scratch/bin/g++"
chmod +x "$scratch/bin/g++"
export PATH="$scratch/bin:$PATH" CXX=g++
cp -r "$root/include" "$root/cmake" "$root/meson.build" "$root/meson_options.txt" "$root/LICENSE" "$scratch/pufferfish"

cd "$scratch"
cp "$root/examples/docs/first.cpp" .
# [copied]
g++ -std=c++20 -O2 -Ipufferfish/include first.cpp -o first
./first
# [copied]

# From here on the build systems are tested, with a program that is compiled sooner.
consumer=$root/tests/install/consumer
cp "$consumer/main.cpp" first.cpp
# [pkg-config]
meson setup pufferfish/build-install pufferfish --prefix="$PWD/prefix" -Dtests=disabled -Dexamples=disabled -Dbench=disabled
meson install -C pufferfish/build-install
export PKG_CONFIG_PATH="$PWD/prefix/share/pkgconfig"
g++ -std=c++20 -O2 first.cpp $(pkg-config --cflags --libs pufferfish) -o first
# [pkg-config]
./first

cp "$consumer/find_package.cmake" CMakeLists.txt
cp "$consumer/main.cpp" .
# [cmake]
cmake -S . -B build -DCMAKE_PREFIX_PATH="$PWD/prefix"
cmake --build build
build/consumer
# [cmake]

# The subproject, not what is installed.
unset PKG_CONFIG_PATH
cd project
cp "$consumer/main.cpp" "$consumer/meson.build" .
cp -r ../pufferfish subprojects/pufferfish
rm -rf subprojects/pufferfish/build-install
# [meson]
meson setup build
meson compile -C build
build/consumer
# [meson]
