// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Lottery tickets of the network at full width that the paper compares itself with.
#include <doctest/doctest.h>

#include <pufferfish/models/vgg.hpp>
#include <pufferfish/prune/lottery.hpp>

namespace {

using namespace pufferfish;

TEST_CASE("lottery: five levels of vgg19_lth") {
  network<float> net = vgg19_lth<float>();
  net.initialize(3);
  lottery<float> tickets(net.store(), {.unpruned = {"fc"}, .parameters = 8'107'466});
  for (const index_t kept : {16'015'104, 12'812'083, 10'249'666, 8'199'732, 6'559'785}) {
    CHECK_FALSE(tickets.finished());
    tickets.prune(net.store());
    CHECK(tickets.mask()->kept() == kept);
  }
  CHECK(tickets.finished());
  CHECK(tickets.parameters() == 6'575'923);
}

}  // namespace
