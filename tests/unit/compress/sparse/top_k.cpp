// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <limits>

#include <pufferfish/compress/sparse/top_k.hpp>

#include "../../support/codec_support.hpp"
#include "../../support/resnet18_tensors.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace codec_support;
using namespace rank_simulation;

template <class T>
std::vector<T> normal_values(index_t size, std::uint64_t stream) {
  std::vector<T> values(static_cast<std::size_t>(size));
  fill_normal(std::span<T>(values), 1.0, random_stream(5, stream));
  return values;
}

/// Values of every kind that the selection could get wrong, by name.
template <class T>
std::vector<std::pair<std::string, std::vector<T>>> difficult_values(index_t size) {
  std::vector<std::pair<std::string, std::vector<T>>> all;
  const auto add = [&](const char* name, auto&& value) {
    std::vector<T> values(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(value(i));
    all.emplace_back(name, std::move(values));
  };
  const random_stream random(1, static_cast<std::uint64_t>(size));
  const auto whole = [&](std::size_t i, std::uint64_t bound) {
    return static_cast<T>(static_cast<double>(random.below(i, bound)));
  };
  all.emplace_back("normal", normal_values<T>(size, 1));
  add("few magnitudes, both signs", [&](std::size_t i) { return whole(i, 7) - T(3); });
  add("constant", [](std::size_t) { return T(-0.75); });
  add("one magnitude, both signs", [&](std::size_t i) { return random.below(i, 2) == 0 ? T(2) : T(-2); });
  add("zeros of both signs", [](std::size_t i) { return i % 3 == 0 ? -T(0) : T(0); });
  add("mostly zeros", [&](std::size_t i) { return random.below(i, 50) == 0 ? whole(i, 9) - T(4) : -T(0); });
  add("subnormal",
      [&](std::size_t i) { return (whole(i, 2000) - T(1000)) * std::numeric_limits<T>::denorm_min(); });
  add("all scales", [&](std::size_t i) {
    const int exponent = static_cast<int>(random.below(i, 240)) - 120;
    return std::ldexp(i % 2 == 0 ? T(1) + whole(i, 3) : -T(1), exponent);
  });
  add("largest and smallest", [&](std::size_t i) {
    using limits = std::numeric_limits<T>;
    const T values[] = {limits::max(), limits::lowest(), limits::min(), limits::denorm_min(), T(0)};
    return values[random.below(i, 5)];
  });
  add("ascending", [](std::size_t i) { return static_cast<T>(i); });
  add("descending", [](std::size_t i) { return -T(1) / static_cast<T>(i + 1); });
  add("large at the end", [&](std::size_t i) { return static_cast<index_t>(i) > size - 30 ? T(9) : T(1); });
  // The sample from which the selector guesses its bound has only large values.
  add("misleading sample", [&](std::size_t i) {
    const std::size_t stretch = 64, at = i / stretch;
    return i % stretch == substream(0, at) % stretch ? T(100) : whole(i, 5) * T(0.125);
  });
  return all;
}

TEST_CASE_TEMPLATE("select_largest is a stable sort by magnitude", T, float, double) {
  cpu_context one, three({3, 0});
  for (const index_t size : {0, 1, 2, 31, 33, 1000, 4097, 8192, 40001}) {
    CAPTURE(size);
    for (const auto& difficult : difficult_values<T>(size)) {
      const std::string& name = difficult.first;
      const std::vector<T>& values = difficult.second;
      CAPTURE(name);
      for (const index_t k :
           {index_t{0}, index_t{1}, size / 1000, size / 100, size / 8, size / 2, size - 1, size}) {
        if (k < 0 || k > size) continue;
        CAPTURE(k);
        std::vector<std::int32_t> selected, of_threads;
        select_largest<T>(one, values, k, selected);
        REQUIRE(selected == reference::select_largest<T>(values, k));
        select_largest<T>(three, values, k, of_threads);
        REQUIRE(selected == of_threads);
      }
    }
  }
}

TEST_CASE_TEMPLATE("largest_selector: lists of many tensors, with sums formed on the way", T, float, double) {
  const std::vector<coded_tensor> tensors = vectors_of<T>({5, 20000, 1, 16384, 300, 40000});
  const index_t size = coded_size(tensors);
  const detail::entry_lists lists({2, 150, 1, 0, 299, 20000});
  const std::vector<T> values = normal_values<T>(size, 3), added = normal_values<T>(size, 4);
  std::vector<T> wanted = values;
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] += added[i];
  largest_selector<T> selector("test", tensors);
  for (const int threads : {1, 4}) {
    cpu_context ctx({threads, 0});
    std::vector<T> sums = values;
    selector.select_sums(ctx, lists, added, sums);
    CHECK(same_bits(sums, wanted));
    REQUIRE(selector.indices().size() == 20452);
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const auto own = std::span<const T>(wanted).subspan(static_cast<std::size_t>(tensors[t].offset),
                                                          static_cast<std::size_t>(tensors[t].size));
      const std::vector<std::int32_t> right = reference::select_largest<T>(own, lists.count(t));
      for (std::size_t i = 0; i < right.size(); ++i) {
        const std::size_t at = static_cast<std::size_t>(lists.first(t)) + i;
        REQUIRE(selector.indices()[at] == right[i]);
        REQUIRE(selector.values()[at] == own[static_cast<std::size_t>(right[i])]);
      }
    }
    const std::vector<std::int32_t> of_sums(selector.indices().begin(), selector.indices().end());
    selector.select(ctx, lists, std::as_const(sums));
    CHECK(std::equal(of_sums.begin(), of_sums.end(), selector.indices().begin()));
  }
}

TEST_CASE_TEMPLATE("the filter of select_largest is the plain one, for any length and instruction set", T,
                   float, double) {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    const auto filter = PUFFERFISH_KERNEL(target, detail::largest_passes, find_at_least<T>);
    for (const index_t count : {0, 1, 5, 31, 32, 33, 64, 100, 1001}) {
      CAPTURE(count);
      std::vector<T> values = normal_values<T>(count, 9);
      for (std::size_t i = 3; i < values.size(); i += 7) values[i] = i % 2 == 0 ? -T(0) : T(0);
      if (count > 40) values[40] = std::numeric_limits<T>::quiet_NaN();
      for (const T bound : {T(0), std::numeric_limits<T>::denorm_min(), T(0.5), T(2),
                            std::abs(values.empty() ? T(1) : values[0])}) {
        const auto least = detail::magnitude_key(bound);
        std::vector<detail::large_entry<T>> found(values.size());
        const index_t length = filter(values.data(), count, least, 77, found.data());
        index_t right = 0;
        for (std::size_t i = 0; i < values.size(); ++i) {
          if (!(std::abs(values[i]) >= bound) && values[i] == values[i]) continue;
          REQUIRE(right < length);
          const detail::large_entry<T>& entry = found[static_cast<std::size_t>(right++)];
          REQUIRE(entry.index == 77 + static_cast<std::int32_t>(i));
          REQUIRE(std::memcmp(&entry.value, &values[i], sizeof(T)) == 0);
        }
        CHECK(right == length);
      }
    }
  }
}

TEST_CASE_TEMPLATE("kth_largest finds the key and how many of its equals count", Word, std::uint32_t,
                   std::uint64_t) {
  const random_stream random(3, 3);
  for (const std::uint64_t bound :
       {std::uint64_t{1}, std::uint64_t{3}, std::uint64_t{5000}, std::uint64_t{1} << 31}) {
    for (const std::size_t size : {std::size_t{1}, std::size_t{2}, std::size_t{700}}) {
      std::vector<Word> keys(size);
      for (std::size_t i = 0; i < size; ++i) {
        keys[i] = static_cast<Word>(random.below(i, bound)) << (sizeof(Word) == 8 && i % 2 == 0 ? 31 : 0);
      }
      std::vector<Word> sorted = keys;
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      for (const std::size_t k : {std::size_t{1}, (size + 1) / 2, size}) {
        std::vector<Word> used = keys;
        auto rank = static_cast<index_t>(k);
        const Word found = detail::kth_largest(used, rank);
        CHECK(found == sorted[k - 1]);
        const auto above = std::count_if(keys.begin(), keys.end(), [&](Word key) { return key > found; });
        CHECK(rank == static_cast<index_t>(k) - above);
      }
    }
  }
}

TEST_CASE("entry_lists: runs are all entries once, each in one list") {
  cpu_context ctx;
  for (const std::vector<index_t>& counts :
       {std::vector<index_t>{}, {0}, {0, 3, 0, 0, 1, 0}, {20000, 0, 16384, 7}}) {
    const detail::entry_lists lists(counts);
    std::vector<index_t> seen;
    lists.for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      CHECK(begin < end);
      CHECK(begin >= lists.first(t));
      CHECK(end <= lists.first(t) + lists.count(t));
      for (index_t i = begin; i < end; ++i) seen.push_back(i);
    });
    CHECK(static_cast<index_t>(seen.size()) == lists.size());
    for (std::size_t i = 0; i < seen.size(); ++i) REQUIRE(seen[i] == static_cast<index_t>(i));
  }
  CHECK(detail::entries_of_share(0.01, 99) == 1);
  CHECK(detail::entries_of_share(0.01, 300) == 3);
  CHECK(detail::entries_of_share(0.999, 1) == 1);
  CHECK(detail::entries_of_share(1.0, 1000) == 1000);
  CHECK(detail::entries_of_share(0.5, 0) == 0);
}

template <class T>
std::vector<top_k_options> all_options() {
  std::vector<top_k_options> all;
  for (const double ratio : {1e-9, 0.01, 0.3, 1.0}) {
    for (const bool halved : {false, true}) {
      for (const top_k_scope scope : {top_k_scope::tensor, top_k_scope::arena}) {
        all.push_back({ratio, halved, scope, code_memory::error_feedback});
      }
    }
  }
  return all;
}

TEST_CASE_TEMPLATE("top_k_codec keeps the rules of codecs", T, float, double) {
  for (const top_k_options& options : all_options<T>()) check_codec<top_k_codec<T>>(options);
}

TEST_CASE_TEMPLATE("top_k_codec: of equal magnitudes the first, values before indices, a memory of the rest",
                   T, float, double) {
  cpu_context ctx;
  top_k_codec<T> codec(vectors_of<T>({4, 3}), {0.5});
  std::vector<T> memory(7, T(0));
  const auto code = coded(codec, ctx, std::vector<T>{3, -3, 2, 3, 0.5, 0, -0.25}, memory);
  CHECK(code.size() == 3 * sizeof(T) + 3 * sizeof(std::int32_t));
  CHECK(detail::read_at<T>(code, 0) == T(3));
  CHECK(detail::read_at<T>(code, sizeof(T)) == T(-3));
  CHECK(detail::read_at<std::int32_t>(code, 2 * sizeof(T)) == 0);
  CHECK(detail::read_at<std::int32_t>(code, 2 * sizeof(T) + 4) == 1);
  CHECK(detail::read_at<T>(code, 2 * sizeof(T) + 8) == T(0.5));
  CHECK(detail::read_at<std::int32_t>(code, 3 * sizeof(T) + 8) == 0);
  CHECK(decoded(codec, ctx, code, 7) == std::vector<T>{3, -3, 0, 0, 0.5, 0, 0});
  CHECK(memory == std::vector<T>{0, 0, 2, 3, 0, 0, -0.25});

  top_k_codec<T> together(vectors_of<T>({4, 3}), {0.5, false, top_k_scope::arena, code_memory::none});
  std::vector<T> none;
  const auto code_of_all = coded(together, ctx, std::vector<T>{1, -3, 2, 3, 4, 0, -3}, none);
  CHECK(decoded(together, ctx, code_of_all, 7) == std::vector<T>{0, -3, 0, 3, 4, 0, 0});
  CHECK(detail::read_at<std::int32_t>(code_of_all, 3 * sizeof(T) + 8) == 4);
}

TEST_CASE("top_k_codec: what is lost is at most the share of values that are not sent") {
  cpu_context ctx;
  for (const auto& difficult : difficult_values<double>(9000)) {
    const std::string& name = difficult.first;
    const std::vector<double>& values = difficult.second;
    if (name == "largest and smallest") continue;  // squares overflow
    CAPTURE(name);
    top_k_codec<double> codec(vectors_of<double>({9000}), {0.1});
    std::vector<double> memory(9000, 0.0);
    coded(codec, ctx, values, memory);
    double squares = 0, lost = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      squares += values[i] * values[i];
      lost += memory[i] * memory[i];
    }
    CHECK(lost <= 0.9 * squares * (1 + 1e-12));
    CHECK(std::count_if(memory.begin(), memory.end(), [](double e) { return e != 0.0; }) <= 8100);
  }
}

TEST_CASE("top_k_codec: codes with bad indices are refused before anything changes") {
  cpu_context ctx;
  top_k_codec<float> codec(vectors_of<float>({2, 8}), {0.5});
  std::vector<float> none, to(10, 7.0F);
  const auto good = coded(codec, ctx, std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, none);
  // One value and one index, then four values and four indices: 4, 5, 6, 7.
  const auto with_index = [&](std::size_t byte, std::int32_t index) {
    std::vector<std::byte> code = good;
    detail::write_at(code, byte, index);
    return code;
  };
  struct change {
    std::size_t byte;
    std::int32_t index;
  };
  for (const change& bad :
       {change{4, 2}, {4, -1}, {24, -1}, {24, 5}, {28, 4}, {28, 6}, {32, 7}, {36, 6}, {36, 8}, {36, -1}}) {
    CAPTURE(bad.byte);
    CAPTURE(bad.index);
    CHECK_THROWS_WITH_AS(codec.decode(ctx, with_index(bad.byte, bad.index), decode_as::values, to),
                         doctest::Contains(bad.byte == 4 ? "v0" : "v1"), value_error);
    CHECK(to == std::vector<float>(10, 7.0F));
  }
  codec.decode(ctx, with_index(24, 0), decode_as::values, to);
  CHECK(to == std::vector<float>{0, 2, 7, 0, 0, 0, 0, 8, 9, 10});
  CHECK_THROWS_AS(codec.decode(ctx, std::span(good).first(8), decode_as::values, to), value_error);
  CHECK_THROWS_AS(codec.decode(ctx, {}, decode_as::values, to), value_error);
}

TEST_CASE("top-k: options that cannot be and tensors that are too large are refused by name") {
  const double not_a_number = std::numeric_limits<double>::quiet_NaN();
  for (const double ratio : {0.0, -0.5, 1.5, not_a_number}) {
    CHECK_THROWS_WITH_AS(top_k_codec<float>(vectors_of<float>({4}), {ratio}),
                         doctest::Contains(("ratio " + detail::message({ratio})).c_str()), value_error);
  }
  constexpr index_t limit = std::numeric_limits<std::int32_t>::max();
  const auto tensors = vectors_of<float>({3, limit + 1});
  CHECK_THROWS_WITH_AS(top_k_codec<float>{tensors}, doctest::Contains("v1 has 2147483648 elements"),
                       value_error);
  const auto halves = vectors_of<float>({limit / 2 + 1, limit / 2 + 1});
  CHECK_NOTHROW(detail::check_entry_indices("top_k", halves[0].name, halves[0].size));
  CHECK_NOTHROW(detail::check_entry_indices("top_k", "v", limit));
  CHECK_THROWS_WITH_AS(top_k_codec<float>(halves, {0.01, false, top_k_scope::arena, code_memory::none}),
                       doctest::Contains("2147483648 elements"), value_error);
}

TEST_CASE("top-k: lines tell options apart") {
  CHECK(describe(top_k_options{}) == "top-k, ratio 0.01, per tensor, error feedback");
  CHECK(describe(top_k_options{0.25, true, top_k_scope::arena, code_memory::none}) ==
        "top-k, ratio 0.25 halved, over all tensors, no memory");
  odd_parameters<float> net;
  for (const top_k_options& options : all_options<float>()) {
    CHECK(new_compressor(net.store, options).describe() == describe(options));
  }
}

TEST_CASE("top-k: bytes of ResNet-18") {
  struct setting {
    top_k_options options;
    std::size_t dense, hybrid;
  };
  const code_memory feedback = code_memory::error_feedback;
  const auto tensor = top_k_scope::tensor, arena = top_k_scope::arena;
  const setting settings[] = {
      {{0.1}, 8'938'832, 2'668'624},
      {{0.01}, 893'768, 266'696},
      {{0.001}, 89'528, 26'792},
      {{0.99}, 88'496'496, 26'421'888},
      {{0.25}, 22'347'664, 6'672'272},
      {{1.0 / 136.0, true, tensor, feedback}, 328'592, 98'024},
      {{1.0 / 32.0, true, tensor, feedback}, 1'396'736, 417'024},
      {{0.01, false, arena, feedback}, 893'904, 266'888},
  };
  for (const setting& s : settings) {
    CAPTURE(describe(s.options));
    CHECK(top_k_codec<float>(resnet18_tensors::resnet18_tensors(false), s.options).most_bytes() == s.dense);
    CHECK(top_k_codec<float>(resnet18_tensors::resnet18_tensors(true), s.options).most_bytes() == s.hybrid);
  }
}

template <class T>
std::vector<std::vector<T>> gradients_of_ranks(const parameter_store<T>& store, int ranks,
                                               std::uint64_t step) {
  std::vector<std::vector<T>> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<double> values = gradients_of(store, rank, step);
    all.emplace_back(values.begin(), values.end());
  }
  return all;
}

/// Adds factor * x to the sum.
template <class Sum, class X>
void add_to(std::vector<Sum>& sum, const X& x, double factor) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += factor * static_cast<double>(x[i]);
}

TEST_CASE_TEMPLATE("top-k with memory: what was sent and what is left is the sum of the gradients", T, float,
                   double) {
  odd_parameters<T> net;
  cpu_context one, three({3, 0});
  for (const int count : {1, 2, 3, 4}) {
    for (const top_k_scope scope : {top_k_scope::tensor, top_k_scope::arena}) {
      const top_k_options options{0.05, false, scope, code_memory::error_feedback};
      const auto make = [&](int) { return new_compressor(net.store, options); };
      simulated_ranks<any_compressor<T>> ranks(count, make), threaded(count, make);
      std::vector<double> given(net.store.values().size(), 0.0), result = given;
      for (std::uint64_t step = 0; step < 50; ++step) {
        auto gradients = gradients_of_ranks(net.store, count, step);
        if (step == 7) {
          for (auto& one_of_them : gradients) std::fill(one_of_them.begin(), one_of_them.end(), T(0));
        }
        auto copies = gradients;
        for (const auto& g : gradients) add_to(given, g, 1.0 / count);
        ranks.step(one, gradients);
        threaded.step(three, copies);
        REQUIRE(ranks_agree(gradients));
        REQUIRE(same_bits(gradients[0], copies[0]));
        add_to(result, gradients[0], 1.0);
      }
      double largest_left = 0;
      for (std::size_t w = 0; w < ranks.size(); ++w) {
        const auto states = ranks[w].states();
        REQUIRE(states.size() == 1);
        CHECK(states[0].of_rank);
        add_to(result, states[0].values, 1.0 / count);
        for (const T e : states[0].values) largest_left = std::max(largest_left, std::abs(double{e}));
      }
      CHECK(largest_left > 1.0);
      for (std::size_t i = 0; i < given.size(); ++i)
        REQUIRE(result[i] == doctest::Approx(given[i]).epsilon(1e-5).scale(50));
    }
  }
}

TEST_CASE_TEMPLATE("top-k of all values is the mean; equal gradients give what one rank sends", T, float,
                   double) {
  odd_parameters<T> net;
  cpu_context ctx;
  simulated_ranks<any_compressor<T>> whole(
      3, [&](int) { return new_compressor(net.store, top_k_options{1.0}); });
  for (std::uint64_t step = 0; step < 2; ++step) {
    auto gradients = gradients_of_ranks(net.store, 3, step);
    std::vector<T> mean(gradients[0].size());
    for (std::size_t i = 0; i < mean.size(); ++i) {
      mean[i] = (gradients[0][i] + gradients[1][i] + gradients[2][i]) * (T(1) / T(3));
    }
    whole.step(ctx, gradients);
    CHECK(gradients[2] == mean);
    for (std::size_t w = 0; w < 3; ++w) {
      const std::span<T> memory = whole[w].states()[0].values;
      CHECK(std::all_of(memory.begin(), memory.end(), [](T left) { return left == T(0); }));
    }
  }
  const auto make = [&](int) { return new_compressor(net.store, top_k_options{0.1}); };
  simulated_ranks<any_compressor<T>> four(4, make), alone(1, make);
  for (std::uint64_t step = 0; step < 5; ++step) {
    auto of_one = gradients_of_ranks(net.store, 1, step);
    std::vector<std::vector<T>> of_four(4, of_one[0]);
    four.step(ctx, of_four);
    alone.step(ctx, of_one);
    CHECK(of_four[0] == of_one[0]);
    CHECK(four.payload_bytes(3) == static_cast<std::size_t>(alone[0].payload_bytes()));
    CHECK(four.sent_bytes(1) == 3 * four.payload_bytes(1));
  }
}

TEST_CASE("top-k resumed from its states goes on with the same bits; without memory it has none") {
  odd_parameters<float> net;
  cpu_context ctx;
  const auto make = [&](int) { return new_compressor(net.store, top_k_options{0.03}); };
  simulated_ranks<any_compressor<float>> whole(2, make), resumed(2, make);
  for (std::uint64_t step = 0; step < 6; ++step) {
    if (step == 3) {
      for (std::size_t w = 0; w < 2; ++w) {
        const auto from = whole[w].states()[0].values;
        std::copy(from.begin(), from.end(), resumed[w].states()[0].values.begin());
      }
    }
    auto gradients = gradients_of_ranks(net.store, 2, step), again = gradients;
    whole.step(ctx, gradients);
    if (step >= 3) {
      resumed.step(ctx, again);
      CHECK(same_bits(gradients[1], again[1]));
    }
  }
  const top_k_options no_memory{0.03, false, top_k_scope::tensor, code_memory::none};
  simulated_ranks<any_compressor<float>> forgetful(2,
                                                   [&](int) { return new_compressor(net.store, no_memory); });
  CHECK(forgetful[0].states().empty());
  auto first = gradients_of_ranks(net.store, 2, 0), second = first;
  forgetful.step(ctx, first);
  forgetful.step(ctx, second);
  CHECK(same_bits(first[0], second[0]));
}

TEST_CASE("top-k by two hops: both memories together hold what is left") {
  odd_parameters<double> net;
  cpu_context ctx;
  const std::vector<coded_tensor> tensors = coded_tensors(net.store);
  using two_hops = two_hop_codes<top_k_codec<double>>;
  simulated_ranks<two_hops> ranks(
      3, [&](int) { return two_hops(tensors, {0.05}, code_memory::error_feedback); });
  std::vector<double> given(net.store.values().size(), 0.0), result = given;
  for (std::uint64_t step = 0; step < 20; ++step) {
    auto gradients = gradients_of_ranks(net.store, 3, step);
    for (const auto& g : gradients) add_to(given, g, 1.0 / 3.0);
    ranks.step(ctx, gradients);
    REQUIRE(ranks_agree(gradients));
    add_to(result, gradients[0], 1.0);
  }
  for (std::size_t w = 0; w < 3; ++w) {
    const auto states = ranks[w].states();
    add_to(result, states[0].values, 1.0 / 3.0);
    const auto offset =
        static_cast<std::size_t>(stripe_of(coded_size(tensors), static_cast<int>(w), 3).begin);
    for (std::size_t i = 0; i < states[1].values.size(); ++i) result[offset + i] += states[1].values[i];
  }
  CHECK(largest_difference<double>(result, given) < 1e-11);
}

}  // namespace
