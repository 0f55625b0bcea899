// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <pufferfish/core/context.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../support/child_process.hpp"

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

template <class F>
std::string text_of(const F& f) {
  try {
    f();
  } catch (const error& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("not one of ours: ") + e.what();
  }
  return "nothing was thrown";
}

#if !defined(_OPENMP)  // whose runtime ends the program, or hangs
/// Whether a sanitizer reserves the address space, so that a limit on it ends the process.
constexpr bool reserves_addresses() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  return true;
#else
  return false;
#endif
#else
  return false;
#endif
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("thread_pool: threads that cannot be started are an error, and those that run are ended" *
          doctest::skip(reserves_addresses())) {
  const std::string text = text_of_child([] {
    // Room for the stacks of some threads (8 MiB each), not of 1,000; root's threads have no other limit.
    rlimit limit{};
    ::getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = rlim_t{1} << 30;
    if (::setrlimit(RLIMIT_AS, &limit) != 0) return std::string("no limit");
    const std::string failed = text_of([] { cpu_context ctx({1000, 0}); });
    // The memory of those that ran is free again.
    cpu_context ctx({4, 0});
    std::atomic<int> done{0};
    ctx.parallel_for(100, [&](index_t, int) { ++done; });
    return failed + "; then " + std::to_string(done);
  });
  INFO(text);
  CHECK(contains(text, "thread_pool: 1000 threads asked for, the calling one included; "));
  CHECK_FALSE(contains(text, "included; 1 run"));
  CHECK(contains(text, " run, and the next cannot be started ("));
  CHECK(contains(text, "ask for fewer threads"));
  CHECK(contains(text, "; then 100"));
}

TEST_CASE("thread_pool: in a forked process it says that its threads are not there, and can be destroyed") {
  auto ctx = std::make_unique<cpu_context>(context_options{3, 0});
  const auto count = [](cpu_context& on, index_t tasks) {
    std::atomic<index_t> done{0};
    on.parallel_for(tasks, [&](index_t, int) { ++done; });
    return std::to_string(done);
  };
  CHECK(count(*ctx, 50) == "50");
  const std::string text = text_of_child([&] {
    std::string result =
        text_of([&] { static_cast<void>(count(*ctx, 50)); }) + "; one task: " + count(*ctx, 1);
    ctx.reset();
#if !defined(__SANITIZE_THREAD__)  // which refuses threads after such a fork
    cpu_context fresh({3, 0});
    result += "; a new one: " + count(fresh, 50);
#else
    result += "; a new one: 50";
#endif
    return result;
  });
  CHECK(
      text ==
      "thread_pool: this process was forked after the context (or pool) had started threads, and they do not "
      "exist here: make a new one after fork; one task: 1; a new one: 50");
  CHECK(count(*ctx, 50) == "50");
}
#endif

TEST_CASE("context: a task that starts tasks, and two threads at once, are told so, each in its words") {
  for (const int threads : {1, 2, 4}) {
    cpu_context ctx({threads, 0});
    // Where one thread does everything, a task may start tasks.
    const std::string nested = text_of(
        [&] { ctx.parallel_for(8, [&](index_t, int) { ctx.parallel_for(8, [](index_t, int) {}); }); });
    CHECK(nested == (threads == 1
                         ? "nothing was thrown"
                         : "thread_pool: a task started tasks on the context (or pool) that runs it; use "
                           "another one there"));
    std::atomic<int> inside{0};
    ctx.parallel_for(8, [&](index_t, int) { ctx.parallel_for(1, [&](index_t, int) { ++inside; }); });
    CHECK(inside == 8);

    std::string other;
    ctx.parallel_for(2, [&](index_t task, int) {
      if (task != 0) return;
      std::thread([&] { other = text_of([&] { ctx.parallel_for(2, [](index_t, int) {}); }); }).join();
    });
    CHECK(other ==
          "thread_pool: two threads use one context (or pool) at once; each thread needs one of its own");
    std::atomic<int> again{0};
    ctx.parallel_for(8, [&](index_t, int) { ++again; });
    CHECK(again == 8);
  }
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
  struct {
    std::string describe() const { return "the owner"; }
  } const owner, other;
  t.push_value(owner, extents<4>{1, 2, 3, 4});
  CHECK(t.top_value<extents<4>>(owner) == extents<4>{1, 2, 3, 4});
  CHECK_THROWS_AS(t.pop<float>(3), state_error);
  // What is wrong leaves the entry where it is.
  CHECK_THROWS_WITH_AS(t.pop_value<extents<4>>(other), doctest::Contains("the owner: backward without"),
                       state_error);
  CHECK_THROWS_AS(t.top_value<extents<4>>(other), state_error);
  CHECK_THROWS_AS(t.pop_value<extents<3>>(owner), state_error);
  t.replace_value(extents<4>{5, 6, 7, 8});
  CHECK_THROWS_AS(t.replace_value(1), state_error);
  CHECK(t.pop_value<extents<4>>(owner) == extents<4>{5, 6, 7, 8});
  CHECK_THROWS_AS(t.pop_value<extents<4>>(owner), state_error);
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
  const auto listener = ctx.on_gradient_ready(
      [](void* list, const void*, int id) { static_cast<std::vector<int>*>(list)->push_back(id); }, &told);
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
