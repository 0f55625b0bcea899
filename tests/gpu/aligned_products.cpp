// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Products of 16-bit elements whose rows begin at no multiple of 16 bytes: with and without copies to aligned
// rows, and a language model of such sizes.
#include "support.hpp"

#include <pufferfish/gpu.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/nn.hpp>

using namespace gpu_test;

// The emulated device counts the products that are not aligned; a device does not.
extern "C" std::size_t emulated_device_misaligned_products() __attribute__((weak));

namespace {

std::size_t misaligned() {
  return emulated_device_misaligned_products == nullptr ? 0 : emulated_device_misaligned_products();
}

// Costs by which every operand that is not aligned is copied, or none.
class costs_scope {
 public:
  costs_scope(pf::gpu_context& ctx, bool copies) : costs_(ctx.blas().costs()), before_(costs_) {
    costs_.launch = copies ? 0.0 : INFINITY;
    costs_.bandwidth = INFINITY;
  }
  costs_scope(const costs_scope&) = delete;
  costs_scope& operator=(const costs_scope&) = delete;
  ~costs_scope() { costs_ = before_; }

 private:
  pf::gpu::product_costs& costs_;
  pf::gpu::product_costs before_;
};

// A case of a batch of products with random sizes, strides and transpositions.
struct batch_case {
  explicit batch_case(std::uint64_t number) : random(19, number) {
    const auto below = [this](index_t limit) {
      return static_cast<index_t>(random.below(next++, static_cast<std::uint64_t>(limit)));
    };
    m = below(20);
    n = below(20);
    k = below(20);
    groups = 1 + below(4);
    for (index_t& gap : gaps) gap = below(3) == 0 ? 0 : below(9);
    for (index_t& first : firsts) first = below(3) == 0 ? 0 : below(9);
    transposed_a = below(2) != 0;
    transposed_b = below(2) != 0;
    shared_a = below(3) == 0;
    add = below(2) != 0;
    with_bias = below(2) != 0;
  }

  pf::random_stream random;
  std::uint64_t next = 0;
  index_t m, n, k, groups, gaps[3], firsts[3];
  bool transposed_a, transposed_b, shared_a, add, with_bias;
};

// Groups side by side: group g begins g columns (or rows, if transposed) further on.
struct place {
  pf::extents<2> shape, strides;
  index_t step, size;

  place(index_t rows, index_t columns, bool transposed, index_t groups, index_t gap) {
    const index_t width = transposed ? rows : columns, lines = transposed ? columns : rows;
    const index_t pitch = groups * width + gap;
    shape = {rows, columns};
    strides = transposed ? pf::extents<2>{1, pitch} : pf::extents<2>{pitch, 1};
    step = width;
    size = lines * pitch;
  }
  template <class T>
  pf::tensor_view<T, 2> at(T* data, index_t group) const {
    return {data + group * step, shape, strides};
  }
};

template <class T, class C>
void check_batch(const batch_case& c, bool copies) {
  pf::gpu_context& ctx = gpu_context();
  const index_t a_groups = c.shared_a ? 1 : c.groups;
  const place pa(c.m, c.k, c.transposed_a, a_groups, c.gaps[0]),
      pb(c.k, c.n, c.transposed_b, c.groups, c.gaps[1]), pc(c.m, c.n, false, c.groups, c.gaps[2]);
  auto a = random_twin<T>(pa.size + c.firsts[0], 3 * c.next),
       b = random_twin<T>(pb.size + c.firsts[1], 4 * c.next);
  auto bias = random_twin<C>(c.groups * c.n, 5 * c.next);
  auto result = random_twin<C>(pc.size + c.firsts[2], 6 * c.next);
  const C* const host_bias = c.with_bias ? bias.host_data() : nullptr;
  double largest = 1.0;
  for (index_t g = 0; g < c.groups; ++g) {
    const auto left = pa.at(a.host_data() + c.firsts[0], c.shared_a ? 0 : g),
               right = pb.at(b.host_data() + c.firsts[1], g);
    const auto to = pc.at(result.host_data() + c.firsts[2], g);
    for (index_t i = 0; i < c.m; ++i) {
      for (index_t j = 0; j < c.n; ++j) {
        double sum = c.add ? static_cast<double>(to(i, j)) : 0.0;
        if (host_bias != nullptr) sum += static_cast<double>(host_bias[g * c.n + j]);
        for (index_t l = 0; l < c.k; ++l)
          sum += static_cast<double>(left(i, l)) * static_cast<double>(right(l, j));
        to(i, j) = static_cast<C>(sum);
        largest = std::max(largest, std::abs(sum));
      }
    }
  }
  const costs_scope costs(ctx, copies);
  const std::size_t before = misaligned();
  const auto left = pa.at<const T>(a.device_data() + c.firsts[0], 0),
             right = pb.at<const T>(b.device_data() + c.firsts[1], 0);
  const auto to = pc.at<C>(result.device_data() + c.firsts[2], 0);
  const C* const device_bias = c.with_bias ? bias.device_data() : nullptr;
  pf::gpu::multiply_batch<T, C>(ctx, c.groups, left, c.shared_a ? 0 : pa.step, right, pb.step, to, pc.step,
                                c.add, device_bias);
  // The expected result, the result and, with a bias, the sum before it are rounded.
  CHECK(difference(result, largest) < (std::is_same_v<T, C> ? 3 * unit<T> : 1e-5));
  if (copies) CHECK(misaligned() == before);
}

}  // namespace

TEST_CASE_TEMPLATE("gpu aligned products: random shapes, strides and groups, copied or not", T, pf::gpu::bf16,
                   pf::gpu::fp16) {
  const std::size_t before = misaligned();
  for (std::uint64_t number = 0; number < 50; ++number) {
    CAPTURE(number);
    const batch_case c(number);
    for (const bool copies : {false, true}) {
      CAPTURE(copies);
      check_batch<T, T>(c, copies);
      check_batch<T, float>(c, copies);
    }
  }
  if (emulated_device_misaligned_products != nullptr) CHECK(misaligned() > before);
}

TEST_CASE("gpu aligned products: operands are copied where the product is large enough") {
  using pf::gpu::bf16;
  const pf::gpu::product_costs costs;
  // c = a b by rows: `step` is the row stride of all three operands.
  const auto pays = [&](index_t m, index_t k, index_t n, index_t step, index_t groups = 1) {
    pf::gpu::detail::blas_product p;
    p.m = n;
    p.n = m;
    p.k = k;
    p.a = {nullptr, step, false};
    p.b = {nullptr, step, false};
    p.c_step = step;
    const pf::gpu::detail::product_batch batch{groups, 375, 375, 375};
    return pf::gpu::detail::copies_pay(costs, p, batch, pf::gpu::detail::product_lines<bf16, bf16>(p, batch));
  };
  CHECK(pays(700, 1500, 33278, 1500));  // logits of 35 x 20 tokens
  CHECK(pays(700, 1500, 1500, 1500));   // a low-rank layer's first factor
  CHECK(pays(700, 375, 1500, 1500, 4));
  CHECK(!pays(20, 1500, 6000, 1500));    // one time step: few rows
  CHECK(!pays(700, 1500, 33278, 1504));  // aligned
  CHECK(!pays(64, 12, 48, 12));
}

TEST_CASE("gpu aligned products: a captured step of a language model has none that is not aligned") {
  using pf::device::gpu;
  using T = pf::gpu::bf16;
  pf::gpu_context& ctx = gpu_context();
  const pf::mode_scope<gpu> training(ctx, pf::run_mode::training);
  bool low_rank = false;
  SUBCASE("dense") {}
  SUBCASE("factorized") { low_rank = true; }
  // As 33,278 words, width 1500 and rank 375: 37 words, width 12, rank 3.
  constexpr index_t steps = 5, batch = 3, vocabulary = 37;
  auto net = pf::make_lstm_lm<T, gpu>({vocabulary, 12, 2, 0.4});
  net.initialize(3);
  if (low_rank) CHECK(pf::factorize(net, pf::lstm_lm_policy()).low_rank.size() == 2);
  const pf::extents<2> shape{steps, batch};
  std::vector<double> losses[2];
  std::vector<float> gradients[2];
  for (const bool copies : {false, true}) {
    const costs_scope costs(ctx, copies);
    auto state = net.root().make_state(batch);
    auto tokens = random_tokens(steps * batch, vocabulary, 1),
         targets = random_tokens(steps * batch, vocabulary, 2);
    twin<double> results(2, NAN);
    pf::gpu::step_graph graph;
    const std::size_t before = misaligned();
    for (std::uint64_t step = 0; step < 4; ++step) {
      ctx.begin_step(step);
      graph.run(ctx, pf::gpu::step_graph::key(shape, net.generation()), [&] {
        net.root().loss(ctx, tokens.device_view(shape), targets.device_view(shape), state,
                        results.device_data());
        net.root().backward(ctx, static_cast<double>(steps * batch));
      });
      losses[copies].push_back(results.fetched()[0]);
    }
    CHECK(graph.replays() > 0);
    const std::size_t found = misaligned() - before;
    if (copies || emulated_device_misaligned_products == nullptr)
      CHECK(found == 0);
    else
      CHECK(found > 0);
    const std::span<float> all = net.store().gradients();
    gradients[copies].resize(all.size());
    pf::gpu::device_memory().to_host(gradients[copies].data(), all.data(), all.size_bytes());
  }
  for (std::size_t i = 0; i < losses[0].size(); ++i) {
    CHECK(losses[1][i] == doctest::Approx(losses[0][i]).epsilon(2 * unit<T>));
  }
  CHECK(difference(gradients[1], gradients[0]) < 8 * unit<T>);
}
