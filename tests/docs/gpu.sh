#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# gpu.sh ROOT CUDA KERNELS: builds a program for devices as docs/gpu.md says. Of nvcc, which takes minutes, only the
# command is looked at: KERNELS is what the build has made by the same one.
set -euo pipefail

root=$1 cuda=$2 kernels=$(realpath "$3")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/bin"
cat > "$scratch/bin/nvcc" <<END
#!/bin/sh
case "\$*" in
*"-gencode=arch=compute_80,code=sm_80"*"-Iinclude -c kernels.cu -o kernels.o") grep -q kernels.cuh kernels.cu && cp "$kernels" kernels.o ;;
*) echo "what nvcc is told has changed: \$*" >&2; exit 1 ;;
esac
END
chmod +x "$scratch/bin/nvcc"
# The toolkit may be elsewhere.
cat > "$scratch/bin/g++" <<END
#!/bin/bash
exec /usr/bin/g++ "\${@//\/usr\/local\/cuda/$cuda}"
END
chmod +x "$scratch/bin/g++"
export PATH="$scratch/bin:$PATH"
ln -s "$root/include" "$scratch/include"
cp "$root/examples/kernels.cpp" "$scratch/kernels.cu"
cp "$root/tests/docs/gpu_program.cpp" "$scratch/program.cpp"
cd "$scratch"

# [build]
nvcc -std=c++20 -O3 -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a \
  --expt-relaxed-constexpr --extended-lambda -Iinclude -c kernels.cu -o kernels.o
g++ -std=c++20 -O2 -Iinclude -isystem /usr/local/cuda/include program.cpp kernels.o \
  -L/usr/local/cuda/lib64 -lcudart -lcublas -lcublasLt -o program
# [build]

LD_LIBRARY_PATH="$cuda/lib64" ./program
