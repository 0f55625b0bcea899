// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>
#include <algorithm>

#include <algorithm>
#include <atomic>
#include <pufferfish/core/context.hpp>
#include <set>
#include <stdexcept>
#include <vector>

namespace {

using namespace pufferfish;

TEST_CASE("thread_pool: every task once, workers in range, exceptions come back, it works again after one") {
  for (int threads : {1, 2, 5}) {
    thread_pool pool(threads);
    CHECK(pool.size() == threads);
    for (index_t tasks : {0, 1, 2, 100, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      std::atomic<bool> in_range{true};
      pool.run(tasks, [&](index_t task, int worker) {
        ++runs[static_cast<std::size_t>(task)];
        if (worker < 0 || worker >= threads) in_range = false;
      });
      CHECK(in_range);
      for (const auto& count : runs) REQUIRE(count == 1);
    }
    CHECK_THROWS_WITH_AS(pool.run(50,
                                  [](index_t task, int) {
                                    if (task == 17) throw std::runtime_error("task 17");
                                  }),
                         "task 17", std::runtime_error);
    std::atomic<int> again{0};
    pool.run(10, [&](index_t, int) { ++again; });
    CHECK(again == 10);
  }
  CHECK_THROWS_AS(thread_pool(0), value_error);
}

TEST_CASE("stack_arena: blocks are aligned, never move, and from the second round on stay where they are") {
  stack_arena arena;
  std::vector<std::byte*> first, second, third;
  const auto round = [&](std::vector<std::byte*>& blocks) {
    const auto start = arena.top();
    for (std::size_t bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{70000}, std::size_t{64}, std::size_t{500000}}) {
      std::byte* block = arena.allocate(bytes);
      CHECK(reinterpret_cast<std::uintptr_t>(block) % memory_alignment == 0);
      std::fill_n(block, bytes, std::byte{1});
      blocks.push_back(block);
    }
    arena.release(start);
  };
  round(first);
  round(second);  // joins what the first round found out
  const std::size_t asked = arena.system_allocations();
  round(third);
  CHECK(arena.system_allocations() == asked);
  CHECK(second == third);
  CHECK(std::set<std::byte*>(second.begin(), second.end()).size() == second.size());
  CHECK(arena.in_use() == 0);
  CHECK(arena.peak_bytes() >= 570065);
  CHECK(arena.held_bytes() >= arena.peak_bytes());
}

TEST_CASE("tape: last in, first out; a backward pass without its forward pass is told so") {
  tape t;
  t.push<float>(3)[2] = 7.0F;
  t.push_value(extents<4>{1, 2, 3, 4});
  CHECK(t.top_value<extents<4>>() == extents<4>{1, 2, 3, 4});
  CHECK_THROWS_AS(t.pop<float>(3), state_error);
  CHECK(t.pop_value<extents<4>>() == extents<4>{1, 2, 3, 4});
  CHECK(t.pop<float>(3)[2] == 7.0F);
  CHECK(t.empty());
  CHECK_THROWS_AS(t.pop<float>(3), state_error);
  t.push<double>(100);
  t.clear();
  CHECK(t.empty());
}

TEST_CASE("tape: what the last pop gives stays readable, however many chunks of memory there are") {
  tape t;
  const index_t sizes[] = {30000, 40000, 50000};
  for (index_t size : sizes) std::fill_n(t.push<double>(size), size, static_cast<double>(size));
  for (std::size_t i = 3; i-- > 0;) {
    const double* kept = t.pop<double>(sizes[i]);
    CHECK(std::all_of(kept, kept + sizes[i], [&](double v) { return v == static_cast<double>(sizes[i]); }));
  }
  CHECK(t.empty());
}

TEST_CASE("context: random streams follow (seed, step, order of asking) only") {
  cpu_context a({1, 42}), b({3, 42}), c({1, 43});
  a.begin_step(5);
  b.begin_step(4);
  b.next_random_stream();
  b.begin_step(5);
  c.begin_step(5);
  const auto first = a.next_random_stream(), same = b.next_random_stream(), other = c.next_random_stream();
  const auto second = a.next_random_stream();
  for (std::uint64_t i = 0; i < 10; ++i) {
    CHECK(first.bits(i) == same.bits(i));
    CHECK(first.bits(i) != other.bits(i));
    CHECK(first.bits(i) != second.bits(i));
  }
}

TEST_CASE("context: gradient_written tells when the last writer of a step is done") {
  std::vector<int> told;
  cpu_context ctx;
  ctx.on_gradient_ready([](void* list, int id) { static_cast<std::vector<int>*>(list)->push_back(id); },
                        &told);
  parameter<float> shared(logical_layout::vector(2), parameter_role::weight);
  float place[4];
  shared.bind(place, place + 2, 9);
  shared.set_writers(2);
  CHECK_FALSE(shared.accumulate());
  ctx.gradient_written(shared);
  CHECK(told.empty());
  CHECK(shared.accumulate());
  ctx.gradient_written(shared);
  CHECK(told == std::vector<int>{9});
  CHECK_FALSE(shared.accumulate());
}

TEST_CASE("parameter: logical views, binding keeps values, copies own theirs") {
  parameter<float> p(logical_layout::kernel(2, 3, 1, 2), parameter_role::weight);
  for (index_t i = 0; i < p.size(); ++i) p.data()[i] = static_cast<float>(i);
  // Stored [height][width][in][out].
  CHECK(p.logical()(1, 2, 0, 1) == static_cast<float>((0 * 2 + 1) * 6 + 2 * 2 + 1));
  CHECK(to_string(p.layout()) == "[2 x 3 x 1 x 2]");
  std::vector<float> values(12), gradients(12);
  p.bind(values.data(), gradients.data(), 3);
  CHECK(p.data() == values.data());
  CHECK(p.gradient_data() == gradients.data());
  CHECK(values[11] == 11.0F);
  parameter<float> copy = p;
  CHECK(copy.data() != values.data());
  CHECK(copy.id() == -1);
  CHECK(copy.values()[11] == 11.0F);
  copy.data()[0] = -1.0F;
  CHECK(values[0] == 0.0F);
}

}  // namespace
