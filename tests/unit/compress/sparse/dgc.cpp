// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <pufferfish/compress/sparse/dgc.hpp>
#include <pufferfish/compress/sparse/top_k.hpp>
#include <pufferfish/optim/sgd.hpp>

#include "../../support/compress_support.hpp"
#include "../../support/resnet18_tensors.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace compress_support;
using rank_simulation::ranks_agree;
using rank_simulation::simulated_ranks;

static_assert(gradient_compressor<dgc<float>> && gradient_compressor<dgc<double>>);

template <class T>
using gradients_of_ranks = std::vector<std::vector<T>>;

/// Parameters of these layouts, in this order in the arena.
template <class T>
struct parameters {
  std::vector<parameter<T>> all;
  parameter_store<T> store;
  explicit parameters(std::vector<logical_layout> layouts) {
    std::reverse(layouts.begin(), layouts.end());  // the arena begins with the last one
    for (const logical_layout& layout : layouts) all.emplace_back(layout, parameter_role::weight);
    store.pack([this](state_visitor<T>& visitor) {
      for (std::size_t i = 0; i < all.size(); ++i) visitor.on_parameter("p" + std::to_string(i), all[i]);
    });
  }
};

template <class T>
simulated_ranks<dgc<T>> ranks_with(const parameter_store<T>& store, int ranks, const dgc_options& options) {
  return {ranks, [&](int) { return dgc<T>(store, options); }};
}

template <class T>
gradients_of_ranks<T> random_gradients(const parameter_store<T>& store, std::size_t ranks,
                                       std::uint64_t step) {
  gradients_of_ranks<T> all;
  for (std::size_t w = 0; w < ranks; ++w) {
    const std::vector<double> values = gradients_of(store, static_cast<int>(w), step);
    all.emplace_back(values.begin(), values.end());
  }
  return all;
}

/// The same with numbers that cost less, for long tests: multiples of 1/16 in -4 .. 4, so that many
/// magnitudes are equal.
template <class T>
gradients_of_ranks<T> coarse_gradients(const parameter_store<T>& store, std::size_t ranks,
                                       std::uint64_t step) {
  gradients_of_ranks<T> all(ranks, std::vector<T>(store.values().size()));
  std::uint64_t word = step * 977 + 1;
  for (std::vector<T>& one : all) {
    for (T& value : one) {
      word = word * 6364136223846793005ULL + 1442695040888963407ULL;
      value = static_cast<T>(static_cast<int>(word >> 33 & 127) - 64) / T(16);
    }
  }
  return all;
}

/// All ranks' gradients, u and v, and b, by the formulas of the header, in double and with plain loops.
template <class T>
class serial_dgc {
 public:
  serial_dgc(const parameter_store<T>& store, const dgc_options& options, std::size_t ranks)
      : options_(options), store_(&store), b_(store.values().size(), 0.0) {
    u_.assign(ranks, std::vector<double>(b_.size(), 0.0));
    v_ = u_;
  }

  const gradients_of_ranks<double>& u() const { return u_; }
  const gradients_of_ranks<double>& v() const { return v_; }

  std::vector<double> step(gradients_of_ranks<double> g, index_t epoch) {
    clip(g);
    std::vector<double> result(b_.size(), 0.0);
    for (const auto& entry : store_->parameters()) {
      const auto begin = static_cast<std::size_t>(entry.offset),
                 size = static_cast<std::size_t>(entry.thing->size());
      if (size == 0) continue;
      entry.thing->layout().dims >= 2 ? matrix(g, begin, size, epoch, result)
                                      : vector(g, begin, size, result);
      if (options_.weight_decay > 0.0 &&
          (options_.decay_all || entry.thing->role() == parameter_role::weight)) {
        decay(begin, size, result);
      }
    }
    return result;
  }

 private:
  void clip(gradients_of_ranks<double>& g) const {
    if (options_.clip_norm == 0.0) return;
    for (std::vector<double>& one : g) {
      double squares = 0.0;
      for (const double x : one) squares += x * x;
      const double most = options_.clip_norm / std::sqrt(static_cast<double>(g.size()));
      const double factor = std::min(1.0, most / std::sqrt(squares));
      for (double& x : one) x *= factor;
    }
  }

  void matrix(const gradients_of_ranks<double>& g, std::size_t begin, std::size_t size, index_t epoch,
              std::vector<double>& result) {
    const auto k =
        static_cast<std::size_t>(std::ceil(dgc_ratio(options_, epoch) * static_cast<double>(size)));
    for (std::size_t w = 0; w < g.size(); ++w) {
      std::vector<double>&u = u_[w], &v = v_[w];
      for (std::size_t i = begin; i < begin + size; ++i) {
        u[i] = options_.nesterov ? options_.momentum * (u[i] + g[w][i]) : options_.momentum * u[i] + g[w][i];
        v[i] += options_.nesterov ? u[i] + g[w][i] : u[i];
      }
      std::vector<std::size_t> order(size);
      for (std::size_t i = 0; i < size; ++i) order[i] = begin + i;
      std::stable_sort(order.begin(), order.end(),
                       [&](std::size_t a, std::size_t b) { return std::abs(v[a]) > std::abs(v[b]); });
      for (std::size_t i = 0; i < k; ++i) {
        double& value = v[order[i]];
        const double sent =
            options_.half_values ? static_cast<double>(float16(static_cast<float>(value))) : value;
        result[order[i]] += sent / static_cast<double>(g.size());
        value -= sent;
        if (options_.factor_masking) u[order[i]] = 0.0;
      }
    }
  }

  void vector(const gradients_of_ranks<double>& g, std::size_t begin, std::size_t size,
              std::vector<double>& result) {
    const std::vector<double> mean = mean_of(g);
    for (std::size_t i = begin; i < begin + size; ++i) {
      for (std::vector<double>& u : u_) {
        u[i] = options_.nesterov ? options_.momentum * (u[i] + mean[i]) : options_.momentum * u[i] + mean[i];
      }
      result[i] = options_.nesterov ? u_[0][i] + mean[i] : u_[0][i];
    }
  }

  void decay(std::size_t begin, std::size_t size, std::vector<double>& result) {
    for (std::size_t i = begin; i < begin + size; ++i) {
      const double pull = options_.weight_decay * static_cast<double>(store_->values()[i]);
      b_[i] = options_.momentum * b_[i] + pull;
      result[i] += options_.nesterov ? pull + options_.momentum * b_[i] : b_[i];
    }
  }

  dgc_options options_;
  const parameter_store<T>* store_;
  std::vector<double> b_;
  gradients_of_ranks<double> u_, v_;
};

/// All options but those of single tests.
std::vector<dgc_options> varied_options() {
  std::vector<dgc_options> all;
  for (const bool nesterov : {false, true}) {
    for (const bool masking : {false, true}) {
      dgc_options& one = all.emplace_back();
      one.ratio = 0.05;
      one.nesterov = nesterov;
      one.factor_masking = masking;
      one.warmup_epochs = 2;
    }
  }
  all[1].clip_norm = 5.0;
  all[2].clip_norm = 3.0;
  all[2].weight_decay = 0.05;
  all[3].weight_decay = 0.01;
  all[3].decay_all = true;
  all.push_back(all[1]);
  all.back().half_values = true;
  return all;
}

TEST_CASE_TEMPLATE("dgc is what its formulas say", T, float, double) {
  cpu_context ctx;
  for (const dgc_options& options : varied_options()) {
    for (const int ranks : {1, 2, 3, 4}) {
      CAPTURE(describe(options));
      CAPTURE(ranks);
      odd_parameters<T> net;
      fill_normal(net.store.values(), 1.0, random_stream(1, 2));
      auto simulated = ranks_with(net.store, ranks, options);
      serial_dgc<T> serial(net.store, options, simulated.size());
      double worst = 0.0;
      for (std::uint64_t step = 0; step < 12; ++step) {
        auto gradients = random_gradients(net.store, simulated.size(), step);
        if (step == 7) {
          for (auto& one : gradients) std::fill(one.begin(), one.end(), T(0));
        }
        gradients_of_ranks<double> wide;
        for (const auto& one : gradients) wide.emplace_back(one.begin(), one.end());
        simulated.set_epoch(static_cast<index_t>(step / 3), 0.1);
        simulated.step(ctx, gradients);
        const std::vector<double> expected = serial.step(wide, static_cast<index_t>(step / 3));
        CHECK(ranks_agree(gradients));
        worst = std::max(worst, largest_difference<T>(gradients[0], expected));
        for (std::size_t w = 0; w < simulated.size(); ++w) {
          worst = std::max(worst, largest_difference<T>(simulated[w].states()[0].values, serial.u()[w]));
          worst = std::max(worst, largest_difference<T>(simulated[w].states()[1].values, serial.v()[w]));
          CHECK(simulated.payload_bytes(w) == static_cast<std::size_t>(simulated[w].payload_bytes()));
        }
      }
      // A value that is rounded to 10 bits may be rounded to either side.
      CHECK(worst < (options.half_values ? 2e-2 : sizeof(T) == 4 ? 1e-5 : 1e-13));
    }
  }
}

TEST_CASE_TEMPLATE("dgc: one entry of two is sent, and starts again", T, float, double) {
  const parameters<T> net({logical_layout::matrix(1, 2)});
  cpu_context ctx;
  dgc_options options;
  options.ratio = 0.5;
  auto alone = ranks_with(net.store, 1, options);
  gradients_of_ranks<T> gradients = {{T(1), T(0.5)}};
  alone.step(ctx, gradients);
  CHECK(gradients[0] == std::vector<T>{1, 0});
  gradients = {{T(0.1), T(0.5)}};
  alone.step(ctx, gradients);
  CHECK(gradients[0][0] == 0);
  CHECK(gradients[0][1] == doctest::Approx(1.45));
  const auto states = alone[0].states();
  REQUIRE(states.size() == 2);
  for (const auto& state : states) {
    CHECK(state.of_rank);
    CHECK(state.values[0] == T(0.1));
    CHECK(state.values[1] == 0);
  }
}

/// Values after 20 steps of dgc on `ranks` ranks, then SGD without momentum; or of SGD with these options on
/// the mean gradients.
template <class T>
std::vector<T> trained(int ranks, const dgc_options* compressed, const sgd_options& options, double lr) {
  odd_parameters<T> net;
  fill_normal(net.store.values(), 1.0, random_stream(3, 4));
  cpu_context ctx;
  SGD<T> sgd(make_optimizer_target(net.store), options);
  std::optional<simulated_ranks<dgc<T>>> simulated;
  if (compressed != nullptr) simulated.emplace(ranks_with(net.store, ranks, *compressed));
  for (std::uint64_t step = 0; step < 20; ++step) {
    auto gradients = random_gradients(net.store, static_cast<std::size_t>(ranks), step);
    if (simulated) {
      simulated->step(ctx, gradients);
      std::copy(gradients[0].begin(), gradients[0].end(), net.store.gradients().begin());
    } else {
      gradients_of_ranks<double> wide;
      for (const auto& one : gradients) wide.emplace_back(one.begin(), one.end());
      const std::vector<double> mean = mean_of(wide);
      std::transform(mean.begin(), mean.end(), net.store.gradients().begin(),
                     [](double x) { return static_cast<T>(x); });
    }
    sgd.step(ctx, lr);
  }
  return {net.store.values().begin(), net.store.values().end()};
}

TEST_CASE_TEMPLATE("dgc: all entries without masking is SGD with momentum and weight decay", T, float,
                   double) {
  for (const bool nesterov : {false, true}) {
    for (const int ranks : {1, 3}) {
      CAPTURE(nesterov);
      CAPTURE(ranks);
      dgc_options options;
      options.ratio = 1.0;
      options.nesterov = nesterov;
      options.factor_masking = false;
      options.weight_decay = 0.02;
      sgd_options wanted;
      wanted.momentum = 0.9;
      wanted.nesterov = nesterov;
      wanted.weight_decay = 0.02;
      const std::vector<T> expected = trained<T>(ranks, nullptr, wanted, 0.1);
      const std::vector<T> found = trained<T>(ranks, &options, {}, 0.1);
      CHECK(largest_difference<T>(found, {expected.begin(), expected.end()}) <
            (sizeof(T) == 4 ? 2e-5 : 1e-13));
    }
  }
}

TEST_CASE("dgc: all entries with masking is SGD without momentum on matrices") {
  dgc_options options;
  options.ratio = 1.0;
  const std::vector<double> found = trained<double>(2, &options, {}, 0.1);
  const std::vector<double> plain = trained<double>(2, nullptr, {}, 0.1);
  sgd_options momentum;
  momentum.momentum = 0.9;
  const std::vector<double> heavy = trained<double>(2, nullptr, momentum, 0.1);
  const odd_parameters<double> net;
  for (const auto& entry : net.store.parameters()) {
    const std::vector<double>& wanted = entry.thing->layout().dims >= 2 ? plain : heavy;
    double worst = 0.0;
    for (index_t i = entry.offset; i < entry.offset + entry.thing->size(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      worst = std::max(worst, std::abs(found[at] - wanted[at]));
    }
    CAPTURE(entry.name);
    CHECK(worst < 1e-13);
  }
}

TEST_CASE_TEMPLATE("dgc without momentum is top-k with memory", T, float, double) {
  const parameters<T> net({logical_layout::matrix(40, 17), logical_layout::kernel(16, 8, 3, 3)});
  cpu_context ctx;
  dgc_options options;
  options.ratio = 0.25;
  options.momentum = 0.0;
  auto deep = ranks_with(net.store, 3, options);
  simulated_ranks<any_compressor<T>> plain(
      3, [&](int) { return new_compressor(net.store, top_k_options{.ratio = 0.25}); });
  for (std::uint64_t step = 0; step < 10; ++step) {
    auto a = random_gradients(net.store, 3, step), b = a;
    deep.step(ctx, a);
    plain.step(ctx, b);
    CHECK(a == b);
    CHECK(deep.payload_bytes(1) == plain.payload_bytes(1));
  }
}

TEST_CASE("dgc: what was sent and what is left are the gradients") {
  // Without momentum all is linear; rounding to float16 stays in v.
  for (const bool half : {false, true}) {
    odd_parameters<float> net;
    cpu_context ctx;
    dgc_options options;
    options.ratio = 0.03;
    options.momentum = 0.0;
    options.half_values = half;
    auto simulated = ranks_with(net.store, 3, options);
    std::vector<double> sent(net.store.values().size(), 0.0), given = sent, left = sent;
    for (std::uint64_t step = 0; step < 50; ++step) {
      auto gradients = random_gradients(net.store, 3, step);
      for (const auto& one : gradients) {
        for (std::size_t i = 0; i < given.size(); ++i) given[i] += static_cast<double>(one[i]) / 3;
      }
      simulated.step(ctx, gradients);
      for (std::size_t i = 0; i < sent.size(); ++i) sent[i] += static_cast<double>(gradients[0][i]);
    }
    double worst = 0.0, most_left = 0.0, largest = 0.0;
    for (std::size_t w = 0; w < 3; ++w) {
      const auto v = simulated[w].states()[1].values;
      for (std::size_t i = 0; i < sent.size(); ++i) left[i] += static_cast<double>(v[i]) / 3;
    }
    for (std::size_t i = 0; i < sent.size(); ++i) {
      worst = std::max(worst, std::abs(sent[i] + left[i] - given[i]));
      most_left = std::max(most_left, std::abs(left[i]));
      largest = std::max(largest, std::abs(given[i]));
    }
    CHECK(worst < 1e-5 * largest);
    CHECK(most_left > 0.1);
  }
}

TEST_CASE("dgc: the share of entries of each epoch") {
  dgc_options options;
  options.warmup_epochs = 4;
  const double published[] = {0.2512, 0.0631, 0.0158, 0.0040, 0.001, 0.001};
  for (index_t epoch = 0; epoch < 6; ++epoch) {
    CHECK(dgc_ratio(options, epoch) == doctest::Approx(published[epoch]).epsilon(0.006));
  }
  CHECK(dgc_ratio(options, 4) == options.ratio);
  options.warmup_epochs = 5;
  const double repository[] = {0.316, 0.1, 0.0316, 0.01, 0.0032, 0.001};
  for (index_t epoch = 0; epoch < 6; ++epoch) {
    CHECK(dgc_ratio(options, epoch) == doctest::Approx(repository[epoch]).epsilon(0.02));
  }
  options.warmup_epochs = 0;
  CHECK(dgc_ratio(options, 0) == options.ratio);
}

TEST_CASE("dgc: bytes of ResNet-18") {
  for (const bool hybrid : {false, true}) {
    std::vector<logical_layout> layouts;
    for (const coded_tensor& tensor : resnet18_tensors::resnet18_tensors(hybrid)) {
      layouts.push_back(tensor.layout);
    }
    const parameters<float> net(layouts);
    CHECK(net.store.values().size() == (hybrid ? 3336138U : 11173834U));
    dgc_options options;
    CHECK(dgc<float>(net.store, options).payload_bytes() == (hybrid ? 64688 : 127312));
    options.half_values = true;
    CHECK(dgc<float>(net.store, options).payload_bytes() == (hybrid ? 57998 : 104966));
    if (hybrid) continue;
    cpu_context ctx;
    options = {};
    options.warmup_epochs = 4;
    auto alone = ranks_with(net.store, 1, options);
    const std::size_t bytes[] = {22472888, 5673376, 1453600, 393592, 127312};
    gradients_of_ranks<float> gradients = coarse_gradients(net.store, 1, 0);
    CHECK(alone[0].payload_bytes() == 22472888);
    for (std::size_t epoch = 0; epoch < 5; ++epoch) {
      alone.set_epoch(static_cast<index_t>(epoch), 0.1);
      alone.step(ctx, gradients);
      CHECK(alone.payload_bytes(0) == bytes[epoch]);
      CHECK(alone[0].payload_bytes() == static_cast<index_t>(bytes[epoch]));
    }
  }
}

TEST_CASE("dgc: clipping") {
  odd_parameters<float> net;
  cpu_context ctx;
  dgc_options options;
  options.ratio = 0.1;
  auto free = ranks_with(net.store, 2, options);
  options.clip_norm = std::numeric_limits<double>::infinity();
  auto unbounded = ranks_with(net.store, 2, options);
  // All entries of a first step are sent: the norm of the mean of equal gradients is tau / sqrt(2).
  options = {.ratio = 1.0, .momentum = 0.0, .clip_norm = 3.0};
  auto bounded = ranks_with(net.store, 2, options);
  for (std::uint64_t step = 0; step < 5; ++step) {
    auto a = random_gradients(net.store, 2, step), b = a, c = a;
    free.step(ctx, a);
    unbounded.step(ctx, b);
    CHECK(a == b);
    c[1] = c[0];
    bounded.step(ctx, c);
    CHECK(gradient_norm<float>(ctx, c[0]) == doctest::Approx(3.0 / std::sqrt(2.0)).epsilon(1e-5));
  }
}

TEST_CASE_TEMPLATE("dgc: threads change no bit, 50 steps leave the same bits on all ranks", T, float,
                   double) {
  cpu_context one, three({3, 0});
  dgc_options options = varied_options()[3];
  options.half_values = true;
  options.clip_norm = 4.0;
  for (const int ranks : {2, 3, 4}) {
    const parameters<T> net({logical_layout::vector(20000), logical_layout::matrix(200, 100),
                             logical_layout::matrix(1, 1), logical_layout::kernel(8, 8, 3, 3)});
    auto a = ranks_with(net.store, ranks, options), b = ranks_with(net.store, ranks, options);
    for (std::uint64_t step = 0; step < 50; ++step) {
      auto x = coarse_gradients(net.store, a.size(), step), y = x;
      a.set_epoch(static_cast<index_t>(step / 20), 0.1);
      b.set_epoch(static_cast<index_t>(step / 20), 0.1);
      a.step(one, x);
      b.step(three, y);
      CHECK(x == y);
      CHECK(ranks_agree(x));
    }
    for (std::size_t s = 0; s < 3; ++s) {
      const auto left = a[0].states()[s].values, right = b[0].states()[s].values;
      CHECK(std::equal(left.begin(), left.end(), right.begin(), right.end()));
    }
  }
}

TEST_CASE("dgc goes on from its states") {
  odd_parameters<float> net;
  fill_normal(net.store.values(), 1.0, random_stream(1, 2));
  cpu_context ctx;
  dgc_options options = varied_options()[3];
  auto before = ranks_with(net.store, 2, options), after = ranks_with(net.store, 2, options);
  for (std::uint64_t step = 0; step < 5; ++step) {
    auto gradients = random_gradients(net.store, 2, step);
    before.step(ctx, gradients);
  }
  for (std::size_t w = 0; w < 2; ++w) {
    const auto from = before[w].states(), to = after[w].states();
    REQUIRE(from.size() == 3);
    for (std::size_t s = 0; s < 3; ++s) {
      CHECK(from[s].of_rank == (s < 2));
      std::copy(from[s].values.begin(), from[s].values.end(), to[s].values.begin());
    }
  }
  after.set_steps(before.steps());
  after.set_epoch(1, 0.1);
  before.set_epoch(1, 0.1);
  for (std::uint64_t step = 5; step < 10; ++step) {
    auto a = random_gradients(net.store, 2, step), b = a;
    before.step(ctx, a);
    after.step(ctx, b);
    CHECK(a == b);
  }
}

TEST_CASE("dgc: zero gradients, float16's range, nothing to do") {
  cpu_context ctx;
  odd_parameters<float> net;
  auto simulated = ranks_with(net.store, 2, {.ratio = 0.1});
  const std::vector<float> zeros(net.store.values().size(), 0.0F);
  gradients_of_ranks<float> gradients(2, zeros);
  simulated.step(ctx, gradients);
  CHECK(gradients[0] == zeros);

  const parameters<float> two({logical_layout::matrix(1, 2)});
  auto alone = ranks_with(two.store, 1, {.ratio = 1.0, .half_values = true});
  gradients = {{1e5F, -1e6F}};
  alone.step(ctx, gradients);
  CHECK(gradients[0] == std::vector<float>{65504.0F, -65504.0F});
  CHECK(alone[0].states()[1].values[0] == 1e5F - 65504.0F);
  CHECK(alone[0].states()[1].values[1] == -1e6F + 65504.0F);

  const parameters<float> nothing({});
  auto none = ranks_with(nothing.store, 2, {});
  gradients = {{}, {}};
  none.step(ctx, gradients);
  CHECK(none.payload_bytes(0) == 0);
}

TEST_CASE("dgc: indices that are none are refused") {
  const parameters<float> net({logical_layout::matrix(4, 4), logical_layout::matrix(2, 2)});
  cpu_context ctx;
  // Three entries of 16 and one of 4: four values, then the indices.
  const exchange_place place{0, 1, 0};
  const auto decode_with = [&](std::size_t entry, std::int32_t index) {
    dgc<float> compressor(net.store, {.ratio = 0.17});
    std::vector<float> gradients(20, 1.0F);  // equal magnitudes: the lowest indices
    const auto message = compressor.encode(ctx, place, 0, gradients);
    REQUIRE((*message.gathered)[0].size() == 32);
    std::memcpy((*message.gathered)[0].data() + 16 + 4 * entry, &index, sizeof index);
    compressor.decode(ctx, place, 0, gradients);
    return gradients;
  };
  CHECK(decode_with(2, 15)[15] == 1.0F);
  CHECK(decode_with(3, 3)[19] == 1.0F);
  CHECK_THROWS_AS(decode_with(2, 16), value_error);
  CHECK_THROWS_AS(decode_with(2, 1), value_error);
  CHECK_THROWS_AS(decode_with(0, -1), value_error);
  CHECK_THROWS_WITH(decode_with(3, 4),
                    doctest::Contains("from rank 0 are not ascending numbers from 0 to 3"));
}

TEST_CASE("dgc: options") {
  odd_parameters<float> net;
  const double nan = std::nan("");
  const auto refused = [&](const dgc_options& options, const char* text) {
    CHECK_THROWS_AS(dgc<float>(net.store, options), value_error);
    CHECK_THROWS_WITH(dgc<float>(net.store, options), doctest::Contains(text));
  };
  for (const double ratio : {0.0, -0.1, 1.1, nan}) refused({.ratio = ratio}, "ratio");
  for (const double momentum : {-0.1, 1.0, nan}) refused({.momentum = momentum}, "momentum");
  for (const double norm : {-0.1, nan}) refused({.clip_norm = norm}, "clip_norm");
  for (const double decay : {-0.1, nan, HUGE_VAL}) refused({.weight_decay = decay}, "weight_decay");
  refused({.warmup_epochs = -1}, "warmup_epochs -1");
  CHECK(describe(dgc_options{}) == "DGC, ratio 0.001, momentum 0.9, factor masking");
  CHECK(
      describe(dgc_options{.nesterov = true,
                           .clip_norm = 2.5,
                           .factor_masking = false,
                           .warmup_epochs = 4,
                           .weight_decay = 0.01,
                           .decay_all = true,
                           .half_values = true}) ==
      "DGC, ratio 0.001, Nesterov momentum 0.9, no factor masking, clipped to norm 2.5, warm-up of 4 epochs, "
      "weight decay 0.01 of all, half values");
  CHECK(new_compressor(net.store, dgc_options{}).describe().find("DGC, ratio 0.001") == 0);
}

// Kernels against their plain forms. Values are small multiples of 1/8 and momenta are 1/2: nothing is
// rounded, whichever operations are fused.
std::vector<float> eighths(std::size_t count, std::uint64_t stream) {
  std::vector<float> result(count);
  for (std::size_t i = 0; i < count; ++i) {
    result[i] = static_cast<float>(static_cast<int>(random_stream(9, stream).word(i) % 65) - 32) / 8.0F;
  }
  return result;
}

TEST_CASE("dgc: kernels of all instruction sets") {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(std::string(to_string(target)));
    for (const std::size_t count : {0U, 1U, 3U, 8U, 15U, 16U, 17U, 100U, 1023U}) {
      for (const bool nesterov : {false, true}) {
        CAPTURE(count);
        CAPTURE(nesterov);
        const auto n = static_cast<index_t>(count);
        const auto g = eighths(count, 1), u = eighths(count, 2), v = eighths(count, 3);
        for (const float factor : {1.0F, 0.25F}) {
          auto new_u = u, new_v = v, plain_u = u, plain_v = v;
          PUFFERFISH_KERNEL(target, detail::dgc_passes, accumulate<float>)
          (nesterov, 0.5F, factor, g.data(), new_u.data(), new_v.data(), n);
          for (std::size_t i = 0; i < count; ++i) {
            const float own = factor * g[i];
            plain_u[i] = nesterov ? 0.5F * (u[i] + own) : 0.5F * u[i] + own;
            plain_v[i] += nesterov ? plain_u[i] + own : plain_u[i];
          }
          CHECK(new_u == plain_u);
          CHECK(new_v == plain_v);
        }
        auto new_u = u, to = v, plain_u = u, plain_to = v;
        PUFFERFISH_KERNEL(target, detail::dgc_passes, add_momentum<float>)
        (nesterov, 0.5F, g.data(), new_u.data(), to.data(), n);
        for (std::size_t i = 0; i < count; ++i) {
          plain_u[i] = nesterov ? 0.5F * (u[i] + g[i]) : 0.5F * u[i] + g[i];
          plain_to[i] = nesterov ? plain_u[i] + g[i] : plain_u[i];
        }
        CHECK(new_u == plain_u);
        CHECK(to == plain_to);
        auto new_b = u, plain_b = u;
        to = v;
        PUFFERFISH_KERNEL(target, detail::dgc_passes, add_decay<float>)
        (nesterov, 0.5F, 0.125F, g.data(), new_b.data(), to.data(), n);
        for (std::size_t i = 0; i < count; ++i) {
          plain_b[i] = 0.5F * u[i] + g[i];
          plain_to[i] = v[i] + 0.125F * (nesterov ? g[i] + 0.5F * plain_b[i] : plain_b[i]);
        }
        CHECK(new_b == plain_b);
        CHECK(to == plain_to);
      }
    }
  }
}

}  // namespace
