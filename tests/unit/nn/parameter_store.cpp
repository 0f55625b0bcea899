// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The copies in 16 bits that a store keeps of its parameters.
#include <pufferfish/nn/parameter_store.hpp>

#include <doctest/doctest.h>

#include <cstdint>

#include <pufferfish/core/random.hpp>

namespace {
using namespace pufferfish;

struct two_tensors {
  parameter<float> first{logical_layout::vector(10), parameter_role::bias};
  parameter<float> second{logical_layout::matrix(7, 9), parameter_role::weight};

  two_tensors() {
    fill_uniform(first.values(), -2.0, 2.0, random_stream(1, 1));
    fill_uniform(second.values(), -2.0, 2.0, random_stream(1, 2));
  }
  void visit(state_visitor<float>& visitor) {
    visitor.on_parameter("first", first);
    visitor.on_parameter("second", second);
  }
};

template <class Narrow>
void check_copies(const parameter<float>& p) {
  const Narrow* const copies = p.as<Narrow>();
  CHECK(reinterpret_cast<std::uintptr_t>(copies) % memory_alignment == 0);
  for (index_t i = 0; i < p.size(); ++i) CHECK(copies[i].bits() == Narrow(p.data()[i]).bits());
  CHECK(p.as<float>() == p.data());
}

}  // namespace

TEST_CASE_TEMPLATE("parameter_store: copies of 16 bits follow the values", Narrow, bfloat16, float16) {
  two_tensors tensors;
  CHECK_THROWS_AS(static_cast<void>(tensors.first.as<Narrow>()), state_error);
  parameter_store<float> store(host_memory(), rounded_format_of<Narrow>);
  store.pack([&](state_visitor<float>& visitor) { tensors.visit(visitor); });
  check_copies<Narrow>(tensors.first);
  check_copies<Narrow>(tensors.second);
  store.values()[3] = 0.123456F;
  store.round();
  check_copies<Narrow>(tensors.first);
  check_copies<Narrow>(tensors.second);
  const parameter<float> copy = tensors.first;  // belongs to no store
  CHECK_THROWS_AS(static_cast<void>(copy.as<Narrow>()), state_error);
}

TEST_CASE("parameter_store: no copies unless they are asked for") {
  two_tensors tensors;
  parameter_store<float> store;
  store.pack([&](state_visitor<float>& visitor) { tensors.visit(visitor); });
  CHECK(store.rounded() == nullptr);
  CHECK(store.rounded_as() == rounded_format::none);
  store.round();
}
