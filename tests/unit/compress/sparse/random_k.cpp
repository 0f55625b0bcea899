// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <limits>

#include <pufferfish/compress/sparse/random_k.hpp>

#include "../../support/codec_support.hpp"
#include "../../support/resnet18_tensors.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace codec_support;
using namespace rank_simulation;

static_assert(gradient_compressor<random_k<float>> && gradient_compressor<random_k<double>>);

constexpr code_memory no_memory = code_memory::none;

random_k_options with_ratio(double ratio, code_memory memory = code_memory::error_feedback) {
  random_k_options options;
  options.ratio = ratio;
  options.memory = memory;
  return options;
}

/// Options of all forms that odd_parameters tell apart.
std::vector<random_k_options> all_options() {
  std::vector<random_k_options> all;
  for (const bool block : {false, true}) {
    for (const index_t rank : {0, 1, 3}) {
      for (const code_memory memory : {code_memory::error_feedback, no_memory}) {
        all.push_back({0.2, rank, block, memory, false, 1});
      }
      all.push_back({0.3, rank, block, no_memory, true, 5});
    }
  }
  return all;
}

std::vector<std::int32_t> subset(std::uint64_t stream, index_t n, index_t k) {
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(k));
  detail::draw_subset({7, stream}, n, k, numbers.data());
  return numbers;
}
std::vector<std::int32_t> block(std::uint64_t stream, index_t n, index_t k) {
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(k));
  detail::draw_block({7, stream}, n, k, numbers.data());
  return numbers;
}

TEST_CASE("bounded_draws: uniform numbers below a bound, from the words of the stream in order") {
  const random_stream random(11, 13);
  for (const std::uint32_t bound : {1U, 2U, 10U, 1000U, 3U << 30, 0xffffffffU, 0x80000001U}) {
    CAPTURE(bound);
    // The plain form: words for which bound word mod 2^32 is below 2^32 mod bound are skipped, so that each
    // draw floor(bound word / 2^32) has floor(2^32 / bound) words.
    detail::bounded_draws draws(random);
    std::uint64_t position = 0;
    for (int i = 0; i < 1000; ++i) {
      const std::uint64_t least = (std::uint64_t{1} << 32) % bound;
      std::uint64_t product = 0;
      do {
        product = std::uint64_t{bound} * random.word(position++);
      } while ((product & 0xffffffffU) < least);
      REQUIRE(draws.below(bound) == product >> 32);
    }
    if (bound == 3U << 30) CHECK(position > 1200);
  }
}

TEST_CASE("draw_subset: ascending numbers without duplicates, each as often as any other") {
  for (const index_t n : {1, 2, 63, 64, 65, 1000, 100000}) {
    for (const index_t k : {index_t{0}, index_t{1}, n / 3, n - 1, n}) {
      CAPTURE(n);
      CAPTURE(k);
      const std::vector<std::int32_t> numbers = subset(static_cast<std::uint64_t>(n + k), n, k);
      CHECK(std::is_sorted(numbers.begin(), numbers.end()));
      CHECK(std::adjacent_find(numbers.begin(), numbers.end()) == numbers.end());
      if (k > 0) CHECK((numbers.front() >= 0 && numbers.back() < n));
    }
  }
  constexpr index_t draws = 20000;
  for (const index_t n : {5, 37, 100}) {
    for (const index_t k : {index_t{1}, index_t{2}, n / 2, n - 1}) {
      CAPTURE(n);
      CAPTURE(k);
      std::vector<index_t> of_subsets(static_cast<std::size_t>(n), 0), of_blocks = of_subsets;
      for (index_t i = 0; i < draws; ++i) {
        const auto stream = static_cast<std::uint64_t>(1000 * n * draws + k * draws + i);
        for (const std::int32_t at : subset(stream, n, k)) ++of_subsets[static_cast<std::size_t>(at)];
        for (const std::int32_t at : block(stream, n, k)) ++of_blocks[static_cast<std::size_t>(at)];
      }
      const double share = static_cast<double>(k) / static_cast<double>(n),
                   count = static_cast<double>(draws);
      const double sigma = std::sqrt(count * share * (1.0 - share));
      for (std::size_t i = 0; i < of_subsets.size(); ++i) {
        CHECK(std::abs(static_cast<double>(of_subsets[i]) - count * share) < 4.0 * sigma);
        CHECK(std::abs(static_cast<double>(of_blocks[i]) - count * share) < 4.0 * sigma);
      }
    }
  }
}

TEST_CASE("draw_subset: every pair of five numbers is drawn as often as any other") {
  constexpr int draws = 20000;
  std::vector<int> seen(32, 0);
  for (int i = 0; i < draws; ++i) {
    unsigned bits = 0;
    for (const std::int32_t at : subset(static_cast<std::uint64_t>(i), 5, 2)) bits |= 1U << at;
    ++seen[bits];
  }
  const double sigma = std::sqrt(draws * 0.1 * 0.9);
  for (unsigned bits = 0; bits < 32; ++bits) {
    if (__builtin_popcount(bits) == 2) CHECK(std::abs(seen[bits] - draws * 0.1) < 4.0 * sigma);
  }
}

TEST_CASE("draw_block: neighbours, the first number after the last") {
  int wrapped = 0;
  for (std::uint64_t stream = 0; stream < 200; ++stream) {
    const std::vector<std::int32_t> numbers = block(stream, 10, 4);
    for (std::size_t i = 1; i < 4; ++i)
      REQUIRE(numbers[i] == (numbers[0] + static_cast<std::int32_t>(i)) % 10);
    wrapped += numbers[3] < numbers[0] ? 1 : 0;
  }
  CHECK(wrapped > 30);
  CHECK(wrapped < 90);
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

template <class T>
struct ranks_of {
  simulated_ranks<random_k<T>> all;
  ranks_of(const parameter_store<T>& store, int count, const random_k_options& options)
      : all(count, [&](int) { return random_k<T>(store, options); }) {}
};

TEST_CASE_TEMPLATE("random-k is what its formulas say, on any number of ranks and threads", T, float,
                   double) {
  odd_parameters<T> net;
  cpu_context one, three({3, 0});
  const std::size_t size = net.store.values().size();
  for (const int count : {1, 2, 3, 4}) {
    for (const random_k_options& options : all_options()) {
      CAPTURE(count);
      CAPTURE(describe(options));
      ranks_of<T> ranks(net.store, count, options), threaded(net.store, count, options);
      const bool has_memory = options.memory == code_memory::error_feedback;
      std::vector<std::vector<T>> memory(static_cast<std::size_t>(count), std::vector<T>(size, T(0)));
      std::vector<std::vector<bool>> drawn;
      for (std::uint64_t step = 0; step < 6; ++step) {
        auto gradients = gradients_of_ranks(net.store, count, step), copies = gradients;
        std::vector<std::vector<T>> d = gradients;
        for (std::size_t w = 0; w < d.size(); ++w) {
          for (std::size_t i = 0; i < size; ++i) d[w][i] += memory[w][i];
        }
        ranks.all.step(one, gradients);
        threaded.all.step(three, copies);
        REQUIRE(ranks_agree(gradients));
        REQUIRE(same_bits(gradients[0], copies[0]));
        auto& positions = drawn.emplace_back(size);
        index_t sent = 0;
        for (const coded_tensor& tensor : coded_tensors(net.store)) {
          index_t here = 0;
          for (index_t i = tensor.offset; i < tensor.offset + tensor.size; ++i) {
            const auto at = static_cast<std::size_t>(i);
            positions[at] = gradients[0][at] != T(0);
            here += positions[at] ? 1 : 0;
          }
          index_t wanted = detail::entries_of_share(options.ratio, tensor.size);
          if (options.rank > 0) {
            const index_t rows = tensor.layout.shape[0], columns = tensor.size / rows;
            wanted = tensor.layout.dims == 1 ? tensor.size
                                             : std::min(tensor.size, options.rank * (rows + columns));
          }
          CHECK(here == wanted);
          sent += here;
          const double factor =
              options.unbiased ? static_cast<double>(tensor.size) / static_cast<double>(here) : 1.0;
          for (index_t i = tensor.offset; i < tensor.offset + tensor.size; ++i) {
            const auto at = static_cast<std::size_t>(i);
            double mean = 0;
            for (const auto& of_rank : d) mean += static_cast<double>(of_rank[at]) / count;
            if (positions[at]) {
              REQUIRE(gradients[0][at] == doctest::Approx(factor * mean).epsilon(1e-5).scale(1));
            }
            for (auto& of_rank : d) of_rank[at] = positions[at] || !has_memory ? T(0) : of_rank[at];
          }
        }
        CHECK(ranks.all.payload_bytes(0) == static_cast<std::size_t>(sent) * sizeof(T));
        CHECK(ranks.all[0].payload_bytes() == sent * static_cast<index_t>(sizeof(T)));
        memory = d;
        for (std::size_t w = 0; w < d.size() && has_memory; ++w) {
          const auto states = ranks.all[w].states();
          REQUIRE(states.size() == 1);
          CHECK(states[0].of_rank);
          CHECK(std::equal(d[w].begin(), d[w].end(), states[0].values.begin(), states[0].values.end()));
        }
        if (!has_memory) CHECK(ranks.all[0].states().empty());
      }
      for (std::size_t step = 1; step < drawn.size(); ++step) CHECK(drawn[step] != drawn[0]);
    }
  }
}

TEST_CASE("random-k: tensors of one shape draw positions of their own, seeds other ones, blocks neighbours") {
  cpu_context ctx;
  const auto tensors = vectors_of<double>({1000, 1000});
  const auto result_of = [&](const random_k_options& options) {
    random_k<double> compressor(tensors, options);
    std::vector<double> gradients(2000, 1.0);
    compressor.encode(ctx, {2, 1, 4}, 0, gradients);
    compressor.decode(ctx, {2, 1, 4}, 0, gradients);
    return gradients;
  };
  random_k_options options = with_ratio(0.1);
  const std::vector<double> result = result_of(options);
  CHECK(std::vector(result.begin(), result.begin() + 1000) !=
        std::vector(result.begin() + 1000, result.end()));
  CHECK(result_of(options) == result);
  options.seed = 2;
  CHECK(result_of(options) != result);
  const auto starts_of_runs = [](const std::vector<double>& values) {
    int starts = 0;
    for (std::size_t i = 0; i < 1000; ++i) {
      starts += values[i] != 0.0 && values[(i + 999) % 1000] == 0.0 ? 1 : 0;
    }
    return starts;
  };
  CHECK(starts_of_runs(result) > 50);
  options.block = true;
  CHECK(starts_of_runs(result_of(options)) == 1);
}

TEST_CASE_TEMPLATE("random-k of all entries is the mean, and leaves nothing", T, float, double) {
  odd_parameters<T> net;
  cpu_context ctx;
  for (const bool as_block : {false, true}) {
    for (const index_t rank : {0, 100}) {
      random_k_options options = with_ratio(1.0);
      options.block = as_block;
      options.rank = rank;
      ranks_of<T> ranks(net.store, 3, options);
      for (std::uint64_t step = 0; step < 3; ++step) {
        auto gradients = gradients_of_ranks(net.store, 3, step);
        std::vector<T> mean(gradients[0].size());
        for (std::size_t i = 0; i < mean.size(); ++i) {
          mean[i] = (gradients[0][i] + gradients[1][i] + gradients[2][i]) * (T(1) / T(3));
        }
        ranks.all.step(ctx, gradients);
        CHECK(gradients[1] == mean);
        const std::span<T> memory = ranks.all[1].states()[0].values;
        CHECK(std::all_of(memory.begin(), memory.end(), [](T left) { return left == T(0); }));
      }
    }
  }
}

TEST_CASE_TEMPLATE("random-k with memory: what was sent and what is left is the sum of the gradients", T,
                   float, double) {
  odd_parameters<T> net;
  cpu_context ctx;
  for (const int count : {1, 2, 3, 4}) {
    for (const bool as_block : {false, true}) {
      random_k_options options = with_ratio(0.05);
      options.block = as_block;
      ranks_of<T> ranks(net.store, count, options);
      std::vector<double> given(net.store.values().size(), 0.0), result = given;
      for (std::uint64_t step = 0; step < 50; ++step) {
        auto gradients = gradients_of_ranks(net.store, count, step);
        if (step == 7) {
          for (auto& of_rank : gradients) std::fill(of_rank.begin(), of_rank.end(), T(0));
        }
        for (const auto& of_rank : gradients) {
          for (std::size_t i = 0; i < given.size(); ++i) given[i] += static_cast<double>(of_rank[i]) / count;
        }
        ranks.all.step(ctx, gradients);
        REQUIRE(ranks_agree(gradients));
        for (std::size_t i = 0; i < given.size(); ++i) result[i] += static_cast<double>(gradients[0][i]);
      }
      for (int w = 0; w < count; ++w) {
        const std::span<T> memory = ranks.all[static_cast<std::size_t>(w)].states()[0].values;
        for (std::size_t i = 0; i < given.size(); ++i) result[i] += static_cast<double>(memory[i]) / count;
      }
      for (std::size_t i = 0; i < given.size(); ++i) {
        REQUIRE(result[i] == doctest::Approx(given[i]).epsilon(1e-5).scale(50));
      }
    }
  }
}

TEST_CASE("random-k, unbiased: the mean over 4,000 draws is the gradient within 5 standard deviations") {
  cpu_context ctx;
  constexpr int draws = 4000;
  constexpr std::size_t size = 64;
  std::vector<double> values(size);
  fill_normal(std::span<double>(values), 1.0, random_stream(3, 1));
  for (const bool as_block : {false, true}) {
    random_k_options options = with_ratio(0.125, no_memory);
    options.unbiased = true;
    options.block = as_block;
    random_k<double> compressor(vectors_of<double>({64}), options);
    std::vector<double> sums(size, 0.0);
    for (std::uint64_t step = 0; step < draws; ++step) {
      std::vector<double> gradients = values;
      compressor.encode(ctx, {0, 1, step}, 0, gradients);
      compressor.decode(ctx, {0, 1, step}, 0, gradients);
      for (std::size_t i = 0; i < size; ++i) sums[i] += gradients[i];
    }
    for (std::size_t i = 0; i < size; ++i) {
      const double sigma = std::abs(values[i]) * std::sqrt((8.0 - 1.0) / draws);
      CHECK(std::abs(sums[i] / draws - values[i]) < 5.0 * sigma);
    }
  }
}

TEST_CASE("random-k resumed from its states goes on with the same bits; zeros stay zeros") {
  odd_parameters<float> net;
  cpu_context ctx;
  ranks_of<float> whole(net.store, 2, with_ratio(0.1)), resumed(net.store, 2, with_ratio(0.1));
  resumed.all.set_steps(3);
  for (std::uint64_t step = 0; step < 6; ++step) {
    if (step == 3) {
      for (std::size_t w = 0; w < 2; ++w) {
        const std::span<float> from = whole.all[w].states()[0].values;
        std::copy(from.begin(), from.end(), resumed.all[w].states()[0].values.begin());
      }
    }
    auto gradients = gradients_of_ranks(net.store, 2, step), again = gradients;
    whole.all.step(ctx, gradients);
    if (step >= 3) {
      resumed.all.step(ctx, again);
      CHECK(same_bits(gradients[1], again[1]));
    }
  }
  ranks_of<float> fresh(net.store, 2, with_ratio(0.1));
  std::vector<std::vector<float>> zeros(2, std::vector<float>(net.store.values().size(), 0.0F));
  fresh.all.step(ctx, zeros);
  CHECK(zeros[0] == std::vector<float>(net.store.values().size(), 0.0F));
  random_k<float> none(std::vector<coded_tensor>{}, with_ratio(0.1));
  std::vector<float> nothing;
  CHECK(none.encode(ctx, {}, 0, nothing).sum.empty());
  none.decode(ctx, {}, 0, nothing);
}

TEST_CASE("random-k: bytes of ResNet-18") {
  const auto bytes = [](bool hybrid, index_t rank, bool as_block) {
    random_k_options options = with_ratio(0.01, no_memory);
    options.rank = rank;
    options.block = as_block;
    return random_k<float>(resnet18_tensors::resnet18_tensors(hybrid), options).payload_bytes();
  };
  for (const bool as_block : {true, false}) {
    CHECK(bytes(false, 1, as_block) == 183'228);
    CHECK(bytes(false, 2, as_block) == 328'528);
    CHECK(bytes(false, 7, as_block) == 1'055'028);
    CHECK(bytes(true, 1, as_block) == 190'652);
    CHECK(bytes(true, 2, as_block) == 343'376);
    CHECK(bytes(true, 7, as_block) == 1'106'996);
    CHECK(bytes(false, 0, as_block) == 446'884);
    CHECK(bytes(true, 0, as_block) == 133'348);
  }
}

TEST_CASE("random-k: options that cannot be and tensors that are too large are refused by name") {
  odd_parameters<float> net;
  const double not_a_number = std::numeric_limits<double>::quiet_NaN();
  for (const double ratio : {0.0, -0.5, 1.5, not_a_number}) {
    CHECK_THROWS_WITH_AS(random_k<float>(net.store, with_ratio(ratio)),
                         doctest::Contains(("ratio " + detail::message({ratio})).c_str()), value_error);
  }
  random_k_options options;
  options.rank = -2;
  CHECK_THROWS_WITH_AS(random_k<float>(net.store, options), doctest::Contains("rank -2"), value_error);
  options = {};
  options.unbiased = true;
  CHECK_THROWS_WITH_AS(random_k<float>(net.store, options), doctest::Contains("unbiased"), value_error);
  constexpr index_t limit = std::numeric_limits<std::int32_t>::max();
  const auto tensors = vectors_of<float>({3, limit + 1});
  CHECK_THROWS_WITH_AS(random_k<float>(tensors, with_ratio(1e-6, no_memory)),
                       doctest::Contains("v1 has 2147483648 elements"), value_error);
}

TEST_CASE("random-k: lines tell options apart") {
  CHECK(describe(random_k_options{}) == "random-k, ratio 0.01, error feedback, seed 1");
  CHECK(describe(random_k_options{0.5, 2, true, no_memory, true, 9}) ==
        "random block, budget of rank 2, no memory, unbiased, seed 9");
  odd_parameters<float> net;
  for (const random_k_options& options : all_options()) {
    CHECK(new_compressor(net.store, options).describe() == describe(options));
  }
}

}  // namespace
