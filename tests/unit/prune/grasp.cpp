// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include <pufferfish/prune/grasp.hpp>

#include "../support/prune_support.hpp"

namespace {

using namespace prune_support;

/// The gradient of which of the loss (1/2) sum_i d_i theta_i^2.
template <class T>
auto half_of_quadratic(one_matrix<T>& net, const std::vector<T>& d) {
  return [&net, d](int) {
    for (std::size_t i = 0; i < d.size(); ++i) net.store.gradients()[i] = d[i] * net.store.values()[i] / 2;
  };
}

TEST_CASE_TEMPLATE("GraSP: scores of a quadratic", T, float, double) {
  cpu_context ctx;
  one_matrix<T> net({1, 1, 1});
  weight_mask mask(net.store);
  const auto gradient = half_of_quadratic<T>(net, {1, 2, 3});
  const std::vector<T> scores = grasp_scores(ctx, net.store, mask, gradient);
  const T wanted[] = {-1, -4, -9};
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(static_cast<double>(scores[i]) ==
          doctest::Approx(static_cast<double>(wanted[i])).epsilon(sizeof(T) == 4 ? 1e-4 : 1e-12));
  }
  // The largest score goes first.
  CHECK(prune_by_grasp(ctx, net.store, mask, gradient, {.share = 0.34}) == 1);
  CHECK(kept_elements(mask) == std::vector<bool>{false, true, true});
  CHECK(prune_by_grasp(ctx, net.store, mask, gradient, {.share = 0.67}) == 1);
  CHECK(kept_elements(mask) == std::vector<bool>{false, false, true});
}

TEST_CASE("GraSP: halves with different Hessians are added") {
  cpu_context ctx;
  one_matrix<double> net({2, -1});
  const weight_mask mask(net.store);
  // H_0 = diag(1, 0), H_1 = diag(2, 5): g = (6, -5), h = (18, -25).
  const std::vector<double> scores = grasp_scores(ctx, net.store, mask, [&](int which) {
    const auto theta = net.store.values();
    net.store.gradients()[0] = (which == 0 ? 1.0 : 2.0) * theta[0];
    net.store.gradients()[1] = which == 0 ? 0.0 : 5.0 * theta[1];
  });
  CHECK(scores[0] == doctest::Approx(-36));
  CHECK(scores[1] == doctest::Approx(-25));
}

/// A network of two layers: outputs = W2 tanh(W1 x), mean cross entropy of outputs / temperature. Its
/// gradient, and the exact product of its Hessian with a vector (Pearlmutter, "Fast exact multiplication by
/// the Hessian", 1994).
struct softmax_network {
  static constexpr index_t inputs = 5, hidden = 6, classes = 4, samples = 12;
  double temperature;
  std::vector<double> x = normal_values<double>(samples * inputs, 21);

  /// w, v: W1 [hidden][inputs], then W2 [classes][hidden]. Writes the gradient of samples which, which + 2,
  /// .., and its derivative in the direction v.
  void gradients(std::span<const double> w, std::span<const double> v, index_t which,
                 std::span<double> gradient, std::span<double> product) const {
    constexpr std::size_t in = inputs, mid = hidden, out = classes, second = in * mid;
    std::ranges::fill(gradient, 0.0);
    std::ranges::fill(product, 0.0);
    for (auto s = static_cast<std::size_t>(which); s < samples; s += 2) {
      const double* const sample = x.data() + s * in;
      double z[mid], rz[mid], p[out], ro[out], total = 0, mean = 0, d[out], rd[out];
      for (std::size_t j = 0; j < mid; ++j) {
        double a = 0, ra = 0;
        for (std::size_t i = 0; i < in; ++i) {
          a += w[j * in + i] * sample[i];
          ra += v[j * in + i] * sample[i];
        }
        z[j] = std::tanh(a);
        rz[j] = (1 - z[j] * z[j]) * ra;
      }
      for (std::size_t k = 0; k < out; ++k) {
        double o = 0;
        ro[k] = 0;
        for (std::size_t j = 0; j < mid; ++j) {
          o += w[second + k * mid + j] * z[j];
          ro[k] += v[second + k * mid + j] * z[j] + w[second + k * mid + j] * rz[j];
        }
        total += p[k] = std::exp(o / temperature);
      }
      for (std::size_t k = 0; k < out; ++k) mean += (p[k] /= total) * ro[k] / temperature;
      for (std::size_t k = 0; k < out; ++k) {
        d[k] = (p[k] - (k == s % out ? 1.0 : 0.0)) / temperature / samples;
        rd[k] = p[k] * (ro[k] / temperature - mean) / temperature / samples;
      }
      for (std::size_t j = 0; j < mid; ++j) {
        double dz = 0, rdz = 0;
        for (std::size_t k = 0; k < out; ++k) {
          gradient[second + k * mid + j] += d[k] * z[j];
          product[second + k * mid + j] += rd[k] * z[j] + d[k] * rz[j];
          dz += w[second + k * mid + j] * d[k];
          rdz += v[second + k * mid + j] * d[k] + w[second + k * mid + j] * rd[k];
        }
        const double slope = 1 - z[j] * z[j], da = dz * slope;
        const double rda = rdz * slope - 2 * dz * z[j] * rz[j];
        for (std::size_t i = 0; i < in; ++i) {
          gradient[j * in + i] += da * sample[i];
          product[j * in + i] += rda * sample[i];
        }
      }
    }
  }
};

TEST_CASE_TEMPLATE("GraSP: finite differences against the exact product on a softmax network", T, float,
                   double) {
  cpu_context ctx;
  for (const double temperature : {1.0, 200.0}) {
    CAPTURE(temperature);
    const softmax_network network{temperature};
    constexpr index_t size = 5 * 6 + 6 * 4;
    // Arenas begin with the last layer; one tensor has both, so that positions are those of the network.
    one_matrix<T> net(normal_values<T>(size, 4));
    const weight_mask mask(net.store);
    std::vector<double> g(size), product(size), none(size, 0.0), exact(size, 0.0);
    const auto gradient = [&](int which) {
      const std::vector<double> w(net.store.values().begin(), net.store.values().end());
      network.gradients(w, none, which, g, product);
      std::ranges::transform(g, net.store.gradients().begin(),
                             [](double one) { return static_cast<T>(one); });
    };
    const std::vector<double> theta(net.store.values().begin(), net.store.values().end());
    std::vector<double> direction(size, 0.0);
    for (const index_t which : {0, 1}) {
      network.gradients(theta, none, which, g, product);
      for (std::size_t i = 0; i < direction.size(); ++i) direction[i] += g[i];
    }
    for (const index_t which : {0, 1}) {
      network.gradients(theta, direction, which, g, product);
      for (std::size_t i = 0; i < exact.size(); ++i) exact[i] += product[i];
    }
    const auto error_at = [&](double step) {
      const std::vector<T> scores = grasp_scores(ctx, net.store, mask, gradient, {.step = step});
      double difference = 0, norm = 0;
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const double wanted = -theta[i] * exact[i];
        difference += std::pow(static_cast<double>(scores[i]) - wanted, 2);
        norm += wanted * wanted;
      }
      return std::sqrt(difference / norm);
    };
    // The default step is for outputs divided by 200. Errors are of second order.
    CHECK(error_at(temperature == 1.0 ? 1e-3 : 1e-2) < 1e-3);
    if (sizeof(T) == 8) CHECK(error_at(1e-3) / error_at(1e-2) == doctest::Approx(0.01).epsilon(0.1));
  }
}

TEST_CASE_TEMPLATE("GraSP: values and running statistics come back bit for bit, also after an exception", T,
                   float, double) {
  cpu_context ctx;
  small_store<T> net;
  state_buffer<T> statistics(6);
  net.store.pack([&](state_visitor<T>& visitor) {
    for (std::size_t i = 0; i < net.all.size(); ++i)
      visitor.on_parameter("p" + std::to_string(i), net.all[i]);
    visitor.on_buffer("bn.mean", statistics);
  });
  fill_normal(statistics.values(), 1.0, random_stream(3, 3));
  net.store.values()[5] = T(-0.0);
  const std::vector<T> values(net.store.values().begin(), net.store.values().end());
  const std::vector<T> buffers(net.store.buffers().begin(), net.store.buffers().end());
  weight_mask mask(net.store);
  int calls = 0;
  const auto gradient = [&](int) {
    for (T& one : statistics.values()) one = one * T(0.9) + T(1);
    for (std::size_t i = 0; i < values.size(); ++i) {
      net.store.gradients()[i] = net.store.values()[i] * static_cast<T>(1 + i % 7);
    }
    if (++calls == 9) throw std::runtime_error("out of samples");
  };
  const auto unchanged = [&] {
    return same_bits<T>(net.store.values(), values) && same_bits<T>(net.store.buffers(), buffers) &&
           std::ranges::all_of(net.store.gradients(), [](T g) { return g == T(0); });
  };
  const std::vector<T> scores = grasp_scores(ctx, net.store, mask, gradient);
  CHECK(calls == 6);
  CHECK(unchanged());
  // Nothing that is not prunable has a score.
  for (const masked_tensor& tensor : mask.tensors()) {
    for (index_t i = 0; i < tensor.size; ++i) {
      const bool is_zero = scores[static_cast<std::size_t>(tensor.offset + i)] == T(0);
      if (is_zero == tensor.prunable) REQUIRE(values[static_cast<std::size_t>(tensor.offset + i)] == T(0));
    }
  }
  CHECK_THROWS_AS(grasp_scores(ctx, net.store, mask, gradient), std::runtime_error);
  CHECK(unchanged());
}

TEST_CASE("GraSP: only weights that remain are moved") {
  cpu_context ctx;
  one_matrix<double> net({1, 0, 1, 2});
  weight_mask mask(net.store);
  mask.remove(0, 1);
  bool moved = false;
  // The loss has mixed terms: theta_0 theta_1 would reach the score if theta_1 moved.
  const std::vector<double> scores = grasp_scores(ctx, net.store, mask, [&](int) {
    const auto w = net.store.values();
    moved = moved || w[1] != 0.0;
    const double gradient[] = {w[0] + 3 * w[1], 3 * w[0] + 8 * w[1], w[2], w[3]};
    std::ranges::copy(gradient, net.store.gradients().begin());
  });
  CHECK_FALSE(moved);
  CHECK(scores[0] == doctest::Approx(-4));  // g = 2, H g = 4
  CHECK(scores[1] == 0.0);
  CHECK(scores[2] == doctest::Approx(-4));
  CHECK(scores[3] == doctest::Approx(-16));
}

TEST_CASE("GraSP: number and order of removed weights, and the reference's rule") {
  cpu_context ctx;
  small_store<float> net;
  const auto gradient = [&](int) {
    for (std::size_t i = 0; i < net.store.values().size(); ++i) {
      net.store.gradients()[i] = net.store.values()[i] * (static_cast<float>(i % 11) - 3.0F);
    }
  };
  for (const double share : {0.0, 0.3, 0.8, 1.0}) {
    weight_mask mask(net.store), reference(net.store);
    const std::vector<float> scores = grasp_scores(ctx, net.store, mask, gradient);
    const auto count = static_cast<index_t>(std::floor(share * static_cast<double>(mask.prunable())));
    std::vector<std::pair<float, index_t>> order;
    mask.for_each_kept(0, mask.tensors().size(), [&](std::size_t t, index_t i) {
      const index_t at = mask.tensors()[t].offset + i;
      order.emplace_back(-scores[static_cast<std::size_t>(at)], at);
    });
    std::sort(order.begin(), order.end());  // ties by position
    std::vector<bool> wanted(static_cast<std::size_t>(mask.size()), true);
    for (index_t i = 0; i < count; ++i) {
      wanted[static_cast<std::size_t>(order[static_cast<std::size_t>(i)].second)] = false;
    }
    CHECK(prune_by_grasp(ctx, net.store, mask, gradient, {.share = share}) == count);
    CHECK(kept_elements(mask) == wanted);
    // One weight more is kept where scores differ; all ties of the threshold otherwise.
    const index_t removed =
        prune_by_grasp(ctx, net.store, reference, gradient, {.share = share, .rule = removal_rule::but_last});
    CHECK(removed == std::max<index_t>(0, std::count_if(order.begin(), order.end(), [&](const auto& one) {
                                         return count > 0 &&
                                                one.first < order[static_cast<std::size_t>(count - 1)].first;
                                       })));
    if (count > 0) CHECK(removed < count);
  }
}

TEST_CASE("GraSP: scores of fresh linear weights") {
  cpu_context ctx;
  small_store<double> net;
  const weight_mask mask(net.store);
  std::vector<double> seen;
  const auto gradient = [&](int) {
    if (seen.empty()) seen.assign(net.store.values().begin(), net.store.values().end());
    std::ranges::copy(net.store.values(), net.store.gradients().begin());
  };
  const std::vector<double> values(net.store.values().begin(), net.store.values().end());
  const std::vector<double> first = grasp_scores(ctx, net.store, mask, gradient, {.fresh_linear = true});
  CHECK(same_bits<double>(net.store.values(), values));
  double squares = 0;
  for (const masked_tensor& tensor : mask.tensors()) {
    for (index_t i = 0; i < tensor.size; ++i) {
      const auto at = static_cast<std::size_t>(tensor.offset + i);
      const bool drawn = tensor.prunable && tensor.layout.dims == 2;
      REQUIRE((seen[at] != values[at]) == drawn);
      if (tensor.name == "large.weight") squares += seen[at] * seen[at] / static_cast<double>(tensor.size);
    }
  }
  CHECK(squares == doctest::Approx(2.0 / 301.0).epsilon(0.05));
  CHECK(grasp_scores(ctx, net.store, mask, gradient, {.fresh_linear = true}) == first);
  CHECK(grasp_scores(ctx, net.store, mask, gradient, {.fresh_linear = true, .seed = 2}) != first);
  CHECK(grasp_scores(ctx, net.store, mask, gradient) != first);
}

TEST_CASE("GraSP: keys fall as scores rise") {
  const float infinity = std::numeric_limits<float>::infinity();
  const float rising[] = {-infinity, -2.0F, -1.0F, -1e-45F, 0.0F, 1e-45F, 1.0F, 2.0F, infinity};
  for (std::size_t i = 1; i < std::size(rising); ++i) {
    CHECK(detail::falling_key(rising[i - 1]) > detail::falling_key(rising[i]));
    CHECK(detail::falling_key(static_cast<double>(rising[i - 1])) >
          detail::falling_key(static_cast<double>(rising[i])));
  }
  CHECK(detail::falling_key(0.0F) == detail::falling_key(-0.0F));
}

TEST_CASE("GraSP: errors") {
  cpu_context ctx;
  one_matrix<float> net({1, 1, 1}), zeros({0, 0, 0});
  weight_mask mask(net.store);
  const auto zero_gradient = [&](int) { std::ranges::fill(net.store.gradients(), 0.0F); };
  CHECK_THROWS_WITH_AS(grasp_scores(ctx, net.store, mask, zero_gradient),
                       doctest::Contains("norm of the gradient 0"), value_error);
  const auto nan = [&](int) {
    std::ranges::fill(net.store.gradients(), std::numeric_limits<float>::quiet_NaN());
  };
  CHECK_THROWS_AS(grasp_scores(ctx, net.store, mask, nan), value_error);
  int calls = 0;
  const auto late_infinity = [&](int) {
    std::ranges::fill(net.store.gradients(), ++calls > 2 ? std::numeric_limits<float>::infinity() : 1.0F);
  };
  CHECK_THROWS_WITH_AS(grasp_scores(ctx, net.store, mask, late_infinity), doctest::Contains("element 0"),
                       value_error);
  CHECK_THROWS_AS(grasp_scores(ctx, zeros.store, weight_mask(zeros.store),
                               [&](int) { std::ranges::fill(zeros.store.gradients(), 1.0F); }),
                  value_error);
  const auto gradient = half_of_quadratic<float>(net, {1, 2, 3});
  CHECK_THROWS_AS(prune_by_grasp(ctx, net.store, mask, gradient, {.share = 1.5}), value_error);
  CHECK(mask.kept() == 3);
  small_store<float> other;
  CHECK_THROWS_AS(grasp_scores(ctx, other.store, mask, gradient), state_error);
}

TEST_CASE("balanced_halves: the same number of samples of each class, none twice") {
  std::vector<int> labels;
  for (int i = 0; i < 300; ++i) labels.push_back(i * 7 % 10);
  for (const index_t per_class : {10, 5, 1}) {
    const auto [first, second] = balanced_halves<int>(labels, 10, per_class);
    std::vector<index_t> all = first;
    all.insert(all.end(), second.begin(), second.end());
    for (int c = 0; c < 10; ++c) {
      const auto is_of_class = [&](index_t i) { return labels[static_cast<std::size_t>(i)] == c; };
      CHECK(std::ranges::count_if(first, is_of_class) == (per_class + 1) / 2);
      CHECK(std::ranges::count_if(second, is_of_class) == per_class / 2);
    }
    std::ranges::sort(all);
    CHECK(std::ranges::adjacent_find(all) == all.end());
  }
  CHECK(balanced_halves<int>(labels, 10, 10) == balanced_halves<int>(labels, 10, 10));
  CHECK(balanced_halves<int>(labels, 10, 10, 2) != balanced_halves<int>(labels, 10, 10));
  CHECK_THROWS_WITH_AS(balanced_halves<int>(labels, 10, 31), doctest::Contains("has 30 samples, not 31"),
                       value_error);
  CHECK_THROWS_WITH_AS(balanced_halves<int>(labels, 11, 1), doctest::Contains("class 10 has 0"), value_error);
  CHECK_THROWS_AS(balanced_halves<int>(labels, 9, 1), value_error);
  for (const auto& [classes, per_class] : {std::pair{10, 0}, std::pair{10, -3}, std::pair{-1, 2}}) {
    CHECK_THROWS_AS(balanced_halves<int>(labels, classes, per_class), value_error);
  }
}

}  // namespace
