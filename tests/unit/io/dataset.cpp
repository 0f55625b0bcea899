// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"
#include "../support/real_data.hpp"

#include <algorithm>
#include <cmath>

#include <doctest/doctest.h>

#include <pufferfish/io/dataset.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {

/// What every loader promises.
void check_consistent(const image_set& set) {
  CHECK(set.pixels.size() == static_cast<std::size_t>(set.count * set.height * set.width * set.channels));
  CHECK(set.labels.size() == static_cast<std::size_t>(set.count));
  CHECK(std::all_of(set.labels.begin(), set.labels.end(),
                    [&](std::int32_t label) { return label >= 0 && label < set.classes; }));
}

std::vector<int> label_counts(const image_set& set) {
  std::vector<int> counts(static_cast<std::size_t>(set.classes));
  for (const std::int32_t label : set.labels) ++counts[static_cast<std::size_t>(label)];
  return counts;
}

double mean(const image_set& set) {
  double sum = 0;
  for (const std::uint8_t pixel : set.pixels) sum += pixel;
  return sum / static_cast<double>(set.pixels.size());
}

void write_pair(const scratch_folder& folder, const std::vector<index_t>& extents, const bytes& labels,
                const std::string& suffix = "") {
  std::size_t count = 1;
  for (const index_t extent : extents) count *= static_cast<std::size_t>(extent);
  bytes pixels(count);
  for (std::size_t i = 0; i < count; ++i) pixels[i] = static_cast<std::uint8_t>(i * 7);
  write_idx(folder / ("train-images-idx3-ubyte" + suffix), extents, pixels);
  write_idx(folder / ("train-labels-idx1-ubyte" + suffix), {static_cast<index_t>(labels.size())}, labels);
}

}  // namespace

TEST_CASE("MNIST layout: plain, gzip, with and without channels, empty") {
  for (const char* suffix : {"", ".gz"}) {
    const scratch_folder folder;
    write_pair(folder, {3, 2, 5}, {0, 9, 4}, suffix);
    const image_set grey = load_mnist_layout(folder.path(), true);
    check_consistent(grey);
    CHECK(grey.count == 3);
    CHECK(grey.height == 2);
    CHECK(grey.width == 5);
    CHECK(grey.channels == 1);
    CHECK(grey.classes == 10);
    CHECK(grey.labels == std::vector<std::int32_t>{0, 9, 4});
    CHECK(grey.pixels[11] == 77);
    write_pair(folder, {2, 4, 1, 3}, {1, 1}, suffix);
    const image_set colour = load_mnist_layout(folder.path(), true, 2);
    check_consistent(colour);
    CHECK(colour.channels == 3);
    CHECK(colour.width == 1);
    write_pair(folder, {0, 28, 28}, {}, suffix);
    check_consistent(load_mnist_layout(folder.path(), true));
  }
}

TEST_CASE("mismatches are named with both numbers") {
  const scratch_folder folder;
  const auto problem = [&](index_t classes = 10) {
    return io_error_of([&] { load_mnist_layout(folder.path(), true, classes); });
  };
  CHECK(mentions(problem(), "train-images-idx3-ubyte.gz"));
  write_pair(folder, {3, 2, 2}, {1, 2});
  CHECK(mentions(problem(), "2 labels for 3 images"));
  write_pair(folder, {3, 2, 2}, {1, 2, 10});
  CHECK(mentions(problem(), "label 2 is 10, not in 0..9"));
  CHECK(problem(11).empty());
  CHECK_THROWS_AS(load_mnist_layout(folder.path(), true, 0), value_error);
  write_pair(folder, {3, 4}, {1, 2, 3});
  CHECK(mentions(problem(), "[3 x 4]"));
  write_pair(folder, {3, 2, 2}, {1, 2, 3});
  write_idx(folder / "train-labels-idx1-ubyte", {3, 1}, bytes{1, 2, 3});
  CHECK(mentions(problem(), "[3 x 1]"));
  CHECK(mentions(io_error_of([&] { load_mnist_layout(folder.path(), false); }), "t10k-images-idx3-ubyte"));
}

TEST_CASE("CIFAR-10: five batches in order, or the test batch") {
  const scratch_folder folder;
  for (int batch = 1; batch <= 5; ++batch) {
    bytes file(static_cast<std::size_t>(batch) * 3073, static_cast<std::uint8_t>(batch));
    const std::string name = folder / ("data_batch_" + std::to_string(batch) + ".bin");
    if (batch == 3) {
      write_file_atomically(name + ".gz", gzip(file));
    } else {
      write_file_atomically(name, file);
    }
  }
  const image_set train = load_cifar10(folder.path(), true);
  check_consistent(train);
  CHECK(train.count == 15);
  CHECK(train.channels == 3);
  CHECK(std::is_sorted(train.labels.begin(), train.labels.end()));
  CHECK(train.pixels.front() == 1);
  CHECK(train.pixels.back() == 5);
  CHECK(mentions(io_error_of([&] { load_cifar10(folder.path(), false); }), "test_batch.bin"));
  write_file_atomically(folder / "test_batch.bin", bytes(3073, 7));
  CHECK(load_cifar10(folder.path(), false).count == 1);
  write_file_atomically(folder / "data_batch_4.bin", bytes(3072, 7));
  CHECK(mentions(io_error_of([&] { load_cifar10(folder.path(), true); }), "data_batch_4.bin: 3072 bytes"));
}

TEST_CASE("the bundled digits") {
  const char* const root = std::getenv("PUFFERFISH_SOURCE_DIR");
  const std::string folder = std::string(root != nullptr ? root : ".") + "/examples/data/digits";
  const image_set train = load_mnist_layout(folder, true);
  const image_set test = load_mnist_layout(folder, false);
  check_consistent(train);
  check_consistent(test);
  CHECK(train.count == 1437);
  CHECK(test.count == 360);
  CHECK(train.height == 8);
  CHECK(train.width == 8);
  CHECK(train.channels == 1);
  CHECK(label_counts(train) == std::vector<int>{142, 146, 141, 147, 145, 146, 145, 143, 138, 144});
  CHECK(label_counts(test) == std::vector<int>(10, 36));
  CHECK(*std::max_element(train.pixels.begin(), train.pixels.end()) == 16);
  CHECK(*std::max_element(test.pixels.begin(), test.pixels.end()) == 16);
  CHECK(mean(train) == doctest::Approx(4.878077).epsilon(1e-6));
  CHECK(mean(test) == doctest::Approx(4.908464).epsilon(1e-6));
}

TEST_CASE("real MNIST") {
  const std::string folder = real_data("mnist", "t10k-images-idx3-ubyte");
  if (folder.empty()) return;
  const image_set train = load_mnist_layout(folder, true);
  check_consistent(train);
  CHECK(train.count == 60000);
  CHECK(train.height == 28);
  CHECK(mean(train) / 255 == doctest::Approx(0.130660).epsilon(1e-5));
  CHECK(label_counts(train) == std::vector<int>{5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949});
  CHECK(load_mnist_layout(folder, false).count == 10000);
}

TEST_CASE("real Fashion-MNIST") {
  const std::string folder = real_data("fashion-mnist", "t10k-images-idx3-ubyte");
  if (folder.empty()) return;
  const image_set test = load_mnist_layout(folder, false);
  check_consistent(test);
  CHECK(mean(test) / 255 == doctest::Approx(0.286849).epsilon(1e-5));
  CHECK(label_counts(test) == std::vector<int>(10, 1000));
}

TEST_CASE("real CIFAR-10") {
  const std::string folder = real_data("cifar10", "test_batch.bin");
  if (folder.empty()) return;
  const image_set test = load_cifar10(folder, false);
  check_consistent(test);
  CHECK(test.count == 10000);
  CHECK(label_counts(test) == std::vector<int>(10, 1000));
  double sums[3] = {0, 0, 0};
  for (std::size_t i = 0; i < test.pixels.size(); ++i) sums[i % 3] += test.pixels[i];
  const double scale = 1.0 / (10000.0 * 1024.0 * 255.0);
  CHECK(sums[0] * scale == doctest::Approx(0.494214).epsilon(1e-5));
  CHECK(sums[1] * scale == doctest::Approx(0.485131).epsilon(1e-5));
  CHECK(sums[2] * scale == doctest::Approx(0.450409).epsilon(1e-5));
}
