// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// One convolution with its data, dense or low-rank, and its passes as things to call.

#include <memory>

#include <pufferfish/core/context.hpp>

#include "roofline.hpp"

namespace bench {

/// The passes of a convolution over data of its own, in training. Backward passes need prepare_backward()
/// before each.
class conv_case {
 public:
  conv_case(const conv_shape& shape, index_t rank, const extents<4>& input) : work_(shape, rank, input) {}
  conv_case(const conv_case&) = delete;
  conv_case& operator=(const conv_case&) = delete;
  virtual ~conv_case() = default;
  virtual void forward() = 0;
  virtual void prepare_backward() {}
  virtual void grad_weight() = 0;
  /// Of a dense convolution only: a low-rank one's needs half of grad_weight's work.
  virtual void grad_input() {}
  /// Both.
  virtual void backward() = 0;

  const conv_work& cost() const { return work_; }

 private:
  conv_work work_;
};

/// The context must outlive the case.
std::unique_ptr<conv_case> dense_case(pufferfish::cpu_context& ctx, const conv_shape& shape,
                                      const extents<4>& input);

/// A low-rank convolution as factorize() makes them: the rank is a number of run time.
std::unique_ptr<conv_case> dynamic_case(pufferfish::cpu_context& ctx, const conv_shape& shape, index_t rank,
                                        const extents<4>& input);

/// The same with the rank in the type; nullptr for a rank that no such type is compiled for (there are 16,
/// 32, 64, 128).
std::unique_ptr<conv_case> static_case(pufferfish::cpu_context& ctx, const conv_shape& shape, index_t rank,
                                       const extents<4>& input);

}  // namespace bench
