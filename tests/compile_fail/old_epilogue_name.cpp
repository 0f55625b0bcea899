// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: forward_with_moments(ctx, x, y, moments) of layers is now

#include <pufferfish/nn.hpp>
#include <string>

namespace old_epilogue_name {
struct Layer {
  using value_type = float;
  using view = pufferfish::tensor_view<float, 4>;
  using const_view = pufferfish::tensor_view<const float, 4>;
  std::string describe() const { return "Layer"; }
  pufferfish::extents<4> output_shape(const pufferfish::extents<4>& input) const { return input; }
  void forward(pufferfish::cpu_context&, const const_view&, const view&) const {}
  void backward(pufferfish::cpu_context&, const const_view&, const view&) const {}
#ifdef PUFFERFISH_FAIL
  void forward_with_moments(pufferfish::cpu_context&, const const_view&, const view&,
                            pufferfish::ops::moment_parts<float>&) const {}
#else
  void forward_with_epilogue(pufferfish::cpu_context&, const const_view&, const view&,
                             const pufferfish::ops::output_epilogue<float>&) const {}
#endif
};

inline bool use() { return pufferfish::any_layer<float>(Layer()).abilities().gives_moments; }
}  // namespace old_epilogue_name
