// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>
#include <turbojpeg.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <pufferfish/adapters/jpeg.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/distributed/self.hpp>
#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/train/procedure.hpp>
#include <span>
#include <string>
#include <vector>

#include "../support/scratch_folder.hpp"

namespace {

using namespace pufferfish;

/// A JPEG file of an image whose colours change slowly, in `format` (TJPF_RGB, TJPF_GRAY, TJPF_CMYK).
std::vector<std::uint8_t> encoded(index_t height, index_t width, int phase, int format = TJPF_RGB,
                                  int sampling = TJSAMP_444) {
  const index_t values = tjPixelSize[format];
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(height * width * values));
  for (std::size_t i = 0; i < pixels.size(); ++i) {
    const auto pixel = static_cast<index_t>(i) / values, c = static_cast<index_t>(i) % values;
    const double turn = 0.02 * static_cast<double>(pixel / width) + 0.03 * static_cast<double>(pixel % width);
    pixels[i] = static_cast<std::uint8_t>(127.0 + 100.0 * std::sin(turn + static_cast<double>(phase + c)));
  }
  const std::unique_ptr<void, int (*)(void*)> handle(tjInitCompress(), &tjDestroy);
  unsigned char* data = nullptr;
  unsigned long size = 0;
  REQUIRE(tjCompress2(handle.get(), pixels.data(), static_cast<int>(width), 0, static_cast<int>(height),
                      format, &data, &size, format == TJPF_GRAY ? TJSAMP_GRAY : sampling, 95,
                      TJFLAG_ACCURATEDCT) == 0);
  std::vector<std::uint8_t> file(data, data + size);
  tjFree(data);
  return file;
}

/// train/ and val/ with two classes: the phases 0 and 3, in images of different sizes.
class photo_folders {
 public:
  photo_folders() {
    for (const char* part : {"train", "val"}) {
      for (int label = 0; label < 2; ++label) {
        const std::string folder = place_ / (std::string(part) + "/" + (label == 0 ? "first" : "second"));
        std::filesystem::create_directories(folder);
        for (int i = 0; i < 6; ++i) {
          write_file_atomically(folder + "/" + std::to_string(i) + ".jpg",
                                encoded(40 + 7 * i, 64 - 5 * i, 3 * label));
        }
      }
    }
  }
  std::string operator/(const std::string& name) const { return place_ / name; }

 private:
  scratch_folder place_;
};

TEST_CASE("jpeg decoder: colours come back, at each of the eight scales") {
  jpeg_decoder decoder;
  rgb_image image;
  const auto file = encoded(48, 64, 1);
  CHECK(decoder.size_of(file, "photo") == extents<2>{48, 64});
  decoder.decode(file, "photo", {8, 8}, image);
  REQUIRE(image.pixels.size() == 48U * 64U * 3U);
  double worst = 0.0;
  for (index_t y = 0; y < 48; ++y) {
    for (index_t x = 0; x < 64; ++x) {
      for (index_t c = 0; c < 3; ++c) {
        const double turn = 0.02 * static_cast<double>(y) + 0.03 * static_cast<double>(x);
        const double value = 127.0 + 100.0 * std::sin(turn + 1.0 + static_cast<double>(c));
        worst =
            std::max(worst, std::abs(value - image.pixels[static_cast<std::size_t>((y * 64 + x) * 3 + c)]));
      }
    }
  }
  CHECK(worst < 8.0);
  for (int n = 1; n <= 8; ++n) {
    decoder.decode(file, "photo", {n, 8}, image);
    CHECK(image.height == 48 * n / 8);
    CHECK(image.width == 64 * n / 8);
  }
}

TEST_CASE("jpeg decoder: the scale keeps the window at least as large as what is needed") {
  CHECK(jpeg_decoder::scale_for(224, 300, 224).num == 8);
  CHECK(jpeg_decoder::scale_for(100, 300, 224).num == 8);
  CHECK(jpeg_decoder::scale_for(448, 900, 224).num == 4);
  CHECK(jpeg_decoder::scale_for(447, 900, 224).num == 5);
  CHECK(jpeg_decoder::scale_for(4000, 4000, 224).num == 1);
}

TEST_CASE("jpeg decoder: grey images have three equal channels, CMYK becomes RGB") {
  jpeg_decoder decoder;
  rgb_image image;
  decoder.decode(encoded(16, 24, 0, TJPF_GRAY), "grey", {8, 8}, image);
  REQUIRE(image.pixels.size() == 16U * 24U * 3U);
  for (std::size_t p = 0; p < image.pixels.size(); p += 3) {
    REQUIRE(image.pixels[p] == image.pixels[p + 1]);
    REQUIRE(image.pixels[p] == image.pixels[p + 2]);
  }
  decoder.decode(encoded(16, 24, 0, TJPF_CMYK), "inks", {8, 8}, image);
  REQUIRE(image.pixels.size() == 16U * 24U * 3U);
  const double black = 127.0 + 100.0 * std::sin(3.0), cyan = 127.0;
  CHECK(std::abs(image.pixels[0] - black * cyan / 255.0) < 8.0);
}

TEST_CASE("jpeg decoder: other bytes, empty files and files cut short are refused by name") {
  jpeg_decoder decoder;
  rgb_image image;
  const std::vector<std::uint8_t> png{0x89, 'P', 'N', 'G', 13, 10, 26, 10};
  CHECK_THROWS_WITH_AS(decoder.decode(png, "a.jpg", {8, 8}, image),
                       doctest::Contains("a.jpg: not a JPEG image"), io_error);
  CHECK_THROWS_AS(decoder.decode({}, "a.jpg", {8, 8}, image), io_error);
  const auto whole = encoded(64, 64, 2);
  decoder.decode(whole, "b.jpg", {8, 8}, image);  // a decoder that has worked before
  CHECK_THROWS_AS(decoder.size_of(std::span(whole).first(40), "a.jpg"), io_error);
  for (std::size_t size = 1; size + 2 < whole.size(); size += 1 + size / 9) {
    CAPTURE(size);
    CHECK_THROWS_AS(decoder.decode(std::span(whole).first(size), "a.jpg", {8, 8}, image), io_error);
  }
  auto padded = whole;  // bytes that mean nothing, between two markers
  padded.insert(padded.end() - 2, 5, std::uint8_t{0});
  decoder.decode(padded, "b.jpg", {8, 8}, image);
  CHECK(image.pixels.size() == 64U * 64U * 3U);
  auto huge = whole;  // a header that claims 65,500 x 65,500 pixels
  const std::uint8_t start[] = {0xff, 0xc0};
  const auto frame = std::search(huge.begin(), huge.end(), std::begin(start), std::end(start));
  REQUIRE(frame != huge.end());
  for (const int at : {5, 7}) {
    frame[at] = 0xff;
    frame[at + 1] = 0xdc;
  }
  CHECK_THROWS_WITH_AS(decoder.decode(huge, "a.jpg", {8, 8}, image),
                       doctest::Contains("65500 x 65500 pixels"), io_error);
}

TEST_CASE("jpeg decoder: damage is found after a harmless message of the header, which hides it") {
  jpeg_decoder decoder;
  rgb_image image;
  const auto plain = encoded(64, 64, 2, TJPF_RGB), inks = encoded(64, 64, 2, TJPF_CMYK);
  const auto with_junk = [](std::vector<std::uint8_t> file, std::vector<std::uint8_t> junk) {
    file.insert(file.begin() + 4 + 256 * file[4] + file[5], junk.begin(), junk.end());  // after one segment
    return file;
  };
  auto version = plain, transform = inks, no_transform = inks;
  version[11] = 9;  // of JFIF
  const std::string adobe = "Adobe";
  const auto at = std::search(transform.begin(), transform.end(), adobe.begin(), adobe.end());
  REQUIRE(at != transform.end());
  at[11] = 7;
  no_transform[static_cast<std::size_t>(at - transform.begin()) + 11] = 0;
  const std::pair<const std::vector<std::uint8_t>&, std::vector<std::uint8_t>> files[] = {
      {plain, with_junk(plain, {7, 0xe1, 0, 9})},
      {plain, with_junk(plain, {0xff, 0, 0xc0, 0xff, 0xff, 0, 3})},
      {plain, version},
      {inks, transform},
      {no_transform, with_junk(no_transform, {7})}};
  for (const auto& pair : files) {  // clang 14 captures no structured binding in CAPTURE
    const auto& clean = pair.first;
    const auto& file = pair.second;
    CAPTURE(file.size());
    decoder.decode(clean, "clean.jpg", {8, 8}, image);
    const std::vector<std::uint8_t> pixels = image.pixels;
    decoder.decode(file, "a.jpg", {8, 8}, image);
    CHECK(image.pixels == pixels);
    for (std::size_t size = 1; size + 2 < file.size(); size += 1 + size / 9) {
      CAPTURE(size);
      CHECK_THROWS_AS(decoder.decode(std::span(file).first(size), "a.jpg", {8, 8}, image), io_error);
    }
    auto damaged = file;
    std::fill_n(damaged.begin() + static_cast<std::ptrdiff_t>(file.size()) * 3 / 4, 40, std::uint8_t{0x55});
    CHECK_THROWS_AS(decoder.decode(damaged, "a.jpg", {8, 8}, image), io_error);
  }
}

struct epoch_images {
  std::vector<float> pixels;
  std::vector<std::int32_t> labels;
};

epoch_images read_epoch(const folder_images<float>& source, loader_options options, int ranks,
                        index_t epoch) {
  epoch_images all;
  context<device::cpu> ctx;
  options.ranks = ranks;
  std::vector<std::unique_ptr<image_batches<float>>> parts;
  for (options.rank = 0; options.rank < ranks; ++options.rank) parts.push_back(source.batches(options));
  extents<4> shape = source.images();
  shape[0] = parts[0]->max_local_batch();
  tensor<float, 4> images(shape);
  std::vector<std::int32_t> labels(static_cast<std::size_t>(shape[0]));
  const index_t size = shape[1] * shape[2] * shape[3];
  for (index_t step = 0; step < parts[0]->steps_per_epoch(); ++step) {
    for (const auto& part : parts) {
      const index_t count = part->load(ctx, epoch, step, images.view(), labels).count;
      all.pixels.insert(all.pixels.end(), images.data(), images.data() + count * size);
      all.labels.insert(all.labels.end(), labels.begin(), labels.begin() + count);
    }
  }
  return all;
}

TEST_CASE("folder images: batches do not depend on the numbers of ranks and threads") {
  const photo_folders folders;
  const loader_options options{.batch = 5, .augment = {.flip = true, .smallest_area = 0.3}, .seed = 9};
  const folder_images<float> one(folders / "train", {.size = 24, .resize = 28, .threads = 1});
  const folder_images<float> many(folders / "train", {.size = 24, .resize = 28, .threads = 3});
  const epoch_images expected = read_epoch(one, options, 1, 2);
  CHECK(expected.labels.size() == 12);
  CHECK(std::count(expected.labels.begin(), expected.labels.end(), 1) == 6);
  for (const int ranks : {1, 2, 3, 7}) {
    const epoch_images seen = read_epoch(many, options, ranks, 2);
    CHECK(seen.pixels == expected.pixels);
    CHECK(seen.labels == expected.labels);
  }
  CHECK(read_epoch(one, options, 1, 3).pixels != expected.pixels);
  // Normalized where it is asked for.
  loader_options scaled = options;
  scaled.normalize = {{10.0F, 20.0F, 30.0F}, {2.0F, 4.0F, 8.0F}};
  const epoch_images normal = read_epoch(one, scaled, 1, 2);
  for (std::size_t i = 0; i < normal.pixels.size(); ++i) {
    const auto c = i % 3;
    REQUIRE(normal.pixels[i] ==
            (expected.pixels[i] - scaled.normalize.mean[c]) / scaled.normalize.deviation[c]);
  }
}

TEST_CASE("folder images: batches may be loaded in any order") {
  const photo_folders folders;
  const folder_images<float> source(folders / "train", {.size = 8, .resize = 8, .threads = 2});
  const auto batches = source.batches({.batch = 4, .augment = {.smallest_area = 0.5}});
  context<device::cpu> ctx;
  tensor<float, 4> images({4, 8, 8, 3});
  std::vector<std::int32_t> labels(4);
  std::vector<std::vector<float>> first;
  for (const index_t step : {0, 1, 2, 1, 0, 2, 2}) {
    batches->load(ctx, 1, step, images.view(), labels);
    std::vector<float> now(images.data(), images.data() + images.size());
    if (first.size() == static_cast<std::size_t>(step)) first.push_back(now);
    CHECK(now == first[static_cast<std::size_t>(step)]);
  }
}

TEST_CASE("folder images: samples of tests are the middle, and equal those of chosen()") {
  const photo_folders folders;
  const folder_images<float> source(folders / "val", {.size = 16, .resize = 20});
  CHECK(source.images() == extents<4>{12, 16, 16, 3});
  CHECK(source.classes() == 2);
  const epoch_images seen = read_epoch(source, {.batch = 12, .shuffle = false}, 1, 0);
  const image_set some = source.chosen({3, 11});
  CHECK(some.labels == std::vector<std::int32_t>{0, 1});
  const std::size_t size = 16 * 16 * 3;
  CHECK(std::equal(some.pixels.begin(), some.pixels.begin() + size, seen.pixels.begin() + 3 * size));
  CHECK(std::equal(some.pixels.begin() + size, some.pixels.end(), seen.pixels.begin() + 11 * size));
  CHECK(source.describe() != folder_images<float>(folders / "val", {.size = 16, .resize = 16}).describe());
}

TEST_CASE("folder images: a bad file ends the step with its name, and later steps work") {
  const photo_folders folders;
  write_file_atomically(folders / "train/second/3.jpg", std::vector<std::uint8_t>{1, 2, 3});
  const folder_images<float> source(folders / "train", {.size = 8, .resize = 8, .threads = 2});
  const auto batches = source.batches({.batch = 6, .shuffle = false});
  context<device::cpu> ctx;
  tensor<float, 4> images({6, 8, 8, 3});
  std::vector<std::int32_t> labels(6);
  batches->load(ctx, 0, 0, images.view(), labels);
  CHECK_THROWS_WITH_AS(batches->load(ctx, 0, 1, images.view(), labels),
                       doctest::Contains("second/3.jpg: not a JPEG"), io_error);
  CHECK(batches->load(ctx, 0, 0, images.view(), labels).count == 6);
}

TEST_CASE("folder images: options that do not fit are refused") {
  const photo_folders folders;
  CHECK_THROWS_AS(folder_images<float>(folders / "train", {.size = 0}), value_error);
  CHECK_THROWS_AS(folder_images<float>(folders / "train", {.size = 30, .resize = 20}), value_error);
  CHECK_THROWS_AS(folder_images<float>(folders / "train", {.threads = -1}), value_error);
  const folder_images<float> source(folders / "train", {.size = 8, .resize = 8});
  CHECK_THROWS_AS(source.batches({.augment = {.pad_crop = 2}}), value_error);
  CHECK_THROWS_AS(source.batches({.augment = {.smallest_area = 0.0}}), value_error);
  CHECK_THROWS_AS(source.batches({.batch = 0}), value_error);
  const image_folder whole = source.folder();
  image_folder fewer = whole, other = whole;
  fewer.labels.pop_back();
  CHECK_THROWS_WITH_AS(folder_images<float>(fewer, {.size = 8, .resize = 8}), doctest::Contains(" labels"),
                       value_error);
  other.labels.front() = static_cast<std::int32_t>(other.classes.size());
  CHECK_THROWS_WITH_AS(folder_images<float>(other, {.size = 8, .resize = 8}), doctest::Contains("has label"),
                       value_error);
  const auto files = static_cast<index_t>(whole.files.size());
  CHECK_THROWS_AS(source.chosen({files}), value_error);
  CHECK_THROWS_AS(source.chosen({-1}), value_error);
}

TEST_CASE("folder images: a network learns to tell two colours apart, and resumes from a checkpoint") {
  const photo_folders data;
  const auto untrained = [] {
    network<float> net = small_resnet<float>({.channels_in = 3, .classes = 2, .width = 4});
    net.initialize(1);
    return net;
  };
  training_options options;
  options.epochs = 8;
  options.warmup_epochs = 3;
  options.batch = 4;
  options.learning_rate = 0.05;
  self comm;
  // [sources]
  const folder_options small{.size = 16, .resize = 16};
  const auto train = std::make_shared<folder_images<float>>(data / "train", small);
  const auto test = std::make_shared<folder_images<float>>(data / "val", small);
  options.augment = {.flip = true, .smallest_area = 0.3};
  procedure<float, self> run(untrained(), comm, train, test, options);
  // [sources]
  training_observer quiet;
  run.run(quiet);
  CHECK(run.history().back().test_accuracy == 100.0);
  CHECK(run.history().back().test_top5 == 0.0);

  const scratch_folder place;
  procedure<float, self> begun(untrained(), comm, train, test, options);
  for (int i = 0; i < 10; ++i) begun.advance(quiet);
  begun.save(place / "run.safetensors");
  procedure<float, self> resumed(untrained(), comm, train, test, options);
  resumed.resume(place / "run.safetensors");
  resumed.run(quiet);
  CHECK(parameter_digest(resumed.net()) == parameter_digest(run.net()));
}

}  // namespace
