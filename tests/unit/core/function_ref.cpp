// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/core/function_ref.hpp>

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace {

using pufferfish::function_ref;

int plus_one(int value) { return value + 1; }

int call(function_ref<int(int)> f, int value) { return f(value); }
void call_twice(function_ref<void(int)> f) {
  f(1);
  f(2);
}

TEST_CASE("function_ref: functions, lambdas, const objects, other results") {
  CHECK(call(plus_one, 4) == 5);
  CHECK(call(&plus_one, 4) == 5);
  int sum = 0;
  call_twice([&](int value) { sum += value; });
  CHECK(sum == 3);
  call_twice([&](int value) { return sum *= value; });  // a result that is discarded
  CHECK(sum == 6);
  const auto minus = [sum](int value) { return value - sum; };
  CHECK(call(minus, 10) == 4);
  int calls = 0;
  auto counting = [calls](int value) mutable { return value + ++calls; };
  CHECK(call(counting, 0) == 1);
  CHECK(call(counting, 0) == 2);  // the object itself is called, not a copy
  const auto length = [](std::unique_ptr<std::string> text) { return text->size(); };
  const function_ref<std::size_t(std::unique_ptr<std::string>)> moves = length;
  CHECK(moves(std::make_unique<std::string>("four")) == 4);
  const function_ref<int(int)> first = plus_one;
  const function_ref<int(int)> copy = first;
  CHECK(copy(1) == 2);
}

static_assert(!std::is_constructible_v<function_ref<int(int)>, void (*)(int)>);
static_assert(!std::is_constructible_v<function_ref<int(int)>, int>);

}  // namespace
