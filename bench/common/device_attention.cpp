// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "device_attention.hpp"

#include <pufferfish/gpu/kernels/attention/attention.hpp>
#include <pufferfish/gpu/kernels/copy/rows.hpp>

#include "device_arrays.hpp"

namespace bench {
namespace {

namespace pf = pufferfish;
namespace kernels = pf::gpu::kernels;
using T = pf::gpu::bf16;
using pf::index_t;

class attention_timer {
 public:
  attention_timer(pf::gpu_context& ctx, index_t tokens, index_t sequences, int heads, int depth, int samples)
      : ctx_(ctx),
        tokens_(tokens),
        rows_(tokens * sequences),
        columns_(static_cast<index_t>(heads) * depth),
        samples_(samples),
        first_(sequences),
        count_(sequences),
        q_(rows_ * columns_, 1),
        k_(rows_ * columns_, 2),
        v_(rows_ * columns_, 3),
        dy_(rows_ * columns_, 4),
        log_sums_(rows_ * heads),
        products_(rows_ * heads) {
    kernels::make_runs(ctx.stream(), sequences, tokens, nullptr, first_.data(), count_.data());
    problem_.q = rows_of(q_);
    problem_.k = rows_of(k_);
    problem_.v = rows_of(v_);
    problem_.query_rows = problem_.key_rows = rows_;
    problem_.queries = problem_.keys = {sequences, first_.data(), count_.data()};
    problem_.heads = heads;
    problem_.depth = problem_.value_depth = depth;
    problem_.scale = 1.0F / std::sqrt(static_cast<float>(depth));
  }

  void time(bool causal, double dropout, answer& rows) {
    problem_.causal = causal;
    ctx_.begin_step(1);
    problem_.dropout = pf::gpu::detail::dropout_of(ctx_, dropout, ctx_.next_random_stream());
    device_array<T> y(rows_ * columns_), dq(rows_ * columns_), dk(rows_ * columns_), dv(rows_ * columns_);
    device_array<T> other(rows_ * columns_);
    measure(rows, "forward", 2, y, other, [&](device_array<T>& to) {
      kernels::attention_forward<T>(ctx_.stream(), problem_, writable(to), log_sums_.data());
    });
    kernels::attention_row_products<T>(ctx_.stream(), problem_, rows_of(dy_), rows_of(y), products_.data());
    measure(rows, "gradient of the queries", 3, dq, other, [&](device_array<T>& to) {
      kernels::attention_query_gradient<T>(ctx_.stream(), problem_, rows_of(dy_), log_sums_.data(),
                                           products_.data(), writable(to));
    });
    measure(rows, "gradient of keys and values", 4, dk, other, [&](device_array<T>& to) {
      kernels::attention_key_gradient<T>(ctx_.stream(), problem_, rows_of(dy_), log_sums_.data(),
                                         products_.data(), writable(to), writable(dv));
    });
  }

 private:
  kernels::row_array<const T> rows_of(device_array<T>& of) const { return {of.data(), columns_}; }
  kernels::row_array<T> writable(device_array<T>& of) const { return {of.data(), columns_}; }

  // `products`: number of products of queries x keys x depth in a pass.
  void measure(answer& rows, const char* pass, int products, device_array<T>& one, device_array<T>& other,
               const std::function<void(device_array<T>&)>& call) {
    const auto tokens = static_cast<double>(tokens_);
    const double keys = problem_.causal ? (tokens + 1) / 2 : tokens;
    const double flops = 2.0 * products * static_cast<double>(rows_ * columns_) * keys;
    problem_.tensor = false;
    const double floats = microseconds(ctx_, samples_, [&] { call(one); });
    problem_.tensor = true;
    const double tensor = microseconds(ctx_, samples_, [&] { call(other); });
    rows.push_back({{"tokens", tokens_},
                    {"heads", problem_.heads},
                    {"depth", problem_.depth},
                    {"causal", problem_.causal},
                    {"dropout", problem_.dropout.drops()},
                    {"pass", pass},
                    {"gflop", flops * 1e-9},
                    {"floats_us", floats},
                    {"tensor_us", tensor},
                    {"difference", difference(one, other)}});
  }

  pf::gpu_context& ctx_;
  index_t tokens_, rows_, columns_;
  int samples_;
  device_array<index_t> first_, count_;
  device_array<T> q_, k_, v_, dy_;
  device_array<float> log_sums_, products_;
  kernels::attention_problem<T> problem_{};
};

}  // namespace

answer time_attention(const request& asked) {
  const bool tiny = asked.value("tiny", false);
  const int depth = asked.value("depth", 64);
  pf::gpu_context ctx;
  answer rows = answer::array();
  for (const index_t tokens : tiny ? std::vector<index_t>{24, 130} : std::vector<index_t>{128, 512, 2048}) {
    attention_timer timer(ctx, tokens, tiny ? 1 : 16384 / tokens, tiny ? 2 : 8, depth, tiny ? 1 : 15);
    for (const bool causal : {false, true}) timer.time(causal, asked.value("dropout", 0.0), rows);
  }
  return {{"attention", rows}};
}

}  // namespace bench
