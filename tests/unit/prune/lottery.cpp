// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>

#include <pufferfish/models/vgg.hpp>
#include <pufferfish/optim/optimizer.hpp>
#include <pufferfish/prune/lottery.hpp>

#include "../support/prune_support.hpp"

namespace {

using namespace prune_support;

TEST_CASE("lottery: levels of vgg19_lth, by our rule and by the reference program's") {
  const network<float> net = vgg19_lth<float>();
  const lottery<float> tickets(net.store(), {.unpruned = {"fc"}, .parameters = 8'107'466});
  const index_t fixed = tickets.mask()->size() - tickets.mask()->prunable();
  index_t kept = tickets.mask()->kept();
  CHECK(kept == 20'018'880);
  CHECK(tickets.parameters() == 20'035'018);
  CHECK_FALSE(tickets.finished());
  CHECK(tickets.new_row().dense_bytes == 4 * 20'035'018);
  int level = 0;
  const auto next = [&](const lottery<float>& of) {
    ++level;
    return kept -= of.count_of(kept);
  };
  for (const index_t wanted : {16'015'104, 12'812'083, 10'249'666, 8'199'732, 6'559'785}) {
    CHECK(next(tickets) == wanted);
  }
  CHECK(kept + fixed == 6'575'923);
  while (level < 10) next(tickets);
  CHECK(kept == 2'149'509);
  CHECK(kept + fixed == 2'165'647);
  const lottery<float> reference(net.store(), {.rule = lottery_rule::reference, .unpruned = {"fc"}});
  kept = reference.mask()->kept();
  for (const index_t wanted : {16'014'079, 12'810'238, 10'247'165, 8'196'707, 6'556'340}) {
    CHECK(next(reference) == wanted);
  }
}

TEST_CASE("lottery: a level removes as many weights as it should") {
  network<float> net = vgg19_lth<float>({.width = 4});
  net.initialize(3);
  for (const lottery_rule rule : {lottery_rule::exact, lottery_rule::reference}) {
    lottery<float> tickets(net.store(), {.rule = rule, .unpruned = {"fc"}, .parameters = 30'000});
    while (!tickets.finished()) {
      const index_t before = tickets.mask()->kept(), count = tickets.next_count();
      CHECK(tickets.prune(net.store()) == count);
      CHECK(tickets.mask()->kept() == before - count);
      CHECK(tickets.parameters() == tickets.mask()->size() - tickets.mask()->prunable() + before - count);
      CHECK(tickets.new_row().bytes == 4 * tickets.parameters());
    }
    CHECK(tickets.level() > 3);
  }
}

TEST_CASE_TEMPLATE("lottery: a level starts from theta_k, bit for bit, with removed weights at 0", T, float,
                   double) {
  cpu_context ctx;
  small_store<T> net;
  const std::vector<T> theta(net.store.values().begin(), net.store.values().end());
  lottery<T> tickets(net.store, {.unpruned = {"fc"}}, 7);
  CHECK(tickets.step() == 7);
  CHECK(tickets.level() == 0);
  CHECK(tickets.mask()->kept() == small_store<T>::prunable - 35);
  for (int level = 1; level <= 3; ++level) {
    for (T& value : net.store.values()) value = value * T(1.5) + T(0.01);  // "training"
    mask_weights(ctx, *tickets.mask(), net.store);
    const auto before = tickets.mask();
    const std::vector<T> trained(net.store.values().begin(), net.store.values().end());
    const index_t removed = tickets.prune(net.store);
    CHECK(removed == static_cast<index_t>(std::ceil(0.2 * static_cast<double>(before->kept()))));
    tickets.rewind(ctx, net.store);
    const std::vector<bool> kept = kept_elements(*tickets.mask()), was_kept = kept_elements(*before);
    T largest_removed = 0, smallest_kept = 1000;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const T now = net.store.values()[i];
      wrong += now != (kept[i] ? theta[i] : T(0)) || (kept[i] && !was_kept[i]) ? 1U : 0U;
    }
    for (std::size_t t = 0; t < tickets.mask()->tensors().size(); ++t) {
      const masked_tensor& tensor = tickets.mask()->tensors()[t];
      for (index_t i = 0; tensor.prunable && i < tensor.size; ++i) {
        const T size = std::abs(trained[static_cast<std::size_t>(tensor.offset + i)]);
        if (tickets.mask()->keeps(t, i)) smallest_kept = std::min(smallest_kept, size);
        if (!tickets.mask()->keeps(t, i) && before->keeps(t, i)) {
          largest_removed = std::max(largest_removed, size);
        }
      }
    }
    CHECK(wrong == 0);
    CHECK(largest_removed <= smallest_kept);
  }
}

TEST_CASE("lottery: removed weights stay exactly 0 under every optimizer") {
  cpu_context ctx;
  const std::vector<optimizer_options> rules{
      sgd_options{.momentum = 0.9, .weight_decay = 1e-2},
      sgd_options{.momentum = 0.9, .nesterov = true, .weight_decay = 1e-2, .decay_all = true},
      sgd_options{.momentum = 0.5, .dampening = 0.5}, adam_options{.weight_decay = 1e-2},
      adam_options{.weight_decay = 1e-2, .decoupled_decay = true, .decay_all = true}};
  for (const optimizer_options& rule : rules) {
    CAPTURE(describe(rule));
    small_store<float> net;
    lottery<float> tickets(net.store, {.share = 0.5});
    tickets.prune(net.store);
    tickets.rewind(ctx, net.store);
    optimizer<float> opt(make_optimizer_target(net.store), rule);
    for (std::uint64_t step = 0; step < 200; ++step) {
      fill_normal(net.store.gradients(), 1.0, random_stream(step, 3));
      mask_gradients(ctx, *tickets.mask(), net.store);
      opt.step(ctx, 0.01);
    }
    const std::vector<bool> kept = kept_elements(*tickets.mask());
    std::size_t wrong = 0, unmoved = 0;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const bool is_zero = net.store.values()[i] == 0.0F;
      wrong += !kept[i] && !is_zero ? 1U : 0U;
      unmoved += kept[i] && net.store.values()[i] == tickets.values()[i] ? 1U : 0U;
      for (const auto& [name, state] : opt.states()) wrong += !kept[i] && state[i] != 0.0F ? 1U : 0U;
    }
    CHECK(wrong == 0);
    CHECK(unmoved == 0);
  }
}

TEST_CASE("lottery: state as text and numbers") {
  cpu_context ctx;
  small_store<float> net;
  lottery<float> tickets(net.store, {.unpruned = {"fc"}, .parameters = 100}, 12);
  tickets.add(tickets.new_row());
  tickets.prune(net.store);
  lottery_row row = tickets.new_row();
  row.epochs = 9;
  row.seconds = 0.1;
  row.accuracy = 93.25;
  tickets.add(row);
  const std::vector<float> numbers = mask_numbers<float>(*tickets.mask());
  lottery<float> again(net.store, tickets.options());
  again.restore(tickets.to_text(), numbers, "file");
  CHECK(again.level() == 1);
  CHECK(again.step() == 12);
  CHECK(*again.mask() == *tickets.mask());
  CHECK(again.rows() == tickets.rows());
  CHECK(again.to_text() == tickets.to_text());
  CHECK(again.prune(net.store) == tickets.prune(net.store));
  CHECK(*again.mask() == *tickets.mask());

  lottery<float> other(net.store, {.share = 0.5});
  CHECK_THROWS_WITH_AS(other.restore(tickets.to_text(), numbers, "file"),
                       doctest::Contains("file: made by lottery tickets of share 0.2"), state_error);
  CHECK_THROWS_AS(again.restore("lottery 1\n", numbers, "file"), io_error);
  CHECK_THROWS_AS(again.restore("row 1 2\n", numbers, "file"), io_error);
  CHECK_THROWS_AS(again.restore("something\n", numbers, "file"), io_error);
  CHECK_THROWS_AS(again.restore(tickets.to_text(), std::span(numbers).first(5), "file"), value_error);
  CHECK(again.level() == 2);
}

TEST_CASE("lottery: what is refused") {
  cpu_context ctx;
  small_store<float> net;
  CHECK_THROWS_WITH_AS(lottery<float>(net.store, {.share = 1.5}), doctest::Contains("share of 1.5"),
                       value_error);
  CHECK_THROWS_WITH_AS(lottery<float>(net.store, {.unpruned = {"head"}}), doctest::Contains("head"),
                       value_error);
  lottery<float> tickets(net.store);
  one_matrix<float> other({1, 2, 3});
  CHECK_THROWS_AS(tickets.prune(other.store), state_error);
  CHECK_THROWS_AS(tickets.rewind(ctx, other.store), state_error);
  device_like_memory memory;
  one_matrix<float> there({1, 2, 3}, memory);
  CHECK_THROWS_WITH_AS(lottery<float>(there.store), doctest::Contains("on a device"), state_error);
  CHECK(tickets.level() == 0);
  // Everything may go, and then nothing more goes.
  lottery<float> all(net.store, {.share = 1.0});
  const std::vector<float> numbers = mask_numbers<float>(*tickets.mask());
  for (const std::string& text :
       {std::string(), std::string("lottery -1 0 ") + describe(tickets.options()) + "\n"}) {
    CHECK_THROWS_WITH_AS(tickets.restore(text, numbers, "file"), doctest::Contains("file: there is no level"),
                         io_error);
  }
  CHECK_NOTHROW(tickets.restore(tickets.to_text(), numbers, "file"));
  CHECK(all.prune(net.store) == small_store<float>::prunable);
  CHECK(all.prune(net.store) == 0);
}

}  // namespace
