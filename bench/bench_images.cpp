// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Times the reading of training images from JPEG files: random windows and the middle, scaled to the size of
// the network's images. The files are made here, or are in a folder of classes. bench/peer_images.py times
// Pillow, which torchvision uses, with the same files.

#include <turbojpeg.h>

#include <pufferfish/adapters/jpeg.hpp>
#include <pufferfish/core/tensor.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "../examples/common/console.hpp"
#include "../examples/common/session.hpp"

#ifndef PUFFERFISH_BENCH_FLAGS
#define PUFFERFISH_BENCH_FLAGS "unknown"
#endif

namespace pf = pufferfish;
using pf::index_t;

namespace {

struct options {
  std::string data, json;
  index_t images = 256, height = 375, width = 500, size = 224;
  std::vector<int> threads{1};
  int runs = 5;
};

/// Smooth colours with noise: at quality 90 a file of 500 x 375 pixels has about 50 KB, half of ImageNet's.
std::vector<std::uint8_t> made_photo(index_t height, index_t width, index_t number) {
  const pf::random_stream random(7, static_cast<std::uint64_t>(number));
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(3 * height * width));
  for (std::size_t i = 0; i < pixels.size(); ++i) {
    const auto pixel = static_cast<index_t>(i / 3);
    const double wave = std::sin(0.03 * static_cast<double>(pixel % width + number)) +
                        std::cos(0.05 * static_cast<double>(pixel / width) + static_cast<double>(i % 3));
    const double noise = 24.0 * (random.uniform(i) - 0.5);
    pixels[i] = static_cast<std::uint8_t>(std::clamp(127.0 + 50.0 * wave + noise, 0.0, 255.0));
  }
  const std::unique_ptr<void, int (*)(void*)> handle(tjInitCompress(), &tjDestroy);
  unsigned char* data = nullptr;
  unsigned long size = 0;
  if (tjCompress2(handle.get(), pixels.data(), static_cast<int>(width), 0, static_cast<int>(height), TJPF_RGB,
                  &data, &size, TJSAMP_420, 90, 0) != 0) {
    throw pf::backend_error(tjGetErrorStr2(handle.get()));
  }
  std::vector<std::uint8_t> file(data, data + size);
  tjFree(data);
  return file;
}

void make_photos(const options& o) {
  const std::string folder = o.data + "/photos";
  std::filesystem::create_directories(folder);
  for (index_t i = 0; i < o.images; ++i) {
    pf::write_file_atomically(folder + "/" + std::to_string(i) + ".jpg", made_photo(o.height, o.width, i));
  }
}

/// Images per second of all epochs, sorted.
std::vector<double> rates(const pf::image_folder& folder, const options& o, int threads,
                          double smallest_area) {
  const pf::folder_images<float> source(folder,
                                        {.size = o.size, .resize = o.size * 8 / 7, .threads = threads});
  const index_t batch = std::min<index_t>(64, source.images()[0]);
  const auto batches = source.batches({.batch = batch,
                                       .augment = {.flip = true, .smallest_area = smallest_area},
                                       .normalize = source.normalize()});
  pf::cpu_context ctx({1, 1});
  pf::tensor<float, 4> images({batch, o.size, o.size, 3});
  std::vector<std::int32_t> labels(static_cast<std::size_t>(batch));
  std::vector<double> found;
  for (int run = 0; run <= o.runs; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    for (index_t step = 0; step < batches->steps_per_epoch(); ++step) {
      batches->load(ctx, run, step, images.view(), labels);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (run > 0) found.push_back(static_cast<double>(source.images()[0]) / took.count());  // run 0 warms up
  }
  std::sort(found.begin(), found.end());
  return found;
}

nlohmann::json measure(const options& o) {
  const pf::image_folder folder = pf::list_image_folder(o.data);
  nlohmann::json rows = nlohmann::json::array();
  for (const int threads : o.threads) {
    for (const double area : {0.08, 1.0}) {
      const std::vector<double> found = rates(folder, o, threads, area);
      rows.push_back({{"window", area < 1.0 ? "random" : "middle"},
                      {"threads", threads},
                      {"images", folder.files.size()},
                      {"images_per_s", found[found.size() / 2]},
                      {"least", found.front()},
                      {"most", found.back()}});
    }
  }
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times the reading of training images from JPEG files", "bench_images"};
  options o;
  app.option_defaults()->always_capture_default();
  app.add_option("--data", o.data, "Folder of classes with JPEG files; made if it does not exist")
      ->required();
  app.add_option("--json", o.json, "Write the report as JSON to this file (- for standard output)");
  app.add_option("--images", o.images, "Files that are made")->check(CLI::PositiveNumber);
  app.add_option("--height", o.height, "Of their images")->check(CLI::Range(1, 10000));
  app.add_option("--width", o.width, "Of their images")->check(CLI::Range(1, 10000));
  app.add_option("--size", o.size, "Height and width of the results")->check(CLI::Range(1, 4096));
  app.add_option("--threads", o.threads, "Threads that decode")->check(CLI::PositiveNumber);
  app.add_option("--runs", o.runs, "Epochs that are timed")->check(CLI::PositiveNumber);
  return examples::run_on_first(app, argc, argv, [&] {
    examples::check_writable(o.json);
    if (!std::filesystem::exists(o.data)) make_photos(o);
    const nlohmann::json report{{"benchmark", "images"},
                                {"compiler", __VERSION__},
                                {"flags", PUFFERFISH_BENCH_FLAGS},
                                {"rows", measure(o)}};
    if (o.json != "-") {
      std::printf("%-8s %8s %10s %22s\n", "window", "threads", "images/s", "least .. most");
      for (const nlohmann::json& r : report["rows"]) {
        std::printf("%-8s %8d %10.1f %12.1f .. %.1f\n", r["window"].get<std::string>().c_str(),
                    r["threads"].get<int>(), r["images_per_s"].get<double>(), r["least"].get<double>(),
                    r["most"].get<double>());
      }
    }
    examples::write_json(o.json, report);
  });
}
