// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Parameters without layers, and a communicator of two equal ranks in one process: for tests of exchanges and
// optimizers.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/distributed/self.hpp>
#include <pufferfish/nn/parameter_store.hpp>

namespace bare_parameters {

using namespace pufferfish;

/// Two ranks with the same gradients, of which this is one. Sums fail when `sums_left` is used up.
class twins : public self {
 public:
  explicit twins(bool threads = false) : threads_(threads) {}
  int size() const { return 2; }
  bool usable_from_threads() const { return threads_; }
  template <class T>
  void all_reduce_sum(std::span<T> values) {
    if (sums_left-- == 0) throw backend_error("the link is down");
    for (T& value : values) value += value;
  }
  template <class T>
  request start_all_reduce_sum(std::span<T> values) {
    all_reduce_sum(values);
    return {};
  }
  template <class T>
  std::vector<T> all_gather(const T& value) {
    return {value, value};
  }

  int sums_left = 1 << 30;

 private:
  bool threads_;
};
static_assert(communicator<twins>);

/// Parameters without layers around them. `write` stands for the backward pass of one of them.
struct parameters {
  explicit parameters(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      all.emplace_back(logical_layout::vector(40), parameter_role::weight);
    store.pack([this](state_visitor<float>& visitor) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        std::string name = "p";
        visitor.on_parameter(name += std::to_string(i), all[i]);
      }
    });
  }
  void write(cpu_context& ctx, std::size_t i, float value) {
    const bool adds = all[i].accumulate();
    for (float& g : all[i].gradient()) g = adds ? g + value : value;
    ctx.gradient_written(all[i]);
  }
  float gradient(std::size_t i) const { return all[i].gradient()[0]; }

  std::vector<parameter<float>> all;
  parameter_store<float> store;
};

}  // namespace bare_parameters
