// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include <pufferfish/compress/sparse/block_top_k.hpp>
#include <pufferfish/compress/sparse/select_largest.hpp>

#include "../../support/codec_support.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace codec_support;

block_top_k_options without_decay(index_t side, index_t count) { return {side, count, 1.0}; }

/// The two levels by trying every subset of the magnitudes that is a prefix of their sorted list, with errors
/// added up one by one.
double least_error(std::vector<double> magnitudes) {
  std::sort(magnitudes.begin(), magnitudes.end());
  const auto error_of = [&](std::size_t begin, std::size_t end) {
    double mean = 0.0, error = 0.0;
    for (std::size_t i = begin; i < end; ++i) mean += magnitudes[i] / static_cast<double>(end - begin);
    for (std::size_t i = begin; i < end; ++i) error += (magnitudes[i] - mean) * (magnitudes[i] - mean);
    return error;
  };
  double least = error_of(0, magnitudes.size());
  for (std::size_t cut = 1; cut < magnitudes.size(); ++cut) {
    least = std::min(least, error_of(0, cut) + error_of(cut, magnitudes.size()));
  }
  return least;
}

/// The plain form of a block's selection: places of the values that are sent.
template <class T>
std::vector<std::size_t> places_of(const detail::matrix_block& block, index_t sent,
                                   const std::vector<T>& all) {
  std::vector<T> values;
  for (index_t i = 0; i < block.size(); ++i) {
    values.push_back(all[static_cast<std::size_t>(block.place(i))]);
  }
  std::vector<std::size_t> places;
  for (const std::int32_t i : reference::select_largest<T>(values, sent)) {
    places.push_back(static_cast<std::size_t>(block.place(i)));
  }
  return places;
}

TEST_CASE_TEMPLATE("block_top_k_codec keeps the rules of codecs", T, float, double) {
  check_codec<block_top_k_codec<T>>(without_decay(64, 64));
  check_codec<block_top_k_codec<T>>(without_decay(8, 9));
  check_codec<block_top_k_codec<T>>(without_decay(3, 1));
  check_codec<block_top_k_codec<T>>(without_decay(1, 1));
  check_codec<block_top_k_codec<T>>(without_decay(256, 65536));
}

TEST_CASE("matrix_blocks: every value is in one block; thin matrices and vectors have long blocks") {
  const auto tensors = tensors_of({logical_layout::matrix(130, 70),
                                   logical_layout::vector(5000),
                                   logical_layout::matrix(3, 5000),
                                   logical_layout::matrix(5000, 3),
                                   logical_layout::kernel(65, 7, 3, 3),
                                   logical_layout::matrix(1, 9),
                                   logical_layout::matrix(9, 1),
                                   logical_layout::vector(1),
                                   {2, {13, 6, 1, 1}, {6, 1, 0, 0}}});
  const auto blocks = detail::matrix_blocks(tensors, 64);
  std::vector<int> found(static_cast<std::size_t>(coded_size(tensors)), 0);
  std::vector<std::vector<std::pair<index_t, index_t>>> shapes(tensors.size());
  for (const detail::matrix_block& block : blocks) {
    shapes[block.tensor].push_back({block.rows, block.columns});
    CHECK(block.size() <= 4096);
    for (index_t i = 0; i < block.size(); ++i) {
      const index_t place = block.place(i);
      const coded_tensor& tensor = tensors[block.tensor];
      CHECK((place >= tensor.offset && place < tensor.offset + tensor.size));
      ++found[static_cast<std::size_t>(place)];
    }
  }
  CHECK(std::all_of(found.begin(), found.end(), [](int n) { return n == 1; }));
  using list = std::vector<std::pair<index_t, index_t>>;
  // Stored with outputs innermost: rows are inputs.
  CHECK(shapes[0] == list{{64, 64}, {64, 64}, {64, 2}, {6, 64}, {6, 64}, {6, 2}});
  CHECK(shapes[1] == list{{1, 4096}, {1, 904}});
  CHECK(shapes[2] == list{{1365, 3}, {1365, 3}, {1365, 3}, {905, 3}});
  CHECK(shapes[3] == list{{3, 1365}, {3, 1365}, {3, 1365}, {3, 905}});
  CHECK(shapes[4] == list{{63, 65}});
  CHECK(shapes[5] == list{{1, 9}});
  CHECK(shapes[6] == list{{1, 9}});
  CHECK(shapes[7] == list{{1, 1}});
  CHECK(shapes[8] == list{{13, 6}});
  // A part of a tensor is a run.
  const auto parts = detail::matrix_blocks(coded_parts(tensors, 10, 9100), 64);
  CHECK(parts[0].rows == 1);
  CHECK(parts[0].columns == 4096);
}

TEST_CASE("block_top_k_codec: a code, byte by byte") {
  cpu_context ctx;
  // Blocks of 4 values, of which 3 are sent; the second has 1 value.
  block_top_k_codec<float> codec(vectors_of<float>({5}), without_decay(2, 3));
  CHECK(codec.index_bits() == 2);
  std::vector<float> memory(5, 0.0F);
  const auto code = coded(codec, ctx, std::vector<float>{-4, 1, 0.5F, 2, -7}, memory);
  // Block 1: levels 1.5 and 4; indices 0, 1, 3: 0b110100; fields 0b11, 0b00, 0b00. Block 2: one level, 7.
  REQUIRE(code.size() == 2 * (8 + 1 + 1));
  CHECK(detail::read_at<float>(code, 0) == 1.5F);
  CHECK(detail::read_at<float>(code, 4) == 4.0F);
  CHECK(code[8] == std::byte{0b110100});
  CHECK(code[9] == std::byte{0b11});
  CHECK(detail::read_at<float>(code, 10) == 7.0F);
  CHECK(detail::read_at<float>(code, 14) == 7.0F);
  CHECK(code[18] == std::byte{0});
  CHECK(code[19] == std::byte{0b11});
  CHECK(decoded(codec, ctx, code, 5) == std::vector<float>{-4, 1.5F, 0, 1.5F, -7});
  CHECK(memory == std::vector<float>{0, -0.5F, 0.5F, 0.5F, 0});
}

TEST_CASE("block_top_k_codec: exact bytes; a block of 64 x 64 floats takes 120") {
  const auto bytes_of = [](const std::vector<logical_layout>& layouts, const block_top_k_options& options) {
    return block_top_k_codec<float>(tensors_of(layouts), options).most_bytes();
  };
  CHECK(bytes_of({logical_layout::matrix(64, 64)}, {}) == 120);
  CHECK(bytes_of({logical_layout::matrix(640, 128)}, {}) == 20 * 120);
  CHECK(bytes_of({logical_layout::vector(8192)}, {}) == 2 * 120);
  // 65 x 64: a block, and one of 64 values of which 1 is sent: 8 + 2 + 1 bytes.
  CHECK(bytes_of({logical_layout::matrix(65, 64)}, {}) == 120 + 11);
  CHECK(bytes_of({logical_layout::vector(1)}, {}) == 11);
  CHECK(bytes_of({}, {}) == 0);
  CHECK(block_top_k_codec<double>(tensors_of({logical_layout::matrix(64, 64)})).most_bytes() == 128);
  CHECK(block_top_k_codec<float>({}).index_bits() == 12);
}

TEST_CASE(
    "block_top_k_codec: random shapes are coded as by the plain form, with the least error of two levels") {
  cpu_context ctx({2, 0});
  for (int round = 0; round < 40; ++round) {
    const auto drawn = [&](std::uint64_t i, index_t most) {
      return 1 + static_cast<index_t>(substream(substream(77, static_cast<std::uint64_t>(round)), i) %
                                      static_cast<std::uint64_t>(most));
    };
    const index_t side = drawn(0, 12), count = drawn(1, side * side);
    CAPTURE(round);
    CAPTURE(side);
    CAPTURE(count);
    const auto tensors =
        tensors_of({logical_layout::matrix(drawn(2, 40), drawn(3, 40)), logical_layout::vector(drawn(4, 300)),
                    logical_layout::kernel(drawn(5, 9), drawn(6, 9), 3, 3), logical_layout::vector(1)});
    const auto size = static_cast<std::size_t>(coded_size(tensors));
    block_top_k_codec<double> codec(tensors, without_decay(side, count));
    std::vector<double> values(size), none;
    fill_normal(std::span<double>(values), 1.0, random_stream(static_cast<std::uint64_t>(round), 9));
    if (round % 4 == 0) {  // ties and zeros
      for (double& value : values) value = std::round(2.0 * value) / 2.0;
    }
    const auto result = decoded(codec, ctx, coded(codec, ctx, values, none), coded_size(tensors));
    std::size_t bytes = 0;
    for (const detail::matrix_block& block : detail::matrix_blocks(tensors, side)) {
      const index_t sent = (count * block.size() + side * side - 1) / (side * side);
      bytes += 2 * sizeof(double) + static_cast<std::size_t>((codec.index_bits() * sent + 7) / 8) +
               static_cast<std::size_t>((2 * sent + 7) / 8);
      const auto places = places_of(block, sent, values);
      const std::set<std::size_t> chosen(places.begin(), places.end());
      std::vector<double> magnitudes;
      double error = 0.0;
      for (index_t i = 0; i < block.size(); ++i) {
        const auto place = static_cast<std::size_t>(block.place(i));
        if (chosen.count(place) == 0) {
          CHECK(result[place] == 0.0);
          continue;
        }
        magnitudes.push_back(std::abs(values[place]));
        CHECK(result[place] * values[place] >= 0.0);
        error += (result[place] - values[place]) * (result[place] - values[place]);
      }
      CHECK(error == doctest::Approx(least_error(magnitudes)).epsilon(1e-9));
    }
    CHECK(codec.most_bytes() == bytes);
  }
}

TEST_CASE_TEMPLATE("block_top_k_codec: the memory fades before the gradients are added", T, float, double) {
  cpu_context ctx;
  odd_parameters<T> net;
  const auto tensors = coded_tensors(net.store);
  const auto size = static_cast<std::size_t>(coded_size(tensors));
  const block_top_k_options options{8, 3, 0.75};
  block_top_k_codec<T> codec(tensors, options), plain(tensors, without_decay(8, 3));
  std::vector<T> memory(size, T(0)), no_memory;
  bool differs = false;
  for (std::uint64_t step = 0; step < 4; ++step) {
    set_gradients(net.store, 1, step);
    const std::vector<T> gradients(net.store.gradients().begin(), net.store.gradients().end());
    std::vector<T> sum(size);
    for (std::size_t i = 0; i < size; ++i) {
      const volatile T product = T(0.75) * memory[i];
      sum[i] = product + gradients[i];
    }
    const std::vector<T> before = memory;
    const auto code = coded(codec, ctx, gradients, memory);
    CHECK(same_bits(code, coded(plain, ctx, sum, no_memory)));
    plain.decode(ctx, code, decode_as::subtraction, sum);
    CHECK(same_bits(memory, sum));
    differs = differs || !same_bits(memory, before);
  }
  CHECK(differs);
}

TEST_CASE("block_top_k_codec: options and codes that cannot be are refused by name") {
  const auto made = [](const block_top_k_options& options) {
    return block_top_k_codec<float>(tensors_of({logical_layout::vector(20)}), options);
  };
  CHECK_THROWS_WITH_AS(made({0, 1}), doctest::Contains("side 0"), value_error);
  CHECK_THROWS_WITH_AS(made({257, 1}), doctest::Contains("side 257"), value_error);
  CHECK_THROWS_WITH_AS(made({4, 17}), doctest::Contains("17 values of a block of 4 x 4"), value_error);
  CHECK_THROWS_WITH_AS(made({4, 0}), doctest::Contains("not 1 to 16"), value_error);
  CHECK_THROWS_WITH_AS(made({4, 4, 1.5}), doctest::Contains("decay 1.5"), value_error);
  CHECK_THROWS_AS(made({4, 4, std::nan("")}), value_error);
  cpu_context ctx;
  auto codec = made({4, 4});
  std::vector<float> values(20, 1.0F), none, kept(20, 5.0F);
  std::vector<std::byte> code = coded(codec, ctx, values, none);
  code[8] = std::byte{0};  // indices 0 and 0
  CHECK_THROWS_WITH_AS(codec.decode(ctx, code, decode_as::values, kept), doctest::Contains("t0"),
                       value_error);
  // The last block has 4 values, and 1 is sent: index 5 is none of them.
  code = coded(codec, ctx, values, none);
  code[code.size() - 2] = std::byte{5};
  CHECK_THROWS_AS(codec.decode(ctx, code, decode_as::values, kept), value_error);
  CHECK(kept == std::vector<float>(20, 5.0F));
}

TEST_CASE("block_top_k_codec: numbers that are not finite do no harm to the codec") {
  cpu_context ctx;
  block_top_k_codec<float> codec(tensors_of({logical_layout::matrix(70, 70)}));
  const float nan = std::nanf(""), infinity = INFINITY;
  std::vector<float> values(4900, 1.0F), none;
  for (std::size_t i = 0; i < values.size(); i += 7) values[i] = i % 2 == 0 ? nan : infinity;
  const auto code = coded(codec, ctx, values, none);
  CHECK_FALSE(std::isfinite(decoded(codec, ctx, code, 4900)[0]));
  std::fill(values.begin(), values.end(), 2.0F);
  CHECK(decoded(codec, ctx, coded(codec, ctx, values, none), 4900)[0] == 2.0F);
}

TEST_CASE("block_top_k over ranks: all have the same bits, and nothing is lost without decay") {
  cpu_context ctx;
  for (const code_route route : {code_route::gather, code_route::two_hop}) {
    odd_parameters<double> net;
    block_top_k_options options = without_decay(8, 4);
    options.route = route;
    CAPTURE(describe(options));
    rank_simulation::simulated_ranks<any_compressor<double>> ranks(
        3, [&](int) { return new_compressor(net.store, options); });
    std::vector<double> given(net.store.values().size(), 0.0), taken(given);
    for (std::uint64_t step = 0; step < 20; ++step) {
      std::vector<std::vector<double>> all;
      for (int rank = 0; rank < 3; ++rank) all.push_back(gradients_of(net.store, rank, step));
      const std::vector<double> wanted = mean_of(all);
      ranks.step(ctx, all);
      CHECK(rank_simulation::ranks_agree(all));
      for (std::size_t i = 0; i < given.size(); ++i) {
        given[i] += wanted[i];
        taken[i] += all[0][i];
      }
    }
    // What was sent and what is remembered, on all ranks together, is what was given.
    for (std::size_t w = 0; w < 3 && route == code_route::gather; ++w) {
      const auto states = ranks[w].states();
      REQUIRE(states.size() == 1);
      CHECK(states[0].of_rank);
      for (std::size_t i = 0; i < taken.size(); ++i) taken[i] += states[0].values[i] / 3.0;
    }
    if (route == code_route::gather) CHECK(largest_difference<double>(taken, given) < 1e-12);
  }
}

TEST_CASE("block_top_k_options: a line tells them apart") {
  CHECK(describe(block_top_k_options{}) ==
        "block top-k, 64 of 64 x 64 values, memory decay 0.95, error feedback, gather");
  odd_parameters<float> net;
  CHECK(new_compressor(net.store, block_top_k_options{}).describe() ==
        "block top-k, 64 of 64 x 64 values, memory decay 0.95, error feedback");
}

}  // namespace
