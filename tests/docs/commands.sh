#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# commands.sh ROOT BUILD MPIRUN: runs the commands that the pages show, in a folder that looks like a built clone.
set -euo pipefail

root=$1 build=$2 launcher=$3
[ "$launcher" != - ] || { echo "there is no MPI"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/bin"
ln -s "$launcher" "$scratch/bin/mpirun"
export PATH="$scratch/bin:$PATH"
ln -s "$build" "$scratch/build"
for folder in bench docs examples; do ln -s "$root/$folder" "$scratch/$folder"; done
cd "$scratch"

# [train]
mpirun -n 2 build/examples/train_image_classifier --first-layer 4 --epochs 20 --warmup-epochs 5 --save digits.safetensors
build/examples/predict --model digits.safetensors examples/data/digits/t10k-images-idx3-ubyte.gz \
  --labels examples/data/digits/t10k-labels-idx1-ubyte.gz
# [train]

# [digits]
build/examples/train_digits examples/data/digits
# [digits]

# [embed]
build/examples/embed
# [embed]

# [network]
build/examples/own_network
# [network]

# [own]
mpirun -n 2 build/examples/distribute
# [own]

# [ranks]
mpirun -n 2 build/examples/train_image_classifier --first-layer 4 --epochs 8 --warmup-epochs 3 --json two-ranks.json
# [ranks]

# [tune]
mpirun -n 2 build/examples/train_image_classifier --epochs 2 --warmup-epochs 1 --tune-exchange --json tuned.json
# [tune]

# [checkpoint]
mpirun -n 2 build/examples/train_image_classifier --epochs 8 --warmup-epochs 3 --timeout 60 \
  --checkpoint run.safetensors --checkpoint-every 20 --resume
# [checkpoint]

# [compress]
mpirun -n 2 build/examples/train_image_classifier --epochs 4 --warmup-epochs 2 --compress bf16
mpirun -n 2 build/examples/train_image_classifier --epochs 4 --warmup-epochs 2 --compress powersgd --compress-rank 4
mpirun -n 2 build/examples/train_image_classifier --epochs 4 --warmup-epochs 2 --compress signum --lr 0.001 --momentum 0
# [compress]

# [plan]
build/examples/plan --model resnet18_cifar --ranks 8 64 --gbit 1 --budgets 0.5 0.3 --compressors none bf16 powersgd
# [plan]

# [scaling]
bench/scaling --measured docs/results/exchange/allreduce-*.json docs/results/exchange/step-*-{100mbit,1gbit,1gbit-again}.json \
  docs/results/scaling/{allreduce-2-hosts-unlimited,compressors}.json --latency-us 50 --ask --ranks 64 --rate 1
# [scaling]

# [layers]
build/examples/model_zoo --model resnet18_cifar --layers
# [layers]

# [zoo]
build/examples/model_zoo --model resnet50 --layers          # a network, layer by layer
build/examples/model_zoo --model resnet50 --json zoo.json   # the same for programs
# [zoo]

# [sweep]
for ratio in 0.125 0.25 0.5; do
  for warmup in 0 5; do
    build/examples/train_image_classifier --policy paper --rank-ratio $ratio --warmup-epochs $warmup --first-layer 4 --epochs 10 \
      --progress none --json rank-$ratio-warmup-$warmup.json
  done
done
# [sweep]

# [tickets]
build/examples/lottery_ticket --epochs 8 --levels 5 --checkpoint tickets.safetensors --resume \
  --json tickets.json --plot tickets.svg
# [tickets]

# [bird]
build/examples/early_bird --epochs 12 --share 0.3,0.5,0.7 --train-share 0.5 \
  --checkpoint bird.safetensors --resume --json bird.json --plot bird.svg
build/examples/early_bird --criterion slimming --epochs 12 --fine-tune-epochs 4 --save slim.safetensors
# [bird]

for file in digits.safetensors two-ranks.json tuned.json run.safetensors zoo.json rank-0.5-warmup-5.json tickets.json \
    bird.json slim.safetensors; do
  [ -s "$file" ] || { echo "no $file"; exit 1; }
done
