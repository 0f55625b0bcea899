// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the lanes of a warp do together, once all of them are there: shuffles, votes, tensor cores; and
/// copies in the background.

#include "cuda.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <bit>
#include <vector>

#include "device.hpp"

namespace emulated_device {

void shuffle(void* const* slots) {
  for (int l = 0; l < 32; ++l) {
    auto* self = static_cast<shuffle_slot*>(slots[l]);
    if (self == nullptr) continue;
    const auto* from = static_cast<const shuffle_slot*>(slots[self->from]);
    if (from == nullptr) misuse("a shuffle from a lane that does not take part", *self->where);
    self->out = from->in;
  }
}

void vote(void* const* slots) {
  unsigned ballot = 0;
  for (int l = 0; l < 32; ++l) {
    const auto* self = static_cast<const vote_slot*>(slots[l]);
    if (self != nullptr && self->predicate) ballot |= 1U << l;
  }
  for (int l = 0; l < 32; ++l) {
    if (slots[l] != nullptr) static_cast<vote_slot*>(slots[l])->ballot = ballot;
  }
}

// ---------------------------------------------------------------------------------------------------------
// Tensor cores

std::uint32_t to_tf32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7f800000U) == 0x7f800000U) return bits;  // infinity or no number
  return (bits + 0x1000U) & 0xffffe000U;
}

namespace {

// Number i of a row (or column) that lanes hold as words of 4 bytes, four lanes a row: words[0] has the first
// half.
template <class T>
double number(std::uint32_t word, int i) {
  if constexpr (sizeof(T) == 4) {
    return static_cast<double>(std::bit_cast<float>(word & 0xffffe000U));  // the device looks at no more
  } else {
    const auto half = static_cast<std::uint16_t>(i % 2 == 0 ? word : word >> 16);
    return static_cast<double>(static_cast<float>(std::bit_cast<T>(half)));
  }
}

// Towards zero, as tensor cores do: what a device may lose, tests should tolerate.
float truncated(double value) {
  const auto nearest = static_cast<float>(value);
  const bool beyond = value > 0 ? static_cast<double>(nearest) > value : static_cast<double>(nearest) < value;
  return beyond && std::isfinite(nearest) ? std::nextafterf(nearest, 0.0F) : nearest;
}

}  // namespace

template <class T>
void multiply(void* const* slots) {
  constexpr int in_word = 4 / static_cast<int>(sizeof(T)), depth = 8 * in_word;
  double a[16][16], b[8][16];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* s = static_cast<const mma_slot*>(slots[lane]);
    if (s == nullptr) misuse("a product by a warp that is not whole", site::current());
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < in_word; ++i) {
        const int k = (half * 4 + t) * in_word + i;
        a[g][k] = number<T>(s->a[half * 2], i);
        a[g + 8][k] = number<T>(s->a[half * 2 + 1], i);
        b[g][k] = number<T>(s->b[half], i);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* c = static_cast<const mma_slot*>(slots[lane])->c;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      double sum = static_cast<double>(c[i]);
      for (int k = 0; k < depth; ++k) sum += a[row][k] * b[column][k];
      c[i] = truncated(sum);
    }
  }
}
template void multiply<float>(void* const*);
template void multiply<__nv_bfloat16>(void* const*);
template void multiply<__half>(void* const*);

namespace {

// Number `inner` of row `row` (across the depth) of an operand whose depth is 16.
template <class T>
double in_blocks(const blocks& m, bool rows_across, int row, int k) {
  const unsigned char* block = m.first + row / 8 * m.across + k / 8 * m.along;
  const int line = rows_across ? k % 8 : row % 8, inner = rows_across ? row % 8 : k % 8;
  T value;
  std::memcpy(&value, block + line * 16 + inner * 2, sizeof(value));
  return static_cast<double>(static_cast<float>(value));
}

}  // namespace

template <class T>
void group_multiply(void* const* slots) {
  const auto* first = static_cast<const group_slot*>(slots[0]);
  const int warp = thread_of_block() / 32 % 4;
  double a[16][16], b[64][16];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* s = static_cast<const group_slot*>(slots[lane]);
    if (s == nullptr) misuse("a product by a warp that is not whole", site::current());
    for (const blocks& m : {s->left, s->right}) {
      if (reinterpret_cast<std::uintptr_t>(m.first) % 16 != 0 || m.across % 16 != 0 || m.along % 16 != 0) {
        misuse("a matrix of a warp group at an address or stride that is no multiple of 16", site::current());
      }
    }
    if (s->right.first != first->right.first || s->left.first != first->left.first) {
      misuse("lanes of a warp group multiply different matrices", site::current());
    }
    if (s->words == nullptr) continue;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i % 2 * 8, k = i / 2 * 8 + lane % 4 * 2;
      a[row][k] = number<T>(s->words[i], 0);
      a[row][k + 1] = number<T>(s->words[i], 1);
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 16 && first->words == nullptr; ++row) {
      a[row][k] = in_blocks<T>(first->left, first->left_across, warp * 16 + row, k);
    }
    for (int column = 0; column < first->columns; ++column) {
      b[column][k] = in_blocks<T>(first->right, first->right_across, column, k);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto* s = static_cast<const group_slot*>(slots[lane]);
    for (int i = 0; i < s->columns / 2; ++i) {
      const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      double sum = static_cast<double>(s->sums[i]);
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[column][k];
      s->sums[i] = truncated(sum);
    }
  }
}
template void group_multiply<__nv_bfloat16>(void* const*);
template void group_multiply<__half>(void* const*);

namespace {

struct matrices_slot {
  const void* row;
  std::uint32_t* words;
};

template <bool Transposed>
void distribute(void* const* slots) {
  for (int block = 0; block < 4; ++block) {
    std::uint16_t numbers[8][8];
    for (int row = 0; row < 8; ++row) {
      const auto* s = static_cast<const matrices_slot*>(slots[block * 8 + row]);
      if (s == nullptr) misuse("matrices for a warp that is not whole", site::current());
      if (reinterpret_cast<std::uintptr_t>(s->row) % 16 != 0) {
        misuse("a row of a matrix at an address that is no multiple of 16", site::current());
      }
      std::memcpy(numbers[row], s->row, 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4 * 2;
      const std::uint32_t low = Transposed ? numbers[t][g] : numbers[g][t];
      const std::uint32_t high = Transposed ? numbers[t + 1][g] : numbers[g][t + 1];
      static_cast<matrices_slot*>(slots[lane])->words[block] = low | high << 16;
    }
  }
}

}  // namespace

void load_matrices(std::uint32_t (&words)[4], const void* row, bool transposed, const site& where) {
  matrices_slot slot{row, words};
  warp_exchange(0xffffffffU, &slot, transposed ? distribute<true> : distribute<false>, where);
}

// ---------------------------------------------------------------------------------------------------------
// Copies in the background

namespace {

struct pending_copy {
  void* to;
  const void* from;
  std::size_t bytes;
  bool inside;
};

struct pending_copies {
  std::vector<pending_copy> copies;
  std::vector<std::size_t> groups;  // copies before the end of each
};

std::vector<pending_copies>& pending() {
  static auto* all = new std::vector<pending_copies>(1024);
  return *all;
}

bool any_pending = false;

}  // namespace

void copy_async(void* to, const void* from, int bytes, bool inside) {
  const auto size = static_cast<std::size_t>(bytes);
  if (reinterpret_cast<std::uintptr_t>(to) % size != 0 ||
      (inside && reinterpret_cast<std::uintptr_t>(from) % size != 0)) {
    misuse("a copy in the background between addresses that are no multiples of its size", site::current());
  }
  if (is_device(to)) misuse("a copy in the background to device memory", site::current());
  std::memset(to, 0xff, size);
  pending()[static_cast<std::size_t>(thread_of_block())].copies.push_back({to, from, size, inside});
  any_pending = true;
}

void commit_copies() {
  pending_copies& mine = pending()[static_cast<std::size_t>(thread_of_block())];
  mine.groups.push_back(mine.copies.size());
  any_pending = true;
}

void wait_for_copies(int under) {
  pending_copies& mine = pending()[static_cast<std::size_t>(thread_of_block())];
  const auto kept = static_cast<std::size_t>(under);
  if (mine.groups.size() <= kept) return;
  const std::size_t groups = mine.groups.size() - kept, arrived = mine.groups[groups - 1];
  for (std::size_t i = 0; i < arrived; ++i) {
    const pending_copy& c = mine.copies[i];
    if (c.inside) {
      std::memcpy(c.to, c.from, c.bytes);
    } else {
      std::memset(c.to, 0, c.bytes);
    }
  }
  mine.copies.erase(mine.copies.begin(), mine.copies.begin() + static_cast<std::ptrdiff_t>(arrived));
  mine.groups.erase(mine.groups.begin(), mine.groups.begin() + static_cast<std::ptrdiff_t>(groups));
  for (std::size_t& end : mine.groups) end -= arrived;
}

void forget_copies() {
  if (!any_pending) return;
  for (pending_copies& p : pending()) {
    p.copies.clear();
    p.groups.clear();
  }
  any_pending = false;
}

}  // namespace emulated_device
