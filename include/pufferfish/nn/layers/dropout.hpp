// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `Dropout`: sets elements to zero at random in training.

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Inverted dropout (Srivastava et al., JMLR 2014): in training each element is zero with the given
/// probability, otherwise divided by (1 - probability); in inference y = x. The mask depends on the
/// context's seed and step, on the order of layers, and on the sample's position in the global
/// batch (context::first_sample), not on how the batch is split over ranks or threads. The mask is
/// not stored: backward computes it again.
///
/// \code
/// Sequential<float> classifier;
/// classifier.add(Dropout<float>(0.5)).add(Linear<float>(512, 10));
/// cpu_context ctx({.threads = 2, .seed = 7});
/// ctx.set_mode(run_mode::training);
/// ctx.begin_step(step, first_sample);  // the masks are a function of seed, step and first_sample
/// \endcode
template <class T>
class Dropout {
 public:
  using value_type = T;
  static constexpr bool output_in_place = true;
  static constexpr bool gradient_in_place = true;
  static constexpr bool reads_input = false;
  static constexpr bool reads_output = false;

  /// Throws value_error unless 0 <= probability < 1.
  explicit Dropout(double probability = 0.5) : probability_(probability) {
    if (!(probability >= 0.0 && probability < 1.0)) {
      PUFFERFISH_THROW(
          value_error("Dropout: probability " + detail::shortest_number(probability) + " is not in [0, 1)"));
    }
  }

  /// Probability that an element is dropped in training.
  double probability() const { return probability_; }
  std::string describe() const { return "Dropout " + detail::shortest_number(probability_); }
  extents<4> output_shape(const extents<4>& input) const { return input; }

  /// x, y: dense, of one shape; y may be x. Throws shape_error.
  /// Draws one random stream of the context in training, none in inference, where y is a copy of x.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y);
    if (!ctx.training()) {
      if (x.data() != y.data()) ops::copy_elements<T>(ctx, x.flat().data(), y.flat().data(), x.size());
      return;
    }
    const mask kept{ctx.next_random_stream(), first_element(ctx, x.shape())};
    ops::dropout<T>(ctx, x.flat(), y.flat(), probability_, kept.random, kept.first);
    ctx.tape().push_value(*this, kept);
  }

  /// dx = dy under the mask of the forward pass; dx may be dy, or a null view. Throws shape_error, and
  /// state_error without a forward pass in training mode.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const auto kept = ctx.tape().template pop_value<mask>(*this);
    detail::check_backward(*this, dy.shape(), dy, dx);
    if (dx.is_null()) return;
    ops::dropout<T>(ctx, dy.flat(), dx.flat(), probability_, kept.random, kept.first);
  }

 private:
  // What the backward pass needs to draw the same mask again.
  struct mask {
    random_stream random;
    std::uint64_t first;
  };

  // Number of the first element in the batch of all ranks, so that masks do not depend on the number of
  // ranks.
  template <class Device>
  static std::uint64_t first_element(const context<Device>& ctx, const extents<4>& x) {
    return static_cast<std::uint64_t>(ctx.first_sample()) * static_cast<std::uint64_t>(x[1] * x[2] * x[3]);
  }

  double probability_;
};

PUFFERFISH_NAMESPACE_END
