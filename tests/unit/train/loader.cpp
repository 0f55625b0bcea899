// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/train/loader.hpp>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace pufferfish;

image_set random_set(index_t count, index_t height, index_t width, index_t channels, index_t classes,
                     unsigned seed) {
  image_set set{count, height, width, channels, classes, {}, {}};
  std::mt19937 random(seed);
  set.pixels.resize(static_cast<std::size_t>(count * height * width * channels));
  for (auto& p : set.pixels) p = static_cast<std::uint8_t>(random());
  for (index_t i = 0; i < count; ++i) {
    set.labels.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(classes)));
  }
  return set;
}

/// A set of 1x1 images whose single "pixel" is spread over two channels, so that a sample can be told from
/// its pixels: number = first + 256 * second.
image_set numbered_set(index_t count) {
  image_set set{count, 1, 1, 2, 7, {}, {}};
  for (index_t i = 0; i < count; ++i) {
    set.pixels.push_back(static_cast<std::uint8_t>(i % 256));
    set.pixels.push_back(static_cast<std::uint8_t>(i / 256));
    set.labels.push_back(static_cast<std::int32_t>(i % 7));
  }
  return set;
}

/// A whole epoch as one table of rows, put together from the parts of all ranks.
struct epoch_rows {
  std::vector<std::vector<float>> images;
  std::vector<std::int32_t> labels;
};

epoch_rows read_epoch(const image_set& set, loader_options options, int ranks, index_t epoch) {
  epoch_rows result;
  std::vector<loader> loaders;
  options.ranks = ranks;
  for (options.rank = 0; options.rank < ranks; ++options.rank) loaders.emplace_back(set, options);
  const index_t size = set.height * set.width * set.channels;
  for (index_t step = 0; step < loaders[0].steps_per_epoch(); ++step) {
    index_t next = 0;
    for (loader& part : loaders) {
      tensor<float, 4> images({part.max_local_batch(), set.height, set.width, set.channels});
      std::vector<std::int32_t> labels(static_cast<std::size_t>(part.max_local_batch()), -9);
      const batch_place place = part.load<float>(epoch, step, images.view(), labels);
      CHECK(place.first == next);
      CHECK(place.count <= part.max_local_batch());
      CHECK(place.count >= place.global_count / ranks);
      next += place.count;
      for (index_t i = 0; i < place.count; ++i) {
        const float* row = images.data() + i * size;
        result.images.emplace_back(row, row + size);
        result.labels.push_back(labels[static_cast<std::size_t>(i)]);
      }
      for (auto i = static_cast<std::size_t>(place.count); i < labels.size(); ++i) CHECK(labels[i] == -9);
      if (&part == &loaders.back()) CHECK(next == place.global_count);
    }
  }
  return result;
}

template <class E, class F>
std::string text_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing of that type thrown";
}

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("loader: every sample once an epoch, the same batches for any number of ranks") {
  for (const index_t count : {1, 2, 7, 64, 301}) {
    for (const index_t batch : {1, 5, 64, 1000}) {
      const image_set set = numbered_set(count);
      loader_options options;
      options.batch = batch;
      options.seed = 3;
      const epoch_rows one = read_epoch(set, options, 1, 2);
      CHECK(one.labels.size() == static_cast<std::size_t>(count));
      std::vector<int> seen(static_cast<std::size_t>(count));
      for (std::size_t i = 0; i < one.images.size(); ++i) {
        const auto number = static_cast<std::size_t>(one.images[i][0] + 256.0F * one.images[i][1]);
        REQUIRE(number < seen.size());
        ++seen[number];
        CHECK(one.labels[i] == static_cast<std::int32_t>(number % 7));
      }
      CHECK(seen == std::vector<int>(seen.size(), 1));
      for (const int ranks : {2, 3, 4}) {
        const epoch_rows many = read_epoch(set, options, ranks, 2);
        CHECK(many.images == one.images);
        CHECK(many.labels == one.labels);
      }
    }
  }
}

TEST_CASE("loader: epochs and seeds shuffle differently, no shuffle keeps the order") {
  const image_set set = numbered_set(200);
  loader_options options;
  options.batch = 32;
  const epoch_rows zero = read_epoch(set, options, 1, 0), one = read_epoch(set, options, 1, 1);
  CHECK(zero.images != one.images);
  CHECK(zero.images == read_epoch(set, options, 1, 0).images);
  options.seed = 1;
  CHECK(zero.images != read_epoch(set, options, 1, 0).images);
  options.shuffle = false;
  const epoch_rows plain = read_epoch(set, options, 1, 5);
  CHECK(plain.labels == set.labels);
  CHECK(plain.images != zero.images);
}

TEST_CASE("loader: a return to an earlier epoch gives its batches again") {
  const image_set set = numbered_set(50);
  loader_options options;
  options.batch = 50;
  loader source(set, options);
  tensor<float, 4> first({50, 1, 1, 2}), again({50, 1, 1, 2});
  std::vector<std::int32_t> labels(50), more(50);
  source.load<float>(0, 0, first.view(), labels);
  source.load<float>(1, 0, again.view(), more);
  CHECK(labels != more);
  source.load<float>(0, 0, again.view(), more);
  CHECK(labels == more);
  CHECK(std::equal(first.flat().begin(), first.flat().end(), again.flat().begin()));
}

TEST_CASE("loader: places") {
  const image_set set = numbered_set(10);
  loader_options options;
  options.batch = 4;
  options.ranks = 3;
  options.rank = 1;
  const loader source(set, options);
  CHECK(source.steps_per_epoch() == 3);
  CHECK(source.max_local_batch() == 2);
  CHECK(source.place(0, 0).first == 1);
  CHECK(source.place(0, 0).count == 1);
  CHECK(source.place(0, 0).global_count == 4);
  CHECK(source.place(9, 2).global_count == 2);
  options.rank = 0;
  CHECK(loader(set, options).place(0, 2).count == 0);  // two samples for three ranks
  CHECK(mentions(text_of<value_error>([&] { source.place(0, 3); }), "step 3; steps are 0 .. 2"));
  CHECK_THROWS_AS(source.place(0, -1), value_error);
  CHECK_THROWS_AS(source.place(-1, 0), value_error);
  loader_options whole;  // one batch of all samples, whatever their number
  whole.batch = std::numeric_limits<index_t>::max();
  CHECK(loader(set, whole).steps_per_epoch() == 1);
  CHECK(loader(set, whole).place(3, 0).count == 10);
}

/// The padded image as a plain array, from the definitions of zero padding and numpy's "reflect".
std::vector<float> padded(const image_set& set, index_t sample, index_t pad, bool reflect) {
  const index_t height = set.height + 2 * pad, width = set.width + 2 * pad;
  std::vector<float> result(static_cast<std::size_t>(height * width * set.channels));
  for (index_t y = 0; y < height; ++y) {
    for (index_t x = 0; x < width; ++x) {
      index_t sy = y - pad, sx = x - pad;
      const bool inside = sy >= 0 && sy < set.height && sx >= 0 && sx < set.width;
      if (sy < 0) sy = -sy;
      if (sy >= set.height) sy = 2 * set.height - 2 - sy;
      if (sx < 0) sx = -sx;
      if (sx >= set.width) sx = 2 * set.width - 2 - sx;
      for (index_t c = 0; c < set.channels; ++c) {
        const index_t at = ((sample * set.height + sy) * set.width + sx) * set.channels + c;
        result[static_cast<std::size_t>((y * width + x) * set.channels + c)] =
            inside || reflect ? static_cast<float>(set.pixels[static_cast<std::size_t>(at)]) : 0.0F;
      }
    }
  }
  return result;
}

std::vector<float> crop(const std::vector<float>& from, const image_set& set, index_t pad, index_t top,
                        index_t left, bool flip) {
  std::vector<float> result;
  const index_t width = set.width + 2 * pad;
  for (index_t y = 0; y < set.height; ++y) {
    for (index_t x = 0; x < set.width; ++x) {
      const index_t column = left + (flip ? set.width - 1 - x : x);
      for (index_t c = 0; c < set.channels; ++c) {
        result.push_back(from[static_cast<std::size_t>(((top + y) * width + column) * set.channels + c)]);
      }
    }
  }
  return result;
}

TEST_CASE("loader: every augmented image is one of the plain form's windows, and all windows occur") {
  for (const bool reflect : {false, true}) {
    for (const index_t channels : {1, 3}) {
      const index_t pad = 2;
      const image_set set = random_set(3, 5, 4, channels, 2, 11);
      loader_options options;
      options.batch = 3;
      options.shuffle = false;
      options.augment = {pad, reflect, true};
      std::vector<int> windows(2 * 5 * 5);
      for (index_t epoch = 0; epoch < 150; ++epoch) {
        const epoch_rows rows = read_epoch(set, options, 1, epoch);
        for (index_t sample = 0; sample < 3; ++sample) {
          const std::vector<float> whole = padded(set, sample, pad, reflect);
          int matches = 0;
          for (index_t which = 0; which < 50; ++which) {
            const std::vector<float> expected = crop(whole, set, pad, which % 25 / 5, which % 5, which >= 25);
            if (expected != rows.images[static_cast<std::size_t>(sample)]) continue;
            ++matches;
            ++windows[static_cast<std::size_t>(which)];
          }
          // Mirrored borders make some flipped windows equal to others.
          CHECK((reflect ? matches >= 1 : matches == 1));
        }
      }
      // 450 draws of 50 windows: each is missed with probability 1e-4, the counts are 9 +- 3.
      CHECK(std::count(windows.begin(), windows.end(), 0) <= 1);
      if (reflect) continue;
      CHECK(*std::max_element(windows.begin(), windows.end()) < 30);
      const int flipped = std::accumulate(windows.begin() + 25, windows.end(), 0);
      CHECK(std::abs(flipped - 225) < 60);
    }
  }
}

TEST_CASE("loader: augmentation does not depend on ranks, batch size or order") {
  const image_set set = random_set(20, 6, 6, 2, 3, 5);
  loader_options options;
  options.batch = 8;
  options.augment = {3, true, true};
  options.seed = 17;
  const epoch_rows one = read_epoch(set, options, 1, 4);
  CHECK(read_epoch(set, options, 3, 4).images == one.images);
  CHECK(read_epoch(set, options, 4, 4).images == one.images);
  CHECK(read_epoch(set, options, 1, 5).images != one.images);
  options.shuffle = false;
  options.batch = 20;
  const epoch_rows plain = read_epoch(set, options, 1, 4);
  CHECK(std::is_permutation(plain.images.begin(), plain.images.end(), one.images.begin()));
  const epoch_rows later = read_epoch(set, options, 1, 5);
  int moved = 0;
  for (std::size_t i = 0; i < 20; ++i) moved += plain.images[i] != later.images[i] ? 1 : 0;
  CHECK(moved > 10);
}

TEST_CASE("normalization: mean 0 and deviation 1 of what is loaded, a constant channel only shifted") {
  image_set set = random_set(40, 3, 5, 3, 2, 23);
  for (std::size_t i = 1; i < set.pixels.size(); i += 3) set.pixels[i] = 77;
  loader_options options;
  options.batch = 40;
  options.normalize = measure_normalization(set);
  CHECK(options.normalize.mean.size() == 3);
  CHECK(options.normalize.mean[1] == 77.0F);
  CHECK(options.normalize.deviation[1] == 1.0F);
  const epoch_rows rows = read_epoch(set, options, 1, 0);
  for (std::size_t c = 0; c < 3; ++c) {
    double sum = 0.0, squares = 0.0;
    for (const auto& image : rows.images) {
      for (std::size_t i = c; i < image.size(); i += 3) {
        sum += static_cast<double>(image[i]);
        squares += static_cast<double>(image[i]) * static_cast<double>(image[i]);
      }
    }
    CHECK(std::abs(sum / 600.0) < 1e-6);
    CHECK(std::abs(squares / 600.0 - (c == 1 ? 0.0 : 1.0)) < 1e-6);
  }
}

TEST_CASE("loader: zero padding is a zero pixel, normalised like the others") {
  image_set set{1, 1, 1, 1, 1, {200}, {0}};
  loader_options options;
  options.augment.pad_crop = 1;
  options.normalize = {{100.0F}, {50.0F}};
  int seen_inside = 0, seen_outside = 0;
  for (index_t epoch = 0; epoch < 100; ++epoch) {
    const float value = read_epoch(set, options, 1, epoch).images[0][0];
    CHECK((value == 2.0F || value == -2.0F));
    ++(value == 2.0F ? seen_inside : seen_outside);
  }
  CHECK(seen_inside > 0);
  CHECK(seen_outside > seen_inside);
}

TEST_CASE("loader: other scalars, and room for more rows than a batch has") {
  const image_set set = random_set(3, 2, 2, 1, 2, 31);
  loader_options options;
  options.batch = 2;
  options.shuffle = false;
  options.normalize = {{3.0F}, {0.5F}};
  loader source(set, options);
  tensor<double, 4> images({5, 2, 2, 1});
  std::fill(images.flat().begin(), images.flat().end(), 99.0);
  std::vector<std::int32_t> labels(4, 5);
  CHECK(source.load<double>(0, 1, images.view(), labels).count == 1);
  CHECK(images(0, 1, 1, 0) == (static_cast<double>(set.pixels[11]) - 3.0) / 0.5);
  CHECK(images(1, 0, 0, 0) == 99.0);
  CHECK(labels[0] == set.labels[2]);
  CHECK(labels[1] == 5);
  tensor<bfloat16, 4> narrow({2, 2, 2, 1});
  source.load<bfloat16>(0, 0, narrow.view(), labels);
  CHECK(static_cast<float>(narrow(0, 0, 0, 0)) ==
        static_cast<float>(bfloat16((static_cast<float>(set.pixels[0]) - 3.0F) / 0.5F)));
}

TEST_CASE("loader: refusals name the numbers") {
  const image_set good = random_set(4, 3, 3, 2, 3, 1);
  const auto refused = [](const image_set& set, const loader_options& options) {
    return text_of<value_error>([&] { loader(set, options); });
  };
  const auto misshapen = [](const image_set& set, const loader_options& options) {
    return text_of<shape_error>([&] { loader(set, options); });
  };
  loader_options o;
  CHECK(mentions(refused(image_set{}, o), "[0 x 0 x 0 x 0]"));
  CHECK_THROWS_AS(measure_normalization(image_set{}), value_error);
  image_set bad = good;
  bad.labels[2] = 3;
  CHECK(mentions(refused(bad, o), "label 2 is 3, not in 0 .. 2"));
  bad.labels[2] = -1;
  CHECK(mentions(refused(bad, o), "label 2 is -1"));
  bad = good;
  bad.labels.pop_back();
  CHECK(mentions(misshapen(bad, o), "3, not 4"));
  bad = good;
  bad.pixels.pop_back();
  CHECK(mentions(misshapen(bad, o), "71, not 72"));
  for (const index_t batch : {0, -5}) {
    o = {};
    o.batch = batch;
    CHECK(mentions(refused(good, o), std::to_string(batch)));
  }
  o = {};
  o.rank = o.ranks = 2;
  CHECK(mentions(refused(good, o), "rank 2 of 2"));
  o.rank = -1;
  CHECK(mentions(refused(good, o), "rank -1 of 2"));
  o.rank = o.ranks = 0;
  CHECK(mentions(refused(good, o), "rank 0 of 0"));
  o = {};
  o.augment = {3, true, false};
  CHECK(mentions(refused(good, o), "3 x 3 pixels by 3"));
  o.augment = {2, true, false};
  CHECK_NOTHROW(loader(good, o));
  o.augment = {-1, false, false};
  CHECK(mentions(refused(good, o), "-1"));
  o = {};
  o.normalize = {{1.0F}, {1.0F}};
  CHECK(mentions(misshapen(good, o), "1 means and 1 deviations for 2 channels"));
  o.normalize = {{1.0F, 1.0F}, {}};
  CHECK(mentions(misshapen(good, o), "2 means and 0 deviations"));
  o.normalize = {{1.0F, 1.0F}, {1.0F, 0.0F}};
  CHECK(mentions(refused(good, o), "channel 1"));
  o.normalize = {{1.0F, 1.0F}, {std::numeric_limits<float>::infinity(), 1.0F}};
  CHECK(mentions(refused(good, o), "channel 0 has mean 1 and deviation inf"));

  loader source(good, {});
  tensor<float, 4> small({3, 3, 3, 2}), other({4, 3, 2, 2}), fits({4, 3, 3, 2});
  std::vector<std::int32_t> labels(4), few(3);
  CHECK(mentions(text_of<shape_error>([&] { source.load<float>(0, 0, small.view(), labels); }),
                 "[4 x 3 x 3 x 2] (NHWC) and 4 labels does not fit into [3 x 3 x 3 x 2] and 4"));
  CHECK_THROWS_AS(source.load<float>(0, 0, other.view(), labels), shape_error);
  CHECK_THROWS_AS(source.load<float>(0, 0, fits.view(), few), shape_error);
  CHECK_NOTHROW(source.load<float>(0, 0, fits.view(), labels));
}

}  // namespace
