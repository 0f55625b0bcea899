// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/prune/magnitude.hpp>

/// What tests of masks share: a store with parameters of all kinds, and masks of it.
namespace prune_support {

using namespace pufferfish;

/// Parameters without layers: a convolution, batch norm, matrices of odd sizes, one larger than a task of the
/// mask's loops, an embedding, nothing, one element.
template <class T>
struct small_store {
  std::vector<parameter<T>> all;
  parameter_store<T> store;

  explicit small_store(std::uint64_t seed = 1) {
    using role = parameter_role;
    all.emplace_back(logical_layout::kernel(6, 3, 3, 3), role::weight);              // conv.weight
    all.emplace_back(logical_layout::vector(6), role::norm);                         // bn.weight
    all.emplace_back(logical_layout::vector(6), role::norm);                         // bn.bias
    all.emplace_back(logical_layout{2, {13, 6, 1, 1}, {6, 1, 0, 0}}, role::weight);  // table.weight
    all.emplace_back(logical_layout::matrix(200, 101), role::weight);                // large.weight
    all.emplace_back(logical_layout::vector(0), role::bias);                         // large.bias
    all.emplace_back(logical_layout::matrix(1, 1), role::weight);                    // one.weight
    all.emplace_back(logical_layout::matrix(16, 12), role::weight);                  // three.weight
    all.emplace_back(logical_layout::matrix(7, 5), role::weight);                    // fc.weight
    all.emplace_back(logical_layout::vector(7), role::bias);                         // fc.bias
    store.pack([this](state_visitor<T>& visitor) {
      const char* const names[] = {"conv.weight",  "bn.weight",  "bn.bias",    "table.weight",
                                   "large.weight", "large.bias", "one.weight", "three.weight",
                                   "fc.weight",    "fc.bias"};
      for (std::size_t i = 0; i < all.size(); ++i) visitor.on_parameter(names[i], all[i]);
    });
    fill_normal(store.values(), 1.0, random_stream(seed, 1));
  }

  static constexpr index_t prunable = 6 * 27 + 200 * 101 + 1 + 16 * 12 + 35;
  static constexpr index_t unprunable = 6 + 6 + 78 + 7;
};

/// Host memory that counts as a device's, to see what refuses a device.
class device_like_memory final : public memory_source {
 public:
  void* allocate(std::size_t bytes) override { return host_memory().allocate(bytes); }
  void deallocate(void* memory, std::size_t bytes) noexcept override {
    host_memory().deallocate(memory, bytes);
  }
  void from_host(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void to_host(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void fill_zero(void* memory, std::size_t bytes) override { std::memset(memory, 0, bytes); }
  void copy(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void round(rounded_format format, const float* from, void* to, index_t count) override {
    host_memory().round(format, from, to, count);
  }
  bool on_host() const override { return false; }
};

/// One tensor a vector or matrix, of which the masks of small examples are.
template <class T>
struct one_matrix {
  parameter<T> weight;
  parameter_store<T> store;

  explicit one_matrix(const std::vector<T>& values, memory_source& source = host_memory())
      : weight(logical_layout::matrix(static_cast<index_t>(values.size()), 1), parameter_role::weight),
        store(source) {
    store.pack([this](state_visitor<T>& visitor) { visitor.on_parameter("w", weight); });
    std::copy(values.begin(), values.end(), store.values().begin());
  }
};

/// For each element of the arena whether it remains.
inline std::vector<bool> kept_elements(const weight_mask& mask) {
  std::vector<bool> kept;
  for (std::size_t t = 0; t < mask.tensors().size(); ++t) {
    for (index_t i = 0; i < mask.tensors()[t].size; ++i) kept.push_back(mask.keeps(t, i));
  }
  return kept;
}

/// A mask that keeps a random share of every tensor.
inline void remove_at_random(weight_mask& mask, double share, std::uint64_t seed) {
  const random_stream random(seed, 99);
  std::uint64_t number = 0;
  mask.for_each_kept(0, mask.tensors().size(), [&](std::size_t t, index_t i) {
    if (random.uniform(number++) < share) mask.remove(t, i);
  });
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

template <class T>
std::vector<T> normal_values(index_t size, std::uint64_t seed) {
  std::vector<T> values(static_cast<std::size_t>(size));
  fill_normal(std::span<T>(values), 1.0, random_stream(seed, 5));
  return values;
}

}  // namespace prune_support
