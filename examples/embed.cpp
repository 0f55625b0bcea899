// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A framework meets pufferfish: its linear layer, its NCHW convolution and its LSTM become low-rank layers
// that its own training loop trains. docs/embedding.md shows the parts between markers, word for word (a test
// compares them).

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "common/usage.hpp"

// [host]
namespace host {  // the framework that is there already
struct Linear {
  long in, out;
  std::vector<float> weight, bias;  // weight: [out][in]
};
struct Conv2d {
  long in, out, kernel, stride, padding;
  std::vector<float> weight, bias;  // weight: [out][in][kernel][kernel]
};
struct LSTM {
  long in, hidden;  // gates i, f, g, o, one below the other
  std::vector<float> weight_ih, weight_hh, bias;
};

struct Array {
  std::vector<long> shape;
  std::vector<float> values;
};
struct Parameter {
  std::string name;
  float *values, *gradient;
  long size;
};
struct Module {
  virtual ~Module() = default;
  virtual void forward(Array& x, Array& y) = 0;
  virtual void backward(Array& dy, Array& dx) = 0;
  virtual std::vector<Parameter> parameters() = 0;
};
}  // namespace host
// [host]

// [linear]
#include <pufferfish/lowrank.hpp>

template <>
struct pufferfish::layer_traits<host::Linear> {
  static constexpr auto kind = layer_kind::linear;
  static auto matrices(const host::Linear& l) {
    return std::array{named_view<const float, 2>{"weight", {l.weight.data(), {l.out, l.in}}}};
  }
  static auto bias(const host::Linear& l) { return tensor_view<const float, 1>(l.bias.data(), {l.out}); }
};
// [linear]

// [conv]
template <>
struct pufferfish::layer_traits<host::Conv2d> {
  static constexpr auto kind = layer_kind::conv;
  static auto shape(const host::Conv2d& c) {
    return conv_shape::square(c.in, c.out, c.kernel, c.stride, c.padding);
  }
  static auto matrices(const host::Conv2d& c) {
    const extents<4> oihw{c.out, c.in, c.kernel, c.kernel};
    return std::array{named_view<const float, 4>{"weight", {c.weight.data(), oihw}}};
  }
  static auto bias(const host::Conv2d& c) { return tensor_view<const float, 1>(c.bias.data(), {c.out}); }
};
// [conv]

// [lstm]
template <>
struct pufferfish::layer_traits<host::LSTM> {
  static constexpr auto kind = layer_kind::lstm;
  static auto matrices(const host::LSTM& l) {
    const auto gate = [&l](const char* name, const std::vector<float>& all, long in, long number) {
      return named_view<const float, 2>{name, {all.data() + number * l.hidden * in, {l.hidden, in}}};
    };
    return std::array{gate("ii", l.weight_ih, l.in, 0),     gate("if", l.weight_ih, l.in, 1),
                      gate("ig", l.weight_ih, l.in, 2),     gate("io", l.weight_ih, l.in, 3),
                      gate("hi", l.weight_hh, l.hidden, 0), gate("hf", l.weight_hh, l.hidden, 1),
                      gate("hg", l.weight_hh, l.hidden, 2), gate("ho", l.weight_hh, l.hidden, 3)};
  }
  static auto biases(const host::LSTM& l) {
    const auto gate = [&l](const char* name, long number) {
      return named_view<const float, 1>{name, {l.bias.data() + number * l.hidden, {l.hidden}}};
    };
    return std::array{gate("i", 0), gate("f", 1), gate("g", 2), gate("o", 3)};
  }
};
// [lstm]

// [module]
/// The host's array as a view of N dimensions.
template <std::size_t N>
pufferfish::tensor_view<float, N> view(host::Array& array) {
  pufferfish::extents<N> shape;
  for (std::size_t i = 0; i < N; ++i) shape[i] = array.shape.at(i);
  return {array.values.data(), shape};
}

/// A low-rank layer as one of the host's modules; its activations have N dimensions.
template <class Layer, std::size_t N>
class LowRankModule final : public host::Module {
 public:
  LowRankModule(Layer layer, pufferfish::cpu_context& context)
      : layer_(std::move(layer)), context_(&context) {}

  void forward(host::Array& x, host::Array& y) override { layer_.forward(*context_, view<N>(x), view<N>(y)); }
  void backward(host::Array& dy, host::Array& dx) override {
    layer_.backward(*context_, view<N>(dy), view<N>(dx));
  }
  std::vector<host::Parameter> parameters() override {
    std::vector<host::Parameter> all;
    layer_.visit([&all](const char* name, auto& p) {
      all.push_back({name, p.data(), p.gradient_data(), static_cast<long>(p.size())});
    });
    return all;
  }

 private:
  Layer layer_;
  pufferfish::cpu_context* context_;
};
// [module]

// [factorize]
std::unique_ptr<host::Module> low_rank(const host::Linear& dense, pufferfish::cpu_context& context) {
  using layer = pufferfish::LowRankLinear<float>;  // x: rows x in
  const auto rank = pufferfish::rank_ratio{0.25};
  return std::make_unique<LowRankModule<layer, 2>>(pufferfish::svd_factorize<layer>(dense, rank), context);
}
std::unique_ptr<host::Module> low_rank(const host::Conv2d& dense, pufferfish::cpu_context& context) {
  using layer = pufferfish::LowRankConv<float, 16>;  // x: images x height x width x channels
  return std::make_unique<LowRankModule<layer, 4>>(pufferfish::svd_factorize<layer>(dense), context);
}
std::unique_ptr<host::Module> low_rank(const host::LSTM& dense, pufferfish::cpu_context& context) {
  using layer = pufferfish::LowRankLSTM<float>;  // x: steps x batch x 1 x in, from a state of zeros
  const auto rank = pufferfish::rank_ratio{0.25};
  return std::make_unique<LowRankModule<layer, 4>>(pufferfish::svd_factorize<layer>(dense, rank), context);
}
// [factorize]

// [train]
/// One step of the host's gradient descent towards outputs of zero; the loss before it.
double train_step(host::Module& module, pufferfish::cpu_context& context, std::uint64_t step, host::Array& x,
                  host::Array& y, float rate) {
  context.set_mode(pufferfish::run_mode::training);
  context.begin_step(step);
  module.forward(x, y);
  double loss = 0.0;
  for (float value : y.values) loss += 0.5 * static_cast<double>(value) * static_cast<double>(value);
  host::Array dx = x;
  module.backward(y, dx);  // dy = y
  for (const host::Parameter& p : module.parameters()) {
    for (long i = 0; i < p.size; ++i) p.values[i] -= rate * p.gradient[i];
  }
  context.set_mode(pufferfish::run_mode::inference);
  return loss;
}
// [train]

// [statistics]
/// A dense layer of the host, and statistics of its last training steps before it becomes low-rank.
struct MeasuredLinear {
  const host::Linear& dense;
  pufferfish::output_statistics seen{dense.out, dense.in};

  /// Called after the backward pass of a step. y: outputs of the layer, with its bias; dy: gradients of the
  /// loss with respect to y; rows x out each. The loss is the mean over `samples` samples.
  void add_step(host::Array& y, host::Array& dy, double samples) {
    seen.add_outputs<float>(view<2>(y));
    seen.add_gradients<float>(view<2>(dy), samples);
    seen.add_batch(static_cast<double>(y.shape[0]), samples);
  }
  /// sum_over_ranks(values) replaces the values of a std::span<double> by their sums over all ranks.
  template <class Sum>
  pufferfish::LowRankLinear<float> low_rank(Sum&& sum_over_ranks) {
    for (const auto& part : seen.parts()) sum_over_ranks(part.values);
    return pufferfish::svd_factorize(dense, pufferfish::rank_ratio{0.25}, seen);
  }
};
// [statistics]

// [own]
/// For a host that has fast layers of its own: two dense ones, the second with the bias.
std::array<host::Linear, 2> as_two(const host::Linear& dense) {
  const auto made = pufferfish::svd_factors(dense, pufferfish::energy_kept{0.99}).front();
  const auto values = [](const pufferfish::tensor<float, 2>& t) {
    return std::vector<float>(t.data(), t.data() + t.size());
  };
  return {
      {{dense.in, made.rank(), values(made.down), std::vector<float>(static_cast<std::size_t>(made.rank()))},
       {made.rank(), dense.out, values(made.up), dense.bias}}};
}
// [own]

namespace {

std::size_t index(long i) { return static_cast<std::size_t>(i); }

std::vector<float> noise(long size, double deviation, std::uint64_t seed) {
  std::vector<float> values(index(size));
  pufferfish::fill_normal<float>(values, deviation, {1, seed});
  return values;
}

/// A rows x cols matrix of the given rank: what factorizing must reproduce.
std::vector<float> product(long rows, long cols, long rank, std::uint64_t seed) {
  const std::vector<float> left = noise(rows * rank, 0.3, seed), right = noise(rank * cols, 0.3, seed + 1);
  std::vector<float> all(index(rows * cols));
  for (long i = 0; i < rows; ++i) {
    for (long r = 0; r < rank; ++r) {
      for (long j = 0; j < cols; ++j)
        all[index(i * cols + j)] += left[index(i * rank + r)] * right[index(r * cols + j)];
    }
  }
  return all;
}

void dense_forward(const host::Linear& l, const host::Array& x, host::Array& y) {
  for (long n = 0; n < x.shape[0]; ++n) {
    for (long o = 0; o < l.out; ++o) {
      float sum = l.bias[index(o)];
      for (long i = 0; i < l.in; ++i) sum += l.weight[index(o * l.in + i)] * x.values[index(n * l.in + i)];
      y.values[index(n * l.out + o)] = sum;
    }
  }
}

/// Of 3x3 with padding 1, NHWC.
void dense_forward(const host::Conv2d& c, const host::Array& x, host::Array& y) {
  const long height = x.shape[1], width = x.shape[2];
  for (long at = 0; at < x.shape[0] * height * width * c.out; ++at) {
    const long o = at % c.out, column = at / c.out % width, row = at / c.out / width % height;
    const long image = at / c.out / width / height;
    float sum = c.bias[index(o)];
    for (long tap = 0; tap < 9; ++tap) {
      const long iy = row + tap / 3 - 1, ix = column + tap % 3 - 1;
      if (iy < 0 || iy >= height || ix < 0 || ix >= width) continue;
      for (long i = 0; i < c.in; ++i) {
        sum += x.values[index(((image * height + iy) * width + ix) * c.in + i)] *
               c.weight[index((o * c.in + i) * 9 + tap)];
      }
    }
    y.values[index(at)] = sum;
  }
}

void dense_forward(const host::LSTM& l, const host::Array& x, host::Array& y) {
  const long batch = x.shape[1], hidden = l.hidden;
  std::vector<float> h(index(batch * hidden)), c = h, z(index(batch * 4 * hidden));
  const auto sigmoid = [](float v) { return 1.0F / (1.0F + std::exp(-v)); };
  for (long t = 0; t < x.shape[0]; ++t) {
    const float* input = x.values.data() + t * batch * l.in;
    for (long n = 0; n < batch; ++n) {
      for (long k = 0; k < 4 * hidden; ++k) {
        float sum = l.bias[index(k)];
        for (long i = 0; i < l.in; ++i) sum += l.weight_ih[index(k * l.in + i)] * input[n * l.in + i];
        for (long i = 0; i < hidden; ++i)
          sum += l.weight_hh[index(k * hidden + i)] * h[index(n * hidden + i)];
        z[index(n * 4 * hidden + k)] = sum;
      }
    }
    for (long n = 0; n < batch; ++n) {
      for (long j = 0; j < hidden; ++j) {
        const float* gates = z.data() + n * 4 * hidden + j;
        float& cell = c[index(n * hidden + j)];
        cell = sigmoid(gates[hidden]) * cell + sigmoid(gates[0]) * std::tanh(gates[2 * hidden]);
        h[index(n * hidden + j)] = sigmoid(gates[3 * hidden]) * std::tanh(cell);
        y.values[index((t * batch + n) * hidden + j)] = h[index(n * hidden + j)];
      }
    }
  }
}

double largest_difference(const host::Array& a, const host::Array& b) {
  double worst = 0.0;
  for (std::size_t i = 0; i < a.values.size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(a.values[i] - b.values[i])));
  return worst;
}

/// The low-rank layer must give what the dense one gives, whose weights have its rank, and must learn.
template <class Dense>
bool check(const char* name, const Dense& dense, host::Array x, host::Array y, float rate) {
  pufferfish::cpu_context context;
  const auto module = low_rank(dense, context);
  host::Array expected = y;
  dense_forward(dense, x, expected);
  module->forward(x, y);
  const double difference = largest_difference(y, expected);
  const double before = train_step(*module, context, 0, x, y, rate);
  const double after = train_step(*module, context, 1, x, y, rate);
  std::printf("%-6s largest difference %.1e, loss %.4g -> %.4g\n", name, difference, before, after);
  return difference < 1e-3 && after < before;
}

/// Inputs of unequal size: factors made with statistics must keep the outputs better than those made without.
bool check_statistics() {
  const host::Linear dense{64, 96, noise(64 * 96, 0.1, 40), noise(96, 0.1, 41)};
  pufferfish::cpu_context context;
  const auto batch = [](std::uint64_t seed) {
    host::Array x{{128, 64}, noise(128 * 64, 1.0, seed)};
    for (std::size_t i = 0; i < x.values.size(); ++i) x.values[i] /= static_cast<float>(1 + i % 64);
    return x;
  };
  host::Array y{{128, 96}, std::vector<float>(128 * 96)};
  MeasuredLinear measured{dense};
  for (std::uint64_t step = 0; step < 20; ++step) {
    dense_forward(dense, batch(50 + step), y);
    host::Array dy = y;  // the loss is half the squared norm of y, as a mean over the rows
    for (float& value : dy.values) value /= 128.0F;
    measured.add_step(y, dy, 128.0);
  }
  host::Array x = batch(42), expected = y;
  dense_forward(dense, x, expected);
  const auto error = [&](const pufferfish::LowRankLinear<float>& layer) {
    layer.forward(context, view<2>(x), view<2>(y));
    return largest_difference(y, expected);
  };
  const double plain = error(pufferfish::svd_factorize(dense, pufferfish::rank_ratio{0.25}));
  const double kept = error(measured.low_rank([](const auto&) {}));  // one rank: these are the sums of all
  std::printf("rank 16 of 64: largest difference %.2g, with statistics %.2g\n", plain, kept);
  return kept < 0.5 * plain;
}

}  // namespace

int main(int argc, char** argv) try {
  if (const auto status = examples::usage_shown(
          argc, argv, 0, "\n  Checks that low-rank layers of another framework's give what its own do.")) {
    return *status;
  }
  const host::Linear linear{64, 96, product(96, 64, 16, 1), noise(96, 1.0, 3)};
  const host::Conv2d conv{32, 64, 3, 1, 1, product(64, 288, 16, 4), noise(64, 1.0, 6)};
  host::LSTM lstm{32, 48, {}, {}, noise(4 * 48, 0.5, 7)};
  for (std::uint64_t gate = 0; gate < 4; ++gate) {
    for (float v : product(48, 32, 8, 10 + 2 * gate)) lstm.weight_ih.push_back(v);
    for (float v : product(48, 48, 12, 20 + 2 * gate)) lstm.weight_hh.push_back(v);
  }
  const auto array = [](std::vector<long> shape, std::uint64_t seed) {
    long size = 1;
    for (long extent : shape) size *= extent;
    return host::Array{std::move(shape), noise(size, 1.0, seed)};
  };
  bool good = check("linear", linear, array({10, 64}, 30), array({10, 96}, 31), 1e-4F);
  good = check("conv", conv, array({2, 8, 8, 32}, 32), array({2, 8, 8, 64}, 33), 1e-5F) && good;
  good = check("LSTM", lstm, array({5, 3, 1, 32}, 34), array({5, 3, 1, 48}, 35), 1e-2F) && good;

  const auto two = as_two(linear);
  host::Array x = array({4, 64}, 36), inner = array({4, two[0].out}, 37), y = array({4, 96}, 38), direct = y;
  dense_forward(two[0], x, inner);
  dense_forward(two[1], inner, y);
  dense_forward(linear, x, direct);
  std::printf("two of the host's own, rank %ld: largest difference %.1e\n", two[0].out,
              largest_difference(y, direct));
  good = check_statistics() && good;
  return good && two[0].out <= 16 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "embed: %s\n", error.what());
  return 1;
}
