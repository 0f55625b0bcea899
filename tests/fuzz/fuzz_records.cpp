// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
/// \file
/// libFuzzer harness of the text records of training runs: the first byte chooses which. Readers may accept
/// or throw io_error or value_error; what they accept must be the same when written and read again.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/record_line.hpp>
#include <pufferfish/distributed/exchange/exchange_plan.hpp>
#include <pufferfish/lowrank/statistics/layer_times.hpp>
#include <pufferfish/optim/schedule.hpp>
#include <pufferfish/train/progress_record.hpp>
#include <pufferfish/train/switch_moment.hpp>

namespace {

using namespace pufferfish;

void require(bool condition) {
  if (!condition) std::abort();
}

void try_record(const std::string& text) {
  const std::string written = training_record::from_text(text, "fuzz").to_text();
  require(training_record::from_text(written, "again").to_text() == written);
}

void try_ranks(const std::string& text) {
  const std::vector<layer_rank> ranks = detail::ranks_from_text(text);
  require(detail::ranks_from_text(detail::ranks_to_text(ranks)) == ranks);
}

void try_plan(const std::string& text) {
  const exchange_plan plan = plan_from_text(text, "fuzz");
  require(plan_from_text(to_text(plan), "again") == plan);
}

void try_plateau(const std::string& text) {
  plateau one, other;
  one.set_state(text);
  other.set_state(one.state());
  require(one.state() == other.state());
}

void try_clock(const std::string& text) {
  for (const switch_moment& moment :
       {switch_moment(cuttlefish_moment{}), switch_moment(predicted_loss_moment{})}) {
    switch_clock one(moment), other(moment);
    try {
      one.set_state(text, "fuzz");
    } catch (const io_error&) {
      continue;
    }
    other.set_state(one.state(), "again");
    require(one.state() == other.state() && one.due() == other.due() && one.ranks() == other.ranks());
  }
}

void try_times(const std::string& text) {
  const layer_times times = layer_times_from_text(text, "fuzz");
  require(layer_times_from_text(to_text(times), "again") == times);
}

void try_stages(const std::string& text) {
  const std::vector<stage_time> stages = stage_times_from_text(text, "fuzz");
  require(stage_times_from_text(to_text(stages), "again") == stages);
}

/// Any bytes are a name; numbers come back bit for bit.
void try_words(const std::string& text) {
  const std::string word = detail::quote_word(text);
  std::string back, second;
  require(word.find('\n') == std::string::npos);
  require(detail::record_line(word + " " + word).read(back, second).complete());
  require(back == text && second == text);

  double value = 0.0;
  std::memcpy(&value, text.data(), std::min(text.size(), sizeof value));
  double read = 0.0;
  for (const std::string& form :
       {detail::shortest_number(value), detail::exact_number(value), detail::hexadecimal_number(value)}) {
    require(detail::read_number(form, read));
    require(std::isnan(value) ? std::isnan(read) : std::memcmp(&read, &value, sizeof read) == 0);
  }
  if (detail::read_number(text, read)) require(detail::read_number(detail::exact_number(read), value));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  try {
    // Bytes from 250 on have kinds of their own, so that seeds keep theirs.
    switch (data[0] < 250 ? data[0] % 5 : data[0] - 245) {
      case 0:
        try_record(text);
        break;
      case 1:
        try_ranks(text);
        break;
      case 2:
        try_plan(text);
        break;
      case 3:
        try_plateau(text);
        break;
      case 5:
        try_clock(text);
        break;
      case 6:
        try_times(text);
        break;
      case 7:
        try_stages(text);
        break;
      default:
        try_words(text);
        break;
    }
  } catch (const io_error&) {
  } catch (const value_error&) {
  }
  return 0;
}
