// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support.hpp"

#include <pufferfish/gpu/train/augment.hpp>
#include <pufferfish/gpu/train/byte_stage.hpp>
#include <pufferfish/train/device_parts.hpp>

using namespace gpu_test;

namespace {

pf::image_set random_set(index_t count, index_t height, index_t width, index_t channels) {
  pf::image_set set;
  set.count = count;
  set.height = height;
  set.width = width;
  set.channels = channels;
  set.classes = 10;
  const pf::random_stream random(5, 6);
  for (index_t i = 0; i < count * height * width * channels; ++i) {
    set.pixels.push_back(static_cast<std::uint8_t>(random.below(static_cast<std::uint64_t>(i), 256)));
  }
  for (index_t i = 0; i < count; ++i) set.labels.push_back(static_cast<std::int32_t>(i % 10));
  return set;
}

}  // namespace

TEST_CASE("gpu augment: the batches of the CPU's loader, to the bit") {
  struct loader_case {
    index_t height, width, channels;
    pf::augmentation augment;
    bool shuffle;
    int rank, ranks;
  };
  for (const auto& c : {loader_case{32, 32, 3, {4, false, true}, true, 0, 1},
                        loader_case{7, 9, 1, {3, true, true}, true, 1, 3},
                        loader_case{5, 4, 2, {0, false, false}, false, 0, 1}}) {
    const pf::image_set set = random_set(23, c.height, c.width, c.channels);
    pf::loader_options options;
    options.batch = 8;
    options.shuffle = c.shuffle;
    options.augment = c.augment;
    options.normalize = pf::measure_normalization(set);
    options.seed = 77;
    options.rank = c.rank;
    options.ranks = c.ranks;
    pf::loader host(set, options);
    pf::gpu::image_loader device(set, options);
    CHECK(device.steps_per_epoch() == host.steps_per_epoch());
    const pf::extents<4> shape{host.max_local_batch(), c.height, c.width, c.channels};
    twin<float> images(pf::volume<4>(shape), -3.0F);
    twin<std::int32_t> labels(shape[0], -3);
    for (const index_t epoch : {0, 1, 5}) {
      for (index_t step = 0; step < host.steps_per_epoch(); ++step) {
        const pf::batch_place expected = host.load(epoch, step, images.host_view(shape), labels.host_span());
        const pf::batch_place found =
            device.load(gpu_context(), epoch, step, images.device_view(shape), labels.device_span());
        CHECK(found.first == expected.first);
        CHECK(found.count == expected.count);
        CHECK(images.fetched() == images.host());
        CHECK(labels.fetched() == labels.host());
      }
    }
    CHECK_THROWS_AS(device.load(gpu_context(), 0, 99, images.device_view(shape), labels.device_span()),
                    pf::value_error);
    CHECK_THROWS_AS(
        device.load(gpu_context(), 0, 0, images.device_view(shape), labels.device_span().first(1)),
        pf::shape_error);
  }
}

TEST_CASE("gpu byte stage: the numbers of the CPU's stage, to the bit, in batches of different sizes") {
  const pf::image_set set = random_set(9, 5, 7, 3);
  const pf::extents<4> shape{9, 5, 7, 3};
  const std::vector<float> table =
      pf::batch_plan(shape, {.batch = 9, .normalize = pf::measure_normalization(set)}).normalized_values();
  pf::detail::device_parts<pf::device::cpu>::byte_stage host(shape, table);
  pf::gpu::byte_stage device(shape, table);
  twin<float> images(pf::volume<4>(shape), -3.0F);
  twin<std::int32_t> labels(shape[0], -3);
  pf::context<pf::device::cpu> cpu;
  for (const index_t count : {9, 0, 1, 4, 9, 2, 3}) {  // more than input_place keeps at once
    const std::uint8_t* const pixels = set.pixels.data() + (9 - count) * 5 * 7 * 3;
    const std::int32_t* const of = set.labels.data() + (9 - count);
    host.bring(cpu, count, pixels, of, images.host().data(), labels.host().data());
    device.bring(gpu_context(), count, pixels, of, images.device_span().data(), labels.device_span().data());
    CHECK(images.fetched() == images.host());
    CHECK(labels.fetched() == labels.host());
  }
}
