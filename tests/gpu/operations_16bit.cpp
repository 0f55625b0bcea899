// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Operations on numbers of 16 bits: what the same operation makes of them as floats, rounded. (Those of
// floats have tests of their own, against the CPU's.)
#include "support.hpp"

#include <pufferfish/gpu.hpp>

using namespace gpu_test;

namespace {

/// Numbers that T has, for an operation in T and for the same one in float.
template <class T>
class activations {
 public:
  activations(index_t size, std::uint64_t stream)
      : activations(rounded(random_twin<float>(size, stream).host())) {}

  template <class U>
  U* as() {
    if constexpr (std::is_same_v<U, T>) {
      return narrow_.device_data();
    } else {
      return wide_.device_data();
    }
  }
  template <class U>
  std::span<U> span() {
    return {as<U>(), static_cast<std::size_t>(wide_.size())};
  }
  template <class U, std::size_t N>
  pf::tensor_view<U, N> view(const pf::extents<N>& shape) {
    return {as<U>(), shape};
  }
  /// How far the operation in T is from the other, relative to the largest number.
  double error() const {
    const std::vector<T> got = narrow_.fetched();
    return difference(std::vector<float>(got.begin(), got.end()), wide_.fetched());
  }

 private:
  explicit activations(const std::vector<T>& values)
      : narrow_(values), wide_(std::vector<float>(values.begin(), values.end())) {}
  static std::vector<T> rounded(const std::vector<float>& values) {
    std::vector<T> result;
    for (const float value : values) result.push_back(static_cast<T>(value));
    return result;
  }

  twin<T> narrow_;
  twin<float> wide_;
};

/// Floats that both operations have, one each: parameters, their gradients, statistics.
template <class T>
class parameters {
 public:
  parameters(index_t size, std::uint64_t stream)
      : of_narrow_(random_twin<float>(size, stream)), of_wide_(of_narrow_.host()) {}
  template <class U>
  float* as() {
    return std::is_same_v<U, T> ? of_narrow_.device_data() : of_wide_.device_data();
  }
  template <class U, std::size_t N>
  pf::tensor_view<float, N> view(const pf::extents<N>& shape) {
    return {as<U>(), shape};
  }
  double error() const { return difference(of_narrow_.fetched(), of_wide_.fetched()); }

 private:
  twin<float> of_narrow_, of_wide_;
};

template <class T, class Operation>
void in_both(Operation&& operation) {
  operation(T{});
  operation(float{});
}

}  // namespace

TEST_CASE_TEMPLATE("gpu 16 bits: element by element", T, pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  for (const index_t size : {1, 7, 8, 1003, 4096}) {
    CAPTURE(size);
    activations<T> x(size, 1), y(size, 2), dy(size, 3), dx(size, 4), sum(size, 5), scaled(size, 6),
        dropped(size, 7), gelu(size, 8), dgelu(size, 9);
    in_both<T>([&](auto type) {
      using U = decltype(type);
      using in = std::span<const U>;
      ctx.begin_step(3);
      pf::ops::relu_forward<U>(ctx, in(x.template span<U>()), y.template span<U>());
      pf::ops::relu_backward<U>(ctx, in(y.template span<U>()), in(dy.template span<U>()),
                                dx.template span<U>());
      pf::ops::add_relu<U>(ctx, in(x.template span<U>()), sum.template span<U>());
      pf::ops::add<U>(ctx, in(x.template span<U>()), sum.template span<U>());
      pf::ops::scale<U>(ctx, 1.37F, in(x.template span<U>()), scaled.template span<U>());
      pf::ops::dropout<U>(ctx, in(x.template span<U>()), dropped.template span<U>(), 0.3,
                          ctx.next_random_stream(), 5);
      pf::ops::activation_forward<pf::activation_kind::gelu, U>(ctx, in(x.template span<U>()),
                                                                gelu.template span<U>());
      pf::ops::activation_backward<pf::activation_kind::gelu, U>(
          ctx, in(x.template span<U>()), in(dy.template span<U>()), dgelu.template span<U>());
    });
    CHECK(y.error() == 0.0);
    CHECK(dx.error() == 0.0);
    CHECK(sum.error() < 2 * unit<T>);
    CHECK(scaled.error() < unit<T>);
    CHECK(dropped.error() < unit<T>);
    CHECK(gelu.error() < unit<T>);
    CHECK(dgelu.error() < unit<T>);
  }
}

TEST_CASE_TEMPLATE("gpu 16 bits: batch norm", T, pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  for (const pf::extents<2>& shape :
       {pf::extents<2>{33, 16}, pf::extents<2>{300, 64}, pf::extents<2>{1000, 20}, pf::extents<2>{50, 1032},
        pf::extents<2>{37, 5}}) {
    CAPTURE(shape[1]);
    const index_t size = shape[0] * shape[1], channels = shape[1];
    activations<T> x(size, 1), addend(size, 2), y(size, 3), dy(size, 4), dx(size, 5), masked(size, 6);
    parameters<T> statistics(2 * channels, 7), weight(channels, 8), bias(channels, 9), mean(channels, 10),
        variance(channels, 11), batches(1, 12), sums(channels, 13);
    std::vector<std::vector<float>> gradients;
    in_both<T>([&](auto type) {
      using U = decltype(type);
      twin<float> found(2 * channels);
      // Both pass what the float's ReLU passes.
      twin<typename pf::ops::relu_mask<U>::word> mask(pf::ops::relu_mask<U>::size(shape));
      pf::ops::batch_norm_use_batch<U>(ctx, x.template view<U>(shape), 1e-5, 0.1, statistics.template as<U>(),
                                       mean.template as<U>(), variance.template as<U>(),
                                       batches.template as<U>());
      pf::ops::norm_epilogue<U> epilogue;
      epilogue.addend = addend.template view<U>(shape);
      epilogue.relu = true;
      epilogue.mask.words = mask.device_data();
      pf::ops::batch_norm_apply<U>(ctx, x.template view<U>(shape), statistics.template as<U>(),
                                   statistics.template as<U>() + channels, weight.template as<U>(),
                                   bias.template as<U>(), y.template view<U>(shape), epilogue);
      pf::ops::batch_norm_backward<U>(
          ctx, x.template view<U>(shape), dy.template view<U>(shape), statistics.template as<U>(),
          statistics.template as<U>() + channels, weight.template as<U>(), {found.device_data()},
          {found.device_data() + channels}, dx.template view<U>(shape), epilogue.mask);
      pf::ops::masked_copy<U>(ctx, dy.template view<U>(shape), epilogue.mask, masked.template view<U>(shape));
      pf::ops::column_sums<U>(ctx, dy.template view<U>(shape), sums.template as<U>(), true);
      gradients.push_back(found.fetched());
    });
    CHECK(statistics.error() < 1e-6);
    CHECK(mean.error() < 1e-6);
    CHECK(variance.error() < 1e-6);
    CHECK(y.error() < unit<T>);
    CHECK(masked.error() == 0.0);
    CHECK(dx.error() < 2 * unit<T>);
    CHECK(sums.error() < 1e-6);
    CHECK(difference(gradients[0], gradients[1]) < 1e-5);
  }
}

TEST_CASE_TEMPLATE("gpu 16 bits: pooling", T, pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  for (const index_t channels : {3, 16}) {
    const pf::extents<4> input{2, 9, 6, channels}, output{2, 5, 3, channels}, one{2, 1, 1, channels};
    const auto shape = pf::pool_shape::square(3, 2, 1);
    activations<T> x(pf::volume<4>(input), 1), y(pf::volume<4>(output), 2), dy(pf::volume<4>(output), 3),
        dx(pf::volume<4>(input), 4), average(pf::volume<4>(output), 5), daverage(pf::volume<4>(input), 6),
        all(pf::volume<4>(one), 7), dall(pf::volume<4>(input), 8);
    in_both<T>([&](auto type) {
      using U = decltype(type);
      pf::ops::max_pool_forward<U>(ctx, shape, x.template view<U>(input), y.template view<U>(output));
      pf::ops::max_pool_backward<U>(ctx, shape, x.template view<U>(input), y.template view<U>(output),
                                    dy.template view<U>(output), dx.template view<U>(input));
      pf::ops::average_pool_forward<U>(ctx, shape, true, x.template view<U>(input),
                                       average.template view<U>(output));
      pf::ops::average_pool_backward<U>(ctx, shape, true, dy.template view<U>(output),
                                        daverage.template view<U>(input));
      pf::ops::global_average_forward<U>(ctx, x.template view<U>(input), all.template view<U>(one));
      pf::ops::global_average_backward<U>(ctx, all.template view<U>(one), dall.template view<U>(input));
    });
    CHECK(y.error() == 0.0);
    CHECK(dx.error() < unit<T>);
    CHECK(average.error() < unit<T>);
    CHECK(daverage.error() < unit<T>);
    CHECK(all.error() < unit<T>);
    CHECK(dall.error() < 2 * unit<T>);
  }
}

TEST_CASE_TEMPLATE("gpu 16 bits: losses", T, pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  twin<float> scale(1, 1024.0F);
  for (const index_t classes : {5, 1000}) {
    const pf::extents<2> shape{9, classes};
    std::vector<std::int32_t> wanted;
    for (std::int32_t i = 0; i < 9; ++i) wanted.push_back(i % 5);
    twin<std::int32_t> targets(wanted);
    activations<T> logits(9 * classes, 1), gradient(9 * classes, 2), of_tokens(9 * classes, 3),
        scaled(9 * classes, 4);
    std::vector<std::vector<double>> results;
    in_both<T>([&](auto type) {
      using U = decltype(type);
      twin<double> found(4);
      pf::ops::softmax_cross_entropy<U>(ctx, logits.template view<U>(shape), targets.device_span(), {}, 9.0,
                                        gradient.template view<U>(shape), found.device_data());
      pf::ops::token_loss<U>(ctx, logits.template view<U>(shape), targets.device_span(), {}, 3.0,
                             of_tokens.template view<U>(shape), found.device_data() + 2);
      ctx.set_loss_scale(scale.device_data());
      pf::ops::softmax_cross_entropy<U>(ctx, logits.template view<U>(shape), targets.device_span(), {}, 9.0,
                                        scaled.template view<U>(shape), found.device_data());
      ctx.set_loss_scale(nullptr);
      results.push_back(found.fetched());
    });
    CHECK(difference(results[0], results[1]) < 1e-6);
    CHECK(gradient.error() < unit<T>);
    CHECK(of_tokens.error() < unit<T>);
    CHECK(scaled.error() < unit<T>);
  }
}

TEST_CASE_TEMPLATE("gpu 16 bits: layer norm and attention", T, pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  for (const index_t columns : {7, 64}) {
    const pf::extents<2> shape{33, columns};
    const index_t size = 33 * columns;
    activations<T> x(size, 1), residual(size, 2), sum(size, 3), y(size, 4), dy(size, 5), dsum(size, 6),
        dx(size, 7);
    parameters<T> statistics(66, 8), weight(columns, 9), bias(columns, 10);
    std::vector<std::vector<float>> gradients;
    in_both<T>([&](auto type) {
      using U = decltype(type);
      ctx.begin_step(4);
      twin<float> found(2 * columns);
      const pf::ops::row_dropout dropout{0.3, ctx.next_random_stream(), 11, nullptr};
      const pf::ops::norm_record<U> record{sum.template as<U>(), statistics.template as<U>(), nullptr};
      pf::ops::layer_norm_forward<U>(
          ctx, {x.template view<U>(shape), residual.template view<U>(shape), dropout, sum.template as<U>()},
          weight.template as<U>(), bias.template as<U>(), 1e-6, y.template view<U>(shape), record);
      pf::ops::layer_norm_backward<U>(
          ctx, record, dropout, weight.template as<U>(), dy.template view<U>(shape), {found.device_data()},
          {found.device_data() + columns}, dsum.template view<U>(shape), dx.template view<U>(shape));
      gradients.push_back(found.fetched());
    });
    CHECK(sum.error() < unit<T>);
    CHECK(y.error() < 4 * unit<T>);
    CHECK(dsum.error() < 4 * unit<T>);
    CHECK(dx.error() < 4 * unit<T>);
    CHECK(difference(gradients[0], gradients[1]) < 4 * unit<T>);
  }
  for (const index_t length : {9, 70}) {  // a short run, and one that takes tiles
    const pf::extents<2> shape{length, 32};
    activations<T> q(length * 32, 1), k(length * 32, 2), v(length * 32, 3), y(length * 32, 4),
        dy(length * 32, 5), dq(length * 32, 6), dk(length * 32, 7), dv(length * 32, 8);
    twin<index_t> first(std::vector<index_t>{0}), count(std::vector<index_t>{length});
    in_both<T>([&](auto type) {
      using U = decltype(type);
      ctx.begin_step(5);
      pf::ops::attention_input<U> in;
      in.q = q.template view<U>(shape);
      in.k = k.template view<U>(shape);
      in.v = v.template view<U>(shape);
      in.queries = in.keys = {1, first.device_data(), count.device_data()};
      in.heads = 2;
      in.mask.causal = true;
      in.dropout = {0.2, ctx.next_random_stream(), 0};
      twin<float> kept(pf::ops::attention_kept_size(ctx, in));
      pf::ops::attention_forward<U>(ctx, in, y.template view<U>(shape), kept.device_data());
      pf::ops::attention_backward<U>(ctx, in, kept.device_data(), dy.template view<U>(shape),
                                     dq.template view<U>(shape), dk.template view<U>(shape),
                                     dv.template view<U>(shape), y.template view<U>(shape));
    });
    CHECK(y.error() < 2 * unit<T>);
    CHECK(dq.error() < 4 * unit<T>);
    CHECK(dk.error() < 4 * unit<T>);
    CHECK(dv.error() < 4 * unit<T>);
  }
}

TEST_CASE_TEMPLATE("gpu 16 bits: steps of an LSTM, tables, positions", T, pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  for (const index_t hidden : {5, 12, 32}) {
    const pf::extents<2> wide{6, 4 * hidden}, shape{6, hidden};
    activations<T> gates(24 * hidden, 1), before(6 * hidden, 2), cell(6 * hidden, 3), output(6 * hidden, 4),
        dy(6 * hidden, 5), dh(6 * hidden, 6), dc(6 * hidden, 7), dc_before(6 * hidden, 8);
    in_both<T>([&](auto type) {
      using U = decltype(type);
      pf::ops::lstm_forward<U>(ctx, gates.template view<U>(wide), before.template view<U>(shape),
                               cell.template view<U>(shape), output.template view<U>(shape));
      pf::ops::lstm_backward<U>(ctx, gates.template view<U>(wide), before.template view<U>(shape),
                                cell.template view<U>(shape), dy.template view<U>(shape),
                                dh.template view<U>(shape), dc.template view<U>(shape),
                                dc_before.template view<U>(shape));
    });
    CHECK(cell.error() < 2 * unit<T>);
    CHECK(output.error() < 2 * unit<T>);
    CHECK(gates.error() < 4 * unit<T>);
    CHECK(dc_before.error() < 4 * unit<T>);
  }
  for (const index_t width : {5, 64}) {
    const pf::extents<2> table_shape{11, width}, shape{40, width};
    activations<T> table(11 * width, 1), y(40 * width, 2), placed(40 * width, 3);
    parameters<T> gradient(11 * width, 4);
    std::vector<std::int32_t> words;
    for (std::int32_t i = 0; i < 40; ++i) words.push_back(i * i % 11);
    twin<std::int32_t> tokens(words);
    in_both<T>([&](auto type) {
      using U = decltype(type);
      pf::ops::embedding_forward<U>(ctx, table.template view<U>(table_shape), tokens.device_span(),
                                    y.template view<U>(shape));
      pf::ops::embedding_backward<U>(ctx, tokens.device_span(), y.template view<U>(shape), pf::no_token,
                                     gradient.template view<U>(table_shape), true);
      pf::ops::add_positions_in_turn<U>(ctx, {}, 8, y.template view<U>(shape),
                                        placed.template view<U>(shape));
    });
    CHECK(y.error() == 0.0);
    CHECK(gradient.error() < 1e-5);
    CHECK(placed.error() < unit<T>);
  }
}

TEST_CASE_TEMPLATE("gpu 16 bits: products, dense and of low rank, the output layer", T, pf::gpu::bf16,
                   pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  const pf::extents<2> xs{33, 24}, ws{24, 40}, ys{33, 40};
  activations<T> x(33 * 24, 1), w(24 * 40, 2), bias(40, 3), y(33 * 40, 4), dy(33 * 40, 5), dx(33 * 24, 6);
  parameters<T> dw(24 * 40, 7), db(40, 8);
  in_both<T>([&](auto type) {
    using U = decltype(type);
    pf::ops::linear_forward<U>(ctx, x.template view<U>(xs), w.template view<U>(ws), bias.template as<U>(),
                               y.template view<U>(ys));
    pf::ops::linear_backward_input<U>(ctx, dy.template view<U>(ys), w.template view<U>(ws),
                                      dx.template view<U>(xs));
    pf::ops::linear_backward_weight<U>(ctx, x.template view<U>(xs), dy.template view<U>(ys),
                                       dw.template view<U>(ws), true);
    pf::ops::bias_gradient<U>(ctx, dy.template view<U>(ys), db.template as<U>(), false);
  });
  CHECK(y.error() < unit<T>);
  CHECK(dx.error() < unit<T>);
  CHECK(dw.error() < 1e-5);
  CHECK(db.error() < 1e-5);

  const pf::conv_shape shape = pf::conv_shape::square(8, 16, 3, 1, 1);
  const pf::extents<4> images{2, 9, 8, 8}, inner{2, 9, 8, 16}, out{2, 9, 8, 24};
  activations<T> image(pf::volume<4>(images), 1), down(shape.patch() * 16, 2), up(16 * 24, 3),
      t(pf::volume<4>(inner), 4), z(pf::volume<4>(out), 5), dz(pf::volume<4>(out), 6),
      dt(pf::volume<4>(inner), 7), dimage(pf::volume<4>(images), 8);
  parameters<T> ddown(shape.patch() * 16, 9), dup(16 * 24, 10);
  in_both<T>([&](auto type) {
    using U = decltype(type);
    const pf::extents<2> factor{16, 24};
    pf::ops::low_rank_conv_forward<U>(ctx, shape, image.template view<U>(images), down.template as<U>(),
                                      up.template view<U>(factor), nullptr, t.template view<U>(inner),
                                      z.template view<U>(out));
    pf::ops::low_rank_conv_backward_up<U>(ctx, t.template view<U>(inner), dz.template view<U>(out),
                                          up.template view<U>(factor), dup.template view<U>(factor), false,
                                          dt.template view<U>(inner));
    pf::ops::conv_backward_weight<U>(ctx, shape, image.template view<U>(images), dt.template view<U>(inner),
                                     ddown.template as<U>(), false);
    pf::ops::conv_backward_input<U>(ctx, shape, dt.template view<U>(inner), down.template as<U>(),
                                    dimage.template view<U>(images));
  });
  CHECK(t.error() < unit<T>);
  CHECK(z.error() < 2 * unit<T>);
  CHECK(dt.error() < unit<T>);
  CHECK(dup.error() < unit<T>);
  CHECK(ddown.error() < 2 * unit<T>);
  CHECK(dimage.error() < 2 * unit<T>);

  const pf::extents<2> rows{9, 24}, table_shape{50, 24}, logits_shape{9, 50};
  activations<T> top(9 * 24, 1), table(50 * 24, 2), offset(50, 3), logits(9 * 50, 4), dtop(9 * 24, 5);
  parameters<T> dtable(50 * 24, 6), doffset(50, 7);
  twin<std::int32_t> targets(std::vector<std::int32_t>{1, 7, 49, 0, 3, 3, 12, 30, 2});
  std::vector<std::vector<double>> losses;
  in_both<T>([&](auto type) {
    using U = decltype(type);
    const pf::ops::output_layer<U> layer{top.template view<U>(rows), table.template view<U>(table_shape),
                                         offset.template as<U>(), 0.5F};
    twin<double> found(2);
    twin<U> kept(pf::ops::output_loss_kept(ctx, layer));
    pf::ops::output_logits<U>(ctx, layer, logits.template view<U>(logits_shape));
    pf::ops::output_loss_forward<U>(ctx, layer, targets.device_span(), {}, kept.device_data(),
                                    found.device_data());
    pf::ops::output_loss_backward<U>(ctx, layer, targets.device_span(), {}, 9.0, kept.device_data(),
                                     {dtop.template view<U>(rows), dtable.template view<U>(table_shape), true,
                                      doffset.template as<U>(), false});
    losses.push_back(found.fetched());
  });
  CHECK(logits.error() < 2 * unit<T>);
  CHECK(difference(losses[0], losses[1]) < unit<T>);
  CHECK(dtop.error() < 4 * unit<T>);
  CHECK(dtable.error() < 4 * unit<T>);
  CHECK(doffset.error() < 4 * unit<T>);
}

TEST_CASE_TEMPLATE("gpu 16 bits: products of few rows, step after step", T, pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  struct product_case {
    index_t rows, depth, columns;
  };
  constexpr product_case cases[] = {{1, 8, 8},      {3, 12, 16},  {20, 36, 24}, {32, 256, 56}, {7, 520, 1504},
                                    {2, 128, 2056}, {33, 16, 16}, {5, 18, 16},  {4, 16, 12},   {0, 8, 8}};
  std::uint64_t stream = 0;
  for (const product_case& c : cases) {
    for (const bool turned : {false, true}) {
      CAPTURE(c.rows);
      CAPTURE(c.depth);
      CAPTURE(c.columns);
      CAPTURE(turned);
      const index_t gap = 8, dense = turned ? c.depth : c.columns, others = turned ? c.columns : c.depth;
      const bool own_kernel = c.rows <= 32 && c.depth % 4 == 0 && dense % 8 == 0;
      activations<T> a(c.rows * (c.depth + gap), ++stream), b(others * (dense + gap), ++stream),
          y(c.rows * (c.columns + gap), ++stream);
      in_both<T>([&](auto type) {
        using U = decltype(type);
        const pf::tensor_view<const U, 2> left(a.template as<U>(), {c.rows, c.depth}, {c.depth + gap, 1});
        const pf::tensor_view<const U, 2> stored(b.template as<U>(), {others, dense}, {dense + gap, 1});
        const pf::tensor_view<U, 2> result(y.template as<U>(), {c.rows, c.columns}, {c.columns + gap, 1});
        CHECK(pf::gpu::kernels::is_few_rows_product<U>(pf::gpu::detail::rows_of(left),
                                                       pf::gpu::detail::rows_of(stored), turned, c.rows,
                                                       c.depth, c.columns) == (own_kernel && sizeof(U) == 2));
        pf::scratch_frame frame(ctx.scratch());
        const pf::ops::step_operand<U, pf::device::gpu> right(
            ctx, frame, turned ? pf::tensor_view<const U, 2>(transpose(stored)) : stored, 9);
        for (const bool add : {false, true}) right.multiply(ctx, left, result, add);
      });
      CHECK(y.error() < 4 * unit<T>);
    }
  }
}
