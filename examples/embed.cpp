// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A program with a framework of its own meets pufferfish: its NCHW convolution becomes a low-rank layer.
// README.md shows the part between the markers, word for word (a test compares them).

#include <cmath>
#include <cstdio>
#include <vector>

// [embed]
#include <pufferfish/lowrank.hpp>

namespace host {  // the framework that is there already
struct Conv2d {
  long in, out, kernel, stride, padding;
  std::vector<float> weight, bias;  // weight: OIHW
};
}  // namespace host

template <>  // all that pufferfish has to know about it
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

pufferfish::tensor<float, 4> run_low_rank(const host::Conv2d& dense, const float* nchw, long n, long h,
                                          long w) {
  namespace pf = pufferfish;
  const auto layer = pf::svd_factorize<pf::LowRankConv<float, 16>>(dense);
  const pf::tensor_view<const float, 4> image(nchw, {n, dense.in, h, w});
  const pf::tensor<float, 4> nhwc(image.permute({0, 2, 3, 1}));  // our activations are NHWC
  pf::cpu_context context;
  return layer.forward(context, nhwc);  // [n][h'][w'][out]
}
// [embed]

int main() {
  // A weight of rank 16 by construction, so that the low-rank layer must agree with the dense one.
  host::Conv2d dense{32, 64, 3, 1, 1, {}, std::vector<float>(64)};
  std::vector<float> left(64 * 16), right(16 * 32 * 9), images(2 * 32 * 8 * 8);
  pufferfish::fill_normal<float>(left, 0.25, {1, 1});
  pufferfish::fill_normal<float>(right, 0.1, {1, 2});
  pufferfish::fill_normal<float>(images, 1.0, {1, 3});
  pufferfish::fill_normal<float>(dense.bias, 1.0, {1, 4});
  dense.weight.assign(64 * 32 * 9, 0.0F);
  for (std::size_t o = 0; o < 64; ++o) {
    for (std::size_t r = 0; r < 16; ++r) {
      for (std::size_t j = 0; j < 288; ++j)
        dense.weight[o * 288 + j] += left[o * 16 + r] * right[r * 288 + j];
    }
  }
  const auto y = run_low_rank(dense, images.data(), 2, 8, 8);

  double worst = 0.0;
  for (long n = 0; n < 2; ++n) {
    for (long o = 0; o < 64; ++o) {
      for (long row = 0; row < 8; ++row) {
        for (long col = 0; col < 8; ++col) {
          double sum = dense.bias[static_cast<std::size_t>(o)];
          for (long i = 0; i < 32; ++i) {
            for (long ky = 0; ky < 3; ++ky) {
              for (long kx = 0; kx < 3; ++kx) {
                const long iy = row + ky - 1, ix = col + kx - 1;
                if (iy < 0 || iy >= 8 || ix < 0 || ix >= 8) continue;
                sum +=
                    static_cast<double>(images[static_cast<std::size_t>(((n * 32 + i) * 8 + iy) * 8 + ix)]) *
                    static_cast<double>(
                        dense.weight[static_cast<std::size_t>(((o * 32 + i) * 3 + ky) * 3 + kx)]);
              }
            }
          }
          worst = std::max(worst, std::abs(sum - static_cast<double>(y(n, row, col, o))));
        }
      }
    }
  }
  std::printf("dense 18432 weights, rank 16: %d; largest difference of %ld outputs: %.1e\n", 16 * (64 + 288),
              static_cast<long>(y.size()), worst);
  return worst < 1e-4 ? 0 : 1;
}
