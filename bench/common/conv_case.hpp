// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// One convolution with its data, dense or low-rank, with its passes as functions.

#include <memory>

#include <pufferfish/core/context.hpp>

#include "roofline.hpp"

namespace bench {

/// The passes of a convolution in training, over data of its own. Call prepare_backward()
/// before each backward pass.
class conv_case {
 public:
  conv_case(const conv_shape& shape, index_t rank, const extents<4>& input) : work_(shape, rank, input) {}
  conv_case(const conv_case&) = delete;
  conv_case& operator=(const conv_case&) = delete;
  virtual ~conv_case() = default;
  virtual void forward() = 0;
  virtual void prepare_backward() {}
  virtual void grad_weight() = 0;
  /// Of a dense convolution only: for a low-rank one, it needs half of grad_weight's work.
  virtual void grad_input() {}
  /// Gradients of the weights and of the input.
  virtual void backward() = 0;

  const conv_work& cost() const { return work_; }

 private:
  conv_work work_;
};

/// With `bf16`, weights and activations are bfloat16. The context must outlive the case.
std::unique_ptr<conv_case> dense_case(pufferfish::cpu_context& ctx, const conv_shape& shape,
                                      const extents<4>& input, bool bf16 = false);

/// A low-rank convolution as factorize() makes it: the rank is known at run time.
std::unique_ptr<conv_case> dynamic_case(pufferfish::cpu_context& ctx, const conv_shape& shape, index_t rank,
                                        const extents<4>& input, bool bf16 = false);

/// The same with the rank in the type; nullptr for a rank without a compiled type
/// (there are 16, 32, 64, 128).
std::unique_ptr<conv_case> static_case(pufferfish::cpu_context& ctx, const conv_shape& shape, index_t rank,
                                       const extents<4>& input);

}  // namespace bench
