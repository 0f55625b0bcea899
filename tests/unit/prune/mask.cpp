// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <limits>

#include <pufferfish/distributed/self.hpp>
#include <pufferfish/optim/optimizer.hpp>
#include <pufferfish/prune/apply_mask.hpp>

#include "../support/prune_support.hpp"

namespace {

using namespace prune_support;

TEST_CASE("weight_mask: which tensors have bits, and how many") {
  small_store<float> net;
  const weight_mask mask(net.store);
  std::vector<std::string> prunable;
  for (const masked_tensor& tensor : mask.tensors()) {
    if (tensor.prunable) prunable.push_back(tensor.name);
  }
  CHECK(prunable ==
        std::vector<std::string>{"fc.weight", "three.weight", "one.weight", "large.weight", "conv.weight"});
  CHECK(mask.tensors().size() == 9);  // large.bias has no elements
  CHECK(mask.prunable() == small_store<float>::prunable);
  CHECK(mask.kept() == mask.prunable());
  CHECK(mask.size() == static_cast<index_t>(net.store.values().size()));
  CHECK(mask.survivors() == mask.size());
  CHECK(mask.words().size() == 1 + 3 + 1 + 316 + 3);
  // All of them are set, and none after the last element.
  CHECK(mask.words()[0] == (std::uint64_t{1} << 35) - 1);
  CHECK(mask.words()[1] == ~std::uint64_t{0});
  CHECK(mask.words()[4] == 1);
}

TEST_CASE("weight_mask: choices of the caller") {
  small_store<float> net;
  const weight_mask without_fc(net.store, prunable_except(net.store, {"fc", "conv.weight"}));
  CHECK(without_fc.prunable() == small_store<float>::prunable - 35 - 162);
  CHECK(without_fc.kept() + without_fc.report().unprunable == without_fc.size());
  CHECK_THROWS_WITH_AS(prunable_except(net.store, {"fc", "head"}), doctest::Contains("head"), value_error);
  // The choice is not asked about biases and normalization.
  const weight_mask all(net.store, [](const coded_tensor&) { return true; });
  CHECK(all.prunable() == small_store<float>::prunable + 78);
}

TEST_CASE_TEMPLATE("weight_mask::apply: zero where a bit is clear, any thread count, any range of tensors", T,
                   float, double) {
  cpu_context one, three({3, 0});
  small_store<T> net;
  for (const double share : {0.0, 0.3, 0.95, 1.0}) {
    weight_mask mask(net.store);
    remove_at_random(mask, share, 3);
    const std::vector<bool> kept = kept_elements(mask);
    const std::vector<T> values = normal_values<T>(mask.size(), 7);
    std::vector<T> wanted = values, found = values, threaded = values, parts = values;
    // A pruned place is zero whatever its value was.
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (kept[i]) continue;
      wanted[i] = T(0);
      found[i] = i % 3 == 0 ? std::numeric_limits<T>::quiet_NaN() : i % 3 == 1 ? T(-0.0) : values[i];
    }
    mask.apply(one, std::span<T>(found));
    mask.apply(three, std::span<T>(threaded));
    for (const masked_tensor& tensor : mask.tensors()) {
      mask.apply(one,
                 std::span<T>(parts).subspan(static_cast<std::size_t>(tensor.offset),
                                             static_cast<std::size_t>(tensor.size)),
                 tensor.offset);
    }
    CHECK(same_bits<T>(found, wanted));
    CHECK(same_bits<T>(threaded, wanted));
    CHECK(same_bits<T>(parts, wanted));
  }
  const weight_mask mask(net.store);
  std::vector<T> values(static_cast<std::size_t>(mask.size()));
  CHECK_THROWS_WITH_AS(mask.apply(one, std::span<T>(values).first(41)), doctest::Contains("0 .. 41"),
                       value_error);
  CHECK_THROWS_AS(mask.apply(one, std::span<T>(values), 1), value_error);
  CHECK_NOTHROW(mask.apply(one, std::span<T>(values).first(42)));  // fc.bias, fc.weight
  CHECK_NOTHROW(mask.apply(one, std::span<T>()));
}

TEST_CASE_TEMPLATE("weight_mask: kernels with every length and alignment", T, float, double) {
  const auto keep = PUFFERFISH_KERNEL(widest_isa(), detail::mask_passes, keep_marked<T>);
  const auto mark = PUFFERFISH_KERNEL(widest_isa(), detail::mask_passes, mark_nonzero<T>);
  const random_stream random(3, 4);
  for (index_t count = 0; count < 200; ++count) {
    for (const index_t shift : {0, 1, 3}) {
      const std::uint64_t words[4] = {random.bits(0), ~std::uint64_t{0}, 0, random.bits(1)};
      std::vector<T> values = normal_values<T>(count + shift + 1, 9), wanted = values;
      for (index_t i = 0; i < count; ++i) {
        if ((words[i / 64] >> i % 64 & 1U) == 0) wanted[static_cast<std::size_t>(i + shift)] = T(0);
      }
      keep(words, values.data() + shift, count);
      REQUIRE(same_bits<T>(values, wanted));
      std::uint64_t found[5] = {7, 7, 7, 7, 7};
      mark(values.data() + shift, found, count);
      for (index_t w = 0; w < 4; ++w) {
        const index_t here = std::clamp<index_t>(count - 64 * w, 0, 64);
        const std::uint64_t all = here == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << here) - 1;
        REQUIRE(found[w] == (here == 0 ? 7 : words[w] & all));
      }
    }
  }
}

TEST_CASE_TEMPLATE("weight_mask::set_nonzero: NaN is not zero, -0 is", T, float, double) {
  cpu_context one, three({3, 0});
  small_store<T> net;
  weight_mask mask(net.store), threaded(net.store), wanted(net.store);
  std::vector<T> values = normal_values<T>(mask.size(), 2);
  const index_t fc = mask.tensors()[1].offset;
  values[static_cast<std::size_t>(fc)] = std::numeric_limits<T>::quiet_NaN();
  values[static_cast<std::size_t>(fc + 1)] = T(-0.0);
  values[static_cast<std::size_t>(fc + 34)] = T(0);
  values[0] = T(0);  // fc.bias has no bits
  wanted.remove(1, 1);
  wanted.remove(1, 34);
  for (index_t i = 0; i < mask.tensors()[4].size; i += 3) {
    values[static_cast<std::size_t>(mask.tensors()[4].offset + i)] = T(0);
    wanted.remove(4, i);
  }
  remove_at_random(mask, 0.5, 1);  // bits before have no influence
  mask.set_nonzero(one, std::span<const T>(values));
  threaded.set_nonzero(three, std::span<const T>(values));
  CHECK(mask == wanted);
  CHECK(threaded == wanted);
  CHECK(mask.kept() == wanted.kept());
  CHECK_THROWS_AS(mask.set_nonzero(one, std::span<const T>(values).first(3)), value_error);
}

TEST_CASE("weight_mask: counts, report") {
  small_store<float> net;
  weight_mask mask(net.store);
  mask.remove(1, 3);
  mask.remove(1, 3);  // has no effect
  mask.remove(4, 20199);
  const mask_report report = mask.report();
  REQUIRE(report.rows.size() == 5);
  CHECK(report.rows[0].name == "fc.weight");
  CHECK(report.rows[0].kept == 34);
  CHECK(report.rows[0].total == 35);
  CHECK(report.rows[3].kept == 20199);
  CHECK(report.kept == small_store<float>::prunable - 2);
  CHECK(report.total == small_store<float>::prunable);
  CHECK(report.parameters() == report.kept + small_store<float>::unprunable);
  CHECK(report.parameters() == mask.survivors());
  CHECK(to_string(report).find("fc.weight: 34 of 35 weights\n") == 0);
  CHECK(to_string(report).find("all: 20588 of 20590 weights, 20685 parameters\n") != std::string::npos);
  index_t kept = 0;
  for (const bool one : kept_elements(mask)) kept += one ? 1 : 0;
  CHECK(kept == mask.survivors());
}

TEST_CASE("weight_mask: digest") {
  small_store<float> net;
  weight_mask mask(net.store), same(net.store);
  const std::uint64_t full = mask.digest();
  CHECK(same.digest() == full);
  mask.remove(4, 7);
  CHECK(mask.digest() != full);
  CHECK_FALSE(mask == same);
  same.remove(4, 7);
  CHECK(mask.digest() == same.digest());
  CHECK(mask == same);
  const weight_mask other(net.store, prunable_except(net.store, {"one"}));
  CHECK(other.digest() != full);
}

TEST_CASE("weight_mask: bits to words and numbers, and back") {
  small_store<float> net;
  weight_mask mask(net.store);
  remove_at_random(mask, 0.7, 8);
  weight_mask again(net.store);
  again.set_words(mask.words());
  CHECK(again == mask);
  CHECK(again.kept() == mask.kept());
  weight_mask from_floats(net.store), from_doubles(net.store);
  const std::vector<float> floats = mask_numbers<float>(mask);
  CHECK(floats.size() == 4 * mask.words().size());
  set_mask_numbers<float>(from_floats, floats);
  set_mask_numbers<double>(from_doubles, mask_numbers<double>(mask));
  CHECK(from_floats == mask);
  CHECK(from_floats.kept() == mask.kept());
  CHECK(from_doubles == mask);
  // One rank's mask for all.
  self comm;
  broadcast_mask(comm, again);
  CHECK(again == mask);

  std::vector<std::uint64_t> words(mask.words().begin(), mask.words().end());
  words[0] |= std::uint64_t{1} << 35;
  CHECK_THROWS_WITH_AS(again.set_words(words), doctest::Contains("fc.weight"), value_error);
  words.pop_back();
  CHECK_THROWS_AS(again.set_words(words), value_error);
  for (const float wrong : {-1.0F, 65536.0F, 0.5F, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> numbers = floats;
    numbers[9] = wrong;
    CHECK_THROWS_WITH_AS(set_mask_numbers<float>(again, numbers), doctest::Contains("position 9"),
                         value_error);
  }
  CHECK_THROWS_AS(set_mask_numbers<float>(again, std::span(floats).first(4)), value_error);
  CHECK(again == mask);
}

TEST_CASE("weight_mask: refuses other arenas") {
  small_store<float> net;
  const weight_mask mask(net.store);
  CHECK_NOTHROW(mask.check_store(net.store));
  one_matrix<float> other({1, 2, 3});
  CHECK_THROWS_WITH_AS(mask.check_store(other.store), doctest::Contains("fc.bias"), state_error);
  CHECK_THROWS_WITH_AS(weight_mask(other.store).check_store(net.store), doctest::Contains("fc.bias"),
                       state_error);
  // A longer network of which the beginning fits.
  std::vector<coded_tensor> tensors = coded_tensors(net.store);
  tensors.pop_back();
  CHECK_THROWS_WITH_AS(mask.check_tensors(tensors), doctest::Contains("conv.weight"), state_error);
  cpu_context ctx;
  CHECK_THROWS_AS(mask_weights(ctx, mask, other.store), state_error);
}

TEST_CASE("weight_mask: refuses values and gradients of a device") {
  device_like_memory source;
  one_matrix<float> net({1, 2, 0}, source);
  weight_mask mask(net.store);
  cpu_context ctx;
  CHECK_THROWS_WITH_AS(mask_weights(ctx, mask, net.store), doctest::Contains("on a device"), state_error);
  CHECK_THROWS_WITH_AS(mask_gradients(ctx, mask, net.store), doctest::Contains("on a device"), state_error);
  CHECK_THROWS_WITH_AS(mask.set_nonzero(ctx, net.store), doctest::Contains("on a device"), state_error);
  CHECK_THROWS_WITH_AS(prune_by_magnitude(mask, net.store, {}), doctest::Contains("on a device"),
                       state_error);
  CHECK_THROWS_WITH_AS(prune_smallest(mask, net.store, 1), doctest::Contains("on a device"), state_error);
  CHECK(mask.kept() == 3);
}

TEST_CASE("weight_mask: nothing to prune") {
  const weight_mask none(std::vector<coded_tensor>{});
  cpu_context ctx;
  std::vector<float> nothing;
  CHECK_NOTHROW(none.apply(ctx, std::span<float>(nothing)));
  CHECK(none.kept() == 0);
  CHECK(none.words().empty());
}

std::vector<optimizer_options> optimizers() {
  return {sgd_options{},
          sgd_options{0.9, 0.0, false, 1e-2, false},
          sgd_options{0.9, 0.0, true, 1e-2, true},
          sgd_options{0.5, 0.3, false, 0.0, false},
          adam_options{},
          adam_options{0.9, 0.98, 1e-9, 0.1, false, true},
          adam_options{0.0, 0.999, 1e-8, 0.1, true, true}};
}

TEST_CASE_TEMPLATE("pruned weights and their states are exactly 0 after 200 steps with momentum and decay", T,
                   float, double) {
  cpu_context ctx;
  const std::vector<T> numbers = normal_values<T>(small_store<T>::prunable + 400, 11);
  for (const optimizer_options& options : optimizers()) {
    CAPTURE(describe(options));
    small_store<T> net;
    optimizer<T> rule(make_optimizer_target(net.store), options);
    const auto step = [&](index_t number) {
      std::copy_n(numbers.begin() + number, net.store.gradients().size(), net.store.gradients().begin());
    };
    // Dense steps first, so that states are not 0 when the mask is applied.
    for (index_t i = 0; i < 5; ++i) {
      step(i);
      rule.step(ctx, 0.01);
    }
    weight_mask mask(net.store);
    CHECK(prune_by_magnitude(mask, net.store, {.share = 0.75}) == 15442);
    mask_weights(ctx, mask, net.store);
    mask_states(ctx, mask, rule);
    const std::vector<bool> kept = kept_elements(mask);
    const std::vector<T> at_start(net.store.values().begin(), net.store.values().end());
    for (index_t i = 5; i < 205; ++i) {
      step(i);
      mask_gradients(ctx, mask, net.store);
      rule.step(ctx, 0.01);
    }
    std::size_t wrong = 0, unmoved = 0;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const T value = net.store.values()[i];
      if (kept[i]) {
        unmoved += value == at_start[i] ? 1U : 0U;
        continue;
      }
      wrong += value == T(0) ? 0U : 1U;
      for (const auto& [name, state] : rule.states()) {
        if (!state.empty() && state[i] != T(0)) ++wrong;
      }
    }
    CHECK(wrong == 0);
    CHECK(unmoved == 0);
  }
}

}  // namespace
