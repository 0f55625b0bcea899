// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include <pufferfish/nn/accounting.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/dropout.hpp>
#include <pufferfish/nn/layers/flatten.hpp>

namespace {

using namespace pufferfish;

/// 8x6 images of 2 channels: a convolution, a block with a strided shortcut, pooling, a linear layer.
network<float> example() {
  Sequential<float> branch, shortcut, net;
  branch.add("conv1", Conv<float>(conv_shape::square(4, 8, 3, 2, 1)));
  branch.add("bn1", BatchNorm<float>(8));
  branch.add("relu", ReLU<float>());
  branch.add("conv2", LowRankNormConv<float>(conv_shape::square(8, 8, 3, 1, 1), 2));
  shortcut.add("0", Conv<float>(conv_shape::square(4, 8, 1, 2)));
  net.add("conv1", Conv<float>(conv_shape::square(2, 4, 3, 1, 1), true));
  net.add("pool", MaxPool<float>(2));
  net.add("block", Residual<float>(std::move(branch), std::move(shortcut)));
  net.add("average", GlobalAvgPool<float>());
  net.add("flatten", Flatten<float>());
  net.add("dropout", Dropout<float>(0.5));
  net.add("fc", Linear<float>(8, 5));
  return network<float>{any_layer<float>(std::move(net))};
}

struct row {
  const char* name;
  index_t parameters, buffers, macs, macs_paper, rank;
};

void check_rows(const model_cost& cost, const std::vector<row>& expected) {
  REQUIRE(cost.layers.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(expected[i].name);
    CHECK(cost.layers[i].name == expected[i].name);
    CHECK(cost.layers[i].parameters == expected[i].parameters);
    CHECK(cost.layers[i].buffers == expected[i].buffers);
    CHECK(cost.layers[i].macs == expected[i].macs);
    CHECK(cost.layers[i].macs_paper == expected[i].macs_paper);
    CHECK(cost.layers[i].rank == expected[i].rank);
  }
}

TEST_CASE("accounting: every layer by both conventions, and the total") {
  network<float> net = example();
  const extents<4> image{1, 8, 6, 2};
  // Images: 8x6x4 after conv1, 4x3x4 after the pool, 2x2x8 in the block.
  std::vector<row> rows{{"conv1", 76, 0, 48 * 72, 48 * 72, 0},
                        {"pool", 0, 0, 0, 48 * 4, 0},
                        {"block.conv1", 288, 0, 4 * 288, 4 * 288, 0},
                        {"block.bn1", 16, 17, 0, 2 * 32, 0},
                        {"block.relu", 0, 0, 0, 32, 0},
                        {"block.conv2.down", 144, 0, 4 * 144, 4 * 144, 2},
                        {"block.conv2.bn", 4, 5, 0, 2 * 8, 0},
                        {"block.conv2.up", 16, 0, 4 * 16, 4 * 16, 2},
                        {"block.shortcut.0", 32, 0, 4 * 32, 4 * 32, 0},
                        {"block", 0, 0, 0, 32, 0},
                        {"average", 0, 0, 0, 32, 0},
                        {"flatten", 0, 0, 0, 0, 0},
                        {"dropout", 0, 0, 0, 0, 0},
                        {"fc", 45, 0, 40, 40, 0}};
  check_rows(cost_of(net, image), rows);
  layer_cost total = cost_of(net, image).total();
  CHECK(total.parameters == net.parameter_count());
  CHECK(total.buffers == static_cast<index_t>(net.store().buffers().size()));
  CHECK(total.macs == net.macs(image));
  CHECK(cost_of(net, {3, 8, 6, 2}).total().macs_paper == 3 * total.macs_paper);
  CHECK(cost_of(net, image).layers[9].description == "residual, ReLU");

  paper_counter counter;
  counter.sees = [](const std::string& name) { return name == "block" || name == "pool"; };
  rows[4].macs_paper = 0;
  rows[10].macs_paper = 0;
  check_rows(cost_of(net, image, counter), rows);

  apply_ranks(net, {{"block.conv1", 3}, {"block.shortcut.0", 1}, {"fc", 2}});
  const model_cost low_rank = cost_of(net, image);
  const auto at = [&](std::size_t i) { return low_rank.layers[i]; };
  CHECK(at(2).rank == 3);
  CHECK(at(2).parameters == 3 * (36 + 8));
  CHECK(at(2).macs == 4 * 3 * (36 + 8));
  CHECK(at(8).rank == 1);
  CHECK(at(8).macs == 4 * (4 + 8));  // the stride is in the first factor
  CHECK(at(13).rank == 2);
  CHECK(at(13).parameters == 2 * (8 + 5) + 5);
  CHECK(at(13).macs == 2 * (8 + 5));
  CHECK_THROWS_AS(cost_of(net, {1, 8, 6, 3}), shape_error);
}

TEST_CASE("accounting: a network that is one layer, or one block") {
  const network<double> linear{any_layer<double>(Linear<double>(3, 2))};
  check_rows(cost_of(linear, {4, 1, 1, 3}), {{"", 8, 0, 24, 24, 0}});
  Sequential<double> branch;
  branch.add("conv", Conv<double>(conv_shape::square(3, 3, 1)));
  const network<double> block{any_layer<double>(Residual<double>(std::move(branch)))};
  check_rows(cost_of(block, {1, 2, 2, 3}), {{"conv", 9, 0, 36, 36, 0}, {"", 0, 0, 0, 12, 0}});
  CHECK(model_cost().total().parameters == 0);
}

}  // namespace
